"""The paper's claims about the stream, on random shapes, decays and data: what holds exactly, and what in the limit.

Section 4 and appendices B to D of the paper. Two of its claims hold only as alpha goes to 1: independent scalars at
alpha = 0.9 come out with variance 1.233, not 1/alpha, and x' is orthogonal to y only up to O(1 - alpha_fwd).
"""

import pytest
import torch
from helpers import GUARDS, assert_close, assert_same_state, channels_last, state_of
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.torch import OnlineNorm

decays = st.sampled_from([0.0, 0.5, 0.9, 0.99])
shapes = st.tuples(st.integers(2, 12), st.sampled_from([1, 3, 17]), st.integers(2, 9))


class Stream:
    """A layer without guard and affine part, fed sample by sample, and what the paper's equations speak of at each."""

    def __init__(self, shape, alpha_fwd, alpha_bwd, seed):
        generator = torch.Generator().manual_seed(seed)
        xs = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 1
        grads = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.layer = OnlineNorm(shape[1], alpha_fwd=alpha_fwd, alpha_bwd=alpha_bwd, guard=None, affine=False)
        self.y, self.grad_y, self.x_tilde, self.grad_x, self.inv = [], [], [], [], []
        for x, grad in zip(xs[:, None], grads[:, None], strict=True):
            inv = (self.layer.running_var + self.layer.eps).rsqrt()[:, None]
            control_1 = self.layer.control_1.clone()[:, None]
            x.requires_grad_()
            y = self.layer(x)
            y.backward(grad)
            self.y.append(y.detach()[0])
            self.grad_y.append(grad[0])
            self.grad_x.append(x.grad[0])
            self.x_tilde.append((x.grad[0] + (1 - alpha_bwd) * control_1) / inv)  # (12a), solved for x~'
            self.inv.append(inv)


@given(shape=shapes, alpha_fwd=st.sampled_from([0.5, 0.9, 0.99]), alpha_bwd=decays, seed=st.integers(0, 99))
def test_the_control_errors_are_the_sums_that_they_keep_small(shape, alpha_fwd, alpha_bwd, seed):
    """x~' against y, and x' against 1, by telescoping: their sums over a stream are the control errors, no more."""
    stream = Stream(shape, alpha_fwd, alpha_bwd, seed)
    against_y = sum((x_tilde * y).mean(1) for x_tilde, y in zip(stream.x_tilde, stream.y, strict=True))
    against_1 = sum(grad_x.mean(1) for grad_x in stream.grad_x)
    assert_close("the sum of x~' y", against_y, stream.layer.control_y.numpy(), 1e-9)
    assert_close("the sum of x'", against_1, stream.layer.control_1.numpy(), 1e-9)


@given(shape=shapes, alpha_fwd=st.sampled_from([0.9, 0.99]), alpha_bwd=decays, seed=st.integers(0, 99))
def test_the_control_errors_are_bounded(shape, alpha_fwd, alpha_bwd, seed):
    """While (1 - alpha_bwd) mean(y^2) stays within [0, 1], as the paper assumes: a decaying sum of bounded terms."""
    stream = Stream(shape, alpha_fwd, alpha_bwd, seed)
    squares = torch.stack([y.square().mean(1) for y in stream.y])
    fit = ((1 - alpha_bwd) * squares <= 1).all(0)
    products = torch.stack([(g * y).mean(1).abs() for g, y in zip(stream.grad_y, stream.y, strict=True)]).amax(0)
    bound_y = products / ((1 - alpha_bwd) * squares.amin(0))
    assert (stream.layer.control_y.abs() <= bound_y * (1 + 1e-9))[fit].all()

    into_1 = torch.stack([(t * inv).mean(1).abs() for t, inv in zip(stream.x_tilde, stream.inv, strict=True)]).amax(0)
    assert (stream.layer.control_1.abs() <= into_1 / (1 - alpha_bwd) * (1 + 1e-9)).all()


