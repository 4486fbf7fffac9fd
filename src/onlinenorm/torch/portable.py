"""The three steps in plain torch operations, for every device that has no kernel of its own.

The notation is that of the design: a sample has C channels and D elements; m, v are its mean and variance, mu, s2 the
streams before it, inv = 1/sqrt(s2 + eps), yhat = (x - mu) inv, zeta the layer scaling. The scan is a loop over samples
of operations on C numbers; everything else is on whole batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onlinenorm.torch.settings import LEAKY_SLOPE, Act, Settings


class Streams(NamedTuple):
    """The streams as each sample of a batch found them, (N, C) each, and the moments that it brought."""

    mu: Tensor
    s2: Tensor
    m: Tensor
    v: Tensor


class Replay(NamedTuple):
    """What the backward needs beside the input to repeat the scan: the state before the batch, and the moments."""

    mean: Tensor
    var: Tensor
    num_samples: Tensor
    m: Tensor
    v: Tensor


# ---- moments


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every (sample, channel) plane of x, which is (N, C, D)."""
    if x.shape[2] == 1:
        return x[:, :, 0], torch.zeros_like(x[:, :, 0])
    rough = x.mean(2, keepdim=True)
    centred = x - rough
    off = centred.mean(2)
    return rough[:, :, 0] + off, (centred.square().mean(2) - off.square()).clamp(min=0)


