"""timm's networks, converted and built anew; its BatchNorm with activation above all."""

import copy

import pytest
import torch
from packages import needs
from torch import nn

from onlinenorm.torch import OnlineNorm2d, convert, diagnose
from onlinenorm.torch.integrations import TimmNormAct2d
from onlinenorm.torch.layers import online_norm_layers

timm = needs("timm")


def with_statistics(name):
    """A model whose running statistics fit its activations, so that they stay finite through all layers."""
    model = timm.create_model(name, num_classes=3)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 0.5
    for _ in range(4):
        model(torch.randn(4, 3, 64, 64))
    return model.eval()


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "densenet121"])
def test_convert(name):
    model, lines = with_statistics(name), []
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
    acts = {n: (type(m.drop), m.act) for n, m in model.named_modules() if isinstance(m, timm.layers.BatchNormAct2d)}
    parameters = {n: id(p) for n, p in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    convert(model, guard=None, report=lines.append)
    assert len(lines) == 1, "something was left"
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert (name == "resnet50") == (not acts)
    for layer, (drop, act) in acts.items():
        new = model.get_submodule(layer)
        assert type(new) is TimmNormAct2d
        assert type(new.drop) is drop
        assert new.act is act
    with torch.no_grad():
        got = model(x)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    model.load_state_dict(state)  # a checkpoint of the original

    model.train()
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("apply_act", [True, False])
def test_one_layer_is_batchnorm_then_drop_then_activation(apply_act):
    source = timm.layers.BatchNormAct2d(
        5, eps=1e-3, act_layer=nn.SiLU, drop_layer=nn.Dropout2d, apply_act=apply_act
    ).eval()
    nn.init.normal_(source.weight)
    source.running_mean.normal_()
    source.running_var.uniform_(0.5, 2)
    x = torch.randn(3, 5, 4, 4)
    target = convert(copy.deepcopy(source), guard=None, report=None)
    assert torch.allclose(target(x), source(x), atol=1e-6)
    assert target.eps == 1e-3
    with diagnose(target) as diagnosis:
        target.train()(x.requires_grad_()).sum().backward()
    assert diagnosis.as_dict()["TimmNormAct2d"]["train"]["backward_samples"] == 3


def test_layers_synchronised_by_timm():
    model = nn.Sequential(timm.layers.BatchNormAct2d(4, act_layer=nn.SiLU), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 4, 3, 3)
    expected = model(x)
    model = convert(timm.layers.convert_sync_batchnorm(model), guard=None, report=None)
    assert type(model[0]) is TimmNormAct2d
    assert torch.allclose(model(x), expected, atol=1e-6)


def norm_act(channels, **kwargs):
    return TimmNormAct2d(channels, act_layer=nn.SiLU, alpha_fwd=0.99, **kwargs)


@pytest.mark.parametrize(
    ("name", "layer"), [("resnet18", OnlineNorm2d), ("efficientnet_b0", norm_act), ("densenet121", norm_act)]
)
def test_norm_layer(name, layer):
    model = timm.create_model(name, num_classes=2, norm_layer=layer)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    reference = timm.create_model(name, num_classes=2)
    assert len(online_norm_layers(model)) == sum(isinstance(m, nn.BatchNorm2d) for m in reference.modules())
    if name == "efficientnet_b0":
        kinds = [type(m.act) for m in reference.modules() if isinstance(m, nn.BatchNorm2d)]
        assert [type(layer.act) for layer in online_norm_layers(model)] == kinds
    model.load_state_dict(reference.state_dict())
    model(torch.randn(2, 3, 64, 64)).sum().backward()
