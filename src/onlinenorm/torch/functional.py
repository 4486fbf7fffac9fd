"""Online Normalization on explicit tensors: checks, the choice of a backend, and the autograd function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_tracing  # by torch.jit.trace; without the Python around it
from torch.compiler import is_compiling

from onlinenorm import hyperparameters as default
from onlinenorm.torch import checkpointing, compiled, native, portable
from onlinenorm.torch.checkpointing import Start
from onlinenorm.torch.devices import without_engine
from onlinenorm.torch.settings import Act, Guard, Settings, checked_settings

Backend = Literal["auto", "native", "portable"]
_chosen_backend: Backend = "auto"


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Choose what computes inside the context: "native" (the CPU engine), "portable" (plain torch), or "auto"."""
    global _chosen_backend
    if name not in ("auto", "native", "portable"):
        raise ValueError(f'backend must be "auto", "native" or "portable", got {name!r}')
    before, _chosen_backend = _chosen_backend, name
    try:
        yield
    finally:
        _chosen_backend = before


class _Call(NamedTuple):
    """What a call needs beside the tensors that autograd saves."""

    backend: ModuleType
    settings: Settings
    training: bool
    running_mean: Tensor
    running_var: Tensor
    control_y: Tensor
    control_1: Tensor
    num_samples_tracked: Tensor | None


def _forward(
    call: _Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    backend, settings, training, mean, var, _, _, num_samples = call
    result: tuple[Tensor, tuple[Tensor, ...]]
    result = backend.forward(settings, training, x, weight, bias, mean, var, num_samples, keep)
    return result


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call, apply: Callable[..., Tensor] | None = None
) -> Tensor:
    if checkpointing.may_be_near():
        now = Start(call.training, call.running_mean, call.running_var, call.num_samples_tracked)
        start = checkpointing.repeated_start(now)
        if start is not None:
            call = call._replace(**start._asdict())
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        return (apply or _OnlineNorm.apply)(x, weight, bias, call)
    return _forward(call, x, weight, bias, keep=False)[0]


class _OnlineNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        z, replay = _forward(call, x, weight, bias, keep=True)
        ctx.save_for_backward(x, weight, bias, *replay)
        ctx.call = call
        return z

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor) -> Any:
        x, weight, bias, *replay = ctx.saved_tensors
        backend, settings, training, _, _, control_y, control_1, _ = ctx.call
        grads = backend.backward(
            settings, training, x, grad_z, weight, bias, control_y, control_1, replay, ctx.needs_input_grad
        )
        if torch.is_grad_enabled():  # create_graph=True
            grads = (None if grad is None else _Once.apply(grad, grad_z, x, weight) for grad in grads)  # type: ignore[no-untyped-call]
        return (*grads, None)


# What Function.apply calls after its care for functorch's wrappers, which have no memory that the engine could read.
_apply_to_plain_tensors: Callable[..., Tensor] = super(torch.autograd.Function, _OnlineNorm).apply


