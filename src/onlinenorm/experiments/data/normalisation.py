"""Means and standard deviations that pixels, as fractions of 255, are normalised by: one per channel."""

from typing import NamedTuple


class Normalisation(NamedTuple):
    """Pixels become (pixel / 255 - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


FASHION_MNIST = Normalisation((0.0,), (1.0,))  # as the paper's authors: from 0 to 1
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
