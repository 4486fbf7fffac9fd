"""The networks whose training steps are timed, each with a normaliser to choose."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.bench.cases import MODES
from onlinenorm.experiments.mlp import mlp
from onlinenorm.experiments.parts import Norm
from onlinenorm.experiments.resnet import resnet20


class UNet3d(nn.Module):
    """A small 3D U-Net: volumes (N, 1, D, H, W) to logits (N, 2, D, H, W); two poolings, sizes multiples of 4."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.down1 = _conv3d(1, 16, norm)
        self.down2 = _conv3d(16, 32, norm)
        self.down3 = _conv3d(32, 64, norm)
        self.up2 = _conv3d(64 + 32, 32, norm)
        self.up1 = _conv3d(32 + 16, 16, norm)
        self.head = nn.Conv3d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of every voxel."""
        full = self.down1(x)
        half = self.down2(F.max_pool3d(full, 2))
        x = self.down3(F.max_pool3d(half, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), half], dim=1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), full], dim=1))
        logits: Tensor = self.head(x)
        return logits


class RNN(nn.Module):
    """An Elman network, h = tanh(norm(U x + V h)): sequences (N, time, 64) to logits (N, 10)."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.of_input = nn.Linear(64, 200, bias=False)
        self.of_hidden = nn.Linear(200, 200, bias=False)
        self.norm = norm(200)
        self.head = nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits after the last time step."""
        h = x.new_zeros(len(x), 200)
        for at_time in self.of_input(x).unbind(1):
            h = torch.tanh(self.norm(at_time + self.of_hidden(h)))
        logits: Tensor = self.head(h)
        return logits


@dataclass(frozen=True)
class Network:
    """How to build one, and what it trains on."""

    build: Callable[[Norm], nn.Module]
    dims: int  # of the activations that it normalises, N and C included
    input: tuple[int, ...]  # without N
    target: tuple[int, ...]  # likewise: one class index each
    batches: tuple[int, ...]
    modes: tuple[str, ...] = tuple(MODES)


NETWORKS = {
    "resnet20": Network(resnet20, 4, (3, 32, 32), (), (1, 2, 8, 128)),
    "unet": Network(UNet3d, 5, (1, 32, 32, 32), (32, 32, 32), (1, 2)),
    "mlp": Network(mlp, 2, (784,), (), (32,), ("float32",)),
    "rnn": Network(RNN, 2, (20, 64), (), (20,), ("float32",)),
}


def _conv3d(channels: int, out: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels, out, 3, padding=1, bias=False), norm(out), nn.ReLU(),
        nn.Conv3d(out, out, 3, padding=1, bias=False), norm(out), nn.ReLU(),
    )  # fmt: skip
