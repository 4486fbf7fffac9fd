"""What the runs of an experiment show, as a table: beside the paper's numbers where it has any."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from onlinenorm.experiments.experiment import Experiment, Metric, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.paper import REDUCED, REPORTED, Best, best, compare_order, verdict
from onlinenorm.experiments.runs import Record


def summarize(experiment: Experiment, records: Sequence[Record]) -> Summary:
    """The table of an experiment's finished runs, all of one scale."""
    if experiment.summary is not None:
        return experiment.summary(records)
    return compare(experiment, records)


def compare(experiment: Experiment, records: Sequence[Record]) -> Summary:
    """The best metric of each normaliser, its spread over the runs, and the paper's, with a verdict."""
    metric = experiment.metric
    assert metric is not None
    measured = by_norm(records, metric, experiment.x)
    reported = {} if records[0].scale == "smoke" else REPORTED.get(experiment.name, {}).get(metric.key, {})
    alike = all(follows_paper(record, experiment) for record in records)
    columns = ["Normaliser", f"Best {metric.label}", "at"]
    columns += (["Paper", "Verdict"] if alike else ["Paper"]) if reported else []
    rows = []
    for norm, values in measured.items():
        row = [NORMALIZERS[norm].label, values.describe(metric.form), f"{experiment.x} {values.epoch}"]
        theirs = reported.get(norm)
        row += [str(theirs or ""), verdict(values.values, theirs, metric).text if theirs else ""]
        rows.append(tuple(row[: len(columns)]))
    note = ""
    if reported:
        labels = {name: normalizer.label for name, normalizer in NORMALIZERS.items()}
        order = compare_order({norm: b.values for norm, b in measured.items()}, reported, metric, labels).text
        note = order[:1].upper() + order[1:] + "." if alike else f"{REDUCED} Here: {order}."
    return Summary(tuple(columns), tuple(rows), note)


def follows_paper(record: Record, experiment: Experiment) -> bool:
    """Whether a run had the paper's settings, whatever its scale is called."""
    paper = json.loads(json.dumps(asdict(experiment.settings("paper", record.settings["norm"]))))
    same: bool = paper | {"seed": record.settings["seed"]} == record.settings
    return same


def by_norm(records: Sequence[Record], metric: Metric, x: str = "epoch") -> dict[str, Best]:
    """The best of each normaliser's runs, in the order in which the normalisers first come."""
    names = dict.fromkeys(record.settings["norm"] for record in records)
    return {n: best([r.rows for r in records if r.settings["norm"] == n], metric, x) for n in names}
