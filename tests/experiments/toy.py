"""An experiment of a few milliseconds, for the tests of what all experiments share."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from onlinenorm.experiments import reproduce
from onlinenorm.experiments.experiment import Experiment, Metric, Request, Scale, Setting
from onlinenorm.experiments.runs import Record, Run
from onlinenorm.torch import OnlineNorm1d


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    epochs: int = 4
    learning_rate: float = 0.1
    widths: tuple[int, ...] = (8,)


def train(run: Run[Settings]) -> None:
    s = run.settings
    normalizer = OnlineNorm1d(s.widths[0], alpha_fwd=0.9, alpha_bwd=0.8) if s.norm == "online" else nn.Identity()
    model = nn.Sequential(nn.Linear(5, s.widths[0]), normalizer, nn.ReLU(), nn.Dropout(0.1), nn.Linear(s.widths[0], 1))
    optimizer = torch.optim.SGD(model.parameters(), s.learning_rate, momentum=0.9)
    model, optimizer = run.setup(model, optimizer)
    for epoch in run.epochs(s.epochs):
        for number, x in enumerate(run.batches(torch.randn(6, 16, 5))):
            if os.environ.get("KILL_AT") == f"{epoch}.{number}":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            run.fabric.backward(loss)
            optimizer.step()
            run.observe(loss)
        run.log(error=loss.item())


TOY = Experiment(
    name="toy",
    title="A toy",
    shows="that runs are kept",
    data="none",
    time={"paper": "1 s", "cpu": "1 s", "smoke": "1 s"},
    norms=("online", "none"),
    allowed=("online", "none"),
    runs={"paper": 1, "cpu": 1, "smoke": 1},
    settings=lambda scale, norm: Settings(norm=norm),
    load=lambda settings, folder: None,
    train=train,
    metric=Metric("error", "error", "lowest"),
)


def request(*norms: str, seeds: tuple[int, ...] = (0,), scale: Scale = "smoke", **changes: str) -> Request:
    return Request(scale, norms or TOY.norms, seeds, "32", TOY, changes)


def do(out: Path, asked: Request, resume: bool = False) -> list[Record]:
    return reproduce.run_all(TOY, asked, out, "cpu", None, resume, Console(quiet=True))
