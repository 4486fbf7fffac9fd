"""Figures of the experiments that train: learning curves, and what is drawn over seeds and settings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onlinenorm.experiments.charts import Axis, Box, Line, box_chart, heat_map, line_chart, ticks
from onlinenorm.experiments.experiment import Experiment, Metric
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import REPORTED, best, number, over_runs
from onlinenorm.experiments.recipes import batch_size
from onlinenorm.experiments.report.collect import Comparison
from onlinenorm.experiments.report.series import by_norm, capital, of_norm
from onlinenorm.experiments.runs import Record
from onlinenorm.hyperparameters import horizon_of

BEGINNING = 1 / 5  # the share of the epochs that may be cut off, so that the end can be told apart


def learning_curves(comparison: Comparison) -> list[str]:
    """Each metric by epoch: the median over the runs, and a band from the lowest to the highest."""
    figures = []
    for metric in (comparison.base.metric, *comparison.base.also):
        if metric is not None:
            norms = by_norm(comparison.finished).items()
            lines = [of_norm(norm, over_runs([run.rows for run in runs], metric)) for norm, runs in norms]
            height = _height(lines, metric)
            figures.append(line_chart(capital(metric.label), lines, Axis("epochs", "whole"), height, metric.form))
    return figures


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
    return [heat_map(capital(metric.label), cells, *axes, form, metric.best == "highest", [nearest])]


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
    lines = [
        of_norm(norm, {float(size): found.values for size, found in sizes.items()}) for norm, sizes in table.items()
    ]
    return [line_chart(capital(metric.label), lines, Axis("batch size", "two"), Axis(""), metric.form)]


def fine_tuning(comparison: Comparison) -> list[str]:
    """The best metric before, at the usual batch size, and after with each normaliser; and its way there."""
    metric = comparison.base.metric
    assert metric is not None
    before = [run for run in comparison.finished if run.base != comparison.experiment.name]
    after = [run for run in comparison.finished if run.base == comparison.experiment.name]
    found = {norm: best([run.rows for run in runs], metric) for norm, runs in by_norm(after).items()}
    lines = {norm: of_norm(norm, {}) for norm in found}
    boxes = [Box(lines[norm].label, lines[norm].colour, values.values) for norm, values in found.items()]
    if before:
        started = best([run.rows for run in before], metric)
        boxes.insert(0, Box("Before", NORMALIZERS["none"].colour, started.values))
    figures = [box_chart(capital(metric.label), boxes, Axis(metric.label), metric.form)]
    if any(len(run.rows) > 1 for run in after):
        figures += learning_curves(replace(comparison, finished=after))
    return figures
