"""ResNets (He et al., 2016) with any normaliser in BatchNorm's place: ResNet-20 for CIFAR, ResNet-50 for ImageNet."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from onlinenorm.experiments.parts import Join, Norm


class Block(nn.Module):
    """Two 3x3 convolutions, and the identity beside them: subsampled and padded with zero channels, no parameters."""

    def __init__(self, channels: int, out: int, norm: Norm) -> None:
        super().__init__()
        self.stride = 1 if channels == out else 2
        self.new_channels = out - channels
        self.conv1 = _conv(channels, out, stride=self.stride)
        self.norm1 = norm(out)
        self.act1: nn.Module = nn.ReLU()
        self.conv2 = _conv(out, out)
        self.norm2 = norm(out)
        self.join = Join(identity=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after its last ReLU."""
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.new_channels:
            half = self.new_channels // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.new_channels - half))
        output: Tensor = self.join(y, x)
        return output


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last to four times the width, and beside them the identity or a projection.

    The stride is the 3x3 convolution's, as in the network that the paper trains (TensorFlow's official one, and
    torchvision's), not the first one's, as in He et al. No normaliser's scale starts at 0, in their paper as in this.
    """

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out = 4 * width
        self.residual = nn.Sequential(
            _conv(channels, width, 1), norm(width), nn.ReLU(),
            _conv(width, width, 3, stride), norm(width), nn.ReLU(),
            _conv(width, out, 1), norm(out),
        )  # fmt: skip
        project = channels != out or stride > 1
        self.shortcut = nn.Sequential(_conv(channels, out, 1, stride), norm(out)) if project else nn.Identity()
        self.join = Join(identity=not project)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after its last ReLU."""
        output: Tensor = self.join(self.residual(x), self.shortcut(x))
        return output


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


def resnet50(norm: Norm, num_classes: int = 1000, width: int = 64) -> nn.Sequential:
    """Images (N, 3, H, W), usually 224 x 224, to logits (N, num_classes); 25.6 million parameters.

    Args:
        norm: makes the normaliser for a number of channels, such as `OnlineNorm2d`.
        num_classes: of the last layer.
        width: channels of the first convolution; all others' are multiples of it.
    """
    blocks: list[Bottleneck] = []
    channels = width
    for times, count, stride in ((1, 3, 1), (2, 4, 2), (4, 6, 2), (8, 3, 2)):
        for i in range(count):
            blocks.append(Bottleneck(channels, times * width, stride if i == 0 else 1, norm))
            channels = 4 * times * width
    return nn.Sequential(
        _conv(3, width, 7, 2), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes),
    )  # fmt: skip


def _conv(channels: int, out: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv
