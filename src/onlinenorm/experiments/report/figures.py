"""What the runs of each experiment show, drawn: a list of <figure>s for each."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onlinenorm.experiments.charts import Axis, Box, Line, box_chart, heat_map, line_chart, ticks
from onlinenorm.experiments.experiment import Experiment, Metric
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import REPORTED, Best, best, number, over_runs
from onlinenorm.experiments.recipes import batch_size, fine_tune
from onlinenorm.experiments.report.collect import Comparison
from onlinenorm.experiments.runs import Record
from onlinenorm.hyperparameters import horizon_of

BEGINNING = 1 / 5  # the share of the epochs that may be cut off, so that the end can be told apart


def draw(comparison: Comparison) -> list[str]:
    """The figures of a comparison's finished runs."""
    return DRAWN.get(comparison.experiment.name, learning_curves)(comparison)


def metrics(experiment: Experiment) -> list[Metric]:
    """All that an experiment's runs are judged by."""
    return [metric for metric in (experiment.metric, *experiment.also) if metric is not None]


# Training


def learning_curves(comparison: Comparison) -> list[str]:
    """Each metric by epoch: the median over the runs, and a band from the lowest to the highest."""
    norms = by_norm(comparison.finished)
    figures = []
    for metric in metrics(comparison.base):
        lines = [_curve(norm, runs, metric, comparison.base.x) for norm, runs in norms.items()]
        figures.append(
            line_chart(_capital(metric.label), lines, Axis("epochs", "whole"), _height(lines, metric), metric.form)
        )
    return figures


