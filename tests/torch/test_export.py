"""Exported models are plain operations that run without this package, in ONNX Runtime too."""

import copy
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import GUARDS, assert_same_state, channels_last, layer_and_reference, state_of
from torch import nn
from torch.export import Dim, export, save

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: OnlineNorm1d, 2: OnlineNorm2d, 3: OnlineNorm3d}


def trained_network(dims, guard, affine=True):
    """A network that has seen some data, so that its statistics and parameters mean something, in eval mode."""
    torch.manual_seed(0)
    settings = {"guard": guard, "alpha_fwd": 0.9, "affine": affine, "clamp_value": 1.0}
    model = nn.Sequential(
        CONV[dims](3, 6, 3), NORM[dims](6, **settings), nn.ReLU(),
        CONV[dims](6, 4, 3), NORM[dims](4, **settings), nn.Flatten(),
        nn.Linear(4 * 5**dims, 5), OnlineNorm1d(5, **settings),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(images(4, dims)).square().mean().backward()
        optimizer.step()
    return model.eval()


def images(n, dims):
    return torch.randn(n, 3, *[9] * dims) * 2 + 1


def assert_close(got, expected):
    assert np.abs(np.asarray(got) - expected.detach().numpy()).max() <= 1e-5 * (1 + float(expected.abs().max()))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
def test_torch_export(guard, strict):
    model = trained_network(2, guard)
    before = copy.deepcopy(model.state_dict())
    program = export(model, (images(4, 2),), dynamic_shapes=({0: Dim("n")},), strict=strict)
    for n in (4, 2, 7):
        x = images(n, 2)
        assert_close(program.module()(x).detach(), model(x))
    assert "onlinenorm" not in {node.target.namespace for node in program.graph.nodes if node.op == "call_function"}
    assert not program.graph_signature.buffers_to_mutate
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_exported_program_runs_without_the_package(tmp_path):
    model, x = trained_network(2, "layer_scaling"), images(3, 2)
    save(export(model, (x,)), tmp_path / "model.pt2")
    torch.save((x, model(x)), tmp_path / "data.pt")
    code = (
        "import sys; sys.modules['onlinenorm'] = None\n"
        "import torch\n"
        "x, z = torch.load('data.pt')\n"
        "assert torch.allclose(torch.export.load('model.pt2').module()(x), z, atol=1e-5)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_onnx(dims, guard, affine, tmp_path):
    model = trained_network(dims, guard, affine)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (images(4, dims),), file, dynamo=True, dynamic_shapes=({0: Dim("n")},), verbose=False)
    session = onnxruntime.InferenceSession(file)
    (given,) = session.get_inputs()
    for n in (4, 1, 7):
        x = images(n, dims)
        (z,) = session.run(None, {given.name: x.numpy()})
        assert_close(z, model(x))
    graph = onnx.load(file).graph
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}, "only standard operators"
    kinds = {value.data_type for value in graph.initializer}
    assert onnx.TensorProto.DOUBLE not in kinds, "the float64 statistics are folded into float32 constants"


@pytest.mark.parametrize("guard", GUARDS)
def test_jit_trace(guard):
    model = trained_network(2, guard)
    traced = torch.jit.trace(model, images(4, 2))
    x = images(7, 2)
    assert_close(traced(x).detach(), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("guard", GUARDS)
def test_every_dtype_and_layout_keeps_its_own(guard, dtype):
    layer, _ = layer_and_reference(8, guard=guard)
    layer(torch.randn(20, 8, 4, 4) * 3 + 100)
    layer.eval()
    for x in (torch.randn(2, 8, 4, 4) * 3 + 100, channels_last(torch.randn(2, 8, 4, 4) * 3 + 100)):
        z = export(layer, (x.to(dtype),)).module()(x.to(dtype))
        expected = layer(x.to(dtype))
        assert z.dtype == dtype
        assert z.stride() == x.stride()
        tolerance = {torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        assert (z - expected).abs().max() <= tolerance * (1 + expected.abs().max())


def test_a_large_offset_costs_no_precision():
    layer = OnlineNorm(2, alpha_fwd=0.9, guard=None)
    x = torch.randn(200, 2, 16) + 1e4
    layer(x)
    layer.eval()
    assert torch.allclose(export(layer, (x,)).module()(x), layer(x), atol=1e-5)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda layer, x: export(layer, (x,)),
        lambda layer, x: export(layer, (x,), strict=True),
        lambda layer, x: torch.onnx.export(layer, (x,), dynamo=True, verbose=False),
        lambda layer, x: torch.jit.trace(layer, x),
    ],
    ids=["export", "strict", "onnx", "trace"],
)
def test_training_mode_is_refused(attempt):
    layer = OnlineNorm(3)
    before = state_of(layer)
    with pytest.raises(Exception, match=r"training mode can't be exported.*model\.eval\(\)"):
        attempt(layer, torch.randn(2, 3))
    assert_same_state(before, state_of(layer))
    layer.freeze_statistics = True
    export(layer, (torch.randn(2, 3),))
