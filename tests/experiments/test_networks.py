"""The experiments' networks are the paper's."""

import pytest
import torch
from torch import nn

from onlinenorm.experiments.mlp import mlp
from onlinenorm.experiments.resnet import Bottleneck, resnet50
from onlinenorm.experiments.unet import UNet
from onlinenorm.torch import OnlineNorm2d, OnlineNorm3d


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_resnet50_is_the_published_one():
    with torch.device("meta"):
        network = resnet50(nn.BatchNorm2d)
        x = torch.empty(2, 3, 224, 224)
        assert network(x).shape == (2, 1000)
        assert network[:-3](x).shape == (2, 2048, 7, 7)
    assert parameters(network) == 25_557_032
    blocks = [m for m in network if isinstance(m, Bottleneck)]
    assert len(blocks) == 3 + 4 + 6 + 3
    assert sum(isinstance(m, nn.Conv2d) for m in network.modules()) == 1 + 3 * 16 + 4
    strides = [[m.stride[0] for m in block.residual if isinstance(m, nn.Conv2d)] for block in blocks]
    assert [s for s in strides if max(s) > 1] == [[1, 2, 1]] * 3, "the 3x3 convolutions have the strides"
    assert all((m.weight == 1).all() for m in resnet50(nn.BatchNorm2d).modules() if isinstance(m, nn.BatchNorm2d))


def test_mlp_is_the_papers():
    network = mlp(nn.BatchNorm1d)
    assert parameters(network) == 784 * 500 + 2 * 500 + 500 * 300 + 2 * 300 + 300 * 10 + 10
    assert network(torch.randn(4, 1, 28, 28)).shape == (4, 10)
    kinds = [type(m) for m in network]
    assert all(kinds[i + 1] is nn.ReLU for i, kind in enumerate(kinds) if kind is nn.BatchNorm1d)


@pytest.mark.parametrize(("dims", "shape"), [(2, (16, 24)), (3, (8, 16, 24))])
def test_unet_keeps_the_size_of_images_and_volumes(dims, shape):
    norm = OnlineNorm2d if dims == 2 else OnlineNorm3d
    network = UNet(4, norm, channels=2, classes=3, dims=dims)
    logits = network(torch.randn(1, 2, *shape))
    assert logits.shape == (1, 3, *shape)
    logits.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_unets_weights_are_the_same_numbers_in_volumes_but_for_the_third_axis():
    flat, solid = UNet(4, nn.BatchNorm2d), UNet(4, nn.BatchNorm3d, dims=3)
    for (name, a), (_, b) in zip(flat.named_parameters(), solid.named_parameters(), strict=True):
        kernel = 3 if "head" not in name else 1
        assert b.numel() == a.numel() * (kernel if a.dim() == 4 else 1), name
