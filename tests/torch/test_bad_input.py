"""Bad input: an error that names the argument, what it was and what is allowed, and no state changed."""

import re

import pytest
import torch
from helpers import assert_same_state, state_of

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d, functional


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha_fwd": 1.0}, "alpha_fwd must be in [0, 1), got 1.0"),
        ({"alpha_fwd": -0.1}, "alpha_fwd must be in [0, 1), got -0.1"),
        ({"alpha_bwd": 1.5}, "alpha_bwd must be in [0, 1), got 1.5"),
        ({"alpha_bwd": float("nan")}, "alpha_bwd must be in [0, 1), got nan"),
        ({"eps": -1e-5}, "eps must be finite and not negative, got -1e-05"),
        ({"guard_eps": -1.0}, "guard_eps must be finite and not negative, got -1.0"),
        ({"guard": "clip"}, "guard must be one of 'layer_scaling', 'clamp', None, got 'clip'"),
        ({"guard": "clamp", "clamp_value": 0.0}, "clamp_value must be finite and positive, got 0.0"),
        ({"num_features": 0}, "num_features must be at least 1, got 0"),
    ],
)
def test_settings(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OnlineNorm(**{"num_features": 3, **arguments})


def refused(layer, x, error, message):
    before = state_of(layer)
    with pytest.raises(error, match=re.escape(message)):
        layer(x)
    assert_same_state(before, state_of(layer))


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (OnlineNorm1d, (3,), "expected 2D or 3D input (got 1D input)"),
        (OnlineNorm1d, (2, 3, 4, 4), "expected 2D or 3D input (got 4D input)"),
        (OnlineNorm2d, (2, 3, 4), "expected 4D input (got 3D input)"),
        (OnlineNorm3d, (2, 3, 4, 4), "expected 5D input (got 4D input)"),
        (OnlineNorm, (3,), "at least 2 dimensions, got shape (3,)"),
        (OnlineNorm2d, (2, 5, 4, 4), "expected input with 3 channels in dimension 1, got shape (2, 5, 4, 4)"),
        (OnlineNorm, (0, 5), "expected input with 3 channels in dimension 1, got shape (0, 5)"),
    ],
)
def test_shapes(layer, shape, message):
    refused(layer(3), torch.randn(shape), ValueError, message)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_inputs_that_are_not_floating_point(dtype):
    refused(OnlineNorm(3), torch.ones(2, 3).to(dtype), TypeError, f"floating point, got {dtype}")


def test_inputs_that_are_not_tensors():
    refused(OnlineNorm(3), [[1.0, 2.0, 3.0]], TypeError, "the input must be a torch.Tensor, got list")


def test_parameters_of_another_dtype():
    layer = OnlineNorm(3, dtype=torch.float64)
    refused(
        layer,
        torch.randn(2, 3),
        TypeError,
        "weight must be torch.float32, got torch.float64; the input is torch.float32",
    )
    layer = OnlineNorm(3, dtype=torch.bfloat16)
    refused(layer, torch.randn(2, 3).half(), TypeError, "got torch.bfloat16")


def test_mixed_devices():
    layer = OnlineNorm(3, device="meta")
    with pytest.raises(RuntimeError, match="running_mean is on meta, but the input is on cpu"):
        layer(torch.randn(2, 3))


def test_state_of_the_wrong_shape_or_dtype():
    good = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=re.escape("control_y must have shape (3,) for 3 channels, got (2,)")):
        functional.online_norm(x, good[0], good[1], torch.zeros(2, dtype=torch.float64), good[3])
    with pytest.raises(TypeError, match=re.escape("running_var must be torch.float64, got torch.float32")):
        functional.online_norm(x, good[0], good[1].float(), good[2], good[3])
    strided = torch.zeros(6, dtype=torch.float64)[::2]
    with pytest.raises(ValueError, match="control_1 must be contiguous"):
        functional.online_norm(x, good[0], good[1], good[2], strided)
    with pytest.raises(ValueError, match=re.escape("bias must have shape (3,)")):
        functional.online_norm(x, *good, weight=torch.ones(3), bias=torch.ones(4))
    with pytest.raises(TypeError, match="weight and bias must have one dtype"):
        functional.online_norm(x.double(), *good, weight=torch.ones(3), bias=torch.ones(3).double())
    assert all((t == 0).all() for t in good)


def test_backends():
    with pytest.raises(ValueError, match='must be "auto", "native" or "portable"'), functional.backend("cuda"):
        pass
    with functional.backend("native"), pytest.raises(RuntimeError, match="no kernel for"):
        OnlineNorm(3, device="meta")(torch.randn(2, 3, device="meta"))
