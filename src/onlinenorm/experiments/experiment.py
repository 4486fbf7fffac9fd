"""What an experiment is: its settings, the runs that it asks for, and how one is done."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from onlinenorm.experiments.errors import ExperimentError

if TYPE_CHECKING:
    from onlinenorm.experiments.runs import Record, Run

Scale = Literal["paper", "cpu", "smoke"]
Precision = Literal["32", "bf16"]
SCALES: tuple[Scale, ...] = get_args(Scale)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that decides a run's numbers. Each recipe adds its own."""

    norm: str = "online"
    seed: int = 0
    precision: Precision = "32"


@dataclass(frozen=True)
class Metric:
    """What an experiment is judged by: a key of the rows that its runs log, on data held out."""

    key: str
    label: str
    best: Literal["highest", "lowest"]
    form: str = "{:.2f}"

    def better(self, a: float, b: float) -> bool:
        """Whether a is better than b."""
        return a > b if self.best == "highest" else a < b


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    scale: Scale
    norms: tuple[str, ...]
    seeds: tuple[int, ...]
    precision: Precision
    on: "Experiment"  # for an experiment over another: which; otherwise itself
    changes: Mapping[str, str]  # settings by name, as text

    def settings(self, norm: str, seed: int) -> Any:
        """Those of `on` for a normaliser, with all that the user changed."""
        usual = changed(self.on.settings(self.scale, norm), self.changes)
        return replace(usual, seed=seed, precision=self.precision)


@dataclass(frozen=True)
class Job:
    """One run to do.

    Attributes:
        name: of the experiment that it belongs to.
        base: the experiment whose recipe it follows; the same one, but for experiments over others.
        scale: at which.
        settings: all of them.
    """

    name: str
    base: "Experiment"
    scale: Scale
    settings: Any

    @property
    def label(self) -> str:
        """What tells it from its experiment's other runs: the normaliser, settings unlike the scale's, the seed."""
        usual = asdict(self.base.settings(self.scale, self.settings.norm))
        apart = ("norm", "seed")
        unlike = {k: v for k, v in asdict(self.settings).items() if v != usual[k] and k not in apart}
        parts = [self.settings.norm, *(f"{key}={_short(value)}" for key, value in unlike.items())]
        if self.name != self.base.name:
            parts.insert(0, self.base.name)
        return "-".join([*parts, f"seed{self.settings.seed}"])


Plan = Generator[Job, "Record", None]  # what follows may depend on how the runs before it ended


@dataclass(frozen=True)
class Experiment:
    """One of the paper's experiments, or one that it lacks.

    Attributes:
        name: on the command line.
        title: of tables and figures.
        shows: what it is for, in a sentence.
        data: what it reads, in words, with its size.
        time: that the command is expected to take, by scale, in words.
        norms: the normalisers compared unless others are asked for.
        allowed: the normalisers that can be asked for.
        runs: how many seeds unless told otherwise, by scale.
        settings: by scale and normaliser.
        load: reads the data, from a directory or wherever it is found; called before any training.
        train: does one run.
        x: what its rows are indexed by.
        metric: what it is judged by; None where that is not one number.
        also: further metrics, for the record.
        sweep: the paper's grid: the smallest and the largest horizon of each decay factor, both powers of two.
        on: for an experiment over others: their names, the usual one first.
        plan: the runs, where they are not simply each normaliser with each seed.
        summary: what the runs show, as a table, where that is not the best `metric` of each normaliser.
    """

    name: str
    title: str
    shows: str
    data: str
    time: Mapping[Scale, str]
    norms: tuple[str, ...]
    allowed: tuple[str, ...]
    runs: Mapping[Scale, int]
    settings: Callable[[Scale, str], Any]
    load: Callable[[Any, Path | None], Any]
    train: Callable[["Run[Any]"], None]
    x: str = "epoch"
    metric: Metric | None = None
    also: tuple[Metric, ...] = ()
    sweep: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    on: tuple[str, ...] = ()
    plan: Callable[["Experiment", Request], Plan] | None = None
    summary: "Callable[[Sequence[Record]], Summary] | None" = None

    def jobs(self, request: Request) -> Plan:
        """The runs that a request asks for, one after the other; wants each one's record sent back."""
        if self.plan is not None:
            yield from self.plan(self, request)
            return
        for norm in request.norms:
            for seed in request.seeds:
                yield Job(self.name, self, request.scale, request.settings(norm, seed))


@dataclass(frozen=True)
class Summary:
    """A table, and a sentence under it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def changed(settings: Any, changes: Mapping[str, str]) -> Any:
    """Settings with some of them replaced, from text: numbers as in Python, and fractions such as 127/128."""
    known = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in ("norm", "seed", "precision")}
    values = {}
    for name, text in changes.items():
        if name not in known:
            raise ExperimentError(f"There is no setting {name!r} here. There are: {', '.join(known)}.")
        try:
            values[name] = _parse(text, known[name])
        except (ValueError, ZeroDivisionError) as error:
            raise ExperimentError(f"{name}={text!r}: {error}") from error
    return replace(settings, **values)


def _parse(text: str, like: Any) -> Any:
    if isinstance(like, bool):
        if text not in ("true", "false"):
            raise ValueError("true or false is wanted")
        return text == "true"
    if isinstance(like, int):
        return int(text)
    if isinstance(like, float):
        return float(Fraction(text)) if "/" in text else float(text)
    if isinstance(like, tuple):
        return tuple(_parse(part, like[0] if like else 0) for part in text.split(",") if part)
    return text


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
