"""Warming up: sample t averages with decay 1 - 1 / (t + 2), as long as that is below alpha_fwd."""

import copy

import numpy as np
import pytest
import torch
from helpers import GUARDS, STATE, assert_close, layer_and_reference, state_of, step
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, functional

SHAPES = [(40, 20), (130, 300), (30, 3, 5), (24, 64, 8, 8), (5, 3, 70, 70)]


@given(
    shape=st.sampled_from(SHAPES),
    guard=st.sampled_from(GUARDS),
    alpha=st.sampled_from([0.4, 0.9, 0.999]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    backend=st.sampled_from(["native", "portable"]),
)
def test_against_the_reference(shape, guard, alpha, dtype, backend):
    layer, reference = layer_and_reference(
        shape[1], guard=guard, dtype=dtype, warmup=True, alpha_fwd=alpha, clamp_value=100.0
    )
    tolerance = 1e-9 if dtype == torch.float64 else 3e-5
    with functional.backend(backend):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x = (torch.randn(shape, generator=generator) * 2 + 5).to(dtype)
            grad = torch.randn(shape, generator=generator).to(dtype)
            z, grad_x = step(layer, x, grad)
            assert_close("z", z, reference.forward(x.double().numpy()), tolerance)
            assert_close("grad_x", grad_x, reference.backward(grad.double().numpy()), tolerance)
    for name in STATE:
        assert_close(name, getattr(layer, name), getattr(reference, name), tolerance)
    assert layer.num_samples_tracked == reference.num_samples_tracked == 3 * shape[0]


def test_it_is_the_running_mean_of_the_samples_and_the_initial_state():
    x = torch.randn(50, 4, dtype=torch.float64) * 3 + 10
    layer = OnlineNorm1d(4, warmup=True)
    layer(x)
    everything = torch.cat([torch.zeros(1, 4, dtype=torch.float64), x])
    assert torch.allclose(layer.running_mean, everything.mean(0), rtol=1e-12)
    variance = (everything - everything.mean(0)).square().sum(0) / 51 + 1 / 51  # the initial one counts as one sample
    assert torch.allclose(layer.running_var, variance, rtol=1e-12)


def test_it_ends_where_the_decay_is_alpha():
    """From then on the streams move as those of a layer without it that has the same state."""
    warm = OnlineNorm(3, alpha_fwd=0.9, warmup=True)
    warm(torch.randn(9, 3, 5))
    plain = copy.deepcopy(warm)
    plain.warmup = False
    x = torch.randn(4, 3, 5)
    assert torch.equal(warm(x), plain(x))
    assert torch.equal(warm.running_var, plain.running_var)

    early = OnlineNorm(3, alpha_fwd=0.9, warmup=True)
    early(torch.randn(7, 3, 5))
    plain = copy.deepcopy(early)
    plain.warmup = False
    early(x), plain(x)
    assert not torch.equal(early.running_mean, plain.running_mean)


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("shape", SHAPES)
def test_splits(shape, backend):
    x, grad = torch.randn(shape), torch.randn(shape)
    results = []
    with functional.backend(backend):
        for size in (shape[0], 1, 7):
            layer, _ = layer_and_reference(shape[1], warmup=True, alpha_fwd=0.97)
            parts = [step(layer, *part) for part in zip(x.split(size), grad.split(size), strict=True)]
            results.append((*(torch.cat(part) for part in zip(*parts, strict=True)), state_of(layer)))
    for z, grad_x, state in results[1:]:
        if backend == "native":
            assert torch.equal(z, results[0][0])
            assert torch.equal(grad_x, results[0][1])
            assert all(torch.equal(state[name], value) for name, value in results[0][2].items())
        else:
            assert torch.allclose(z, results[0][0], atol=1e-5)
            assert torch.allclose(grad_x, results[0][1], atol=1e-5)


def test_a_stream_far_from_the_start_is_found_at_once():
    """The reason for it: with a long horizon the streams otherwise need thousands of samples to find the data."""
    x = torch.randn(64, 8, 6, 6) * 0.1 + 30
    warm, cold = OnlineNorm(8, warmup=True, guard=None), OnlineNorm(8, guard=None)
    for _ in range(4):
        warm(x), cold(x)
    off = {name: (layer.running_mean - 30).abs().max().item() for name, layer in (("warm", warm), ("cold", cold))}
    assert off["warm"] < 0.5, off
    assert off["cold"] > 20, off


def test_checkpoints_carry_it():
    layer = OnlineNorm(3, warmup=True)
    layer(torch.randn(5, 3, 4))
    other = OnlineNorm(3, warmup=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(6, 3, 4)
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer.running_mean, other.running_mean)
    assert "warmup=True" in repr(layer)


def test_the_functional_form_needs_a_count():
    state = torch.zeros(3).double(), torch.ones(3).double(), torch.zeros(3).double(), torch.zeros(3).double()
    with pytest.raises(ValueError, match="warmup=True needs num_samples_tracked"):
        functional.online_norm(torch.randn(2, 3), *state, warmup=True)
    assert np.array_equal(state[0].numpy(), np.zeros(3)), "the state moved although the call raised"
    count = torch.tensor(0)
    functional.online_norm(torch.randn(2, 3), *state, warmup=True, num_samples_tracked=count)
    assert count == 2
    with pytest.raises(ValueError, match="warmup must be one of False, True, got 'yes'"):
        OnlineNorm(3, warmup="yes")


def test_a_layer_pickled_before_there_was_a_choice():
    layer = OnlineNorm(3)
    del layer.__dict__["warmup"]
    assert layer(torch.randn(2, 3)).shape == (2, 3)
