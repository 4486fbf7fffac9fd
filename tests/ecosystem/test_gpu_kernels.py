"""The kernels for GPUs against the reference: on a GPU if there is one, and otherwise interpreted, on the CPU."""

import os
import sys
from pathlib import Path

import pytest
import torch
from packages import needs

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
needs("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
from helpers import GUARDS, STATE, assert_close, channels_last, layer_and_reference, step  # noqa: E402

from onlinenorm.torch import OnlineNormAct, functional, gpu, portable  # noqa: E402


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    if device == "cpu":  # where "portable" is asked for, the kernels answer
        monkeypatch.setattr(functional, "portable", gpu)
        monkeypatch.setattr(functional, "_chosen_backend", "portable")
    launched = []
    forward = gpu.forward
    monkeypatch.setattr(gpu, "forward", lambda *arguments: launched.append(1) or forward(*arguments))
    yield
    assert launched, "the kernels were not used"


@pytest.mark.parametrize("layout", [torch.clone, channels_last])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", [(5, 7), (4, 40, 6), (3, 5, 6, 5), (2, 3, 50, 60), (2, 4, 5, 6, 7)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_outputs_gradients_and_state_are_the_references(shape, guard, layout, dtype, tolerance):
    layer, reference = layer_and_reference(
        shape[1], guard=guard, dtype=dtype, warmup=len(shape) == 3, bound_control=len(shape) != 3
    )
    layer.to(device)
    for _ in range(2):
        x, grad = (layout(t).to(device) for t in torch.randn(2, *shape, dtype=dtype))
        z, grad_x = step(layer, x, grad)
        assert z.stride() == grad_x.stride() == x.stride()
        assert_close("z", z.cpu(), reference.forward(x.double().cpu().numpy()), tolerance)
        assert_close("grad of x", grad_x.cpu(), reference.backward(grad.double().cpu().numpy()), tolerance)
    for name in STATE:
        assert_close(name, getattr(layer, name).cpu(), getattr(reference, name), tolerance)
    for name in ("weight", "bias"):
        assert_close(name, getattr(layer, name).grad.cpu(), getattr(reference, f"{name}_grad"), 10 * tolerance)
    layer.eval()
    assert_close("evaluated", layer(x).cpu(), reference.infer(x.double().cpu().numpy()), tolerance)


@pytest.mark.parametrize("act", ["relu", "leaky_relu", "silu", "gelu"])
@pytest.mark.parametrize("guard", GUARDS)
def test_activations(act, guard, monkeypatch):
    layers = [OnlineNormAct(6, alpha_fwd=0.9, alpha_bwd=0.8, guard=guard, clamp_value=0.7, act=act) for _ in range(2)]
    x, grad = torch.randn(2, 4, 6, 9)
    z, grad_x = step(layers[0].to(device), x.to(device), grad.to(device))
    monkeypatch.setattr(functional, "portable", portable)
    with functional.backend("portable"):
        expected, expected_grad = step(layers[1], x, grad)
    assert_close("z", z.cpu(), expected.double().numpy(), 1e-5)
    assert_close("grad of x", grad_x.cpu(), expected_grad.double().numpy(), 1e-5)


@pytest.mark.parametrize("splits", [1, 3, 5])
def test_however_a_stream_is_cut_into_batches(splits):
    x, grad = torch.randn(2, 8, 5, 6, 6).to(device)

    def stream(size):
        layer, _ = layer_and_reference(5)
        layer.to(device)
        parts = [step(layer, *both) for both in zip(x.split(size), grad.split(size), strict=True)]
        return [torch.cat(part) for part in zip(*parts, strict=True)] + [getattr(layer, name) for name in STATE]

    for whole, cut in zip(stream(8), stream(splits), strict=True):
        assert torch.equal(whole, cut)


def test_large_offsets_and_planes_cut_into_parts():
    layer, reference = layer_and_reference(2)
    layer.to(device)
    x = 1e4 + torch.randn(2, 2, 150, 151)
    assert gpu._shape(x).moments_grid[2] > 1
    with torch.no_grad():
        layer.running_mean.fill_(1e4)
        reference.running_mean[:] = 1e4
    assert_close("z", layer(x.to(device)).cpu(), reference.forward(x.double().numpy()), 1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_does_not_poison_the_streams(bad):
    layer, reference = layer_and_reference(3)
    layer.to(device)
    x, grad = torch.randn(2, 4, 3, 5)
    x[1, 2, 0] = bad
    z, _ = step(layer, x.to(device), grad.to(device))
    reference.forward(x.double().numpy())
    reference.backward(grad.double().numpy())
    assert z.isfinite().cpu().flatten(1).any(1).tolist() == [True, False, True, True]
    for name in STATE:
        assert_close(name, getattr(layer, name).cpu(), getattr(reference, name), 1e-5)
