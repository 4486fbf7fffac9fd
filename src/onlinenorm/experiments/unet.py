"""The paper's U-Net: three poolings, bilinear upsampling, and a normaliser before every ReLU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


class UNet(nn.Module):
    """Images (N, channels, H, W) to logits (N, classes, H, W); H and W are multiples of 8.

    Args:
        width: channels at full resolution; each of the three poolings doubles them (the paper: 64).
        norm: makes the normaliser for a number of channels.
        channels: of the image.
        classes: masks to predict.
    """

    def __init__(self, width: int, norm: Norm, channels: int = 1, classes: int = 6) -> None:
        super().__init__()
        w1, w2, w3, w4 = width, 2 * width, 4 * width, 8 * width
        self.down1 = _double_conv(channels, w1, norm)
        self.down2 = _double_conv(w1, w2, norm)
        self.down3 = _double_conv(w2, w3, norm)
        self.down4 = _double_conv(w3, w4, norm)
        self.up3 = _double_conv(w4 + w3, w3, norm)
        self.up2 = _double_conv(w3 + w2, w2, norm)
        self.up1 = _double_conv(w2 + w1, w1, norm)
        self.head = nn.Conv2d(w1, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of every mask."""
        full = self.down1(x)
        half = self.down2(F.max_pool2d(full, 2))
        quarter = self.down3(F.max_pool2d(half, 2))
        eighth = self.down4(F.max_pool2d(quarter, 2))
        x = self.up3(torch.cat([_double_size(eighth), quarter], dim=1))
        x = self.up2(torch.cat([_double_size(x), half], dim=1))
        x = self.up1(torch.cat([_double_size(x), full], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _double_conv(channels: int, out: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False), norm(out), nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False), norm(out), nn.ReLU(inplace=True),
    )  # fmt: skip


def _double_size(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
