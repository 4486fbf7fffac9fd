"""The normalisers that the experiments compare: what each is called, drawn in, needs, and how a network gets it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import weight_norm

from onlinenorm.experiments.batch_renorm import BatchRenorm
from onlinenorm.experiments.parts import Norm
from onlinenorm.experiments.propagation import ScaleAndBias, propagate_normalisation
from onlinenorm.torch import OnlineNorm


@dataclass(frozen=True)
class Normalizer:
    """One of the normalisers compared.

    Attributes:
        name: on the command line and in files.
        label: its name in tables and charts.
        colour: in every chart; colour-blind readers can tell it from the others, on black and on white.
        needs: what must hold several values of a channel, for there to be statistics: a "batch", or one "sample".
    """

    name: str
    label: str
    colour: str
    needs: Literal["nothing", "batch", "sample"] = "nothing"

    def can_run(self, batch_size: int, elements: int) -> bool:
        """Whether it can train at a batch size on samples of so many elements a channel (fully connected: 1)."""
        return {"nothing": True, "batch": batch_size * elements > 1, "sample": elements > 1}[self.needs]


NORMALIZERS = {
    normalizer.name: normalizer
    for normalizer in (
        Normalizer("online", "OnlineNorm", "#0072b2"),
        Normalizer("batch", "BatchNorm", "#d55e00", needs="batch"),
        Normalizer("group", "GroupNorm", "#009e73"),
        Normalizer("layer", "LayerNorm", "#cc79a7"),
        Normalizer("instance", "InstanceNorm", "#d9a400", needs="sample"),
        Normalizer("batch-renorm", "BatchRenorm", "#8e2b1a", needs="batch"),
        Normalizer("weight", "WeightNorm", "#6a4fe0"),
        Normalizer("propagation", "NormProp", "#4fb8e8"),
        Normalizer("none", "No normaliser", "#5f5f5f"),
    )
}


class BatchNorm(_BatchNorm):
    """BatchNorm of (N, C, *), whatever *."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (N, C, *), got {tuple(input.shape)}")


class Bias(nn.Module):
    """x + bias, for each channel of (N, C, *): what the layer before a normaliser leaves to it."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        return x + self.bias.view(1, -1, *[1] * (x.dim() - 2))


def build(
    name: str,
    network: Callable[[Norm], nn.Module],
    *,
    alpha_fwd: float,
    alpha_bwd: float,
    groups: int = 8,
    renorm_warmup: int = 5000,
) -> nn.Module:
    """A network with a normaliser. The random numbers drawn, and so the initial weights, are the same for each.

    Args:
        name: a key of `NORMALIZERS`. What each is:
            online: Online Normalization with the layer's defaults, layer scaling among them, and with the control error
                bounded: the paper does not say so, but its authors' code does, and not all of its settings train
                without.
            batch: PyTorch's BatchNorm with its defaults.
            group: GroupNorm, with fewer groups where the channels cannot be divided into so many.
            layer: over all features of a sample, which is GroupNorm with one group.
            instance: over each channel of a sample, which is GroupNorm with a group for each.
            batch-renorm: see `BatchRenorm`.
            weight: every weight but the last layer's is direction times length, and both are learnt; biases follow.
                They are the network's own initial weights until `weight_norm.start_from` has seen some data.
            propagation: see `propagation`.
            none: nothing but a bias, which the layer before it lacks.
        network: makes it, given what makes the normaliser for a number of channels.
        alpha_fwd, alpha_bwd: decay factors of "online".
        groups: of "group".
        renorm_warmup: steps for which "batch-renorm" is BatchNorm; the schedule follows in proportion.
    """
    norms: dict[str, Norm] = {
        "online": partial(OnlineNorm, alpha_fwd=alpha_fwd, alpha_bwd=alpha_bwd, bound_control=True),
        "batch": BatchNorm,
        "group": lambda channels: nn.GroupNorm(gcd(groups, channels), channels),
        "layer": partial(nn.GroupNorm, 1),
        "instance": lambda channels: nn.GroupNorm(channels, channels),
        "batch-renorm": partial(BatchRenorm, warmup=renorm_warmup),
        "weight": Bias,
        "propagation": ScaleAndBias,
        "none": Bias,
    }
    built = network(norms[name])
    if name in ("weight", "propagation"):
        weighted = [m for m in built.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)][:-1]
        if name == "propagation":
            propagate_normalisation(built, weighted)
        else:
            for layer in weighted:
                weight_norm(layer)
    return built
