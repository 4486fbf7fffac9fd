"""What the paper reports, as data, and how a measurement compares with it.

Medians and settings are the paper's; the spread over runs is from the reproducibility table that its authors published
with their code. Names of experiments, metrics and normalisers are those of this package.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from onlinenorm.experiments.experiment import Metric

# Best validation metric (tables 2 and 3, figures 7 to 12)


@dataclass(frozen=True)
class Reported:
    """The best validation metric of one normaliser, as the paper reports it.

    Attributes:
        median: over the runs.
        low: the smallest of the runs; None where it is not reported.
        high: the largest.
        runs: how many; 0 where the paper quotes the number from other papers.
        digits: after the point.
    """

    median: float
    low: float | None = None
    high: float | None = None
    runs: int = 1
    digits: int = 1

    def __str__(self) -> str:
        """As in 92.3 (91.8 to 92.3, 5 runs)."""
        spread = "" if self.low is None else f"{self.low:.{self.digits}f} to {self.high:.{self.digits}f}, "
        runs = "quoted" if not self.runs else "1 run" if self.runs == 1 else f"{self.runs} runs"
        return f"{self.median:.{self.digits}f} ({spread}{runs})"


def _loss(median: float, runs: int, digits: int = 2) -> Reported:
    return Reported(median, runs=runs, digits=digits)


REPORTED: Final[Mapping[str, Mapping[str, Mapping[str, Reported]]]] = {  # experiment, metric, normaliser
    "cifar10": {
        "accuracy": {
            "online": Reported(92.3, 91.8, 92.3, runs=5),
            "batch": Reported(92.2, 91.9, 92.5, runs=5),
            "group": Reported(90.3),
            "instance": Reported(90.4),
            "layer": Reported(87.4),
        },
        "loss": {
            "online": _loss(0.26, runs=5),
            "batch": _loss(0.26, runs=5),
            "group": _loss(0.32, runs=1),
            "instance": _loss(0.31, runs=1),
            "layer": _loss(0.39, runs=1),
        },
    },
    "cifar100": {
        "accuracy": {
            "online": Reported(68.6, 67.6, 69.4, runs=5),
            "batch": Reported(68.6, 68.1, 69.2, runs=5),
            "group": Reported(63.3),
            "instance": Reported(63.1),
            "layer": Reported(59.2),
        },
        "loss": {
            "online": _loss(1.12, runs=5),
            "batch": _loss(1.14, runs=5),
            "group": _loss(1.35, runs=1),
            "instance": _loss(1.32, runs=1),
            "layer": _loss(1.47, runs=1),
        },
    },
    "imagenet": {
        "accuracy": {
            "online": Reported(76.3),
            "batch": Reported(76.4),
            "group": Reported(75.9, runs=0),
            "instance": Reported(71.6, runs=0),
            "layer": Reported(74.7, runs=0),
            "weight": Reported(67, runs=0, digits=0),
            "propagation": Reported(71.9, runs=0),
        },
        "loss": {"online": _loss(0.94, runs=1), "batch": _loss(0.97, runs=1)},
    },
    "unet": {
        "jaccard": {
            "online": Reported(0.977, 0.972, 0.980, runs=50, digits=3),
            "batch": Reported(0.976, 0.970, 0.982, runs=50, digits=3),
            "none": Reported(0.961, 0.0, 0.973, runs=50, digits=3),
        },
    },
    "mlp": {
        "accuracy": {
            "online": Reported(88.9, 86.2, 89.9, runs=400),
            "batch": Reported(88.8, 86.0, 89.7, runs=400),
            "layer": Reported(88.3, 85.5, 89.4, runs=400),
            "none": Reported(88.2, 85.5, 89.0, runs=400),
        },
        "loss": {
            "online": _loss(0.323, runs=400, digits=3),
            "batch": _loss(0.328, runs=400, digits=3),
            "layer": _loss(0.326, runs=400, digits=3),
            "none": _loss(0.332, runs=400, digits=3),
        },
    },
    "rnn": {
        "perplexity": {
            "online": Reported(129.2, 127.0, 181.3, runs=25),
            "layer": Reported(141.9, 136.3, 246.6, runs=25),
            "none": Reported(172.0, 157.5, 7107, runs=25),
        },
    },
    "lstm": {
        "perplexity": {
            "online": Reported(113.4, 110.8, 123.0, runs=25),
            "layer": Reported(121.6, 118.2, 21218, runs=25),
            "none": Reported(124.4, 121.0, 133294, runs=25),
        },
    },
}


# What a measurement is


@dataclass(frozen=True)
class Best:
    """The metric of every run on the epoch at which the median curve over the runs is best: the paper's "best".

    A run that has no number there, as it had diverged, has the worst one: infinity, or minus infinity.
    """

    epoch: Any
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over the runs."""
        return statistics.median(self.values)

    def describe(self, form: str) -> str:
        """As in 92.3 (91.8 to 92.3, 5 runs)."""
        median, low, high = (number(v, form) for v in (self.median, min(self.values), max(self.values)))
        count = len(self.values)
        return f"{median} (1 run)" if count == 1 else f"{median} ({low} to {high}, {count} runs)"


