"""`mlp`: 784-500-300-10 on Fashion-MNIST (paper, appendix A.3, figure 11)."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onlinenorm.experiments.classification import ACCURACY, LOSS, train_classifier
from onlinenorm.experiments.data.fashion_mnist import fashion_mnist
from onlinenorm.experiments.data.images import ImageData
from onlinenorm.experiments.data.made import made_images
from onlinenorm.experiments.experiment import Experiment, Scale, Setting
from onlinenorm.experiments.mlp import mlp
from onlinenorm.experiments.normalizers import build
from onlinenorm.experiments.runs import Run


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Of the paper; plain SGD, no augmentation."""

    data: str = "fashion-mnist"
    images: int = 60_000  # to train on
    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 0.04
    momentum: float = 0.0
    weight_decay: float = 1e-4
    alpha_fwd: float = 0.999
    alpha_bwd: float = 0.99


def settings(scale: Scale, norm: str) -> Settings:
    """The whole experiment takes two cores minutes, so `cpu` is the paper's, with fewer seeds."""
    paper = Settings(norm=norm)
    return (
        replace(paper, data="made", images=2_000, epochs=3, alpha_fwd=0.99, alpha_bwd=0.9)
        if scale == "smoke"
        else paper
    )


def load(settings: Settings, folder: Path | None) -> ImageData:
    """Fashion-MNIST, or made images of its form."""
    return made_images(settings.images, size=28) if settings.data == "made" else fashion_mnist(folder)


def train(run: Run[Settings]) -> None:
    """One run."""
    s = run.settings
    data: ImageData = run.data
    training, shuffle = data.train.first(s.images), torch.default_generator
    model = build(s.norm, mlp, alpha_fwd=s.alpha_fwd, alpha_bwd=s.alpha_bwd)
    optimizer = torch.optim.SGD(model.parameters(), s.learning_rate, s.momentum, weight_decay=s.weight_decay)

    train_classifier(
        run,
        model,
        optimizer,
        epochs=s.epochs,
        learning_rate=lambda _: s.learning_rate,
        training=lambda _: training.batches(s.batch_size, shuffle=shuffle, **run.part),
        validation=lambda: data.test.batches(1000, **run.part),
    )


EXPERIMENT = Experiment(
    name="mlp",
    title="Fashion-MNIST, fully connected",
    shows="a network whose normalisers see single scalars",
    data="Fashion-MNIST, 30 MB",
    time={"paper": "13 h", "cpu": "10 min", "smoke": "10 s"},
    norms=("online", "batch", "layer", "none"),
    allowed=("online", "batch", "layer", "none", "group", "batch-renorm", "weight", "propagation"),
    runs={"paper": 400, "cpu": 5, "smoke": 1},
    settings=settings,
    load=load,
    train=train,
    metric=ACCURACY,
    also=(LOSS,),
    sweep={"alpha_fwd": (2, 8192), "alpha_bwd": (2, 8192)},
)
