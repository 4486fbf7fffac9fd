"""`imagenet`: ResNet-50 (paper, appendix A.1, figure 9).

The rate and the momentum follow from the usual ones for a batch of 256, 0.1 and 0.9, by appendix F: a batch of 32 has
momentum 0.9^(32/256) = 0.98692 and rate 0.1 (1 - 0.98692) / (1 - 0.9) = 0.01308.

Images are cropped and mirrored at random to train on, and cropped at the centre to validate with, as usual and in the
authors' code. The paper ran OnlineNorm and BatchNorm; its figures for the others are quoted from other papers. Weight
normalisation and normalisation propagation diverge at this rate within a few steps, and get a tenth of it.
"""

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from onlinenorm.experiments.classification import ACCURACY, LOSS, dropped, train_classifier
from onlinenorm.experiments.data.image_folder import FolderData, image_folder
from onlinenorm.experiments.data.made_folder import made_folder
from onlinenorm.experiments.experiment import Experiment, Scale, Setting
from onlinenorm.experiments.normalizers import build
from onlinenorm.experiments.resnet import resnet50
from onlinenorm.experiments.runs import Run


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Of the paper."""

    data: str = "imagenet"
    classes: int = 1000  # the first so many, or all there are
    size: int = 224  # sides of the crops
    width: int = 64  # of the network
    epochs: int = 100
    batch_size: int = 32
    learning_rate: float = 0.01308
    drop_after: tuple[int, ...] = (30, 60, 80, 90)  # epochs, each of which divides the rate by ten
    momentum: float = 0.98692
    weight_decay: float = 1e-4
    alpha_fwd: float = 0.999
    alpha_bwd: float = 0.99
    groups: int = 32


def settings(scale: Scale, norm: str) -> Settings:
    """At `cpu`, eight of the classes, crops of 64 pixels, half the width, and ten epochs with the drops in proportion.

    This shows how fast each learns, not what ImageNet's 1.3 million images come to: no hour of two cores does.
    """
    unguarded = norm in ("weight", "propagation")
    paper = Settings(norm=norm, learning_rate=0.001308 if unguarded else 0.01308)
    if scale == "cpu":
        return replace(paper, classes=8, size=64, width=32, epochs=10, drop_after=(3, 6, 8, 9))
    if scale == "smoke":
        made = replace(
            paper, data="made", classes=4, size=48, width=8, groups=4, epochs=5, drop_after=(4,), batch_size=8
        )
        return replace(
            made, learning_rate=0.001 if unguarded else 0.03, momentum=0.0, alpha_fwd=127 / 128, alpha_bwd=31 / 32
        )
    return paper


def load(settings: Settings, folder: Path | None) -> FolderData:
    """An ImageFolder, or a made one that lasts as long as this process."""
    if settings.data != "made":
        return image_folder(folder, settings.size, settings.classes)
    made = Path(tempfile.mkdtemp(prefix="onlinenorm-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    made_folder(made)
    return image_folder(made, settings.size)


def train(run: Run[Settings]) -> None:
    """One run."""
    s = run.settings
    data: FolderData = run.data
    network = partial(resnet50, num_classes=data.train.classes, width=s.width)
    model = build(s.norm, network, alpha_fwd=s.alpha_fwd, alpha_bwd=s.alpha_bwd, groups=s.groups)
    optimizer = torch.optim.SGD(model.parameters(), s.learning_rate, s.momentum, weight_decay=s.weight_decay)
    shuffle, where, workers = torch.default_generator, run.fabric.device, loader_workers()
    train_classifier(
        run,
        model,
        optimizer,
        epochs=s.epochs,
        learning_rate=dropped(s.learning_rate, s.drop_after),
        training=lambda _: data.train.batches(
            s.batch_size, shuffle=shuffle, drop_last=True, device=where, workers=workers, **run.part
        ),
        validation=lambda: data.validation.batches(5 * s.batch_size, device=where, workers=workers, **run.part),
    )


def loader_workers() -> int:
    """How many processes decode images for this one: as many as it has cores. No number depends on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


EXPERIMENT = Experiment(
    name="imagenet",
    title="ImageNet, ResNet-50",
    shows="OnlineNorm is as accurate as BatchNorm on a large task",
    data="ImageNet, 150 GB, by --data",
    time={"paper": "not measured", "cpu": "50 min", "smoke": "30 s"},
    norms=("online", "batch", "group", "instance", "layer", "weight", "propagation"),
    allowed=("online", "batch", "group", "instance", "layer", "weight", "propagation", "batch-renorm"),
    runs={"paper": 1, "cpu": 1, "smoke": 1},
    settings=settings,
    load=load,
    train=train,
    metric=ACCURACY,
    also=(LOSS,),
)