def number(value: float, form: str) -> str:
    """A number that may be none."""
    return form.format(value) if math.isfinite(value) else "diverged"


def over_runs(
    runs: Sequence[Sequence[Mapping[str, Any]]], metric: Metric, x: str = "epoch"
) -> dict[Any, tuple[float, ...]]:
    """A metric of every run, epoch by epoch, the worst where a run has no number.

    A run that ended early, as it had diverged, keeps its last row's number.

    Raises:
        ValueError: no run has a row with the metric.
    """
    worst = -math.inf if metric.best == "highest" else math.inf
    curves = [
        {row[x]: worst if row[metric.key] is None else row[metric.key] for row in rows if metric.key in row}
        for rows in runs
    ]
    epochs = sorted(set().union(*curves))
    if not epochs:
        raise ValueError(f"no run has a row with {metric.key!r}")

    def fill(curve: Mapping[Any, float]) -> list[float]:
        values: list[float] = []
        for epoch in epochs:
            values.append(curve.get(epoch, values[-1] if values else worst))
        return values

    return dict(zip(epochs, zip(*map(fill, curves), strict=True), strict=True))


def best(runs: Sequence[Sequence[Mapping[str, Any]]], metric: Metric, x: str = "epoch") -> Best:
    """The best of several runs' rows: on one epoch for all, and not each run on its own.

    Raises:
        ValueError: no run has a row with the metric.
    """
    first, *others = (Best(epoch, values) for epoch, values in over_runs(runs, metric, x).items())
    chosen = first
    for candidate in others:
        if metric.better(candidate.median, chosen.median):
            chosen = candidate
    return chosen


# Comparisons


@dataclass(frozen=True)
class Verdict:
    """How a measurement compares with the paper.

    Attributes:
        agrees: whether it does; None where the paper gives too little to tell.
        text: in a short phrase.
    """

    agrees: bool | None
    text: str


def verdict(measured: Sequence[float], reported: Reported, metric: Metric) -> Verdict:
    """Whether the median of measured values, rounded as the paper rounds, lies within the paper's smallest to largest.

    Only for runs at the paper's scale: a reduced one has no business in that range, but may well keep the order
    (`compare_order`).
    """
    median = statistics.median(measured)
    if not math.isfinite(median):
        return Verdict(False, "diverged")
    median = round(median, reported.digits)

    def away(edge: float, name: str) -> str:
        side = "above" if median > edge else "below"
        judged = "better" if metric.better(median, edge) else "worse"
        return f"{abs(median - edge):.{reported.digits}f} {side} {name} ({judged})"

    if reported.low is not None and reported.high is not None:
        if reported.low <= median <= reported.high:
            return Verdict(True, "inside the paper's range")
        return Verdict(False, away(reported.low if median < reported.low else reported.high, "the paper's range"))
    name = {0: "what the paper quotes", 1: "the paper's one run"}.get(reported.runs, "the paper's median")
    return Verdict(None, f"equal to {name}" if median == reported.median else away(reported.median, name))


