"""The paper's U-Net: three poolings, linear upsampling, and a normaliser before every ReLU; for images and volumes."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.experiments.parts import Norm


class UNet(nn.Module):
    """Images (N, channels, H, W) or volumes (N, channels, D, H, W) to logits of that size; all sizes multiples of 8.

    Args:
        width: channels at full resolution; each of the three poolings doubles them (the paper: 64).
        norm: makes the normaliser for a number of channels.
        channels: of the image.
        classes: masks to predict.
        dims: 2 for images, 3 for volumes.
    """

    def __init__(self, width: int, norm: Norm, channels: int = 1, classes: int = 6, dims: Literal[2, 3] = 2) -> None:
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.half_size = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims](2)
        self.upsampling = {2: "bilinear", 3: "trilinear"}[dims]

        def double_conv(channels: int, out: int) -> nn.Sequential:
            return nn.Sequential(
                conv(channels, out, 3, padding=1, bias=False), norm(out), nn.ReLU(inplace=True),
                conv(out, out, 3, padding=1, bias=False), norm(out), nn.ReLU(inplace=True),
            )  # fmt: skip

        w1, w2, w3, w4 = width, 2 * width, 4 * width, 8 * width
        self.down1 = double_conv(channels, w1)
        self.down2 = double_conv(w1, w2)
        self.down3 = double_conv(w2, w3)
        self.down4 = double_conv(w3, w4)
        self.up3 = double_conv(w4 + w3, w3)
        self.up2 = double_conv(w3 + w2, w2)
        self.up1 = double_conv(w2 + w1, w1)
        self.head = conv(w1, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of every mask."""
        full = self.down1(x)
        half = self.down2(self.half_size(full))
        quarter = self.down3(self.half_size(half))
        eighth = self.down4(self.half_size(quarter))
        x = self.up3(torch.cat([self._double_size(eighth), quarter], dim=1))
        x = self.up2(torch.cat([self._double_size(x), half], dim=1))
        x = self.up1(torch.cat([self._double_size(x), full], dim=1))
        logits: Tensor = self.head(x)
        return logits

    def _double_size(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=self.upsampling, align_corners=True)
