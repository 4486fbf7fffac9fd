"""Both passes of training as operators, which a compiler calls without looking inside.

Each moves the streams in place, allocates what it returns, and leaves the work to a backend, as the eager path does.
Beside each stands its fake, which tells a compiler the shapes, strides and dtypes. Operators return plain tensors, no
lists and no None: what is not wanted is empty. The settings are the last arguments, as `Settings` has them.
"""

from dataclasses import fields
from math import prod
from typing import Any

import torch
from torch import Tensor

from onlinenorm.torch import checkpointing, native, portable
from onlinenorm.torch.devices import without_engine
from onlinenorm.torch.settings import Act, Guard, Settings, checked_settings

_TYPES: dict[Any, str] = {bool: "bool", int: "int", float: "float", Guard: "str?", Act: "str?"}
_SETTINGS = ", ".join(f"{_TYPES[field.type]} {field.name}" for field in fields(Settings))
_LANES = 16  # the engine keeps moments in rows of a multiple of this many channels

_library = torch.library.Library("onlinenorm", "DEF")  # type: ignore[no-untyped-call]
# The compiler may choose the layout of x and of the gradient: a convolution beside them has its own preference.
_TAGS = (torch.Tag.flexible_layout,)
_library.define(  # type: ignore[no-untyped-call]
    "forward(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, Tensor(b!) running_var, "
    f"Tensor(c!)? num_samples_tracked, bool use_native, bool keep, {_SETTINGS}) -> (Tensor z, Tensor replay)",
    tags=_TAGS,
)
_library.define(  # type: ignore[no-untyped-call]
    "backward(Tensor x, Tensor grad_z, Tensor? weight, Tensor? bias, Tensor(a!) control_y, Tensor(b!) control_1, "
    f"Tensor replay, bool use_native, bool needs_x, bool needs_weight, bool needs_bias, {_SETTINGS}) "
    "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    tags=_TAGS,
)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    num_samples_tracked: Tensor | None,
    use_native: bool,
    keep: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    state = _start(running_mean, running_var, num_samples_tracked)
    backend = native if use_native else without_engine(x)
    z, replay = backend.forward(checked_settings(*settings), True, _laid_out(x, use_native), weight, bias, *state, keep)
    if not keep:
        return z, x.new_empty(0)
    return z, replay[0] if use_native else _pack(portable.Replay(*replay))


def _fake_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    num_samples_tracked: Tensor | None,
    use_native: bool,
    keep: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    z = torch.empty_like(_laid_out(x, use_native))
    samples, channels = x.shape[:2]
    if not keep:
        return z, x.new_empty(0)
    if not use_native:
        return z, running_mean.new_empty((3 + 2 * samples, channels))
    # what onlinenorm_replay_bytes says, for sizes that may be symbols
    moments = 2 * (8 if x.dtype == torch.float64 else 4)
    kept = moments * 20 <= prod(x.shape[2:]) * x.element_size()
    bytes_of_channel = 2 * 8 + (moments * samples if kept else 0)
    return z, x.new_empty((channels + _LANES - 1) // _LANES * _LANES * bytes_of_channel + 8, dtype=torch.uint8)


def _backward(
    x: Tensor,
    grad_z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    control_y: Tensor,
    control_1: Tensor,
    replay: Tensor,
    use_native: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    *settings: Any,
) -> tuple[Tensor, ...]:
    backend = native if use_native else without_engine(x)
    grads = backend.backward(
        checked_settings(*settings),
        True,
        _laid_out(x, use_native),
        grad_z,
        weight,
        bias,
        control_y,
        control_1,
        (replay,) if use_native else _unpack(replay),
        (needs_x, needs_weight, needs_bias),
    )
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _fake_backward(
    x: Tensor,
    grad_z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    control_y: Tensor,
    control_1: Tensor,
    replay: Tensor,
    use_native: bool,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    *settings: Any,
) -> tuple[Tensor, ...]:
    wanted = (_laid_out(x, use_native), needs_x), (weight, needs_weight), (bias, needs_bias)
    return tuple(torch.empty_like(t) if t is not None and needed else x.new_empty(0) for t, needed in wanted)


def _laid_out(x: Tensor, use_native: bool) -> Tensor:
    """x as the backend can read it, and as its results will lie."""
    return native.dense(x) if use_native else x


def _start(
    running_mean: Tensor, running_var: Tensor, num_samples_tracked: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The state to start from and to move: the layer's own, or a copy of older state where a checkpoint repeats."""
    state = running_mean, running_var, num_samples_tracked
    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return (
            state  # not inside a region; gradients, which checkpointing.may_be_near asks for, are off in any operator
        )
    try:
        start = checkpointing.repeated_start(checkpointing.Start(True, *state))
    except RuntimeError as error:
        raise RuntimeError(
            f"{error} In a compiled function, let checkpoint save what this layer returns: checkpoint(..., "
            "use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, "
            "[torch.ops.onlinenorm.forward.default]))"
        ) from None
    return state if start is None else (start.running_mean, start.running_var, start.num_samples_tracked)


def _pack(replay: portable.Replay) -> Tensor:
    """The state before the batch, then the moments, in one tensor: (3 + 2N, C)."""
    mean, var, count, m, v = replay
    return torch.cat(
        [mean[None], var[None], count.to(mean.dtype).expand_as(mean)[None], m.to(mean.dtype), v.to(mean.dtype)]
    )


def _unpack(replay: Tensor) -> portable.Replay:
    mean, var, count = replay[:3]
    return portable.Replay(mean, var, count[0], *replay[3:].chunk(2))


_library.impl("forward", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("backward", _backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("onlinenorm::forward", _fake_forward, lib=_library)
torch.library.register_fake("onlinenorm::backward", _fake_backward, lib=_library)

forward = torch.ops.onlinenorm.forward.default
backward = torch.ops.onlinenorm.backward.default
