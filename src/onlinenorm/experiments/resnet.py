"""ResNet-20 for CIFAR (He et al., 2016, section 4.2), with any normaliser in BatchNorm's place."""

from collections.abc import Callable
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3x3 convolutions, and the identity beside them: subsampled and padded with zero channels, no parameters."""

    def __init__(self, channels: int, out: int, norm: Norm) -> None:
        super().__init__()
        self.stride = 1 if channels == out else 2
        self.new_channels = out - channels
        self.conv1 = _conv(channels, out, self.stride)
        self.norm1 = norm(out)
        self.act1: nn.Module = nn.ReLU()
        self.conv2 = _conv(out, out)
        self.norm2 = norm(out)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after its last ReLU."""
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.new_channels:
            half = self.new_channels // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.new_channels - half))
        return F.relu(y + x)


def resnet20(norm: Norm, num_classes: int = 10) -> nn.Sequential:
    """Images (N, 3, 32, 32) to logits (N, num_classes); 0.27 million parameters.

    Args:
        norm: makes the normaliser for a number of channels, such as `OnlineNorm2d`.
        num_classes: of the last layer.
    """
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [Block(channels, out, norm) for channels, out in pairwise(widths)]
    return nn.Sequential(
        _conv(3, 16), norm(16), nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes),
    )  # fmt: skip


def _conv(channels: int, out: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv
