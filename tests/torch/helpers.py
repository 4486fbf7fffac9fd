"""What the PyTorch tests share: building a layer beside its reference, and comparing the two."""

import numpy as np
import torch

from onlinenorm.reference import OnlineNorm as Reference
from onlinenorm.torch import OnlineNorm

STATE = ("running_mean", "running_var", "control_y", "control_1")
GUARDS = ("layer_scaling", "clamp", None)


def layer_and_reference(channels, *, guard="layer_scaling", affine=True, dtype=torch.float32, seed=0, **settings):
    """A layer with random parameters, and the reference with the same ones."""
    settings = {"alpha_fwd": 0.9, "alpha_bwd": 0.8, "clamp_value": 1.5, "guard": guard, "affine": affine, **settings}
    layer = OnlineNorm(channels, dtype=dtype, **settings)
    reference = Reference(channels, **settings)
    if affine:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            layer.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
            layer.bias.copy_(torch.randn(channels, generator=generator))
        reference.weight = layer.weight.detach().double().numpy().copy()
        reference.bias = layer.bias.detach().double().numpy().copy()
    return layer, reference


def channels_last(x):
    """The same tensor with its channels lying together, for any number of dimensions."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def step(layer, x, grad):
    """One forward and backward; the output and the gradient of x."""
    x = x.detach().requires_grad_()
    z = layer(x)
    z.backward(grad)
    return z.detach(), x.grad


def state_of(layer):
    return {name: getattr(layer, name).clone() for name in (*STATE, "num_samples_tracked")}


def assert_same_state(left, right):
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{name} differs: {value} and {right[name]}"


def assert_close(what, got, expected, tolerance):
    got = np.asarray(got.detach().double() if isinstance(got, torch.Tensor) else got)
    scale = 1 + np.abs(expected).max(initial=0)
    error = np.abs(got - expected).max(initial=0) / scale
    assert error <= tolerance, f"{what}: relative error {error:.2e} is above {tolerance:.0e}"
