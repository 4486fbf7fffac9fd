"""`decay-sweep`: accuracy over the two decay factors, as a map (paper, appendix A.6, figure 15).

The grid is logarithmic in the horizons h = 1 / (1 - alpha). `onlinenorm sweep` runs any other grid, in parallel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onlinenorm.experiments.experiment import Experiment, Job, Plan, Request, Scale, Summary
from onlinenorm.experiments.paper import best
from onlinenorm.experiments.recipes import cifar, mlp
from onlinenorm.experiments.runs import Record
from onlinenorm.experiments.sweep.grid import doubling
from onlinenorm.hyperparameters import decay_of, horizon_of

STRIDE: Mapping[tuple[str, Scale], int] = {  # from one horizon to the next, in powers of two
    ("cifar10", "paper"): 1, ("cifar10", "cpu"): 5, ("cifar10", "smoke"): 11,
    ("mlp", "paper"): 1, ("mlp", "cpu"): 2, ("mlp", "smoke"): 12,
}  # fmt: skip
CHANGES: Mapping[tuple[str, Scale], dict[str, Any]] = {
    ("cifar10", "cpu"): {"epochs": 3, "drop_after": (1, 2)},
    ("mlp", "cpu"): {"epochs": 3},
}


def plan(experiment: Experiment, request: Request) -> Plan:
    """Every pair of horizons."""
    base, at = request.on, (request.on.name, request.scale)
    low, high = base.sweep["alpha_fwd"], base.sweep["alpha_bwd"]
    for forward in doubling(*low, STRIDE[at]):
        for backward in doubling(*high, STRIDE[at]):
            for seed in request.seeds:
                decays = {"alpha_fwd": decay_of(forward), "alpha_bwd": decay_of(backward)}
                settings = replace(request.settings("online", seed), **CHANGES.get(at, {}), **decays)
                yield Job(experiment.name, base, request.scale, settings)


def summary(records: Sequence[Record]) -> Summary:
    """The map: a row for each forward horizon, a column for each backward one."""
    metric = EXPERIMENT.metric
    assert metric is not None
    found: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        decays = (record.settings["alpha_fwd"], record.settings["alpha_bwd"])
        forward, backward = (round(horizon_of(decay)) for decay in decays)
        found.setdefault((forward, backward), []).append(record)
    cells = {at: best([r.rows for r in group], metric).median for at, group in found.items()}
    columns = sorted({backward for _, backward in cells})
    rows = [
        (str(forward), *(metric.form.format(cells[forward, b]) if (forward, b) in cells else "" for b in columns))
        for forward in sorted({forward for forward, _ in cells})
    ]
    top = max(cells, key=cells.__getitem__)
    note = f"Best: {metric.form.format(cells[top])} at horizons {top[0]} forward, {top[1]} backward."
    return Summary(("forward \\ backward", *map(str, columns)), tuple(rows), note)


EXPERIMENT = Experiment(
    name="decay-sweep",
    title="Accuracy over the decay factors",
    shows="the region of near-optimal horizons is broad",
    data="CIFAR-10, 170 MB, or Fashion-MNIST, 30 MB",
    time={"paper": "24 days", "cpu": "30 min", "smoke": "20 s"},
    norms=("online",),
    allowed=("online",),
    runs={"paper": 1, "cpu": 1, "smoke": 1},
    settings=cifar.CIFAR10.settings,
    load=cifar.load,
    train=cifar.train,
    metric=cifar.CIFAR10.metric,
    on=("cifar10", "mlp"),
    plan=plan,
    summary=summary,
)
assert {cifar.CIFAR10.name, mlp.EXPERIMENT.name} == set(EXPERIMENT.on)