class _Once(torch.autograd.Function):
    """Passes a gradient on, and says why it can't be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *_: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "Online Normalization has no second derivative: its backward is a control process over the stream of "
            "gradients, not the derivative of a function. Gradient penalties and Hessians need eval-time statistics "
            "in a layer such as GroupNorm instead."
        )


def _check_all(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    control_y: Tensor,
    control_1: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Refuse, in words, what no backend can work on."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"the input must be floating point, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"the input must be (N, C, *), at least 2 dimensions, got shape {tuple(x.shape)}")
    wide = (torch.float64,) if x.is_cpu else (torch.float64, torch.float32)
    _check("running_mean", running_mean, x, wide)
    _check("running_var", running_var, x, wide)
    _check("control_y", control_y, x, wide)
    _check("control_1", control_1, x, wide)
    if weight is not None:
        _check("weight", weight, x, (x.dtype, torch.float32))
    if bias is not None:
        _check("bias", bias, x, (x.dtype, torch.float32))
        if weight is not None and weight.dtype != bias.dtype:
            raise TypeError(f"weight and bias must have one dtype, got {weight.dtype} and {bias.dtype}")


def _check(name: str, t: Tensor, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    channels = x.shape[1]
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in dtypes:
        allowed = " or ".join(map(str, dict.fromkeys(dtypes)))
        raise TypeError(f"{name} must be {allowed}, got {t.dtype}; the input is {x.dtype}")
    if t.shape != (channels,):
        raise ValueError(f"{name} must have shape ({channels},) for {channels} channels, got {tuple(t.shape)}")
    if t.device != x.device:
        raise RuntimeError(f"{name} is on {t.device}, but the input is on {x.device}: move both to one device")
    if not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {t.stride()}")


def online_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    control_y: Tensor,
    control_1: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool = True,
    alpha_fwd: float = default.ALPHA_FWD,
    alpha_bwd: float = default.ALPHA_BWD,
    eps: float = default.EPS,
    guard: Guard = default.GUARD,
    guard_eps: float = default.GUARD_EPS,
    clamp_value: float = default.CLAMP_VALUE,
    warmup: bool = default.WARMUP,
    bound_control: bool = default.BOUND_CONTROL,
    act: Act = None,
    num_samples_tracked: Tensor | None = None,
) -> Tensor:
    """Normalise a batch of samples by the streaming statistics, sample by sample, on explicit tensors.

    The layers of `onlinenorm.torch` hold these tensors and call this. In training, the call moves `running_mean`,
    `running_var` and `num_samples_tracked` in place, and its backward moves `control_y` and `control_1`; otherwise
    the statistics are only used.

    Args:
        x: (N, C, *), floating point, any memory format.
        running_mean, running_var, control_y, control_1: the state, (C,) and float64 (float32 where the device has no
            float64).
        weight, bias: (C,), of the dtype of x or float32; None for 1 and 0.
        training: whether the state moves.
        alpha_fwd, alpha_bwd: decay factors of the statistics and of the control process, in [0, 1).
        eps: added to the variance.
        guard: "layer_scaling", "clamp" or None.
        guard_eps: added to the second moment under layer scaling's root.
        clamp_value: where the guard "clamp" clips.
        warmup: whether sample t = 0, 1, ... averages with decay 1 - 1 / (t + 2) until that reaches alpha_fwd.
        bound_control: whether a sample takes away no more of control_y than there is.
        act: the activation that follows: "relu", "leaky_relu", "silu", "gelu" or None.
        num_samples_tracked: int64 scalar that counts samples, or None; warmup needs it.

    Returns:
        A tensor of x's shape, dtype and memory format.
    """
    if warmup and training and num_samples_tracked is None:
        raise ValueError("warmup=True needs num_samples_tracked, an int64 scalar that counts the samples, got None")
    return normalise(
        (alpha_fwd, alpha_bwd, eps, guard, guard_eps, clamp_value, warmup, bound_control, act),
        training,
        x,
        running_mean,
        running_var,
        control_y,
        control_1,
        weight,
        bias,
        num_samples_tracked,
    )


def _native_takes(x: Tensor) -> bool:
    """Whether the engine has a kernel for x as far as dtype and device go, and is not forbidden."""
    takes = x.is_cpu and x.dtype in native.DTYPES
    if _chosen_backend == "native" and not takes:
        raise RuntimeError(f"the native backend has no kernel for {x.dtype} on {x.device}")
    return takes and _chosen_backend != "portable"


def normalise(
    values: tuple[Any, ...],
    training: bool,
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    control_y: Tensor,
    control_1: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_samples_tracked: Tensor | None,
) -> Tensor:
    """Do what `online_norm` does; `values` are those of the fields of `Settings`, in their order."""
    state = running_mean, running_var, control_y, control_1
    if is_compiling() or _is_tracing():
        settings = Settings(*values)  # not from the cache, which a compiler can't look into
        _check_all(x, *state, weight, bias)
        if not training:
            return compiled.infer(settings, x, running_mean, running_var, weight, bias)
        # not is_exporting(), which PyTorch before 2.13 compiles as true
        if torch.compiler._is_exporting_flag or not is_compiling():
            raise RuntimeError(
                "a layer of Online Normalization in training mode can't be exported, as its statistics would have to "
                "move in the exported program: call model.eval() first"
            )
        if x.numel() == 0:
            return x.clone()
        return compiled.train(values, _native_takes(x), x, *state, weight, bias, num_samples_tracked)
    settings = checked_settings(*values)
    if _chosen_backend != "portable":
        if native.fits(settings, x, *state, weight, bias, num_samples_tracked):
            call = _Call(native, settings, training, *state, num_samples_tracked)
            return _run(x, weight, bias, call, _apply_to_plain_tensors)
        _check_all(x, *state, weight, bias)
        if x.numel() == 0:
            return x.clone()
        if x.is_meta and training and _chosen_backend == "auto":  # as the engine would, not as any device without it
            return compiled.train(values, True, x, *state, weight, bias, num_samples_tracked)
        copy = native.dense(x)
        if native.fits(settings, copy, *state, weight, bias, num_samples_tracked):
            return _run(copy, weight, bias, _Call(native, settings, training, *state, num_samples_tracked))
        if _chosen_backend == "native":
            raise RuntimeError(f"the native backend has no kernel for {x.dtype} on {x.device}")
    _check_all(x, *state, weight, bias)
    if x.numel() == 0:
        return x.clone()
    serving = portable if _chosen_backend == "portable" else without_engine(x)
    return _run(x, weight, bias, _Call(serving, settings, training, *state, num_samples_tracked))


# Where a compiler gave up on a call, as it does when one raises, it must not start anew inside: the engine's calls
# can't be traced. This leaves `normalise` and all below it to Python when it is not part of a larger graph.
_dynamo = torch._C._dynamo.eval_frame
_dynamo.set_code_exec_strategy(
    normalise.__code__, _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)
)