def long_run(alpha_fwd, draw=torch.randn, alpha_bwd=0.9, samples=20000, channels=128):
    """Independent scalars through a layer, after its streams have settled: y and x'."""
    torch.manual_seed(0)
    layer = OnlineNorm(channels, alpha_fwd=alpha_fwd, alpha_bwd=alpha_bwd, guard=None, affine=False)
    layer(draw(round(20 / (1 - alpha_fwd)), channels).double())
    x = draw(samples, channels).double().requires_grad_()
    y = layer(x)
    y.backward(y.detach().square() + y.detach() + 1 + torch.randn_like(y))  # far from orthogonal to y and to 1
    return y.detach(), x.grad


def test_mean_and_variance_of_the_output_approach_0_and_1():
    away = {alpha: abs(long_run(alpha)[0].var().item() - 1) for alpha in (0.9, 0.97, 0.99, 0.999)}
    assert away[0.9] == pytest.approx(0.233, abs=0.01), "the paper's 1/alpha would be 0.111"
    assert away[0.99] == pytest.approx(0.0203, abs=0.004)
    for alpha in (0.97, 0.99, 0.999):
        assert away[alpha] < 4 * (1 - alpha), f"the variance at alpha = {alpha} is {away[alpha]} from 1"
    for alpha in (0.9, 0.99, 0.999):
        mean = long_run(alpha)[0].mean().item()
        assert abs(mean) < 0.01, f"the mean at alpha = {alpha} is {mean}"


def test_the_gradient_approaches_orthogonality():
    """x' to 1 at any decay, but for the end of the stream; x' to y as O(1 - alpha_fwd). The scalars are skewed."""

    def exponential(*shape):
        return torch.empty(shape).exponential_()

    cosine = {}
    for alpha in (0.9, 0.99, 0.999):
        y, grad_x = long_run(alpha, exponential)
        size = grad_x.square().mean().sqrt()
        assert abs(grad_x.mean() / size) < 0.01, f"x' is not orthogonal to 1 at alpha_fwd = {alpha}"
        cosine[alpha] = abs((grad_x * y).mean() / (size * y.square().mean().sqrt())).item()
    assert cosine[0.99] < cosine[0.9] / 3, cosine
    assert cosine[0.999] < 0.02, cosine


@given(
    shape=shapes,
    guard=st.sampled_from(GUARDS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    last=st.booleans(),
    exponent=st.floats(-18, 18),
    seed=st.integers(0, 99),
)
def test_finite_inputs_come_out_finite(shape, guard, dtype, last, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = OnlineNorm(shape[1], guard=guard, alpha_fwd=0.9)
    for _ in range(3):
        x = (torch.randn(shape, generator=generator) * 10**exponent).clamp(-1e18, 1e18).to(dtype)
        x = channels_last(x) if last else x
        z = layer(x.requires_grad_())
        z.backward(torch.randn(shape, generator=generator).to(dtype))
        assert z.isfinite().all()
        assert x.grad.isfinite().all()
    assert all(value.isfinite().all() for value in state_of(layer).values())


@given(shape=shapes, guard=st.sampled_from(GUARDS), frozen=st.booleans(), warmup=st.booleans())
def test_evaluation_and_errors_change_no_state(shape, guard, frozen, warmup):
    layer = OnlineNorm(shape[1], guard=guard, warmup=warmup)
    layer(torch.randn(shape))
    before = state_of(layer)
    layer.train(frozen)
    layer.freeze_statistics = frozen
    layer(torch.randn(shape).requires_grad_()).sum().backward()
    layer.train()
    layer.freeze_statistics = False
    for bad in (
        torch.zeros(2, shape[1] + 1, 3),
        torch.ones(2, shape[1], dtype=torch.int64),
        torch.zeros(shape[1]),
        None,
    ):
        with pytest.raises((TypeError, ValueError)):
            layer(bad)
    assert_same_state(before, state_of(layer))
