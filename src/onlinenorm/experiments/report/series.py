"""Runs as lines of charts: by normaliser, in its colour, median over the runs with a band from lowest to highest."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from onlinenorm.experiments.charts import Line
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.recipes import fine_tune
from onlinenorm.experiments.runs import Record, Row


def by_norm(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Runs by normaliser, in the order of all normalisers."""
    order = [*NORMALIZERS, *fine_tune.LABELS]
    norms = sorted({record.settings["norm"] for record in records}, key=order.index)
    return {norm: [record for record in records if record.settings["norm"] == norm] for norm in norms}


def of_norm(
    norm: str, values: Mapping[float, Sequence[float]], middle: Callable[[Sequence[float]], float] = median
) -> Line:
    """A normaliser's line: the values of all runs at each x."""
    if norm == "frozen":  # BatchNorm, as what it is
        return line_over_runs(fine_tune.LABELS[norm], NORMALIZERS["batch"].colour, values, middle, dashed=True)
    return line_over_runs(NORMALIZERS[norm].label, NORMALIZERS[norm].colour, values, middle)


def line_over_runs(
    label: str,
    colour: str,
    values: Mapping[float, Sequence[float]],
    middle: Callable[[Sequence[float]], float] = median,
    dashed: bool = False,
) -> Line:
    """A line through the middle of the values at each x, with their spread where there are several."""
    several = any(len(found) > 1 for found in values.values())
    band = [(x, min(found), max(found)) for x, found in values.items()] if several else []
    return Line(label, colour, [(x, middle(found)) for x, found in values.items()], band, dashed)


def collected(rows: Iterable[Row], x: str, y: str) -> dict[float, list[float]]:
    """The values of y at each x; infinity where there is none."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(row[x], []).append(math.inf if row[y] is None else row[y])
    return dict(sorted(found.items()))


def capital(text: str) -> str:
    """With a capital letter at the beginning."""
    return text[:1].upper() + text[1:]