REDUCED = "A reduced scale: its numbers are not the paper's to reach, so only the order of the normalisers is compared."


def compare_order(
    measured: Mapping[str, Sequence[float]],
    reported: Mapping[str, Reported],
    metric: Metric,
    labels: Mapping[str, str],
) -> Verdict:
    """Whether the normalisers stand in the paper's order, by the medians; any scale may be asked that.

    Args:
        measured: values over the runs, by normaliser.
        reported: the paper's, by normaliser.
        metric: what the values are.
        labels: the normalisers' names in words.
    """
    medians = {norm: statistics.median(values) for norm, values in measured.items() if norm in reported}
    in_order = sorted(medians, key=lambda norm: reported[norm].median, reverse=metric.best == "highest")
    pairs = [
        (a, b) for i, a in enumerate(in_order) for b in in_order[i + 1 :] if reported[a].median != reported[b].median
    ]
    if not pairs:
        return Verdict(None, "no two normalisers here whose order the paper reports")
    swapped = [(a, b) for a, b in pairs if metric.better(medians[b], medians[a])]
    if not swapped:
        return Verdict(True, f"the paper's order: {', '.join(labels[norm] for norm in in_order)}")

    def clear(a: str, b: str) -> bool:
        """More than one run each, and no run of one among the other's."""
        apart = min(measured[a]) > max(measured[b]) or min(measured[b]) > max(measured[a])
        return apart and len(measured[a]) > 1 < len(measured[b])

    def words(a: str, b: str) -> str:
        return f"{labels[b]} before {labels[a]}" + ("" if clear(a, b) else " (not clearly)")

    agrees = False if any(clear(a, b) for a, b in swapped) else None
    return Verdict(agrees, f"not the paper's order: {', '.join(words(a, b) for a, b in swapped)}")


# Memory for training (table 1)


@dataclass(frozen=True)
class Memory:
    """Gigabytes for training, as the paper has modelled them."""

    online: int
    batch32: int
    batch128: int


MEMORY: Final[Mapping[str, Memory]] = {
    "ResNet-50, ImageNet": Memory(1, 2, 4),
    "ResNet-50, PyTorch": Memory(2, 5, 15),
    "U-Net, 150³ voxels": Memory(1, 29, 115),
    "U-Net, 250³ voxels": Memory(6, 195, 785),
    "U-Net, 1024² pixels": Memory(2, 31, 123),
    "U-Net, 2048² pixels": Memory(5, 137, 546),
}


# What the paper's figures show


@dataclass(frozen=True)
class Figure:
    """A figure or table of the paper, in words.

    Attributes:
        where: as in "Figure 3".
        caption: the paper's.
        shows: what one sees, or what the text says of it.
    """

    where: str
    caption: str
    shows: str


