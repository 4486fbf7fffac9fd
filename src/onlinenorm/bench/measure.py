"""Alternating rounds and their statistics.

On a shared machine the speed drifts by tens of percent within seconds. So every round measures every contestant
once, one right after another, in an order that rotates from round to round; contestants are compared within a round
and the ratio reported is the median over rounds, with its quartiles.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol, TypedDict

from onlinenorm.bench.allocator import page_faults

MIN_SECONDS = 0.004  # one measurement repeats its pass for at least this long
LONG_SECONDS = 0.1  # a measurement so long does not care in which state the one before it left the machine
MAX_SECONDS, MIN_ROUNDS = 15.0, 5  # a case that has taken so long ends early, but not before so many rounds
WARM_UP_ROUNDS = 6  # at most; the warm-up ends when a round of it maps no new memory
PHASES = ("total", "forward", "backward")


@dataclass(frozen=True)
class Times:
    """Seconds of one pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class Contestant(Protocol):
    """Something to time."""

    name: str
    every: int  # takes part in one round of this many

    def run(self, passes: int) -> Times:
        """Do so many passes; the mean times of one."""


@dataclass
class Samples:
    """One contestant's measurements: by round, None where it sat out."""

    times: list[Times | None]
    page_faults: int = 0  # while it was timed: fresh memory it had to map


class Plan(NamedTuple):
    """One measurement."""

    passes: int
    lead: int  # passes before it, not timed: until the cache is its own and the last one's threads stopped spinning


class Ratio(TypedDict):
    """One contestant's time over another's."""

    median: float  # of the ratios within each round
    q1: float
    q3: float
    of_medians: float  # the ratio of the two medians


def race(contestants: Sequence[Contestant], rounds: int, tick: Callable[[], None]) -> dict[str, Samples]:
    """Time all contestants in alternating rounds; `tick` is called after each round."""
    gc.collect()
    gc.disable()
    try:
        plans = {contestant.name: plan_for(contestant) for contestant in contestants}
        warm_up(contestants)
        samples = {contestant.name: Samples([None] * rounds) for contestant in contestants}
        start = perf_counter()
        for number in range(rounds):
            if number >= MIN_ROUNDS and perf_counter() - start > MAX_SECONDS:
                break
            for contestant in order(contestants, number):
                plan, mine = plans[contestant.name], samples[contestant.name]
                if plan.lead:
                    contestant.run(plan.lead)
                faults = page_faults()
                mine.times[number] = contestant.run(plan.passes)
                mine.page_faults += page_faults() - faults
            tick()
        return samples
    finally:
        gc.enable()


def order(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """Who runs in this round, and in which order."""
    start = number % len(contestants)
    return [c for c in (*contestants[start:], *contestants[:start]) if number % c.every == 0]


def plan_for(contestant: Contestant) -> Plan:
    """Find out how many passes make a measurement."""
    contestant.run(1)
    passes = 1
    while (seconds := contestant.run(passes).total * passes) < MIN_SECONDS:
        passes = min(10 * passes, math.ceil(1.2 * passes * MIN_SECONDS / seconds))
    return Plan(passes, lead=passes if seconds < LONG_SECONDS else 0)


def warm_up(contestants: Sequence[Contestant]) -> None:
    """Run all in turn until no pass needs memory that is not mapped yet."""
    for number in range(WARM_UP_ROUNDS):
        before = page_faults()
        for contestant in order(contestants, number):
            contestant.run(1)
        if number and page_faults() - before < 100:
            return


def ratio(ours: Sequence[Times | None], theirs: Sequence[Times | None], phase: str = "total") -> Ratio:
    """Our time over theirs, over the rounds that both took part in."""
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
    pairs = [(getattr(a, phase), getattr(b, phase)) for a, b in both]
    within = [a / b for a, b in pairs]
    q1, median, q3 = statistics.quantiles(within, n=4, method="inclusive") if len(within) > 1 else 3 * within
    return Ratio(median=median, q1=q1, q3=q3, of_medians=_median(a for a, _ in pairs) / _median(b for _, b in pairs))


def medians(times: Sequence[Times | None]) -> dict[str, float]:
    """Median seconds of each phase."""
    return {phase: _median(getattr(t, phase) for t in times if t is not None) for phase in PHASES}


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that treats 2 and 1/2 alike."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
