"""The three steps by the CPU engine: finds layout and addresses, and calls it."""

from functools import lru_cache

import torch
from torch import Tensor

from onlinenorm import _native
from onlinenorm.torch.settings import GUARDS, Settings

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as in onlinenorm.h
_GUARD_CODES = {None: 0, "layer_scaling": 1, "clamp": 2}
_NCD, _NDC = 0, 1
assert set(GUARDS) == set(_GUARD_CODES)


@lru_cache(maxsize=1024)
def _engine(settings: Settings, channels: int) -> _native.Layer:
    s = settings
    return _native.Layer(channels, s.alpha_fwd, s.alpha_bwd, s.eps, _GUARD_CODES[s.guard], s.guard_eps, s.clamp_value)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_channels_last(x: Tensor) -> bool:
    if x.dim() in _CHANNELS_LAST:
        return x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])
    return x.dim() > 2 and x.movedim(1, -1).is_contiguous()


def _lies_like(x: Tensor, other: Tensor) -> bool:
    return x.is_contiguous() if other.is_contiguous() else _is_channels_last(x)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


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
    samples, channels = x.shape[:2]
    elements = x.numel() // (samples * channels)
    engine = _engine(settings, channels)
    dtype = DTYPES[x.dtype]
    param_dtype = dtype if weight is None else DTYPES[weight.dtype]
    replay = torch.empty(engine.replay_bytes(samples, elements, dtype), dtype=torch.uint8) if keep else None
    z = torch.empty_like(x)
    engine.forward(
        samples,
        elements,
        _NCD if x.is_contiguous() else _NDC,
        dtype,
        param_dtype,
        training,
        torch.get_num_threads(),
        x.data_ptr(),
        _address(weight),
        _address(bias),
        running_mean.data_ptr(),
        running_var.data_ptr(),
        _address(num_samples_tracked),
        z.data_ptr(),
        _address(replay),
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
    samples, channels = x.shape[:2]
    dtype = DTYPES[x.dtype]
    if not _lies_like(grad_z, x):
        grad_z = torch.empty_like(x).copy_(grad_z)
    grad_x = torch.empty_like(x) if needs[0] else None
    grad_weight = torch.empty_like(weight) if weight is not None and needs[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
    _engine(settings, channels).backward(
        samples,
        x.numel() // (samples * channels),
        _NCD if x.is_contiguous() else _NDC,
        dtype,
        dtype if weight is None else DTYPES[weight.dtype],
        training,
        torch.get_num_threads(),
        x.data_ptr(),
        grad_z.data_ptr(),
        _address(weight),
        _address(bias),
        control_y.data_ptr(),
        control_1.data_ptr(),
        replay[0].data_ptr(),
        _address(grad_x),
        _address(grad_weight),
        _address(grad_bias),
    )
    return grad_x, grad_weight, grad_bias


def dense(x: Tensor) -> Tensor:
    """Return x itself if the engine can read it as it lies in memory, else a contiguous copy."""
    return x if x.is_contiguous() or _is_channels_last(x) else x.contiguous()
