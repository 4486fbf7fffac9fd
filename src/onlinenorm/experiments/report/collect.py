"""The runs that a report is about: found, checked, and put together with those that they may be compared with."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import SCALES, Experiment, Scale
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.recipes import EXPERIMENTS
from onlinenorm.experiments.runs import Record, read_record

DECAYS = "decay-sweep"  # the section where the runs of `onlinenorm sweep` over decay factors go as well
SWEEP = "sweep-"  # what the names of these begin with, before the experiment's

# Settings that differ between runs that are compared, as they are what the comparison is about.
VARIED: Mapping[str, set[str]] = {
    DECAYS: {"alpha_fwd", "alpha_bwd"},
    "batch-size": {"batch_size", "learning_rate", "momentum", "epochs", "images", "drop_after"},
    "fine-tune": {"start"},
}
TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("experiment", "base", "scale", "label", "status", "command", "started"), str),
    **dict.fromkeys(("versions", "machine", "settings"), dict),
    **dict.fromkeys(("seconds", "waiting"), (int, float)),
    "commit": (str, NoneType),
    "rows": list,
}


@dataclass(frozen=True)
class Comparison:
    """Runs that may be compared: of one experiment, with one recipe, at one scale, with the same settings changed.

    Attributes:
        experiment: which.
        base: the experiment whose recipe they follow.
        scale: at which.
        changes: settings unlike the scale's, in words.
        finished: the runs that count.
        unfinished: those that were interrupted, or are still running.
    """

    experiment: Experiment
    base: Experiment
    scale: Scale
    changes: str
    finished: list[Record] = field(default_factory=list)
    unfinished: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Collection:
    """All runs below a directory.

    Attributes:
        comparisons: by experiment.
        elsewhere: where sweeps over other settings than the decay factors have drawn maps of their own.
        left_out: what cannot be read, in words.
    """

    comparisons: dict[str, list[Comparison]]
    elsewhere: list[Path]
    left_out: list[str]


def collect(out: Path) -> Collection:
    """Read every run.json below a directory."""
    if not out.is_dir():
        raise ExperimentError(
            f"There is no directory {out}. Run an experiment first, or say with --out where runs are."
        )
    records: dict[str, list[Record]] = {name: [] for name in EXPERIMENTS}
    left_out = []
    for path in sorted(out.rglob("run.json")):
        try:
            record = read_record(path.parent)
            if fault := _fault(record, out):
                raise ExperimentError(f"{path} {fault}. Move it away.")
            records[_section(record)].append(record)
        except ExperimentError as error:
            left_out.append(str(error))
    comparisons = {name: _compare(EXPERIMENTS[name], found) for name, found in records.items()}
    others = [comparison for comparison in comparisons[DECAYS] if not _is_map(comparison)]
    comparisons[DECAYS] = [comparison for comparison in comparisons[DECAYS] if _is_map(comparison)]
    elsewhere = {record.directory.parent for other in others for record in (*other.finished, *other.unfinished)}
    return Collection(comparisons, sorted(elsewhere), left_out)


def _is_map(comparison: Comparison) -> bool:
    """Whether the decay factors were varied."""
    records = (*comparison.finished, *comparison.unfinished)
    return len({repr((record.settings["alpha_fwd"], record.settings["alpha_bwd"])) for record in records}) > 1


def _fault(record: Record, out: Path) -> str | None:
    """What is wrong with a record, if it is not what this version writes, where it writes it."""
    for name, kind in TYPES.items():
        if not isinstance(getattr(record, name), kind):
            return f"has no proper {name!r}: {getattr(record, name)!r}"
    if not {_section(record), record.base} <= set(EXPERIMENTS) or record.scale not in SCALES:
        return f"is of an experiment that is not known here: {record.experiment}, scale {record.scale}"
    if record.directory.relative_to(out).parts != (record.experiment, record.scale, record.label):
        return f"belongs into {out / record.experiment / record.scale / record.label}"
    base, norm = EXPERIMENTS[record.base], record.settings.get("norm")
    if not isinstance(norm, str) or norm not in {*EXPERIMENTS[_section(record)].allowed, *base.allowed}:
        return f"has a normaliser that {record.experiment} does not have: {norm!r}"
    if not isinstance(record.settings.get("seed"), int):
        return "has no seed"
    if missing := set(asdict(base.settings(record.scale, norm))) - set(record.settings):
        return f"has no setting {', '.join(sorted(missing))}"
    metrics = [metric.key for metric in (base.metric, *base.also) if metric]
    for row in record.rows:
        if not isinstance(row, dict) or not _is_number(row.get(base.x)):
            return f"has a row without {base.x!r}: {row!r}"
        for key in metrics:
            if row.get(key) is not None and not _is_number(row[key]):
                return f"has a row with something other than a number for {key!r}: {row!r}"
    for key in metrics:
        if record.finished and not any(key in row for row in record.rows):
            return f"says that it finished, and has no {key!r}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _section(record: Record) -> str:
    return DECAYS if record.experiment == SWEEP + record.base else record.experiment


def _compare(experiment: Experiment, records: Sequence[Record]) -> list[Comparison]:
    """Put runs together that may be compared; the paper's scale and few changes first."""
    norms = list(NORMALIZERS)
    records = sorted(records, key=lambda r: norms.index(r.settings["norm"]) if r.settings["norm"] in norms else 99)
    found: dict[tuple[str, ...], Comparison] = {}
    own: list[Record] = []
    stages: list[Record] = []  # what another experiment's recipe does first for this one
    for record in records:
        (own if record.base == experiment.name or experiment.on else stages).append(record)
    for record in own:
        changes = _changes(record)
        key = (record.experiment, record.base, record.scale, changes)
        comparison = found.setdefault(key, Comparison(experiment, EXPERIMENTS[record.base], record.scale, changes))
        (comparison.finished if record.finished else comparison.unfinished).append(record)
    for record in stages:
        for comparison in found.values():
            if comparison.scale == record.scale:
                (comparison.finished if record.finished else comparison.unfinished).append(record)
    return sorted(
        found.values(), key=lambda c: (SCALES.index(c.scale), c.base.name, c.changes.count(" and "), c.changes)
    )


def _changes(record: Record) -> str:
    usual: Any = asdict(EXPERIMENTS[record.base].settings(record.scale, record.settings["norm"]))
    usual = json.loads(json.dumps(usual))
    unlike = {
        key: record.settings.get(key)
        for key in sorted(usual | record.settings)
        if key not in {"norm", "seed", *VARIED.get(_section(record), ())} and usual.get(key) != record.settings.get(key)
    }
    return " and ".join(f"{key}={_plain(value)}" for key, value in unlike.items())


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
