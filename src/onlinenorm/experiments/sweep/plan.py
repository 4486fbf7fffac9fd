"""What a sweep is to do."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onlinenorm
from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment, Job, Metric, Scale, changed
from onlinenorm.experiments.sweep.grid import Grid, paper_grids, parse_grid


@dataclass(frozen=True)
class Sweep:
    """The runs that are asked for.

    Attributes:
        base: the experiment.
        scale: at which.
        settings: of all runs, but for the grids' and the seed.
        grids: one or two; the first runs along the map.
        seeds: of each point's runs.
    """

    base: Experiment
    scale: Scale
    settings: Any
    grids: tuple[Grid, ...]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """What its runs are kept under."""
        return f"sweep-{self.base.name}"

    @property
    def label(self) -> str:
        """What tells it from other sweeps of the same experiment at the same scale."""
        usual = self.base.settings(self.scale, self.settings.norm)
        kept = {grid.name: getattr(usual, grid.name) for grid in self.grids}
        settings = replace(self.settings, seed=0, **kept)
        label = Job(self.base.name, self.base, self.scale, settings).label.removesuffix("-seed0")
        return "-".join([label, "over", *(grid.name for grid in self.grids)])

    @property
    def metric(self) -> Metric:
        """What it is judged by."""
        assert self.base.metric is not None
        return self.base.metric

    def points(self) -> Iterator[tuple[tuple[float, ...], list[Job]]]:
        """The points of the map, each with its runs."""
        names = [grid.name for grid in self.grids]
        for values in itertools.product(*(grid.values for grid in self.grids)):
            there = replace(self.settings, **dict(zip(names, values, strict=True)))
            yield values, [Job(self.name, self.base, self.scale, replace(there, seed=seed)) for seed in self.seeds]

    def varied(self, job: Job) -> dict[str, float]:
        """The settings of a run that are not those of all."""
        return {name: getattr(job.settings, name) for name in (*(grid.name for grid in self.grids), "seed")}

    def about(self) -> dict[str, Any]:
        """All that its runs have in common, as JSON has it."""
        varied = {"seed", *(grid.name for grid in self.grids)}
        common = {key: value for key, value in asdict(self.settings).items() if key not in varied}
        return json.loads(json.dumps({"onlinenorm": onlinenorm.__version__, **common}))  # type: ignore[no-any-return]

    def page(self, out: Path) -> Path:
        """Where its map is."""
        return out / self.name / self.scale / f"{self.label}.html"


def plan_sweep(
    experiment: Experiment,
    scale: Scale,
    norm: str,
    changes: dict[str, str],
    precision: str,
    grids: Sequence[str],
    step: int,
    seeds: tuple[int, ...],
) -> Sweep:
    """What the options ask for.

    Raises:
        ExperimentError: it makes no sense.
    """
    if experiment.metric is None or experiment.plan is not None:
        over = f" Sweep one that it is over: {', '.join(experiment.on)}." if experiment.on else ""
        raise ExperimentError(f"{experiment.name} has no single run with a metric that a sweep could judge.{over}")
    settings = replace(changed(experiment.settings(scale, norm), changes), precision=precision)
    chosen = tuple(parse_grid(text, settings, step) for text in grids) or paper_grids(experiment, step)
    if not chosen:
        raise ExperimentError(
            f"The paper has no sweep of {experiment.name}. Give a grid, such as --grid alpha_fwd=1/2..4095/4096."
        )
    names = [grid.name for grid in chosen]
    if len(set(names)) < len(names) or len(names) > 2:
        raise ExperimentError(f"--grid: a map is over one setting or two, not over {', '.join(names)}.")
    for both in changes.keys() & set(names):
        raise ExperimentError(f"{both} is in a grid: --set {both}={changes[both]} makes no sense.")
    return Sweep(experiment, scale, settings, chosen, seeds)
