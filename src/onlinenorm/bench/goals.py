"""The project's goals, and what was measured beside each. All are ratios: lower is better."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from onlinenorm.bench.cases import MODES
from onlinenorm.bench.measure import geometric_mean
from onlinenorm.bench.results import Result, memory_over_batch, time_over


@dataclass(frozen=True)
class Goal:
    """A limit on a ratio's geometric mean, or on its worst, over the cases for which `value` is not None."""

    title: str
    mode: str  # "" for all
    statistic: str  # "mean" or "worst"
    limit: float
    value: Callable[[Result], float | None]


class Verdict(TypedDict):
    """A goal and what was measured."""

    title: str
    mode: str
    statistic: str
    goal: float
    cases: int
    mean: float | None  # None, as all below, where no case belongs to the goal
    worst: float | None
    worst_case: str | None
    reached: bool | None


def judge(goal: Goal, results: Sequence[Result]) -> Verdict:
    """Measure the results against one goal."""
    values = {
        r["name"] if goal.mode else f"{r['name']} {r['mode']}": value
        for r in results
        if goal.mode in ("", r["mode"]) and (value := goal.value(r)) is not None
    }
    mean = geometric_mean(list(values.values())) if values else None
    worst = max(values.values(), default=None)
    measured = mean if goal.statistic == "mean" else worst
    return Verdict(
        title=goal.title,
        mode=goal.mode,
        statistic=goal.statistic,
        goal=goal.limit,
        cases=len(values),
        mean=mean,
        worst=worst,
        worst_case=max(values, key=lambda name: values[name], default=None),
        reached=None if measured is None else measured <= goal.limit,
    )


def layer_goals(cache: int) -> list[Goal]:
    """The goals for single layers; `cache` is the size in bytes of the last-level cache."""
    batch, group = _of_maps("batch"), _of_maps("group")

    def one_sample_fits(r: Result) -> float | None:
        return time_over(r, "floor") if r["sample_bytes"] < cache < r["activation_bytes"] else None

    def no_sample_fits(r: Result) -> float | None:
        return time_over(r, "floor") if cache < r["sample_bytes"] else None

    contiguous, *channels_last = MODES
    goals = [
        Goal("÷ BatchNorm", contiguous, "mean", 0.45, batch),
        Goal("÷ BatchNorm", contiguous, "worst", 0.80, batch),
    ]
    for mode in channels_last:
        goals.append(Goal("÷ BatchNorm", mode, "mean", 0.80, batch))
        goals.append(Goal("÷ BatchNorm", mode, "worst", 1.00, batch))
    goals += [Goal("÷ GroupNorm", mode, "mean", 0.95, group) for mode in MODES]
    goals += [Goal(f"÷ BatchNorm1d, {n}", contiguous, "worst", 1.00, _of(n)) for n in ("20x200", "32x500", "128x4096")]
    goals += [Goal("÷ floor, a sample fits the cache", mode, "mean", 1.35, one_sample_fits) for mode in MODES]
    goals += [Goal("÷ floor, no sample fits the cache", mode, "mean", 1.65, no_sample_fits) for mode in MODES]
    goals.append(Goal("bytes kept ÷ BatchNorm", "", "worst", 1.05, _kept("saved")))
    goals.append(Goal("the same, parameters aside", "", "worst", 1.05, _kept("saved_beside_parameters")))
    return goals


def step_goals(results: Sequence[Result]) -> list[Goal]:
    """One goal for each network's step: no slower than with BatchNorm."""
    steps = [r for r in results if r["kind"] == "step"]
    return [Goal(f"÷ BatchNorm, {r['name']}", r["mode"], "worst", 1.00, _of(r["name"])) for r in steps]


def verdicts(results: Sequence[Result], cache: int) -> list[Verdict]:
    """All goals that concern the kinds of cases measured."""
    layers = any(r["kind"] == "layer" for r in results)
    return [judge(goal, results) for goal in (layer_goals(cache) if layers else []) + step_goals(results)]


def _of(name: str) -> Callable[[Result], float | None]:
    """Time over BatchNorm's of the case so named."""
    return lambda r: time_over(r, "batch") if r["name"] == name else None


def _of_maps(peer: str) -> Callable[[Result], float | None]:
    """Time over the peer's of activations with spatial dimensions."""
    return lambda r: time_over(r, peer) if len(r["shape"]) > 2 else None


def _kept(kind: str) -> Callable[[Result], float | None]:
    """Bytes kept over BatchNorm's."""
    return lambda r: memory_over_batch(r, kind)
