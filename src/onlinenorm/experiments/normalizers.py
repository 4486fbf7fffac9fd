"""The normalisers that the experiments compare: what each is called, drawn in, and made with."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from torch import nn

from onlinenorm.torch import OnlineNorm2d

ALPHA_FWD = 31 / 32  # for a U-Net at batch size 2; the paper has 63/64 and 1/2 at batch size 25
ALPHA_BWD = 7 / 8
GROUPS = 8


@dataclass(frozen=True)
class Normalizer:
    """One of the normalisers compared.

    Attributes:
        label: its name in tables and charts.
        settings: in words, for tables.
        colour: in every chart; colour-blind readers can tell it from the others, on black and on white.
        make: the layer for a number of channels.
    """

    label: str
    settings: str
    colour: str
    make: Callable[[int], nn.Module]


def _online(channels: int) -> nn.Module:
    return OnlineNorm2d(channels, alpha_fwd=ALPHA_FWD, alpha_bwd=ALPHA_BWD)


def _group(channels: int) -> nn.Module:
    return nn.GroupNorm(gcd(GROUPS, channels), channels)


NORMALIZERS = {
    "batch": Normalizer("BatchNorm", "PyTorch's defaults", "#d55e00", nn.BatchNorm2d),
    "group": Normalizer("GroupNorm", f"{GROUPS} groups", "#009e73", _group),
    "online": Normalizer("OnlineNorm", "alpha_fwd 31/32, alpha_bwd 7/8", "#0072b2", _online),
}
