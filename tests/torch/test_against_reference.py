"""Both backends against the paper's equations, one sample at a time in float64."""

import pytest
import torch
from helpers import GUARDS, STATE, assert_close, channels_last, layer_and_reference, step
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.torch import functional

# What rounding each type costs, relative to the largest value; the state is compared at the accumulator's.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def compare(shape, guard, affine, dtype, last, backend, batches=3, **settings):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer, reference = layer_and_reference(shape[1], guard=guard, affine=affine, dtype=wide, **settings)
    tolerance = TOLERANCE[dtype]
    state_tolerance = TOLERANCE[wide]
    with functional.backend(backend):
        for batch in range(batches):
            generator = torch.Generator().manual_seed(batch)
            x = (torch.randn(shape, generator=generator) * 2 + 1).to(dtype)
            grad = torch.randn(shape, generator=generator).to(dtype)
            if guard == "clamp":  # keep clear of the bound, where rounding decides what is clipped
                u = reference_affine_output(reference, x)
                x = torch.where((u.abs() - reference.clamp_value).abs() < 0.05, x + 0.3, x)
                u = reference_affine_output(reference, x)
                grad = torch.where((u.abs() - reference.clamp_value).abs() < 0.02, 0, grad)
            if last:
                x, grad = channels_last(x), channels_last(grad)
            z, grad_x = step(layer, x, grad)
            assert z.dtype == dtype
            assert z.stride() == x.stride(), "the output does not keep the input's memory format"
            assert_close("z", z, reference.forward(x.double().numpy()), tolerance)
            assert_close("grad_x", grad_x, reference.backward(grad.double().numpy()), tolerance)
        for name in STATE:
            assert_close(name, getattr(layer, name), getattr(reference, name), state_tolerance)
        assert layer.num_samples_tracked == batches * shape[0]
        if affine:
            assert_close("weight.grad", layer.weight.grad, reference.weight_grad, max(state_tolerance, 1e-4))
            assert_close("bias.grad", layer.bias.grad, reference.bias_grad, max(state_tolerance, 1e-4))
        layer.eval()
        assert_close("eval z", layer(x), reference.infer(x.double().numpy()), tolerance)


def reference_affine_output(reference, x):
    """gamma yhat + beta of each sample of x, as the reference will see it."""
    from copy import deepcopy

    open_ended = deepcopy(reference)
    open_ended.guard = None
    return torch.from_numpy(open_ended.forward(x.double().numpy()))


shapes = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 16, 17, 64, 70])).flatmap(
    lambda nc: st.lists(st.integers(1, 9), min_size=0, max_size=3).map(lambda extra: (*nc, *extra))
)


@given(
    shape=shapes,
    guard=st.sampled_from(GUARDS),
    affine=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    last=st.booleans(),
    backend=st.sampled_from(["native", "portable"]),
)
def test_any_small_shape(shape, guard, affine, dtype, last, backend):
    compare(shape, guard, affine, dtype, last and len(shape) > 2, backend)


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 70, 70),  # planes of more than one chunk
        (2, 130, 17, 17),  # more channels than a strip, more rows than a chunk
        (40, 64, 8, 8),  # several blocks of samples, several threads
        (3, 16, 40, 40, 9),
    ],
)
def test_shapes_that_cross_every_boundary(shape, guard, last, backend):
    compare(shape, guard, True, torch.float32, last, backend, batches=2)


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("guard", GUARDS)
def test_scalar_features_over_many_blocks(guard, backend):
    compare((150, 300), guard, True, torch.float32, False, backend, batches=2)


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("alpha", [0.0, 1 - 2**-15])
def test_extreme_decays(guard, alpha):
    compare((6, 5, 4), guard, True, torch.float64, False, "native", alpha_fwd=alpha, alpha_bwd=alpha)


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", [(4, 6), (3, 6, 5)])
def test_the_gradient_in_eval_is_the_derivative(guard, shape):
    """In eval the layer is a plain function of x, weight and bias, and its gradient can be checked numerically."""
    layer, _ = layer_and_reference(shape[1], guard=guard, dtype=torch.float64)
    torch.manual_seed(0)
    layer(torch.randn(shape, dtype=torch.float64) + 1)
    layer.eval()

    def function(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, layer.weight, layer.bias))
