"""Figures of the experiments that look at networks without training them to the end."""

from statistics import fmean

from onlinenorm.experiments.charts import Axis, Box, box_chart, line_chart, surface
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.recipes import activation_growth as growth
from onlinenorm.experiments.recipes import memory
from onlinenorm.experiments.report.collect import Comparison
from onlinenorm.experiments.report.series import by_norm, collected, line_over_runs, of_norm


def two_elements(comparison: Comparison) -> list[str]:
    """The first output over both inputs, a surface for each normaliser, all of the same height."""
    rows = {norm: runs[0].rows for norm, runs in by_norm(comparison.finished).items()}  # nothing in it is random
    outputs = [y1 for found in rows.values() for row in found for y1 in row["y1"]]
    return [
        surface(
            f"{NORMALIZERS[norm].label}, first output",
            {(row["x1"], x2): y1 for row in found for x2, y1 in zip(row["x2"], row["y1"], strict=True)},
            "first input",
            "second input",
            (min(outputs), max(outputs)),
        )
        for norm, found in rows.items()
    ]


def gradient_bias(comparison: Comparison) -> list[str]:
    """The angle to the true gradient by batch size, mean over the runs, as in the paper."""
    lines = [
        of_norm(norm, collected((row for run in runs for row in run.rows), "samples", "angle"), fmean)
        for norm, runs in by_norm(comparison.finished).items()
    ]
    x = Axis("samples in the batch, or in the horizon", "two")
    return [line_chart("Angle to the true gradient, degrees", lines, x, Axis("", "log"), "{:.1f}")]


def activation_growth(comparison: Comparison) -> list[str]:
    """The size of the activations by layer, without layer scaling and with it, on the same scale."""
    rows = [row for run in comparison.finished for row in run.rows]
    cases = growth.cases(growth.Settings(**comparison.finished[0].settings))
    sizes = [row[case.name] for row in rows for case in cases if row[case.name]]
    figures = []
    for scaling, words, norm in ((False, "without layer scaling", "none"), (True, "with layer scaling", "online")):
        lines = [
            line_over_runs(
                case.name.removesuffix(", layer scaling"),
                NORMALIZERS[norm].colour,
                collected(rows, "layer", case.name),
                dashed=case.underestimate != 1,
            )
            for case in cases
            if case.layer_scaling == scaling
        ]
        figures.append(
            line_chart(
                f"Size of the activations {words}",
                lines,
                Axis("layer", "whole"),
                Axis("", "log", (min(sizes), max(sizes))),
            )
        )
    return figures


def weight_equilibrium(comparison: Comparison) -> list[str]:
    """The length of the weights, from each start, and the one predicted."""
    figures = []
    for norm, runs in by_norm(comparison.finished).items():
        rows, starts = [row for run in runs for row in run.rows], runs[0].settings["starts"]
        lines = [
            line_over_runs(f"from × {start:g}", NORMALIZERS[norm].colour, collected(rows, "step", f"length_{start:g}"))
            for start in starts
        ]
        predicted = collected(rows, "step", f"predicted_{starts[len(starts) // 2]:g}")
        lines.append(line_over_runs("predicted", NORMALIZERS["none"].colour, predicted, dashed=True))
        title = f"|w| with {NORMALIZERS[norm].label}, and √(η/2λ) √E|w'|²"
        figures.append(line_chart(title, lines, Axis("steps", "whole"), Axis("", "log")))
    return figures


def memory_chart(comparison: Comparison) -> list[str]:
    """The peak of a training step of each network, beside the paper's number."""
    figures = []
    for name in memory.SUBJECTS:
        boxes = []
        for norm, runs in by_norm(comparison.finished).items():
            for size in dict.fromkeys(row["batch_size"] for run in runs for row in run.rows):
                peaks = [
                    (row["peak"], memory.reported(run, name, size))
                    for run in runs
                    for row in run.rows
                    if (row["network"], row["batch_size"]) == (name, size)
                ]
                label, paper = f"{NORMALIZERS[norm].label}, {size}", peaks[0][1] if peaks else None
                reference = (float(paper), float(paper), float(paper)) if paper else None
                boxes.append(Box(label, NORMALIZERS[norm].colour, [peak for peak, _ in peaks], reference))
        figures.append(box_chart(name, boxes, Axis("GB at the peak of a step; below, the paper's", "log"), "{:.3g}"))
    return figures
