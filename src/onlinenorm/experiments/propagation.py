"""Normalization propagation (Arpit et al., 2016): if the data is normalised, weights of norm 1 keep it so.

A neuron with weights of norm 1 over inputs that are uncorrelated, of mean 0 and variance 1, has mean 0 and variance 1.
If it is Gaussian, its ReLU has mean sqrt(1 / (2 pi)) and variance (1 - 1 / pi) / 2; take them out, and the next layer
finds what this one found. Statistics of the data are needed at the input only.

The scale behind each layer is learnt, and so is the bias. It starts at 1, so that activations start normalised.

The same is done here for what that paper lacks, and ResNets have. Max pooling of n rectified neurons has the moments of
the largest of n Gaussians, rectified. Where a residual block ends, two independent branches are added, so the sum is
divided by sqrt(2); it is Gaussian behind a shortcut that is a projection. Behind the identity it is skewed, as that was
rectified before, block after block: by this recursion the mean of its ReLU falls from 0.391 to 0.375 in the course
of a chain, and the deviation grows from 0.652 to 0.687. One pair of numbers stands for all of them.
"""

import math
from collections.abc import Sequence
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onlinenorm.experiments.parts import Join

RELU_MEAN = sqrt(1 / (2 * math.pi))
RELU_STD = sqrt((1 - 1 / math.pi) / 2)
CHAIN_MEAN, CHAIN_STD = 0.38, 0.67


class UnitNorm(nn.Module):
    """Weights, scaled so that each output's have norm 1."""

    def forward(self, weight: Tensor) -> Tensor:
        """The weights to compute with."""
        return F.normalize(weight.flatten(1)).view_as(weight)


class ScaleAndBias(nn.Module):
    """weight * x + bias, for each channel of (N, C, *)."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        per_channel = (1, -1, *[1] * (x.dim() - 2))
        return self.weight.view(per_channel) * x + self.bias.view(per_channel)


class NormalisedReLU(nn.Module):
    """ReLU, moved to mean 0 and variance 1 for an input that is Gaussian with mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return (F.relu(x) - RELU_MEAN) / RELU_STD


class NormalisedJoin(nn.Module):
    """A residual block's end, moved to mean 0 and variance 1 for independent branches with mean 0 and variance 1."""

    def __init__(self, identity: bool) -> None:
        super().__init__()
        self.mean, self.std = (CHAIN_MEAN, CHAIN_STD) if identity else (RELU_MEAN, RELU_STD)

    def forward(self, residual: Tensor, shortcut: Tensor) -> Tensor:
        """The block's output."""
        return (F.relu((residual + shortcut) * sqrt(0.5)) - self.mean) / self.std


class NormalisedMaxPool(nn.Module):
    """Max pooling of a `NormalisedReLU`, moved to mean 0 and variance 1."""

    def __init__(self, pool: nn.MaxPool2d | nn.MaxPool3d) -> None:
        super().__init__()
        self.pool = pool
        kernel, dims = pool.kernel_size, 2 if isinstance(pool, nn.MaxPool2d) else 3
        window = math.prod(kernel) if isinstance(kernel, tuple) else kernel**dims
        mean, std = rectified_largest_of(window)
        self.mean, self.std = (mean - RELU_MEAN) / RELU_STD, std / RELU_STD

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        pooled: Tensor = self.pool(x)
        return (pooled - self.mean) / self.std


def rectified_largest_of(count: int) -> tuple[float, float]:
    """Mean and deviation of the ReLU of the largest of so many independent Gaussians; of one, those of the paper."""
    edges = torch.linspace(-8, 8, 10_001, dtype=torch.float64, device="cpu")
    probability = (torch.special.ndtr(edges) ** count).diff()
    value = ((edges[1:] + edges[:-1]) / 2).relu()
    mean = (probability * value).sum().item()
    return mean, sqrt((probability * value**2).sum().item() - mean**2)


def propagate_normalisation(network: nn.Module, weighted: Sequence[nn.Module]) -> None:
    """Make a network's weights and nonlinearities keep normalised data normalised, in place.

    Args:
        network: its nonlinearities are modules (`nn.ReLU`, max pooling, `Join`), and `ScaleAndBias` stands where others
            have normalisers.
        weighted: the convolutions and fully connected layers to change; not the last one, whose output is the result.
    """
    for layer in weighted:
        parametrize.register_parametrization(layer, "weight", UnitNorm())
    for module in list(network.modules()):
        for name, child in module.named_children():
            match child:
                case nn.ReLU():
                    setattr(module, name, NormalisedReLU())
                case Join():
                    setattr(module, name, NormalisedJoin(child.identity))
                case nn.MaxPool2d() | nn.MaxPool3d():
                    setattr(module, name, NormalisedMaxPool(child))
