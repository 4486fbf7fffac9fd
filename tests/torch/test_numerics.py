"""Where float32 and careless formulas lose their digits."""

import numpy as np
import pytest
import torch
from helpers import STATE, assert_close, channels_last, layer_and_reference, step

from onlinenorm.torch import OnlineNorm, functional


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("last", [False, True])
def test_offset_of_ten_thousand(backend, last):
    """float32 inputs of mean 1e4 and variance 1 still normalise, to 1e-3 of the exact result for the same inputs."""
    torch.manual_seed(0)
    layer, reference = layer_and_reference(3, guard=None, affine=False, alpha_fwd=0.99)
    with functional.backend(backend):
        for _ in range(10):
            x = torch.randn(128, 3, 6, 6) + 1e4
            x = channels_last(x) if last else x
            z = layer(x)
            expected = reference.forward(x.double().numpy())
    assert abs(reference.running_mean - 1e4).max() < 1, "the streams have not found the data yet"
    assert np.abs(z.double().numpy() - expected).max() < 1e-3
    assert np.abs(layer.running_var.numpy() / reference.running_var - 1).max() < 1e-3


def test_a_decay_near_one_does_not_stall():
    """A float32 mean would stop 0.38 short of an offset of 1e4 at this decay; the float64 stream arrives."""
    layer = OnlineNorm(1, alpha_fwd=0.999, affine=False)
    layer(torch.full((40_000, 1), 1e4))
    assert abs(layer.running_mean.item() - 1e4) < 1e-6


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("guard", ["layer_scaling", None])
def test_planes_of_ten_million_elements(guard, last):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 10_000_019)
    x[:, 1] = x[:, 1] * 1e-2 + 3
    x = channels_last(x) if last else x
    grad = torch.randn(x.shape)
    layer, reference = layer_and_reference(2, guard=guard)
    z, grad_x = step(layer, x, grad)
    assert_close("z", z, reference.forward(x.double().numpy()), 1e-6)
    assert_close("grad_x", grad_x, reference.backward(grad.double().numpy()), 1e-6)
    for name in STATE:
        assert_close(name, getattr(layer, name), getattr(reference, name), 1e-6)


def test_an_outlier_first_does_not_spoil_the_variance():
    """The shift that keeps squares from cancelling is taken from the first elements: make those the odd ones."""
    x = torch.full((1, 1, 300_000), 1e4) + torch.randn(1, 1, 300_000, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 0
    layer = OnlineNorm(1, alpha_fwd=0.0)
    layer(x)
    assert layer.running_var.item() == pytest.approx(x.double().var(correction=0).item(), rel=1e-5)


@pytest.mark.parametrize("guard", ["layer_scaling", "clamp", None])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 50)])
def test_constant_planes(guard, shape):
    layer, reference = layer_and_reference(3, guard=guard)
    for value in (0.0, 5.0, 5.0):
        x = torch.full(shape, value)
        z, grad_x = step(layer, x, torch.ones(shape))
        assert z.isfinite().all()
        assert grad_x.isfinite().all()
        assert_close("z", z, reference.forward(x.double().numpy()), 1e-5)
        reference.backward(np.ones(shape))


def test_variance_never_negative():
    x = torch.full((64, 4, 33, 33), 1e4 + 1 / 3)
    layer = OnlineNorm(4, alpha_fwd=0.0)
    layer(x)
    assert (layer.running_var >= 0).all()
    assert layer.running_var.max() < 1e-6


def test_a_million_samples_without_drift():
    """The streams after 10^6 samples, against the closed recurrence of the reference in float64."""
    alpha_fwd, alpha_bwd = 1 - 2**-15, 1 - 2**-10
    layer, reference = layer_and_reference(2, guard=None, affine=False, alpha_fwd=alpha_fwd, alpha_bwd=alpha_bwd)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(50_000, 2, generator=generator) * 2 + 3
        grad = torch.randn(50_000, 2, generator=generator)
        z, grad_x = step(layer, x, grad)
        expected = reference.forward(x.double().numpy())
        expected_grad = reference.backward(grad.double().numpy())
    assert layer.num_samples_tracked == 1_000_000
    assert_close("z", z, expected, 1e-6)
    assert_close("grad_x", grad_x, expected_grad, 1e-5)
    for name, tolerance in zip(STATE, (1e-12, 1e-12, 1e-5, 1e-5), strict=True):
        assert_close(name, getattr(layer, name), getattr(reference, name), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 100), (2, 4, 5000)])
def test_large_inputs_stay_finite(dtype, shape):
    """Inputs up to 1e18 in size: their squares are near the end of float32."""
    torch.manual_seed(0)
    layer = OnlineNorm(shape[1])
    for _ in range(3):
        z, grad_x = step(layer, (torch.randn(shape).clamp(-1, 1) * 9e17).to(dtype), torch.randn(shape).to(dtype))
        assert z.isfinite().all()
        assert grad_x.isfinite().all()
    assert all(getattr(layer, name).isfinite().all() for name in STATE)
