"""Grids of settings for sweeps: the paper's, which are logarithmic in the horizons of the decay factors, and others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment, changed
from onlinenorm.hyperparameters import decay_of, horizon_of

HORIZONS = {"alpha_fwd": "forward horizon", "alpha_bwd": "backward horizon"}  # the decay factors, and their axes' names


@dataclass(frozen=True)
class Grid:
    """The values that a sweep gives to one setting."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_decay(self) -> bool:
        """Whether it is of a decay factor."""
        return self.name in HORIZONS

    @property
    def label(self) -> str:
        """What a map has along its axis."""
        return HORIZONS.get(self.name, self.name.replace("_", " "))

    def place(self, value: float) -> float:
        """Where a value is along the axis: a decay factor is at its horizon."""
        return round(horizon_of(value), 6) if self.is_decay else value

    def nearest(self, value: float) -> float | None:
        """The value of the grid that is nearest, by ratio; None where it lies outside."""
        places: dict[float, float] = {self.place(v): v for v in self.values}
        at = self.place(value)
        if not min(places) <= at <= max(places):
            return None
        if min(places) <= 0:
            return places[min(places, key=lambda place: abs(place - at))]
        return places[min(places, key=lambda place: abs(math.log(place / at)))]


def paper_grids(experiment: Experiment, step: int) -> tuple[Grid, ...]:
    """The paper's, of every `step`-th power of two."""
    return tuple(
        Grid(name, tuple(decay_of(horizon) for horizon in doubling(low, high, step)))
        for name, (low, high) in experiment.sweep.items()
    )


def parse_grid(text: str, settings: Any, step: int) -> Grid:
    """A grid as on the command line: NAME=VALUE,VALUE,... or, doubling from one to the other, NAME=FROM..TO.

    Args:
        text: such as alpha_fwd=1/2..4095/4096 or learning_rate=0.01,0.04; of a decay factor, the horizon doubles.
        settings: that have it, for its type.
        step: FROM..TO takes every `step`-th.
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        raise ExperimentError(
            f"--grid {text}: NAME=FROM..TO or NAME=VALUE,VALUE is wanted, such as alpha_fwd=1/2..4095/4096."
        )

    def value(part: str) -> Any:
        found = getattr(changed(settings, {name: part.strip()}), name)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            raise ExperimentError(f"--grid {text}: {name}={part} is not a number.")
        return found

    try:
        low, dots, high = values.partition("..")
        if not dots:
            return Grid(name, tuple(sorted({value(part) for part in values.split(",")})))
        if name in HORIZONS:
            horizons = doubling(horizon_of(value(low)), horizon_of(value(high)), step)
            return Grid(name, tuple(decay_of(horizon) for horizon in horizons))
        return Grid(name, tuple(doubling(value(low), value(high), step)))
    except ValueError as error:
        raise ExperimentError(f"--grid {text}: {error}.") from error


def doubling(low: float, high: float, step: int) -> Sequence[Any]:
    """What follows from low up to high as it doubles; of these every `step`-th."""
    if not 0 < low <= high:
        raise ValueError(f"what doubles must start above 0 and go up, and not from {low:g} to {high:g}")
    values = [low]
    while values[-1] * 2**step <= high * (1 + 1e-9):
        values.append(values[-1] * 2**step)
    return values