FIGURES: Final[Mapping[str, Figure]] = {  # by experiment
    "two-elements": Figure(
        "Figure 2",
        "Two element normalization (N=2)",
        "A surface over the two inputs of a fully connected layer at batch size two. Each pair becomes (−1, +1) or "
        "(+1, −1), whichever is larger, so the surface has two flat parts and a step between them. The gradient is "
        "zero almost everywhere, and no number of such batches gives the true one.",
    ),
    "gradient-bias": Figure(
        "Figure 3",
        "Gradient bias (BN)",
        "The angle between BatchNorm's gradient and the gradient over all 50,000 images of CIFAR-10, against the batch "
        "size in powers of two, mean of ten runs: convolution, normaliser, ReLU, linear and softmax at random weights, "
        "held fixed. It falls as batches grow, and is more than 10 degrees at moderate sizes.",
    ),
    "activation-growth": Figure(
        "Figure 4",
        "Activation growth",
        "The size of activations layer by layer in a fully connected network of 100 layers. Each layer's exact "
        "statistics over the data set are perturbed at random. The activations grow exponentially with depth even "
        "under mild noise, and most where variances are underestimated. Layer scaling prevents that.",
    ),
    "weight-equilibrium": Figure(
        "Figure 5",
        "Weight equilibrium",
        "A diagram without numbers: a step of length ηE|w'| at a right angle to the weights lengthens them, and the L2 "
        "decay ηλ|w| takes the same length away. The two balance at |w| = √(η/2λ) E|w'|.",
    ),
    "cifar10": Figure(
        "Figure 7",
        "CIFAR-10 / ResNet-20",
        "Learning curves over 250 epochs: the median of five runs for Online and Batch Normalization, one run for the "
        "others. Online and Batch Normalization end together, at 92.3 and 92.2 % (table 2); Instance and Group "
        "Normalization end two points lower and Layer Normalization five.",
    ),
    "cifar100": Figure(
        "Figure 8",
        "CIFAR-100 / ResNet-20",
        "Learning curves over 250 epochs, as for CIFAR-10. Online and Batch Normalization both reach 68.6 % (table 2), "
        "Group and Instance Normalization 63 %, Layer Normalization 59 %.",
    ),
    "imagenet": Figure(
        "Figure 9",
        "ImageNet / ResNet-50",
        "Learning curves of one run over 100 epochs. Online Normalization ends with the lower loss, 0.94 against 0.97, "
        "and Batch Normalization with the higher accuracy, 76.4 % against 76.3 % (table 2). The other normalisers' "
        "numbers in that table are quoted from other papers.",
    ),
    "unet": Figure(
        "Figure 10",
        "Image Segmentation with U-Net",
        "The Jaccard similarity over 40 epochs, median of 50 runs. Online Normalization is best, by a thousandth "
        "before Batch Normalization; without a normaliser it is lower, and a few runs fail.",
    ),
    "mlp": Figure(
        "Figure 11",
        "FMNIST with MLP",
        "Learning curves over 10 epochs of a fully connected network. Early in training Online Normalization is ahead "
        "of the other normalisers; in the end it and Batch Normalization are half a point above Layer Normalization "
        "and none.",
    ),
    "rnn": Figure(
        "Figure 12, dashed",
        "RNN (dashed) and LSTM (solid)",
        "Validation perplexity on Penn Treebank over 40 epochs. Online Normalization is best, then Layer "
        "Normalization, then none. The RNN with Online Normalization does nearly as well as the LSTM with none.",
    ),
    "lstm": Figure(
        "Figure 12, solid",
        "RNN (dashed) and LSTM (solid)",
        "Validation perplexity on Penn Treebank over 25 epochs. Online Normalization is best; Layer Normalization and "
        "none are closer to each other than in the RNN.",
    ),
    "memory": Figure(
        "Table 1",
        "Memory for training (GB)",
        "What training needs with Online Normalization, and with Batch Normalization at batch sizes 32 and 128. The "
        "numbers for U-Nets are modelled. ResNet-50 stands there twice: with 1, 2 and 4 GB, and as PyTorch trains it, "
        "which keeps several copies of activations, with 2, 5 and 15. Memory grows with the batch, and with volumes "
        "batches do not fit.",
    ),
    "decay-sweep": Figure(
        "Figure 15",
        "Hyperparameter sweep",
        "ResNet-20 on CIFAR-10 over a logarithmic grid of the forward and backward decays, expressed as horizons "
        "1/(1 − α). The region of near-optimal performance is broad.",
    ),
    "reproducibility": Figure(
        "Figure 14",
        "Reproducibility",
        "Box plots of the best validation metric over the runs of each experiment and normaliser; dashed lines where "
        "there was one run. The spread with Online Normalization is like that of the other normalisers.",
    ),
}
