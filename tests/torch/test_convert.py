"""`convert` carries everything over that BatchNorm had."""

import copy

import pytest
import torch
from torch import nn

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d, convert


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.ReLU())
        self.blocks = nn.ModuleDict({"a": nn.BatchNorm2d(4, affine=False), "b": nn.SyncBatchNorm(4)})
        self.volume = nn.BatchNorm3d(2)
        self.head = nn.ModuleList([nn.Linear(4, 5), nn.BatchNorm1d(5)])

    def forward(self, x):
        x = self.blocks["a"](self.stem(x))
        return self.head[1](self.head[0](x.mean((2, 3))))


def test_every_kind_anywhere():
    model, lines = Net(), []
    assert convert(model, alpha_fwd=0.9, alpha_bwd=0.8, guard="clamp", report=lines.append) is model
    kinds = {name: type(layer) for name, layer in model.named_modules() if isinstance(layer, OnlineNorm)}
    assert kinds == {
        "stem.1": OnlineNorm2d,
        "blocks.a": OnlineNorm2d,
        "blocks.b": OnlineNorm,
        "volume": OnlineNorm3d,
        "head.1": OnlineNorm1d,
    }
    assert lines == ["onlinenorm.torch.convert replaced 5 layers: stem.1, blocks.a, blocks.b, volume, head.1"]
    assert all(
        layer.alpha_fwd == 0.9 and layer.alpha_bwd == 0.8 for layer in model.modules() if hasattr(layer, "guard")
    )
    model(torch.randn(2, 3, 8, 8)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_a_layer_has(dtype):
    source = nn.BatchNorm2d(4, eps=1e-3).to(dtype)
    with torch.no_grad():
        source.weight.uniform_()
        source.bias.normal_()
    for _ in range(3):
        source((torch.randn(4, 4, 5, 5) * 2 + 1).to(dtype))
    source.bias.requires_grad_(False)
    source.eval()
    target = convert(source, report=None)
    assert target.weight is source.weight, "an optimiser that holds the parameter would lose it"
    assert target.bias is source.bias
    assert (target.eps, target.training) == (1e-3, False)
    assert torch.equal(target.running_mean, source.running_mean.double())
    assert torch.equal(target.running_var, source.running_var.double())
    assert target.num_samples_tracked == 3


def test_the_same_function_in_eval():
    model = Net()
    for _ in range(20):
        model(torch.randn(4, 3, 8, 8) + 1)
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    assert torch.allclose(convert(copy.deepcopy(model), guard=None, report=None)(x), expected, atol=1e-5)


def test_choosing_by_name_and_by_predicate():
    by_name = convert(Net(), names={"stem.1", "volume"}, report=None)
    assert isinstance(by_name.stem[1], OnlineNorm2d)
    assert isinstance(by_name.blocks["a"], nn.BatchNorm2d)
    by_predicate = convert(Net(), where=lambda name, layer: layer.num_features == 5, report=None)
    assert isinstance(by_predicate.head[1], OnlineNorm1d)
    assert isinstance(by_predicate.stem[1], nn.BatchNorm2d)
    with pytest.raises(ValueError, match=r"no BatchNorm layer is named \['stem.2'\]; there are .*'stem.1'"):
        convert(Net(), names=["stem.2"])


def test_a_layer_in_two_places_stays_one_layer():
    shared = nn.BatchNorm1d(3)
    model = convert(nn.Sequential(shared, nn.ReLU(), shared), report=None)
    assert isinstance(model[0], OnlineNorm1d)
    assert model[0] is model[2]


def test_subclasses_are_left_and_named():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    lines = []
    model = convert(nn.Sequential(WithActivation(3), nn.BatchNorm2d(3)), report=lines.append)
    assert isinstance(model[0], WithActivation)
    assert isinstance(model[1], OnlineNorm2d)
    assert lines[1] == "onlinenorm.torch.convert left 1 layer: 0 (of type WithActivation)"


def test_subclasses_that_only_normalise_are_replaced():
    class AnyShape(nn.BatchNorm1d):
        def _check_input_dim(self, input):
            pass

    assert type(convert(AnyShape(3), report=None)) is OnlineNorm


def test_nothing_to_do_is_said(capsys):
    convert(nn.Linear(2, 2))
    assert capsys.readouterr().out == "onlinenorm.torch.convert replaced no layers\n"


def test_without_running_statistics():
    target = convert(nn.BatchNorm2d(3, track_running_stats=False), report=None)
    assert target.num_samples_tracked == 0
    target(torch.randn(2, 3, 4, 4))


def test_a_lazy_layer_is_refused():
    with pytest.raises(ValueError, match="0: LazyBatchNorm2d has no shape yet"):
        convert(nn.Sequential(nn.LazyBatchNorm2d()), report=None)
