"""What the runs of each experiment show, drawn: a list of <figure>s for each."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from onlinenorm.experiments.charts import Axis, Box, Line, box_chart, heat_map, line_chart, ticks
from onlinenorm.experiments.experiment import Experiment, Metric
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import REPORTED, Best, best, over_runs
from onlinenorm.experiments.recipes import batch_size, fine_tune
from onlinenorm.experiments.report.collect import Comparison
from onlinenorm.experiments.runs import Record
from onlinenorm.hyperparameters import horizon_of

BEGINNING = 1 / 5  # the share of the epochs that may be cut off, so that the end can be told apart
PAPER_DECAYS = {"cifar10": (1024, 128), "mlp": (1000, 100)}


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
    """The best metric over both horizons, median over the runs; the paper's choice is framed."""
    metric = comparison.base.metric
    assert metric is not None
    found: dict[tuple[float, float], list[Record]] = {}
    for record in comparison.finished:
        decays = (record.settings["alpha_fwd"], record.settings["alpha_bwd"])
        forward, backward = (float(round(horizon_of(decay))) for decay in decays)
        found.setdefault((forward, backward), []).append(record)
    cells = {at: best([run.rows for run in runs], metric, comparison.base.x).median for at, runs in found.items()}
    form = "{:.1f}" if metric.form == "{:.2f}" else metric.form
    horizons = ("forward horizon, samples", "backward horizon, samples")
    highest = metric.best == "highest"
    return [heat_map(_capital(metric.label), cells, *horizons, form, highest, [PAPER_DECAYS[comparison.base.name]])]


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
