"""Online Normalization inside a graph, as `torch.compile`, `torch.export` and `torch.jit.trace` draw it.

Training is the two operators of `ops`: the same backends as in the eager path, so that state and gradients are the
same bit for bit. Evaluation is a few plain operations, which a compiler fuses with their neighbours and any runtime
can run.
"""

from typing import Any

import torch
from torch import Tensor

from onlinenorm.torch import ops, portable
from onlinenorm.torch.settings import Guard, Settings

Values = tuple[Any, ...]  # of the fields of Settings, in their order


def train(
    values: Values,
    use_native: bool,
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    control_y: Tensor,
    control_1: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_samples_tracked: Tensor | None,
) -> Tensor:
    """Normalise x and move the streams on; the gradient's streams move in the backward."""
    statistics = running_mean, running_var, num_samples_tracked
    z: Tensor
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        z = _Training.apply(x, weight, bias, *statistics, control_y, control_1, use_native, values)  # type: ignore[no-untyped-call]
    else:
        z, _ = ops.forward(x, weight, bias, *statistics, use_native, False, *values)
    return z


class _Training(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        num_samples_tracked: Tensor | None,
        control_y: Tensor,
        control_1: Tensor,
        use_native: bool,
        values: Values,
    ) -> Tensor:
        z: Tensor
        z, replay = ops.forward(
            x, weight, bias, running_mean, running_var, num_samples_tracked, use_native, True, *values
        )
        ctx.save_for_backward(x, weight, bias, replay)
        ctx.control = control_y, control_1  # not saved: the backward moves them
        ctx.constants = use_native, values
        return z

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor) -> Any:
        x, weight, bias, replay = ctx.saved_tensors
        use_native, values = ctx.constants
        needs = ctx.needs_input_grad[:3]
        grads = ops.backward(x, grad_z, weight, bias, *ctx.control, replay, use_native, *needs, *values)
        return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *[None] * 7)


def infer(
    settings: Settings,
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Normalise x by the statistics as they are, in plain operations."""
    wide = portable.accumulate_in(x)
    channels = (-1, *[1] * (x.dim() - 2))
    scale = (running_var + settings.eps).to(wide).rsqrt()
    if weight is not None:
        scale = scale * weight.to(wide)
    shift = running_mean.to(wide)
    offset = (shift - running_mean).to(wide) * scale  # the mean's rounding, made good
    if bias is not None:
        offset = offset + bias.to(wide)
    shift, scale, offset = (t.view(channels) for t in (shift, scale, offset))
    u = (x.to(wide) - shift) * scale + offset
    z = guarded(u, settings.guard, settings.guard_eps, settings.clamp_value)
    return portable.activated(z, settings.act).to(x.dtype)


def guarded(u: Tensor, guard: Guard, guard_eps: float, clamp_value: float) -> Tensor:
    """Apply the guard to u, the output of the affine part, in plain operations."""
    if guard == "layer_scaling":
        square = u.square().mean(list(range(1, u.dim())), keepdim=True)
        return u * (square + guard_eps).rsqrt()
    if guard == "clamp":
        return u.clamp(-clamp_value, clamp_value)
    return u
