"""A norm of MONAI's networks, trained on small volumes."""

import pytest
import torch
from packages import needs
from torch import nn

from onlinenorm.torch import OnlineNorm1d, OnlineNorm2d, OnlineNorm3d, convert
from onlinenorm.torch.integrations import register_monai
from onlinenorm.torch.layers import online_norm_layers

nets = needs("monai.networks.nets")
from monai.networks.layers import Norm, get_norm_layer  # noqa: E402

NORM = ("online", {"alpha_fwd": 0.99, "alpha_bwd": 0.9})


@pytest.fixture(autouse=True)
def registered():
    register_monai()
    register_monai()  # twice does no harm


def test_the_factory():
    assert [Norm["online", dimensions] for dimensions in (1, 2, 3)] == [OnlineNorm1d, OnlineNorm2d, OnlineNorm3d]
    layer = get_norm_layer(NORM, spatial_dims=3, channels=7)
    assert type(layer) is OnlineNorm3d
    assert (layer.num_features, layer.alpha_fwd, layer.alpha_bwd) == (7, 0.99, 0.9)
    assert Norm["batch", 3] is nn.BatchNorm3d


def train(model):
    volume = torch.rand(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    mask = (nn.functional.avg_pool3d(volume, 3, 1, 1) > 0.5).float()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for _ in range(25):
        loss = nn.functional.binary_cross_entropy_with_logits(model(volume), mask)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_unet():
    model = nets.UNet(3, 1, 1, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm=NORM)
    assert all(type(layer) is OnlineNorm3d for layer in online_norm_layers(model))
    assert not any(isinstance(m, nn.InstanceNorm3d) for m in model.modules())
    train(model)


def test_segresnet():
    model = nets.SegResNet(3, init_filters=4, in_channels=1, out_channels=1, norm=NORM)
    assert len(online_norm_layers(model)) == sum(
        isinstance(m, nn.GroupNorm) for m in nets.SegResNet(3, init_filters=8).modules()
    )
    train(model)


def test_convert():
    model = nets.UNet(3, 1, 1, channels=(4, 8), strides=(2,), norm="batch")
    train(convert(model, 0.99, 0.9, report=None))
