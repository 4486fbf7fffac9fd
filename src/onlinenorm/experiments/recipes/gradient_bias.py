"""`gradient-bias`: does averaging over batches recover the gradient? (Paper, section 3.2, appendix A.5, figure 3.)

A convolution, a normaliser, ReLU, a fully connected layer and softmax stand at random weights that never change. The
truth is the gradient of the mean loss with the statistics of all images in the normaliser, differentiated through
these statistics too. Beside it stands the mean of the gradients of batches that together hold each image once. If
sampling were all that told them apart, this mean would be the truth; the angle between them is the bias, and no
further averaging removes it.

The paper gives no sizes of its network, and compares "the resulting gradients". Ours has a 3 x 3 convolution of
stride 2 to 16 channels with PyTorch's initial weights, and the angle is that of the convolution's gradient, which is
what comes through the normaliser; the angle of all gradients as one vector is noted beside it.

OnlineNorm's own bias is measured likewise: the images stream by once, with both horizons 1 / (1 - alpha) as long as
BatchNorm's batch, after as many as it takes for the streams to settle. Layer scaling is another function with another
gradient, so it is off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.experiments.analysis import only_float32
from onlinenorm.experiments.data.cifar import cifar10
from onlinenorm.experiments.data.images import ImageData
from onlinenorm.experiments.data.made import made_images
from onlinenorm.experiments.experiment import Experiment, Metric, Scale, Setting, Summary
from onlinenorm.experiments.normalizers import NORMALIZERS
from onlinenorm.experiments.runs import Record, Run
from onlinenorm.hyperparameters import EPS, decay_of
from onlinenorm.torch import OnlineNorm

AT_ONCE = 1000  # images that are computed together
SETTLED = 8  # horizons, after which a stream has forgotten its start
POWERS_OF_TWO = tuple(2**k for k in range(1, 11))

ANGLE = Metric("angle", "angle to the true gradient, in degrees", "lowest")
Images = tuple[Tensor, Tensor]  # and their labels


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """Batch sizes in powers of two, as in the paper, which does not say which; the network is ours."""

    data: str = "cifar10"
    channels: int = 16
    samples: tuple[int, ...] = POWERS_OF_TWO  # in a batch, or in the horizon of OnlineNorm


def settings(scale: Scale, norm: str) -> Settings:
    """`cpu` is the paper's with fewer runs."""
    paper = Settings(norm=norm)
    return replace(paper, data="made", channels=4, samples=(2, 8, 32)) if scale == "smoke" else paper


def load(settings: Settings, folder: Path | None) -> ImageData:
    """CIFAR-10, or made images."""
    only_float32(settings)
    return made_images(500, test=1, size=8, channels=3) if settings.data == "made" else cifar10(folder)


def train(run: Run[Settings]) -> None:
    """The bias at each batch size, or horizon."""
    s = run.settings
    everything = run.data.train.batches(len(run.data.train), device=run.fabric.device)
    images, labels = next(iter(everything))
    network = Network(s.channels, images.shape[1:]).to(run.fabric.device)
    truth = true_gradient(network, (images, labels))
    for samples in run.each("samples", s.samples):
        shuffled = torch.randperm(len(labels), device=labels.device)
        data = images[shuffled], labels[shuffled]
        if s.norm == "batch":
            found = gradient(network, data, partial(in_batches, size=samples), at_once=multiple_of(samples))
        else:
            decay = decay_of(samples)
            layer = OnlineNorm(s.channels, affine=False, guard=None, alpha_fwd=decay, alpha_bwd=decay)
            layer.to(run.fabric.device)
            settling = slice(SETTLED * samples)
            gradient(network, (images[settling], labels[settling]), layer, of=len(labels))
            found = gradient(network, data, layer)
        run.log(angle=angle(found[:1], truth[:1]), angle_of_all=angle(found, truth))