def grad_moments(grad: Tensor, yhat: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of z' and of z' yhat over every plane."""
    return grad.mean(2), (grad * yhat).mean(2)


# ---- scan


def decays(alpha: float, warmup: bool, samples: int, num_samples: Tensor) -> Sequence[float | Tensor]:
    """The decay that each sample averages with, num_samples others having gone before."""
    if not warmup:
        return [alpha] * samples
    wide = torch.float32 if num_samples.device.type == "mps" else torch.float64
    t = num_samples.to(wide) + torch.arange(samples, dtype=wide, device=num_samples.device)
    return (1 - 1 / (t + 2)).clamp(max=alpha).unbind()


def scan_statistics(
    m: Tensor, v: Tensor, mean: Tensor, var: Tensor, alphas: Sequence[float | Tensor], training: bool
) -> tuple[Streams, Tensor, Tensor]:
    """Run eqs. 8b and 8c over the samples: the streams before each of them, and after the last."""
    m, v = m.to(mean.dtype), v.to(mean.dtype)
    if not training:
        return Streams(mean.expand_as(m), var.expand_as(m), m, v), mean, var
    finite = m.isfinite() & v.isfinite()
    before = []
    for m_t, v_t, ok, alpha in zip(m, v, finite, alphas, strict=True):
        before.append((mean, var))
        d = m_t - mean
        var = torch.where(ok, alpha * var + (1 - alpha) * v_t + alpha * (1 - alpha) * d * d, var)
        mean = torch.where(ok, alpha * mean + (1 - alpha) * m_t, mean)
    mu, s2 = (torch.stack(stream) for stream in zip(*before, strict=True))
    return Streams(mu, s2, m, v), mean, var


def scan_control(
    a1: Tensor,
    a2: Tensor,
    y1: Tensor,
    y2: Tensor,
    inv: Tensor,
    control_y: Tensor,
    control_1: Tensor,
    alpha: float,
    bound: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run eqs. 11b and 12b over the samples: both control errors before each of them, and after the last.

    a1, a2: mean of gamma y' and of gamma y' yhat, with y' the gradient at the affine output.
    """
    before = []
    for a1_t, a2_t, y1_t, y2_t, inv_t in zip(a1, a2, y1, y2, inv, strict=True):
        before.append((control_y, control_1))
        pull = (1 - alpha) * control_y
        share = (1 - alpha) * y2_t
        next_y = control_y + (a2_t - control_y * (share.clamp(max=1) if bound else share))
        next_1 = control_1 + (inv_t * (a1_t - pull * y1_t) - (1 - alpha) * control_1)
        ok = next_y.isfinite() & next_1.isfinite()
        control_y, control_1 = torch.where(ok, next_y, control_y), torch.where(ok, next_1, control_1)
    ey, e1 = (torch.stack(control) for control in zip(*before, strict=True))
    return ey, e1, control_y, control_1


# ---- apply


def normalise(x: Tensor, streams: Streams, inv: Tensor) -> Tensor:
    """Compute yhat, eq. 8a. The mean's rounding to x's type is made good, so that large offsets cost no precision."""
    shift = streams.mu.to(x.dtype)
    rest = ((streams.mu - shift.to(inv.dtype)) * inv).to(x.dtype)
    return (x - shift[:, :, None]) * inv.to(x.dtype)[:, :, None] - rest[:, :, None]


def activated(r: Tensor, act: Act) -> Tensor:
    """Apply the activation."""
    match act:
        case "relu":
            return r.relu()
        case "leaky_relu":
            return F.leaky_relu(r, LEAKY_SLOPE)
        case "silu":
            return F.silu(r)
        case "gelu":
            return F.gelu(r)
    return r


def before_activation(grad: Tensor, r: Tensor, act: Act) -> Tensor:
    """The gradient at r, the activation's input; 0 where ReLU is closed, whatever the gradient behind it."""
    match act:
        case "relu":
            return torch.where(r <= 0, 0, grad)
        case "leaky_relu":
            return torch.where(r <= 0, LEAKY_SLOPE * grad, grad)
        case "silu":
            s = r.sigmoid()
            return grad * s * (1 + r * (1 - s))
        case "gelu":
            bell: Tensor = (-0.5 * r * r).exp() * (2 * torch.pi) ** -0.5
            slope: Tensor = r * bell + torch.special.ndtr(r)
            return grad * slope
    return grad


# ---- both passes


def _inverse_root(squared: Tensor) -> Tensor:
    return squared.sqrt().reciprocal()


def _inverse_zeta(y1: Tensor, y2: Tensor, gamma: Tensor, beta: Tensor, settings: Settings) -> Tensor:
    """1/zeta of eq. 9 for each sample, (N, 1); 1 without layer scaling."""
    if settings.guard != "layer_scaling":
        return torch.ones_like(y1[:, :1])
    q = (gamma * gamma * (y2 - y1 * y1).clamp(min=0) + (gamma * y1 + beta).square()).mean(1, keepdim=True)
    return torch.where(q.isfinite(), _inverse_root(q + settings.guard_eps), torch.nan)  # not 1 / infinity = 0


def _means_of_yhat(streams: Streams, inv: Tensor) -> tuple[Tensor, Tensor]:
    y1 = (streams.m - streams.mu) * inv
    return y1, streams.v * inv * inv + y1 * y1


def _parameters(weight: Tensor | None, bias: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    gamma = torch.ones_like(like) if weight is None else weight.to(like.dtype)
    beta = torch.zeros_like(like) if bias is None else bias.to(like.dtype)
    return gamma, beta


def accumulate_in(x: Tensor) -> torch.dtype:
    """The dtype for sums over x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


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
    """Normalise x of shape (N, C, *); in training move the streams. Also what the backward needs, if `keep`."""
    planes = x.to(accumulate_in(x)).flatten(2) if x.dim() > 2 else x.to(accumulate_in(x))[:, :, None]
    gamma, beta = _parameters(weight, bias, running_mean)
    m, v = moments(planes)
    count = torch.zeros((), dtype=torch.int64, device=x.device) if num_samples_tracked is None else num_samples_tracked
    alphas = decays(settings.alpha_fwd, settings.warmup, x.shape[0], count)
    streams, mean, var = scan_statistics(m, v, running_mean, running_var, alphas, training)
    replay = Replay(running_mean.clone(), running_var.clone(), count.clone(), m, v) if keep else ()

    inv = _inverse_root(streams.s2 + settings.eps)
    u = normalise(planes, streams, inv)
    u = u * gamma.to(u.dtype)[:, None] + beta.to(u.dtype)[:, None]
    if settings.guard == "layer_scaling":
        y1, y2 = _means_of_yhat(streams, inv)
        u = u * _inverse_zeta(y1, y2, gamma, beta, settings).to(u.dtype)[:, :, None]
    elif settings.guard == "clamp":
        u = u.clamp(-settings.clamp_value, settings.clamp_value)
    z = torch.empty_like(x).copy_(activated(u, settings.act).view(x.shape))

    if training:
        running_mean.copy_(mean)
        running_var.copy_(var)
        if num_samples_tracked is not None:
            num_samples_tracked += x.shape[0]
    return z, replay


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
    shape = (*x.shape[:2], x.shape[2:].numel())
    planes, grad = (t.to(accumulate_in(x)).reshape(shape) for t in (x, grad_z))
    gamma, beta = _parameters(weight, bias, control_y)
    mean, var, count, m, v = replay
    alphas = decays(settings.alpha_fwd, settings.warmup, x.shape[0], count)
    streams, _, _ = scan_statistics(m, v, mean, var, alphas, training)
    inv = _inverse_root(streams.s2 + settings.eps)
    yhat = normalise(planes, streams, inv)
    y1, y2 = _means_of_yhat(streams, inv)
    inv_zeta = _inverse_zeta(y1, y2, gamma, beta, settings)
    if settings.guard == "clamp" or settings.act is not None:
        r = (yhat * gamma.to(yhat.dtype)[:, None] + beta.to(yhat.dtype)[:, None]) * inv_zeta.to(yhat.dtype)[:, :, None]
        grad = before_activation(grad, r, settings.act)
        if settings.guard == "clamp":
            grad = torch.where(r.abs() > settings.clamp_value, 0, grad)

    s1, s2 = (mean.to(inv.dtype) for mean in grad_moments(grad, yhat))
    common = torch.zeros_like(inv_zeta)  # eq. 10: what all channels subtract
    if settings.guard == "layer_scaling":
        common = (gamma * s2 + beta * s1).mean(1, keepdim=True) * inv_zeta * inv_zeta
    a1 = (s1 - common * (gamma * y1 + beta)) * inv_zeta
    a2 = (s2 - common * (gamma * y2 + beta * y1)) * inv_zeta
    decay = 1 - settings.alpha_bwd if training else 0.0
    if training:
        ey, e1, next_y, next_1 = scan_control(
            gamma * a1, gamma * a2, y1, y2, inv, control_y, control_1, settings.alpha_bwd, settings.bound_control
        )
    else:
        ey, e1, next_y, next_1 = control_y, control_1, control_y, control_1

    grad_x = grad_weight = grad_bias = None
    if needs[0]:
        by_grad = inv * gamma * inv_zeta
        by_yhat = inv * (gamma * gamma * common * inv_zeta + decay * ey)
        less = inv * gamma * beta * common * inv_zeta + decay * e1
        by_grad, by_yhat, less = (t.to(grad.dtype)[:, :, None] for t in (by_grad, by_yhat, less))
        grad_x = torch.empty_like(x).copy_((by_grad * grad - by_yhat * yhat - less).view(x.shape))
    if needs[1] and weight is not None:
        grad_weight = (a2.sum(0) * shape[2]).to(weight.dtype)
    if needs[2] and bias is not None:
        grad_bias = (a1.sum(0) * shape[2]).to(bias.dtype)
    if training:
        control_y.copy_(next_y)
        control_1.copy_(next_1)
    return grad_x, grad_weight, grad_bias
