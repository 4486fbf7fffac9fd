"""bound_control: no sample takes away more of the control error in y than there is."""

import pytest
import torch
from helpers import GUARDS, STATE, assert_close, layer_and_reference, state_of, step
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.torch import OnlineNorm, functional

SHAPES = [(40, 20), (6, 300), (30, 3, 5), (12, 40, 4, 4), (3, 3, 70, 70)]


@given(
    shape=st.sampled_from(SHAPES),
    guard=st.sampled_from(GUARDS),
    alpha_bwd=st.sampled_from([0.0, 0.5, 0.9]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    backend=st.sampled_from(["native", "portable"]),
    seed=st.integers(0, 99),
)
def test_against_the_reference(shape, guard, alpha_bwd, dtype, backend, seed):
    layer, reference = layer_and_reference(
        shape[1], guard=guard, dtype=dtype, alpha_bwd=alpha_bwd, bound_control=True, clamp_value=100.0
    )
    generator = torch.Generator().manual_seed(seed)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    with functional.backend(backend):
        for _ in range(2):
            x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            x[::3] *= 4  # shares far above 1
            z, grad_x = step(layer, x, grad)
            assert_close("z", z, reference.forward(x.double().numpy()), tolerance)
            assert_close("grad_x", grad_x, reference.backward(grad.double().numpy()), tolerance)
    for name in STATE:
        assert_close(name, getattr(layer, name), getattr(reference, name), tolerance)


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("shape", [(400, 8), (400, 8, 3)])
def test_without_it_large_values_make_the_error_grow_without_end(shape, backend):
    """The share that a sample takes away is (1 - 1/2) mean(y^2), some 8 here: eq. 11b multiplies the error by -7."""
    torch.manual_seed(0)
    x, grad = 4 * torch.randn(2, *shape, dtype=torch.float64)
    grown = {}
    for bound in (False, True):
        layer = OnlineNorm(8, alpha_fwd=0.9999, alpha_bwd=0.5, guard=None, bound_control=bound, dtype=torch.float64)
        with functional.backend(backend):
            step(layer, x, grad)
        grown[bound] = layer.control_y.abs().max().item()
    assert grown[False] > 1e50
    assert grown[True] < 1e3


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_changes_nothing_while_shares_are_below_1(shape, backend):
    torch.manual_seed(0)
    x, grad = torch.randn(2, *shape).clamp(-3, 3)
    after = []
    for bound in (False, True):
        layer = OnlineNorm(shape[1], alpha_bwd=0.95, bound_control=bound)
        with functional.backend(backend):
            after.append([*step(layer, x, grad), *state_of(layer).values()])
    for left, right in zip(*after, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@given(shape=st.sampled_from(SHAPES), size=st.integers(1, 7), guard=st.sampled_from(GUARDS))
def test_splits(shape, size, guard):
    torch.manual_seed(0)
    x, grad = 3 * torch.randn(2, *shape)

    def stream(size):
        layer = OnlineNorm(shape[1], alpha_fwd=0.9, alpha_bwd=0.5, guard=guard, bound_control=True)
        parts = [step(layer, *both) for both in zip(x.split(size), grad.split(size), strict=True)]
        return [torch.cat(part) for part in zip(*parts, strict=True)] + list(state_of(layer).values())

    for whole, cut in zip(stream(len(x)), stream(size), strict=True):
        assert torch.equal(whole, cut)


def test_it_shows_and_is_checked():
    assert "bound_control=True" in repr(OnlineNorm(2, bound_control=True))
    assert "bound_control" not in repr(OnlineNorm(2))
    with pytest.raises(ValueError, match="bound_control must be one of False, True, got 3"):
        OnlineNorm(2, bound_control=3)
