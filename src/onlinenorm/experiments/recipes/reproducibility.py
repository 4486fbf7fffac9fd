"""`reproducibility`: how much the result depends on the seed (paper, appendix A.6, figure 14).

The runs are those of the experiments themselves, and are kept with theirs: with --resume, what is there is used.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from onlinenorm.experiments.experiment import Experiment, Job, Plan, Request, Scale, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import REPORTED
from onlinenorm.experiments.recipes import cifar, language, mlp, unet
from onlinenorm.experiments.runs import Record
from onlinenorm.experiments.summary import by_norm

OF = {e.name: e for e in (cifar.CIFAR10, cifar.CIFAR100, unet.EXPERIMENT, mlp.EXPERIMENT, *language.EXPERIMENTS)}
RUNS: dict[Scale, dict[str, int]] = {
    "paper": {"cifar10": 5, "cifar100": 5, "unet": 50, "mlp": 400, "rnn": 25, "lstm": 25},
    "cpu": {"mlp": 10},
    "smoke": {"mlp": 3},
}


def plan(experiment: Experiment, request: Request) -> Plan:
    """Every experiment that the scale has time for, with its normalisers among those asked for."""
    for name, runs in RUNS[request.scale].items():
        base = OF[name]
        asked = replace(request, on=base)
        for norm in request.norms:
            if norm in base.norms:
                for seed in request.seeds[:runs]:
                    yield Job(name, base, request.scale, asked.settings(norm, seed))


def summary(records: Sequence[Record]) -> Summary:
    """What a box plot is drawn from, and the paper's smallest to largest."""
    rows = []
    for name, base in OF.items():
        metric = base.metric
        assert metric is not None
        of_it = [record for record in records if record.experiment == name]
        for norm, found in by_norm(of_it, metric).items() if of_it else ():
            reported = REPORTED[name][metric.key].get(norm)
            marks = quartiles(found.values)
            rows.append(
                (
                    name, NORMALIZERS[norm].label, str(len(found.values)), *(metric.form.format(v) for v in marks),
                    str(reported) if reported else "",
                )
            )  # fmt: skip
    columns = ("Experiment", "Normaliser", "Runs", "Least", "Quarter", "Median", "Three quarters", "Most", "Paper")
    return Summary(columns, tuple(rows))


def quartiles(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Least, lower quartile, median, upper quartile, most."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return min(values), lower, median, upper, max(values)


EXPERIMENT = Experiment(
    name="reproducibility",
    title="Spread over seeds",
    shows="the spread with OnlineNorm is like that of the other normalisers",
    data="that of the experiments that it repeats",
    time={"paper": "weeks", "cpu": "20 min", "smoke": "30 s"},
    norms=("online", "batch", "layer", "none"),
    allowed=("online", "batch", "layer", "none", "group", "instance"),
    runs={scale: max(runs.values()) for scale, runs in RUNS.items()},
    settings=mlp.settings,
    load=mlp.load,
    train=mlp.train,
    plan=plan,
    summary=summary,
)
