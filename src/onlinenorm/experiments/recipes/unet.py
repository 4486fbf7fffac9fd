"""`unet`: a U-Net that segments synthetic shapes (paper, appendix A.2, figure 10).

The paper updates the parameters "at an update cadence of 25". Here that is a batch of 25, as in its authors' code. To
accumulate the gradients of 25 batches of one image, each loss divided by 25, would train the network with OnlineNorm
the same way, as its output does not depend on how samples are split into batches; with BatchNorm it would not.

As in the authors' code, each run draws images of its own, and the similarity is that of an image's six masks taken
together, averaged over images. Their images have three equal channels, these have one.

With the paper's alpha_bwd of 1/2, equation 11 as it stands diverges in the second epoch: each sample multiplies the
accumulated error by 1 - (1 - alpha_bwd) E[y^2], with the mean taken over the sample, which is below -1 where that mean
is above 4. The authors' code lets the factor be no less than 0.00001, which is not in the paper; so does
`bound_control` here, with 0.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from onlinenorm.experiments.classification import LOSS, dropped, set_learning_rate
from onlinenorm.experiments.data.images import Batches, Images
from onlinenorm.experiments.data.normalisation import Normalisation
from onlinenorm.experiments.experiment import Experiment, Metric, Scale, Setting
from onlinenorm.experiments.normalizers import build
from onlinenorm.experiments.runs import Run
from onlinenorm.experiments.segmentation import jaccard, segmentation_loss
from onlinenorm.experiments.shapes import CLASSES, make_shapes
from onlinenorm.experiments.unet import UNet

JACCARD = Metric("jaccard", "Jaccard similarity", "highest", "{:.3f}")


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Of the paper, to the letter."""

    size: int = 192  # sides of the images
    zoom: float = 1.0  # of the shapes within them
    images: int = 2000  # to train on
    held_out: int = 200
    width: int = 64
    epochs: int = 40
    batch_size: int = 25
    learning_rate: float = 0.04
    drop_after: tuple[int, ...] = (25,)  # epochs, each of which divides the rate by ten
    momentum: float = 0.9
    weight_decay: float = 1e-6
    alpha_fwd: float = 63 / 64
    alpha_bwd: float = 1 / 2
    groups: int = 8


def settings(scale: Scale, norm: str) -> Settings:
    """Of each scale.

    At `cpu`, images have half the sides, with shapes of as many pixels, and the network is an eighth as wide. The rate
    was chosen as the paper chose its own: the best of 0.04, 0.1, 0.2 and 0.4 for BatchNorm, and of 0.6 and 1.2 for no
    normaliser.
    """
    paper = Settings(norm=norm, learning_rate=0.6 if norm == "none" else 0.04)
    if scale == "paper":
        return paper
    small = replace(paper, zoom=2.0, width=8, learning_rate=0.6 if norm == "none" else 0.2)
    if scale == "cpu":
        return replace(small, size=96, images=1500, held_out=150)
    made = replace(small, size=32, images=240, held_out=50, epochs=4, drop_after=(3,), batch_size=4)
    return replace(made, alpha_fwd=127 / 128, alpha_bwd=7 / 8)


def draw(count: int, s: Settings, seed: int) -> Images:
    """Images of shapes, each labelled with its six masks."""
    images, masks = make_shapes(count, s.size, seed, s.zoom)
    return Images((255 * images).byte(), masks, len(CLASSES), Normalisation((0.0,), (1.0,)))


def train(run: Run[Settings]) -> None:
    """One run."""
    s = run.settings
    training, validation = draw(s.images, s, seed=2 * s.seed), draw(s.held_out, s, seed=2 * s.seed + 1)
    network = partial(UNet, s.width, classes=len(CLASSES))
    model = build(
        s.norm,
        network,
        alpha_fwd=s.alpha_fwd,
        alpha_bwd=s.alpha_bwd,
        groups=s.groups,
        renorm_warmup=s.images // s.batch_size,
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), s.learning_rate, s.momentum, weight_decay=s.weight_decay
    )
    learning_rate, shuffle, where = dropped(s.learning_rate, s.drop_after), torch.default_generator, run.fabric.device

    model, optimizer = run.setup(model, optimizer)
    for epoch in run.epochs(s.epochs):
        set_learning_rate(optimizer, learning_rate(epoch))
        model.train()
        batches = training.batches(s.batch_size, shuffle=shuffle, drop_last=True, device=where, **run.part)
        for images, masks in run.batches(batches):
            loss = segmentation_loss(model(images), masks.float())
            optimizer.zero_grad()
            run.fabric.backward(loss)
            optimizer.step()
            run.observe(loss)
        run.log(**judge(run, model, validation.batches(25, device=where, **run.part)))


def judge(run: Run[Settings], model: nn.Module, batches: Batches) -> dict[str, float]:
    """The Jaccard similarity, and the mean loss."""
    similarity = loss = count = 0.0
    with run.evaluating(model) as network:
        for images, masks in batches:
            logits: Tensor = network(images).float()
            similarity += jaccard(logits > 0, masks).sum().item()
            loss += len(images) * segmentation_loss(logits, masks.float()).item()
            count += len(images)
    return {"jaccard": run.mean(similarity, count), "loss": run.mean(loss, count)}


def load(settings: Settings, folder: Path | None) -> None:
    """Nothing: the images are drawn."""


EXPERIMENT = Experiment(
    name="unet",
    title="Synthetic shapes, U-Net",
    shows="OnlineNorm segments as well as BatchNorm, which has a batch of 25 to normalise with",
    data="drawn on the spot",
    time={"paper": "one H200: 17 h", "cpu": "50 min", "smoke": "10 s"},
    norms=("online", "batch", "group", "none"),
    allowed=("online", "batch", "group", "none", "instance", "layer", "batch-renorm", "weight", "propagation"),
    runs={"paper": 50, "cpu": 3, "smoke": 1},
    settings=settings,
    load=load,
    train=train,
    metric=JACCARD,
    also=(LOSS,),
    sweep={"alpha_fwd": (16, 32768), "alpha_bwd": (2, 8192)},
)
