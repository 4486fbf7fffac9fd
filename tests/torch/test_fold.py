"""`fold` gives eval mode's results with fewer operations."""

import copy
import pickle

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from helpers import GUARDS
from torch import nn

from onlinenorm.experiments.resnet import resnet20
from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d, fold

NORM = {2: OnlineNorm1d, 3: OnlineNorm1d, 4: OnlineNorm2d, 5: OnlineNorm3d}


def trained(model, *shape, lr=0.05):
    """The model after a few steps on data that is neither centred nor scaled, in eval mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(shape) * 2 + 1).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, OnlineNorm) and layer.affine:
                layer.weight.add_(torch.randn(layer.num_features) * 0.3)
                layer.bias.add_(torch.randn(layer.num_features) * 0.3)
    return model.eval()


def assert_same(folded, model, *inputs):
    expected, got = model(*inputs), folded(*inputs)
    assert (got - expected).abs().max() <= 1e-5 * (1 + expected.abs().max())


def fold_all(model):
    """Fold, and refuse to leave any layer."""
    lines = []
    folded = fold(model, report=lines.append)
    assert len(lines) == 1, lines
    assert not any(isinstance(module, OnlineNorm) for module in folded.modules())
    return folded


def left(model):
    """The lines that say what was left, while nothing was folded."""
    lines = []
    folded = fold(model.eval(), report=lines.append)
    assert lines[0] == "onlinenorm.torch.fold folded no layers"
    assert [type(m) for m in folded.modules()] == [type(m) for m in model.modules()]
    return lines[1:]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda bias: nn.Linear(6, 8, bias=bias), (4, 6)),
        (lambda bias: nn.Conv1d(6, 8, 3, padding=1, bias=bias), (4, 6, 9)),
        (lambda bias: nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2, bias=bias), (4, 6, 9, 9)),
        (lambda bias: nn.Conv2d(6, 8, 3, padding=2, padding_mode="reflect", dilation=2, bias=bias), (4, 6, 9, 9)),
        (lambda bias: nn.Conv3d(6, 8, 3, bias=bias), (4, 6, 5, 5, 5)),
        (lambda bias: nn.ConvTranspose1d(6, 8, 3, stride=2, bias=bias), (4, 6, 5)),
        (lambda bias: nn.ConvTranspose2d(6, 8, 3, stride=2, groups=2, bias=bias), (4, 6, 5, 5)),
        (lambda bias: nn.ConvTranspose3d(6, 8, 2, groups=2, output_padding=0, bias=bias), (4, 6, 3, 3, 3)),
    ],
)
def test_every_kind(make, shape, guard, affine, bias):
    torch.manual_seed(0)
    norm = NORM[len(shape)](8, guard=guard, affine=affine, alpha_fwd=0.9, clamp_value=1.0)
    model = trained(nn.Sequential(make(bias), norm, nn.ReLU()), *shape)
    before = copy.deepcopy(model.state_dict())
    folded = fold_all(model)
    for n in (1, 3):
        assert_same(folded, model, torch.randn(n, *shape[1:]) * 2 + 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in folded.modules())


def test_a_guard_none_leaves_no_operation():
    model = nn.Sequential(nn.Linear(4, 8), OnlineNorm1d(8, guard=None)).eval()
    u = torch.randn(3, 8)
    assert fold_all(model)[1](u) is u


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
def test_resnet20(guard, format_):
    torch.manual_seed(0)
    model = resnet20(lambda c: OnlineNorm2d(c, guard=guard, alpha_fwd=0.9)).to(memory_format=format_)
    model = trained(model, 4, 3, 16, 16, lr=1e-4)
    x = torch.randn(4, 3, 16, 16).to(memory_format=format_)
    assert_same(fold_all(model), model, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("guard", GUARDS)
def test_other_dtypes(guard, dtype):
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), OnlineNorm2d(8, guard=guard, alpha_fwd=0.9)), 4, 3, 8, 8)
    model.to(dtype)
    x = torch.randn(4, 3, 8, 8).to(dtype)
    folded, expected = fold_all(model)(x), model(x)
    assert folded.dtype == dtype
    assert (folded - expected).abs().max() <= (1e-12 if dtype == torch.float64 else 0.05) * (1 + expected.abs().max())


def test_a_folded_model_converts_and_copies():
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), OnlineNorm2d(8), nn.ReLU()), 4, 3, 8, 8)
    folded = fold_all(model)
    x = torch.randn(2, 3, 8, 8)
    for other in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded)), folded.double().float(), fold(folded)):
        assert_same(other, model, x)
    x.requires_grad_()
    folded(x).square().sum().backward()
    got, x.grad = x.grad, None
    model(x).square().sum().backward()
    assert torch.allclose(got, x.grad, atol=1e-3)


@pytest.mark.parametrize("guard", GUARDS)
def test_folded_models_export_and_compile(guard, tmp_path):
    torch.manual_seed(0)
    model = trained(
        nn.Sequential(nn.Conv2d(3, 8, 3), OnlineNorm2d(8, guard=guard), nn.ReLU(), nn.Conv2d(8, 4, 3)), 4, 3, 8, 8
    )
    folded, x = fold_all(model), torch.randn(2, 3, 8, 8)
    expected = model(x).detach()
    assert torch.allclose(torch.compile(folded, fullgraph=True, backend="aot_eager")(x), expected, atol=1e-5)
    assert torch.allclose(torch.jit.trace(folded, x)(x), expected, atol=1e-5)
    program = torch.onnx.export(folded, (x,), dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (z,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.allclose(z, expected, atol=1e-5)
    operations = [node.op_type for node in program.model.graph]
    assert operations.count("Conv") == 2
    assert not {"Sub", "BatchNormalization"} & set(operations), "the statistics are in the convolution"


# what can't be folded


class Net(nn.Module):
    """One convolution and one layer, joined as `join` says."""

    def __init__(self, join):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = OnlineNorm2d(3)
        self.join = join

    def forward(self, x):
        return self.join(self, x)


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (lambda net, x: net.norm(net.conv(x).relu()), "it follows relu, an operation"),
        (lambda net, x: net.norm(F.conv2d(x, net.conv.weight)), "it follows conv2d, an operation"),
        (lambda net, x: net.norm(x), "it follows an input of the model"),
        (lambda net, x: net.conv(x), "it is called 0 times"),
        (lambda net, x: net.norm(net.norm(net.conv(x))), "it is called 2 times"),
        (lambda net, x: net.norm(net.conv(net.conv(x))), "conv before it is called 2 times"),
        (lambda net, x: [u := net.conv(x), net.norm(u) + u][1], "the output of conv before it is used elsewhere too"),
        (lambda net, x: net.norm(net.conv(x)) + net.conv.bias.sum(), "the model reads the parameters of conv"),
        (lambda net, x: net.norm(net.conv(x)) * net.norm.weight.sum(), "the model reads the parameters of norm"),
    ],
)
def test_what_stands_in_the_way_is_said(join, why):
    assert left(Net(join)) == [f"onlinenorm.torch.fold left norm: {why}"]


def test_layers_with_nothing_before_them():
    class Mine(nn.Conv2d):
        pass

    class Norm(OnlineNorm2d):
        pass

    assert left(nn.Sequential(nn.ReLU(), OnlineNorm(3))) == ["onlinenorm.torch.fold left 1: it follows 0, of type ReLU"]
    assert left(nn.Sequential(Mine(3, 3, 1), OnlineNorm(3)))[0].endswith("it follows conv2d, an operation")
    assert left(nn.Sequential(nn.Conv2d(3, 3, 1), Norm(3)))[0].endswith("it is of type Norm")
    assert left(OnlineNorm(3)) == ["onlinenorm.torch.fold left the model itself: nothing is before it"]
    assert left(nn.Linear(3, 3)) == []
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert len(left(nn.Sequential(parametrised, OnlineNorm(3)))) == 1
    hooked = nn.Sequential(nn.Linear(3, 3), OnlineNorm(3))
    hooked[0].register_forward_hook(lambda module, args, z: z * 2)
    assert left(hooked)[0].endswith("0 has hooks")
    assert "puts out 3 channels, and it normalises 5" in left(nn.Sequential(nn.Linear(3, 3), OnlineNorm1d(5)))[0]


def test_a_linear_layer_over_sequences_is_not_taken_for_one_over_vectors():
    """(N, L, C): Online Normalization normalises L there, which may happen to be as large as C."""
    folded = fold_all(nn.Sequential(nn.Linear(3, 5), OnlineNorm1d(5)).eval())
    folded(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"folded for 2D input \(got 3D input\)"):
        folded(torch.randn(2, 5, 3))


def test_some_fold_and_some_stay():
    torch.manual_seed(0)
    model = trained(
        nn.Sequential(nn.Linear(3, 4), OnlineNorm1d(4, alpha_fwd=0.9), nn.ReLU(), OnlineNorm1d(4, alpha_fwd=0.9)), 9, 3
    )
    lines = []
    folded = fold(model, report=lines.append)
    assert lines == [
        "onlinenorm.torch.fold folded 1 layer: 1",
        "onlinenorm.torch.fold left 3: it follows 2, of type ReLU",
    ]
    assert_same(folded, model, torch.randn(5, 3))


def test_shared_parameters_and_layers_in_two_places():
    """A layer registered twice and called once folds; a tied weight stays what it is where it is not folded."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(4, 4)
            self.norm = OnlineNorm1d(4, alpha_fwd=0.9)
            self.decode = nn.Linear(4, 4)
            self.decode.weight = self.encode.weight
            self.all = nn.ModuleList([self.encode, self.norm])

        def forward(self, x):
            return self.decode(self.norm(self.encode(x)))

    model = trained(Tied(), 5, 4)
    folded = fold_all(model)
    assert folded.all[1] is folded.norm
    assert_same(folded, model, torch.randn(3, 4))


def test_arguments_with_defaults():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = OnlineNorm1d(4)

        def forward(self, x, mask=None, scale=1.0):
            z = self.norm(self.linear(x))
            return z * scale if mask is None else z * mask

    model = Optional().eval()
    assert_same(fold_all(model), model, torch.randn(3, 4), torch.ones(4))


def test_a_model_that_cannot_be_traced():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = OnlineNorm(3)

        def forward(self, x):
            return self.norm(x) if x.sum() > 0 else x

    with pytest.raises(ValueError, match=r"torch.fx can't trace it: .*control flow.*fold\(model.backbone\)"):
        fold(Branches().eval())


def test_training_mode_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), OnlineNorm2d(4))
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        fold(model)
    model.eval()
    model[1].train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        fold(model)
