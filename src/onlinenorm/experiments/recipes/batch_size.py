"""`batch-size`: the best accuracy against the batch size, for every normaliser that can run there. Not in the paper.

For each normaliser and batch size, rate and momentum follow from the experiment's own by the text of appendix F (both
of its factors). That rate times 1, 4 and 16 is tried in a short run each; the best trains in full.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onlinenorm.experiments.errors import ExperimentError
from onlinenorm.experiments.experiment import Experiment, Job, Plan, Request, Scale, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import Best, best
from onlinenorm.experiments.recipes import cifar, mlp
from onlinenorm.experiments.runs import Record
from onlinenorm.hyperparameters import scale_hyperparameters

SIZES: dict[Scale, tuple[int, ...]] = {
    "paper": (1, 2, 4, 8, 16, 32, 64, 128),
    "cpu": (1, 2, 4, 8, 32, 128),
    "smoke": (1, 32),
}
FACTORS = (1, 4, 16)  # on the rate that appendix F gives
ELEMENTS = {"mlp": 1, "cifar10": 64}  # the fewest in a channel of one sample, anywhere in the network

# What a scale changes: in the full runs, and in the short ones that choose the rate.
FULL: dict[tuple[str, Scale], dict[str, Any]] = {
    ("mlp", "cpu"): {"epochs": 3},
    ("cifar10", "cpu"): {"epochs": 2, "images": 10_000, "drop_after": (1,)},
}
SHORT: dict[tuple[str, Scale], dict[str, Any]] = {
    ("mlp", "paper"): {"epochs": 1},
    ("mlp", "cpu"): {"epochs": 1, "images": 10_000},
    ("mlp", "smoke"): {"epochs": 1},
    ("cifar10", "paper"): {"epochs": 5, "drop_after": ()},
    ("cifar10", "cpu"): {"epochs": 1, "images": 5_000, "drop_after": ()},
    ("cifar10", "smoke"): {"epochs": 1, "drop_after": ()},
}


def plan(experiment: Experiment, request: Request) -> Plan:
    """Short runs for each normaliser and size, then the full ones at the best rate."""
    base, at = request.on, (request.on.name, request.scale)
    metric = base.metric
    assert metric is not None

    def job(settings: Any, changes: dict[str, Any]) -> Job:
        return Job(experiment.name, base, request.scale, replace(settings, **changes))

    if not request.seeds:
        raise ExperimentError("batch-size needs a seed.")
    for norm in request.norms:
        for size in SIZES[request.scale]:
            if not NORMALIZERS[norm].can_run(size, ELEMENTS[base.name]):
                continue
            usual = request.settings(norm, request.seeds[0])
            scaled = scale_hyperparameters(usual.batch_size, size, usual.learning_rate, usual.momentum)
            rates = [factor * scaled.learning_rate for factor in FACTORS]
            usual = replace(usual, batch_size=size, momentum=scaled.momentum)
            tried: dict[float, float] = {}
            for rate in rates:
                record = yield job(usual, SHORT[at] | {"learning_rate": rate})
                tried[rate] = best([record.rows], metric).median
            chosen = sorted(rates, key=tried.__getitem__, reverse=metric.best == "highest")[0]
            for seed in request.seeds:
                yield job(usual, FULL.get(at, {}) | {"learning_rate": chosen, "seed": seed})


def full_runs(records: Sequence[Record]) -> list[Record]:
    """Those that trained in full, and not to choose a rate."""
    longest = {r.base: max(_length(other) for other in records if other.base == r.base) for r in records}
    return [record for record in records if _length(record) == longest[record.base]]


def by_size(records: Sequence[Record], experiment: Experiment) -> dict[str, dict[int, Best]]:
    """The best of the full runs, by normaliser and batch size."""
    metric = experiment.metric
    assert metric is not None
    found: dict[str, dict[int, list[Record]]] = {}
    for record in full_runs(records):
        found.setdefault(record.settings["norm"], {}).setdefault(record.settings["batch_size"], []).append(record)
    return {
        norm: {size: best([r.rows for r in group], metric) for size, group in sorted(sizes.items())}
        for norm, sizes in found.items()
    }


def summary(records: Sequence[Record]) -> Summary:
    """A row for each batch size, a column for each normaliser."""
    table = by_size(records, EXPERIMENT)
    sizes = sorted({size for norm in table.values() for size in norm})
    rows = [
        (str(size), *(table[norm][size].describe("{:.2f}") if size in table[norm] else "cannot run" for norm in table))
        for size in sizes
    ]
    return Summary(("Batch size", *(NORMALIZERS[norm].label for norm in table)), tuple(rows), "Validation accuracy, %.")


def _length(record: Record) -> tuple[int, int]:
    return record.settings["epochs"], record.settings["images"]


EXPERIMENT = Experiment(
    name="batch-size",
    title="Accuracy against batch size",
    shows="which normalisers hold up as batches get small",
    data="Fashion-MNIST, 30 MB, or CIFAR-10, 170 MB",
    time={"paper": "4 h (mlp)", "cpu": "20 min", "smoke": "20 s"},
    norms=("online", "batch", "group"),
    allowed=mlp.EXPERIMENT.allowed,
    runs={"paper": 5, "cpu": 1, "smoke": 1},
    settings=mlp.settings,
    load=mlp.load,
    train=mlp.train,
    metric=mlp.EXPERIMENT.metric,
    on=("mlp", "cifar10"),
    plan=plan,
    summary=summary,
)
assert {mlp.EXPERIMENT.name, cifar.CIFAR10.name} == set(EXPERIMENT.on)
