"""The data-dependent start of Weight Normalization (Salimans and Kingma, 2016, section 3).

A weight's direction times its length cannot tell how large a layer's inputs are. Where nothing sees to that, as in a
ResNet, whose blocks each add to what goes through them, activations grow from block to block, and training diverges at
once. So lengths and biases start where the activations of some images have mean 0 and variance 1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onlinenorm.experiments.normalizers import Bias


def is_weight_normalised(network: nn.Module) -> bool:
    """Whether any of its layers is."""
    return any(_has_length(module) for module in network.modules())


@torch.no_grad()
def start_from(network: nn.Module, images: Tensor) -> None:
    """Set lengths and biases so that, for these images, each channel behind a layer has mean 0 and variance 1."""

    def divide(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        std = output.transpose(0, 1).flatten(1).std(dim=1)
        std = torch.where(std > 0, std, 1)
        length = layer.parametrizations.weight.original0  # type: ignore[union-attr]
        length /= std.view_as(length)  # type: ignore[operator, arg-type]
        return output / _per_channel(std, output)

    def centre(bias: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        mean = output.transpose(0, 1).flatten(1).mean(dim=1)
        bias.bias -= mean  # type: ignore[operator]
        return output - _per_channel(mean, output)

    hooks = [module.register_forward_hook(divide) for module in network.modules() if _has_length(module)]
    hooks += [module.register_forward_hook(centre) for module in network.modules() if isinstance(module, Bias)]
    network(images)
    for hook in hooks:
        hook.remove()


def _has_length(module: nn.Module) -> bool:
    return parametrize.is_parametrized(module, "weight") and hasattr(module.parametrizations["weight"], "original0")  # type: ignore[index]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
