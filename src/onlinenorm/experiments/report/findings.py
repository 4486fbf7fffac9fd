"""What the runs of each experiment show, in a phrase for the table of contents."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from onlinenorm.experiments.experiment import Summary
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import REDUCED, best
from onlinenorm.experiments.recipes import activation_growth as growth
from onlinenorm.experiments.recipes import batch_size, fine_tune, weight_equilibrium
from onlinenorm.experiments.report.collect import Comparison
from onlinenorm.experiments.report.series import by_norm, collected
from onlinenorm.experiments.runs import Record


def finding(comparison: Comparison, table: Summary) -> str:
    """What a comparison's finished runs show; where an experiment has no phrase of its own, the table's note."""
    phrase = PHRASES.get(comparison.experiment.name)
    return phrase(comparison) if phrase else table.note.removeprefix(REDUCED).strip()


def _two_elements(comparison: Comparison) -> str:
    flat = {norm: fmean(row["flat"] for row in runs[0].rows) for norm, runs in by_norm(comparison.finished).items()}
    return f"Pairs without a gradient: {_listed({norm: f'{100 * share:.0f} %' for norm, share in flat.items()})}."


def _gradient_bias(comparison: Comparison) -> str:
    words = {}
    for norm, runs in by_norm(comparison.finished).items():
        angles = collected((row for run in runs for row in run.rows), "samples", "angle")
        first, last = min(angles), max(angles)
        words[norm] = f"{fmean(angles[first]):.1f}° at {first}, {fmean(angles[last]):.1f}° at {last} samples"
    return f"{_listed(words)}."


def _activation_growth(comparison: Comparison) -> str:
    cases = growth.cases(growth.Settings(**comparison.finished[0].settings))
    last = [record.rows[-1] for record in comparison.finished]

    def largest(scaling: bool) -> str:
        sizes = [
            median(float("inf") if row[case.name] is None else row[case.name] for row in last)
            for case in cases
            if case.layer_scaling == scaling
        ]
        return f"{max(sizes):.3g}"

    return f"Up to {largest(False)} at layer {last[0]['layer']}, with layer scaling {largest(True)}."


def _weight_equilibrium(comparison: Comparison) -> str:
    words = {}
    for norm, runs in by_norm(comparison.finished).items():
        ends = [end for run in runs for end in weight_equilibrium.settled(run)]
        away = max(abs(length / predicted - 1) for _, length, predicted, _ in ends)
        words[norm] = f"within {away:.1%} of the prediction"
    return f"|w| settles: {_listed(words)}."


def _memory(comparison: Comparison) -> str:
    peaks = {
        (record.settings["norm"], row["network"], row["batch_size"]): row["peak"]
        for record in comparison.finished
        for row in record.rows
    }
    name = max((network for _, network, _ in peaks), key=lambda n: max(v for (_, m, _), v in peaks.items() if m == n))
    numbers = (
        f"{NORMALIZERS[norm].label} {peak:.3g} GB at batch size {size}"
        for (norm, network, size), peak in peaks.items()
        if network == name
    )
    return f"{name}: {', '.join(numbers)}."


def _batch_size(comparison: Comparison) -> str:
    table = batch_size.by_size(comparison.finished, comparison.experiment)
    smallest = min(size for sizes in table.values() for size in sizes)
    metric = comparison.base.metric
    assert metric is not None
    words = {
        norm: metric.form.format(sizes[smallest].median) if smallest in sizes else "cannot run"
        for norm, sizes in table.items()
    }
    return f"At batch size {smallest}: {_listed(words)}."


def _fine_tune(comparison: Comparison) -> str:
    metric = comparison.base.metric
    assert metric is not None

    def score(records: Sequence[Record]) -> str:
        return metric.form.format(best([record.rows for record in records], metric).median)

    before = [record for record in comparison.finished if record.base != comparison.experiment.name]
    after = by_norm([record for record in comparison.finished if record.base == comparison.experiment.name])
    words = ", ".join(f"{fine_tune.LABELS[norm]} {score(records)}" for norm, records in after.items())
    return f"From {score(before)}: {words}."


def _listed(words: Mapping[str, str]) -> str:
    return ", ".join(f"{NORMALIZERS[norm].label} {text}" for norm, text in words.items())


PHRASES: Mapping[str, Callable[[Comparison], str]] = {
    "two-elements": _two_elements,
    "gradient-bias": _gradient_bias,
    "activation-growth": _activation_growth,
    "weight-equilibrium": _weight_equilibrium,
    "memory": _memory,
    "batch-size": _batch_size,
    "fine-tune": _fine_tune,
}
