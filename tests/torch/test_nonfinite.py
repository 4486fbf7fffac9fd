"""A bad sample comes out as one and does not poison the streams."""

import numpy as np
import pytest
import torch
from helpers import GUARDS, STATE, assert_close, layer_and_reference, state_of, step

from onlinenorm.torch import OnlineNormAct1d, functional

SHAPES = [(6, 40), (6, 5, 7), (6, 70, 20, 20)]
BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bad_input(shape, bad, guard, backend):
    torch.manual_seed(0)
    layer, reference = layer_and_reference(shape[1], guard=guard)
    x, grad = torch.randn(shape), torch.randn(shape)
    x[2, 3] = x[2, 3].fill_(bad) if len(shape) == 2 else x[2, 3].index_put_((torch.tensor(1),), torch.tensor(bad))
    if guard == "clamp":
        grad[(x.abs() > 1) & (x.abs() < 3)] = 0  # near the bound rounding decides
        x = x.clamp(-50, 50) if np.isinf(bad) else x
    with functional.backend(backend):
        z, _ = step(layer, x, grad)
    expected = reference.forward(x.double().numpy())
    reference.backward(grad.double().numpy())
    finite = np.isfinite(expected)
    assert (z.isfinite().numpy() == finite).all(), "other scalars are finite than in the reference"
    if guard == "layer_scaling":
        assert not z[2].isfinite().any(), "under layer scaling the whole sample must show it"
        assert z[[0, 1, 3, 4, 5]].isfinite().all()
    assert_close("z", z[torch.from_numpy(finite)], expected[finite], 1e-5)
    for name in STATE:
        value = getattr(layer, name)
        assert value.isfinite().all(), f"{name} is poisoned"
        if guard != "clamp" or name.startswith("running"):
            assert_close(name, value, getattr(reference, name), 1e-5)


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bad_gradient(shape, bad, guard, backend):
    torch.manual_seed(0)
    layer, reference = layer_and_reference(shape[1], guard=guard, clamp_value=100.0)
    x, grad = torch.randn(shape), torch.randn(shape)
    grad[3, 2] = bad
    with functional.backend(backend):
        step(layer, x, grad)
    reference.forward(x.double().numpy())
    reference.backward(grad.double().numpy())
    for name in ("control_y", "control_1"):
        assert getattr(layer, name).isfinite().all(), f"{name} is poisoned"
        assert_close(name, getattr(layer, name), getattr(reference, name), 1e-5)
    assert not layer.weight.grad[2].isfinite(), "loss scaling has to see the bad gradient"


def test_other_channels_advance():
    layer, _ = layer_and_reference(3, guard=None)
    x = torch.ones(1, 3, 4)
    x[0, 1, 2] = float("nan")
    before = state_of(layer)
    layer(x)
    moved = layer.running_mean != before["running_mean"]
    assert moved.tolist() == [True, False, True]
    assert layer.num_samples_tracked == 1


@pytest.mark.parametrize("backend", ["native", "portable"])
def test_a_closed_relu_lets_no_infinite_gradient_through(backend):
    torch.manual_seed(0)
    layer = OnlineNormAct1d(4, guard=None)
    x = torch.randn(3, 4, 5)
    x[1, 2, 3] = -9.0
    grad = torch.randn(3, 4, 5)
    grad[1, 2, 3] = float("inf")
    with functional.backend(backend):
        _, grad_x = step(layer, x, grad)
    assert grad_x.isfinite().all()
