"""`two-elements`: what normalising pairs does to a fully connected layer (paper, section 3.2, figure 2).

At batch size two BatchNorm turns each pair of scalars into (-1, +1) or (+1, -1), whichever is larger. Its output is
constant but for a step, and its gradient zero almost everywhere, whereas normalisation by the statistics of all data
is a plane with the slope 1 / sigma. The inputs here are taken to be standard normal: mu = 0, sigma = 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import nn

from onlinenorm.experiments.analysis import no_data
from onlinenorm.experiments.experiment import Experiment, Scale, Setting, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS, BatchNorm
from onlinenorm.experiments.runs import Record, Run
from onlinenorm.torch import OnlineNorm

FLAT = 0.01  # of the slope of normalisation by all data


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """The paper gives none: the grid is ours."""

    extent: float = 3.0  # both inputs go from -extent to extent
    points: int = 31  # in as many steps


def settings(scale: Scale, norm: str) -> Settings:
    """The same at every scale, on a coarser grid for `smoke`."""
    return replace(Settings(norm=norm), points=9 if scale == "smoke" else 31)


def train(run: Run[Settings]) -> None:
    """The first output of each pair, and how steep it is; a row for each first input. Each pair is one channel."""
    s = run.settings
    grid = [round(s.extent * (2 * i / (s.points - 1) - 1), 6) for i in range(s.points)]
    for x1 in run.each("x1", grid):
        pairs = torch.tensor([[x1] * s.points, grid], device=run.fabric.device, requires_grad=True)
        layer = make(s.norm, s.points).to(run.fabric.device)
        y1 = layer(pairs)[0]
        (slopes,) = torch.autograd.grad(y1.sum(), pairs)
        steepness = slopes.norm(dim=0)
        flat = (steepness < FLAT).float().mean().item()
        run.log(x2=grid, y1=y1.tolist(), slope=steepness.tolist(), flat=flat)


def make(norm: str, channels: int) -> nn.Module:
    """A layer that normalises and does nothing else; OnlineNorm's statistics start as those of standard normal data."""
    if norm == "online":
        return OnlineNorm(channels, affine=False, guard=None)
    return BatchNorm(channels, affine=False)


def summary(records: Sequence[Record]) -> Summary:
    """Over how much of the grid the gradient vanishes."""
    rows = []
    for record in records:
        outputs = [y1 for row in record.rows for y1 in row["y1"]]
        flat = fmean(row["flat"] for row in record.rows)
        label = NORMALIZERS[record.settings["norm"]].label
        rows.append((label, f"{min(outputs):.2f} to {max(outputs):.2f}", f"{100 * flat:.0f} %"))
    note = f"No gradient: less than {FLAT:g} of that of normalisation by the statistics of all data."
    return Summary(("Normaliser", "First output", "Pairs without a gradient"), tuple(rows), note)


EXPERIMENT = Experiment(
    name="two-elements",
    title="Normalisation of two elements",
    shows="at batch size two a fully connected layer's gradient vanishes",
    data="none",
    time={"paper": "5 s", "cpu": "5 s", "smoke": "5 s"},
    norms=("batch", "online"),
    allowed=("batch", "online"),
    runs={"paper": 1, "cpu": 1, "smoke": 1},
    settings=settings,
    load=no_data,
    train=train,
    x="x1",
    summary=summary,
)
