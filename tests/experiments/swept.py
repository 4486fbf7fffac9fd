"""An experiment that is nothing but its settings, for the tests of sweeps; it keeps a ledger of what was done.

As a program, it is the command `onlinenorm sweep` for this experiment.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import typer

from onlinenorm.experiments import recipes
from onlinenorm.experiments.experiment import Experiment, Metric, Scale, Setting
from onlinenorm.experiments.runs import Run
from onlinenorm.experiments.sweep import claims, sweep, workers
from onlinenorm.hyperparameters import horizon_of


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    epochs: int = 3
    alpha_fwd: float = 7 / 8
    alpha_bwd: float = 0.7
    rate: float = 0.1
    name: str = "plain"


def settings(scale: Scale, norm: str) -> Settings:
    return Settings(norm=norm)


def load(settings: Settings, folder: Path | None) -> None:
    pass


def train(run: Run[Settings]) -> None:
    s = run.settings
    forward, backward = horizon_of(s.alpha_fwd), horizon_of(s.alpha_bwd)
    for epoch in run.epochs(s.epochs):
        if "LEDGER" in os.environ:
            with Path(os.environ["LEDGER"]).open("a") as ledger:
                ledger.write(f"{os.getpid()} {forward:g},{backward:g},{s.seed} {epoch}\n")
        time.sleep(float(os.environ.get("SECONDS_AN_EPOCH", 0)))
        score = epoch - abs(math.log2(forward / 8)) - abs(math.log2(backward / 4)) + s.seed / 8
        run.log(score=math.nan if forward == 2 and backward == 2 else score)


if "SECONDS_AN_EPOCH" in os.environ:  # in the command's workers too
    claims.BEAT, claims.GRACE, workers.PAUSE = 0.2, 3.0, 0.2


SWEPT = Experiment(
    name="swept",
    title="Swept",
    shows="that no run is lost and none done twice",
    data="none",
    time={"paper": "1 s", "cpu": "1 s", "smoke": "1 s"},
    norms=("online",),
    allowed=("online", "none"),
    runs={"paper": 1, "cpu": 1, "smoke": 1},
    settings=settings,
    load=load,
    train=train,
    metric=Metric("score", "score", "highest"),
    sweep={"alpha_fwd": (2, 16), "alpha_bwd": (2, 8)},
)

if __name__ == "__main__":
    recipes.EXPERIMENTS["swept"] = SWEPT
    typer.run(sweep)
