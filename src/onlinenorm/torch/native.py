"""The three steps by the CPU engine: allocates what it writes, and calls it."""

from functools import lru_cache

import torch
from torch import Tensor

from onlinenorm import _native
from onlinenorm.torch.settings import ACTS, GUARDS, Settings

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GUARD_CODES = {None: 0, "layer_scaling": 1, "clamp": 2}  # as in onlinenorm.h
_ACT_CODES = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3, "gelu": 4}
assert set(GUARDS) == set(_GUARD_CODES)
assert set(ACTS) == set(_ACT_CODES)

if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError(f"onlinenorm needs PyTorch 2.10 or later, this is {torch.__version__}: pip install -U torch")


@lru_cache(maxsize=1024)
def _engine(settings: Settings) -> _native.Layer:
    s = settings
    guard, act = _GUARD_CODES[s.guard], _ACT_CODES[s.act]
    return _native.Layer(
        Tensor, s.alpha_fwd, s.alpha_bwd, s.eps, guard, s.guard_eps, s.clamp_value, s.warmup, s.bound_control, act
    )


def fits(
    settings: Settings,
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    control_y: Tensor,
    control_1: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_samples_tracked: Tensor | None,
) -> bool:
    """Whether the engine can work on these as they are: one call, in place of a check of each."""
    return _engine(settings).fits(x, running_mean, running_var, control_y, control_1, weight, bias, num_samples_tracked)


def forward(
    settings: Settings,
    training: bool,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    num_samples_tracked: Tensor | None,
    keep: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Normalise x of shape (N, C, *), dense in memory; in training move the streams."""
    engine = _engine(settings)
    z = torch.empty_like(x)
    replay = torch.empty(engine.replay_bytes(x), dtype=torch.uint8) if keep else None
    engine.forward(
        training,
        torch.get_num_threads(),
        x,
        weight,
        bias,
        running_mean,
        running_var,
        num_samples_tracked,
        z,
        replay,
    )
    return z, () if replay is None else (replay,)


def backward(
    settings: Settings,
    training: bool,
    x: Tensor,
    grad_z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    control_y: Tensor,
    control_1: Tensor,
    replay: tuple[Tensor, ...],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, as far as they are needed; in training move the control errors."""
    if grad_z.stride() != x.stride() and not (x.is_contiguous() and grad_z.is_contiguous()):
        grad_z = torch.empty_like(x).copy_(grad_z)
    grad_x = torch.empty_like(x) if needs[0] else None
    grad_weight = torch.empty_like(weight) if weight is not None and needs[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
    _engine(settings).backward(
        training,
        torch.get_num_threads(),
        x,
        grad_z,
        weight,
        bias,
        control_y,
        control_1,
        replay[0],
        grad_x,
        grad_weight,
        grad_bias,
    )
    return grad_x, grad_weight, grad_bias


def dense(x: Tensor) -> Tensor:
    """Return x itself if its scalars lie together, channels second or last, else a contiguous copy."""
    if x.is_contiguous() or (x.dim() > 2 and x.movedim(1, -1).is_contiguous()):
        return x
    return x.contiguous()
