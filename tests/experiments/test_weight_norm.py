"""Weight Normalization's start from data."""

from functools import partial

import pytest
import torch
from torch import nn

from onlinenorm.experiments.mlp import mlp
from onlinenorm.experiments.normalizers import NORMALIZERS, Bias, build
from onlinenorm.experiments.resnet import resnet20, resnet50
from onlinenorm.experiments.unet import UNet
from onlinenorm.experiments.weight_norm import is_weight_normalised, start_from

NETWORKS = {
    "mlp": (mlp, (16, 1, 28, 28)),
    "resnet20": (resnet20, (4, 3, 32, 32)),
    "resnet50": (partial(resnet50, num_classes=4, width=4), (4, 3, 48, 48)),
    "unet": (partial(UNet, 4), (4, 1, 32, 32)),
}


def made(name, norm):
    network, shape = NETWORKS[name]
    torch.manual_seed(0)
    return build(norm, network, alpha_fwd=0.9, alpha_bwd=0.9).double(), torch.randn(shape).double()


@pytest.mark.parametrize("norm", NORMALIZERS)
def test_it_is_told_from_the_others(norm):
    assert is_weight_normalised(made("mlp", norm)[0]) == (norm == "weight")


@pytest.mark.parametrize("name", NETWORKS)
def test_activations_start_with_mean_0_and_variance_1(name):
    network, images = made(name, "weight")
    seen = []
    start_from(network, images)
    for module in network.modules():
        if isinstance(module, Bias):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output.clone()))
    with torch.no_grad():
        network(images)
    assert seen
    for output in seen:
        channels = output.transpose(0, 1).flatten(1)
        channels = channels[channels.var(dim=1) > 0]  # a channel may be the same everywhere, as behind dead ReLUs
        torch.testing.assert_close(channels.mean(dim=1), torch.zeros(len(channels)).double())
        torch.testing.assert_close(channels.std(dim=1), torch.ones(len(channels)).double())


@pytest.mark.parametrize("name", NETWORKS)
def test_at_the_start_the_network_is_the_one_with_batch_norm(name):
    network, images = made(name, "weight")
    start_from(network, images)
    torch.testing.assert_close(network(images), made(name, "batch")[0](images), rtol=0.1, atol=0.1)


def test_only_lengths_and_biases_change():
    network, images = made("resnet20", "weight")
    before = {key: value.clone() for key, value in network.state_dict().items()}
    start_from(network, images)
    changed = {key for key, value in network.state_dict().items() if not torch.equal(value, before[key])}
    lengths = {key for key in before if key.endswith("original0")}
    assert changed == lengths | {f"{key}.bias" for key, m in network.named_modules() if isinstance(m, Bias)}
    assert not any(module._forward_hooks for module in network.modules())


def test_a_batch_without_variance_leaves_lengths_alone():
    network = build("weight", lambda norm: nn.Sequential(nn.Linear(3, 4, bias=False), norm(4), nn.Linear(4, 2)),
                    alpha_fwd=0.9, alpha_bwd=0.9)  # fmt: skip
    start_from(network, torch.ones(5, 3))
    assert all(value.isfinite().all() for value in network.state_dict().values())