def by_norm(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Runs by normaliser, in the order of all normalisers."""
    order = [*NORMALIZERS, *fine_tune.LABELS]
    norms = sorted({record.settings["norm"] for record in records}, key=order.index)
    return {norm: [record for record in records if record.settings["norm"] == norm] for norm in norms}


def _curve(norm: str, runs: Sequence[Record], metric: Metric, x: str) -> Line:
    curves = over_runs([run.rows for run in runs], metric, x)
    points = [(at, statistics.median(values)) for at, values in curves.items()]
    band = [(at, min(values), max(values)) for at, values in curves.items()] if len(runs) > 1 else []
    return _line(norm, points, band)


def _line(norm: str, points: Sequence[tuple[float, float]], band: Sequence[tuple[float, float, float]] = ()) -> Line:
    if norm == "frozen":  # BatchNorm, as what it is
        return Line(fine_tune.LABELS[norm], NORMALIZERS["batch"].colour, points, band, dashed=True)
    return Line(NORMALIZERS[norm].label, NORMALIZERS[norm].colour, points, band)


def _height(lines: Sequence[Line], metric: Metric) -> Axis:
    """An axis on which the end of training can be told apart: the beginning's worst values may lie below it."""
    if metric.best == "lowest":
        return Axis("", "log")
    last = max((x for line in lines for x, _ in line.points), default=0)
    later = [y for line in lines for x, y in line.points if x > BEGINNING * last and math.isfinite(y)]
    if not later:
        return Axis("")
    marks = ticks(later)
    return Axis("", limits=(marks[0], marks[-1]))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def reproducibility(experiment: Experiment, records: Sequence[Record]) -> str:
    """All runs of an experiment, on the epoch at which their median is best, above what the paper reports."""
    metric = experiment.metric
    assert metric is not None
    boxes = []
    for norm, runs in by_norm(records).items():
        reported = REPORTED.get(experiment.name, {}).get(metric.key, {}).get(norm)
        theirs = None
        if reported and reported.low is not None and reported.high is not None:
            theirs = (reported.low, reported.median, reported.high)
        found = best([run.rows for run in runs], metric, experiment.x)
        boxes.append(Box(NORMALIZERS[norm].label, NORMALIZERS[norm].colour, found.values, theirs))
    axis = Axis(metric.label, "log" if metric.best == "lowest" else "linear")
    return box_chart(experiment.title, boxes, axis, metric.form)


# Over settings


def decay_map(comparison: Comparison) -> list[str]:
    """The best metric over both horizons, median over the runs; the cell nearest to the paper's choice is framed."""
    metric, cells = over_decays(comparison)
    paper = _horizons(vars(comparison.base.settings("paper", comparison.finished[0].settings["norm"])))
    nearest = min(cells, key=lambda at: sum(abs(math.log(a / b)) for a, b in zip(at, paper, strict=True)))
    form = "{:.1f}" if metric.form == "{:.2f}" else metric.form
    axes = ("forward horizon, samples", "backward horizon, samples")
    return [heat_map(_capital(metric.label), cells, *axes, form, metric.best == "highest", [nearest])]


def best_decays(comparison: Comparison) -> str:
    """Where the map is best, and how much of it is nearly as good, in words."""
    metric, cells = over_decays(comparison)
    sign = 1 if metric.best == "highest" else -1
    (forward, backward), top = max(cells.items(), key=lambda cell: sign * cell[1])
    near = sum(sign * value >= sign * top - 0.01 * abs(top) for value in cells.values())
    return (
        f"Best: {number(top, metric.form)} at horizons {forward:g} forward, {backward:g} backward. "
        f"{near} of {len(cells)} cells are within a hundredth of that. The frame marks the paper's choice, or what is "
        f"nearest to it."
    )


def over_decays(comparison: Comparison) -> tuple[Metric, dict[tuple[float, float], float]]:
    """The best metric, median over the runs, by forward and backward horizon."""
    metric = comparison.base.metric
    assert metric is not None
    found: dict[tuple[float, float], list[Record]] = {}
    for record in comparison.finished:
        found.setdefault(_horizons(record.settings), []).append(record)
    return metric, {at: best([r.rows for r in runs], metric, comparison.base.x).median for at, runs in found.items()}


def _horizons(settings: Mapping[str, Any]) -> tuple[float, float]:
    return round(horizon_of(settings["alpha_fwd"]), 6), round(horizon_of(settings["alpha_bwd"]), 6)


def by_batch_size(comparison: Comparison) -> list[str]:
    """The best metric against the batch size."""
    metric = comparison.base.metric
    assert metric is not None
    table = batch_size.by_size(comparison.finished, comparison.experiment)
    lines = []
    for norm, sizes in table.items():
        points = [(float(size), found.median) for size, found in sizes.items()]
        several = any(len(found.values) > 1 for found in sizes.values())
        lines.append(_line(norm, points, [_spread(size, found) for size, found in sizes.items()] if several else []))
    return [line_chart(_capital(metric.label), lines, Axis("batch size", "two"), Axis(""), metric.form)]


def _spread(size: int, found: Best) -> tuple[float, float, float]:
    return float(size), min(found.values), max(found.values)


def fine_tuning(comparison: Comparison) -> list[str]:
    """The best metric before, at the usual batch size, and after with each normaliser; and its way there."""
    metric = comparison.base.metric
    assert metric is not None
    before = [run for run in comparison.finished if run.base != comparison.experiment.name]
    after = [run for run in comparison.finished if run.base == comparison.experiment.name]
    found = {norm: best([run.rows for run in runs], metric) for norm, runs in by_norm(after).items()}
    lines = {norm: _line(norm, []) for norm in found}
    boxes = [Box(lines[norm].label, lines[norm].colour, values.values) for norm, values in found.items()]
    if before:
        started = best([run.rows for run in before], metric)
        boxes.insert(0, Box("Before", NORMALIZERS["none"].colour, started.values))
    figures = [box_chart(_capital(metric.label), boxes, Axis(metric.label), metric.form)]
    if any(len(run.rows) > 1 for run in after):
        figures += learning_curves(replace(comparison, finished=after))
    return figures


DRAWN: Mapping[str, Callable[[Comparison], list[str]]] = {
    "decay-sweep": decay_map,
    "batch-size": by_batch_size,
    "fine-tune": fine_tuning,
}