class Network(nn.Module):
    """Convolution, a normaliser that is given in each call, ReLU, and a fully connected layer."""

    def __init__(self, channels: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], channels, 3, stride=2, padding=1, bias=False)
        self.head = nn.Linear(channels * (shape[1] // 2) * (shape[2] // 2), 10)

    def forward(self, images: Tensor, normalise: Callable[[Tensor], Tensor]) -> Tensor:
        """The logits."""
        logits: Tensor = self.head(F.relu(normalise(self.conv(images))).flatten(1))
        return logits


def gradient(
    network: Network, data: Images, normalise: Callable[[Tensor], Tensor], at_once: int = AT_ONCE, of: int = 0
) -> list[Tensor]:
    """The gradient of the loss, mean over all images (or sum, divided by `of`), the convolution's first."""
    network.zero_grad()
    images, labels = data
    for part, answers in zip(torch.split(images, at_once), torch.split(labels, at_once), strict=True):
        loss = F.cross_entropy(network(part, normalise), answers, reduction="sum") / (of or len(labels))
        loss.backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in network.parameters() if p.grad is not None]


def true_gradient(network: Network, data: Images) -> list[Tensor]:
    """The gradient of the loss over all images, normalised by the statistics of all images, exactly.

    The statistics depend on the convolution's weights: first come their values, then the loss's derivatives by weights
    and statistics, each as if the others were constant, then those of the statistics by the weights.
    """
    images, _ = data
    with torch.no_grad():
        mean = mean_over(images, lambda part: network.conv(part).double())
        var = mean_over(images, lambda part: (network.conv(part).double() - channels(mean)).square())
    mean, var = mean.float().requires_grad_(), var.float().requires_grad_()
    gradient(network, data, lambda x: (x - channels(mean)) * channels((var + EPS).rsqrt()))
    assert mean.grad is not None
    assert var.grad is not None
    for part in torch.split(images, AT_ONCE):
        x = network.conv(part)
        of_mean = x.mean(dim=(0, 2, 3))
        of_var = (x - channels(mean.detach())).square().mean(dim=(0, 2, 3))
        ((mean.grad @ of_mean + var.grad @ of_var) * len(part) / len(images)).backward()
    return [p.grad for p in network.parameters() if p.grad is not None]


def mean_over(images: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean of something (N, C, H, W) over all but the channels."""
    means = [of(part).mean(dim=(0, 2, 3)) * len(part) for part in torch.split(images, AT_ONCE)]
    return torch.stack(means).sum(0) / len(images)


def channels(values: Tensor) -> Tensor:
    """One value for each channel of images."""
    return values.view(-1, 1, 1)


def in_batches(x: Tensor, size: int) -> Tensor:
    """BatchNorm of one batch of so many samples after the other; the last may be smaller.

    Batches are computed side by side, as channels of one batch.
    """
    whole = len(x) // size * size
    side_by_side = x[:whole].view(-1, size, *x.shape[1:]).transpose(0, 1)
    normalised = F.batch_norm(side_by_side.flatten(1, 2), None, None, training=True, eps=EPS)
    parts = [normalised.view_as(side_by_side).transpose(0, 1).flatten(0, 1)]
    if whole < len(x):
        parts.append(F.batch_norm(x[whole:], None, None, training=True, eps=EPS))
    return torch.cat(parts)


def multiple_of(size: int) -> int:
    """About as many images as are computed together, in whole batches."""
    return size * max(1, AT_ONCE // size)


def angle(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Between two gradients, in degrees; 90 where one of them has vanished."""
    u, v = (torch.cat([part.flatten() for part in parts]).double() for parts in (a, b))
    cosine = u @ v / (u.norm() * v.norm()).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.rad2deg(torch.acos(cosine.clamp(-1, 1))).item()


def summary(records: Sequence[Record]) -> Summary:
    """The mean angle over the runs."""
    norms = list(dict.fromkeys(record.settings["norm"] for record in records))
    runs = {norm: [record for record in records if record.settings["norm"] == norm] for norm in norms}
    sizes = sorted({row["samples"] for record in records for row in record.rows})

    def mean(norm: str, samples: int) -> str:
        angles = [row["angle"] for record in runs[norm] for row in record.rows if row["samples"] == samples]
        return f"{fmean(angles):.1f}°" if angles else ""

    rows = tuple((str(size), *(mean(norm, size) for norm in norms)) for size in sizes)
    columns = ("Samples", *(f"{NORMALIZERS[norm].label} ({len(runs[norm])} runs)" for norm in norms))
    note = (
        "Samples: in BatchNorm's batch, in OnlineNorm's horizons. The paper reports more than 10° at moderate batch "
        "sizes, of a network whose sizes it does not give."
    )
    return Summary(columns, rows, note)


EXPERIMENT = Experiment(
    name="gradient-bias",
    title="Gradient bias",
    shows="the mean of small batches' gradients is not the gradient",
    data="CIFAR-10, 170 MB",
    time={"paper": "30 min", "cpu": "10 min", "smoke": "5 s"},
    norms=("batch", "online"),
    allowed=("batch", "online"),
    runs={"paper": 10, "cpu": 3, "smoke": 1},
    settings=settings,
    load=load,
    train=train,
    x="samples",
    metric=ANGLE,
    summary=summary,
)
