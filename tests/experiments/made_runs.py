"""Runs that nobody ran, for the tests of what is made from runs: the records that each experiment's plan asks for."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onlinenorm.experiments.experiment import Job, Request, Scale
from onlinenorm.experiments.paper import REPORTED
from onlinenorm.experiments.recipes import EXPERIMENTS
from onlinenorm.experiments.recipes.activation_growth import cases
from onlinenorm.experiments.recipes.memory import SUBJECTS
from onlinenorm.experiments.runs import Record, Row

PENALTY = {"online": 0.0, "batch": 0.1, "group": 1.8, "instance": 1.9, "layer": 4.0, "none": 5.0, "frozen": 0.5}
TOP = {"cifar10": 92.3, "cifar100": 68.6, "imagenet": 76.3, "mlp": 89.0, "fine-tune": 91.0}


def make_runs(
    out: Path,
    name: str,
    scale: Scale = "cpu",
    norms: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    on: str = "",
    **changes: str,
) -> list[Record]:
    """Write a finished record for each run that a command would ask for."""
    experiment = EXPERIMENTS[name]
    base = EXPERIMENTS[on or (experiment.on[0] if experiment.on else name)]
    request = Request(scale, tuple(norms) or experiment.norms, tuple(seeds), "32", base, changes)
    plan, records = experiment.jobs(request), []
    job = next(plan, None)
    while job is not None:
        record = make_record(out, job)
        record.write()
        records.append(record)
        try:
            job = plan.send(record)
        except StopIteration:
            job = None
    return records


def make_record(out: Path, job: Job, rows: list[Row] | None = None, status: str = "finished") -> Record:
    """The record of one run, not yet written."""
    settings = vars(job.settings)
    return Record(
        directory=out / job.name / job.scale / job.label,
        experiment=job.name,
        base=job.base.name,
        scale=job.scale,
        label=job.label,
        status=status,
        command=f"onlinenorm reproduce {job.name} --scale {job.scale}",
        commit="0123456789abcdef0123456789abcdef01234567",
        versions={"onlinenorm": "0.1.0", "torch": "2.13.0"},
        machine={"cpu": "A processor", "usable_cores": 2, "device": "cpu", "processes": 1},
        settings={key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        started="2020-01-01T00:00:00+00:00",
        seconds=100.0,
        waiting=0.01,
        rows=made_rows(job) if rows is None else rows,
    )


def made_rows(job: Job) -> list[Row]:
    """Numbers of the kind that the job's recipe logs, some of them like the paper's."""
    s = job.settings
    chance = random.Random(repr((job.name, job.label)))
    return MADE.get(job.base.name, _classification)(job, s, chance)


def _classification(job: Job, s: Any, chance: random.Random) -> list[Row]:
    top = TOP.get(job.base.name, 90.0) - PENALTY.get(s.norm, 3.0) + chance.gauss(0, 0.2)
    top -= 0.3 * abs(math.log2((1 - s.alpha_fwd) * 1000)) + 0.2 * abs(math.log2((1 - s.alpha_bwd) * 100))
    if s.norm == "batch" and s.batch_size < 16:
        top -= 30 / s.batch_size
    drops = [0, *getattr(s, "drop_after", ())]
    rows = []
    for epoch in range(1, s.epochs + 1):
        reached = sum(epoch > drop for drop in drops) / len(drops)
        accuracy = top - 12 * (1 - reached) - 30 * math.exp(-8 * epoch / s.epochs) + chance.gauss(0, 0.3)
        loss = 4 * (1 - accuracy / 100) ** 0.8
        rows.append({"epoch": epoch, "train_loss": 0.8 * loss, "accuracy": accuracy, "loss": loss})
    return rows


def _segmentation(job: Job, s: Any, chance: random.Random) -> list[Row]:
    top = 0.977 - 0.003 * PENALTY.get(s.norm, 3.0) + chance.gauss(0, 0.002)
    if s.norm == "none" and s.seed % 3 == 2:
        return [{"epoch": 1, "train_loss": None, "diverged": True, "jaccard": 0.0, "loss": None}]
    rows = []
    for epoch in range(1, s.epochs + 1):
        similarity = top - 0.5 * math.exp(-8 * epoch / s.epochs) + chance.gauss(0, 0.001)
        rows.append({"epoch": epoch, "train_loss": 1 - similarity, "jaccard": similarity, "loss": 1.1 - similarity})
    return rows


def _language(job: Job, s: Any, chance: random.Random) -> list[Row]:
    least = REPORTED[job.base.name]["perplexity"][s.norm].median * chance.uniform(0.98, 1.02)
    perplexity = [least * (1 + 4 * math.exp(-8 * epoch / s.epochs)) for epoch in range(1, s.epochs + 1)]
    return [
        {"epoch": i, "train_loss": math.log(p), "perplexity": p, "loss": math.log(p)}
        for i, p in enumerate(perplexity, 1)
    ]


def _two_elements(job: Job, s: Any, chance: random.Random) -> list[Row]:
    grid = [s.extent * (2 * i / (s.points - 1) - 1) for i in range(s.points)]
    step = {"batch": lambda a, b: (a > b) - (a < b), "online": lambda a, b: a}[s.norm]
    flat = 1.0 if s.norm == "batch" else 0.0
    return [
        {"x1": a, "x2": grid, "y1": [float(step(a, b)) for b in grid], "slope": [1 - flat for _ in grid], "flat": flat}
        for a in grid
    ]


def _gradient_bias(job: Job, s: Any, chance: random.Random) -> list[Row]:
    factor = {"batch": 80, "online": 100}[s.norm]
    angles = {n: factor / n**0.7 * chance.uniform(0.9, 1.1) for n in s.samples}
    return [{"samples": n, "angle": angle, "angle_of_all": angle} for n, angle in angles.items()]


def _activation_growth(job: Job, s: Any, chance: random.Random) -> list[Row]:
    rows = []
    for layer in range(1, s.depth + 1):
        sizes: Row = {"layer": layer}
        for case in cases(s):
            growth = 0.0 if case.layer_scaling else 3 * case.noise + 0.7 * (1 - case.underestimate)
            size = math.exp(layer * growth * chance.uniform(0.9, 1.1))
            sizes[case.name] = size if size < 1e25 else None
        rows.append(sizes)
    return rows


def _weight_equilibrium(job: Job, s: Any, chance: random.Random) -> list[Row]:
    rows = []
    for step in range(s.window, s.steps + 1, s.window):
        row: Row = {"step": step}
        for start in s.starts:
            row[f"length_{start:g}"] = 2 * start ** math.exp(-4 * step / s.steps) * chance.uniform(0.98, 1.02)
            row[f"predicted_{start:g}"] = 2.0 * chance.uniform(0.98, 1.02)
            row[f"by_mean_{start:g}"] = 1.9
        rows.append(row)
    return rows


def _memory(job: Job, s: Any, chance: random.Random) -> list[Row]:
    cases = [(name, size) for name in SUBJECTS for size in s.batch_sizes]
    counted = {"network": "", "batch_size": 0, "activations": 0.0, "peak": 0.0, "device": "meta"}
    return [
        {"case": i, **counted, "network": name, "batch_size": size, "activations": 0.5 * size, "peak": 0.6 * size}
        for i, (name, size) in enumerate(cases, 1)
    ]


MADE = {
    "unet": _segmentation,
    "rnn": _language,
    "lstm": _language,
    "two-elements": _two_elements,
    "gradient-bias": _gradient_bias,
    "activation-growth": _activation_growth,
    "weight-equilibrium": _weight_equilibrium,
    "memory": _memory,
}
