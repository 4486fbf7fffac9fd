"""Memory of training steps, counted."""

from functools import partial

import pytest
import torch
from torch import nn

from onlinenorm.experiments.memory import count_alive, count_saved
from onlinenorm.experiments.normalizers import build
from onlinenorm.experiments.resnet import resnet20
from onlinenorm.experiments.unet import UNet

NETWORKS = {
    "resnet20": (resnet20, (3, 32, 32)),
    "unet": (partial(UNet, 4), (1, 32, 32)),
    "3D unet": (lambda norm: UNet(4, norm, dims=3), (1, 16, 16, 16)),
}


def counted(network: str, norm: str, batch: int, device: str) -> tuple[int, int, int, int]:
    """Saved in all, saved beside the parameters, alive after the step (the gradients), and at its peak."""
    make, shape = NETWORKS[network]
    with torch.device(device):
        model = build(norm, make, alpha_fwd=0.9, alpha_bwd=0.8)
        x = torch.randn(batch, *shape)
    saved, beside = count_saved(model, x, lambda output: output.square().sum())
    with count_alive() as alive:
        model(x).square().sum().backward()
    return saved, beside, alive.now, alive.peak


@pytest.mark.parametrize("norm", ["online", "batch", "group"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_meta_device_counts_what_the_cpu_takes(network, norm):
    assert counted(network, norm, 3, "meta") == counted(network, norm, 3, "cpu")


@pytest.mark.parametrize("network", NETWORKS)
def test_activations_at_batch_size_1_are_a_thirty_second_of_those_at_32(network):
    _, online, *_ = counted(network, "online", 1, "meta")
    _, batch, *_ = counted(network, "batch", 32, "meta")
    assert online == pytest.approx(batch / 32, rel=0.02)


def test_gradients_are_what_stays():
    model = nn.Linear(30, 20)
    with count_alive() as alive:
        model(torch.randn(5, 30)).sum().backward()
    assert alive.now == sum(p.numel() * 4 for p in model.parameters())


def test_peak_of_a_chain_whose_steps_are_known():
    x = torch.randn(1000)
    with count_alive() as alive:
        y = x.exp()
        assert alive.now == 4000
        z = y + 1  # y still there
        assert alive.now == 8000
        del y, z
        assert alive.now == 0
        x.sin_().view(10, 100)
    assert alive.now == 0
    assert alive.peak == 8000


def test_what_was_there_before_does_not_count_when_it_goes():
    x = torch.randn(1000)
    with count_alive() as alive:
        y = x * 2
        del x
        assert alive.now == 4000
        del y
    assert alive.now == 0
