"""`cifar10` and `cifar100`: ResNet-20 (paper, appendix A.1, figures 7 and 8)."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from onlinenorm.experiments.classification import ACCURACY, LOSS, dropped, train_classifier
from onlinenorm.experiments.data.cifar import cifar10, cifar100
from onlinenorm.experiments.data.images import Augment, ImageData
from onlinenorm.experiments.data.made import made_images
from onlinenorm.experiments.experiment import Experiment, Scale, Setting
from onlinenorm.experiments.normalizers import build
from onlinenorm.experiments.resnet import resnet20
from onlinenorm.experiments.runs import Run


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Of the paper, for CIFAR-10."""

    data: str = "cifar10"
    images: int = 50_000  # to train on
    epochs: int = 250
    batch_size: int = 128
    learning_rate: float = 0.1
    drop_after: tuple[int, ...] = (100, 150, 200)  # epochs, each of which divides the rate by ten
    momentum: float = 0.9
    weight_decay: float = 2e-4
    alpha_fwd: float = 1023 / 1024
    alpha_bwd: float = 127 / 128
    groups: int = 8


PAPER = {"cifar10": Settings(), "cifar100": Settings(data="cifar100", alpha_fwd=511 / 512, alpha_bwd=15 / 16)}


def settings(name: str, scale: Scale, norm: str) -> Settings:
    """At `cpu`, 10 epochs with the drops at the paper's fractions of them: enough to tell the normalisers apart."""
    paper = replace(PAPER[name], norm=norm)
    if scale == "cpu":
        return replace(paper, epochs=10, drop_after=(4, 6, 8))
    if scale == "smoke":
        return replace(
            paper, data="made", images=256, epochs=2, batch_size=32, drop_after=(1,), alpha_fwd=31 / 32, alpha_bwd=7 / 8
        )
    return paper


def load(settings: Settings, folder: Path | None) -> ImageData:
    """CIFAR, or made images of its form."""
    if settings.data == "made":
        return made_images(settings.images, test=100, size=32, channels=3)
    return {"cifar10": cifar10, "cifar100": cifar100}[settings.data](folder)


def train(run: Run[Settings]) -> None:
    """One run."""
    s = run.settings
    data: ImageData = run.data
    training, validation = data.train.first(s.images), data.test
    network = partial(resnet20, num_classes=data.train.classes)
    model = build(s.norm, network, alpha_fwd=s.alpha_fwd, alpha_bwd=s.alpha_bwd, groups=s.groups)
    optimizer = torch.optim.SGD(model.parameters(), s.learning_rate, s.momentum, weight_decay=s.weight_decay)
    shuffle = torch.default_generator
    train_classifier(
        run,
        model,
        optimizer,
        epochs=s.epochs,
        learning_rate=dropped(s.learning_rate, s.drop_after),
        training=lambda _: training.batches(s.batch_size, shuffle=shuffle, augment=Augment(), **run.part),
        validation=lambda: validation.batches(500, **run.part),
    )


def _experiment(name: str, title: str, data: str) -> Experiment:
    return Experiment(
        name=name,
        title=title,
        shows="OnlineNorm is as accurate as BatchNorm, at BatchNorm's own settings",
        data=data,
        time={"paper": "100 h", "cpu": "50 min", "smoke": "10 s"},
        norms=("online", "batch", "group", "instance", "layer"),
        allowed=("online", "batch", "group", "instance", "layer", "none", "batch-renorm", "weight", "propagation"),
        runs={"paper": 5, "cpu": 1, "smoke": 1},
        settings=partial(settings, name),
        load=load,
        train=train,
        metric=ACCURACY,
        also=(LOSS,),
        sweep={"alpha_fwd": (2, 4096), "alpha_bwd": (2, 4096)},
    )


CIFAR10 = _experiment("cifar10", "CIFAR-10, ResNet-20", "CIFAR-10, 170 MB")
CIFAR100 = _experiment("cifar100", "CIFAR-100, ResNet-20", "CIFAR-100, 169 MB")
