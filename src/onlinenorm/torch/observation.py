"""What `diagnose` measures: streaming sums over the calls of a layer, in the precision of its state."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onlinenorm.torch import portable
from onlinenorm.torch.layers import OnlineNorm

DEAD = 0.01  # variance of a normalised channel below which it says nothing
_BLOCK = 1 << 18  # scalars looked at together: copies of 2 MiB stay in the cache, whatever the input's size


class Call:
    """One call of a layer: its input, and the streams as each sample found them."""

    def __init__(self, layer: OnlineNorm, training: bool, x: Tensor, mean: Tensor, var: Tensor, count: Tensor) -> None:
        self.layer = layer
        self.training = training
        self.planes = x.flatten(2) if x.dim() > 2 else x[:, :, None]
        self.m, self.v = (torch.empty(self.planes.shape[:2], dtype=mean.dtype, device=x.device) for _ in "mv")
        for block in _blocks(self.planes):
            self.m[block], self.v[block] = portable.moments(self.planes[block].to(mean.dtype))
        alphas = portable.decays(layer.alpha_fwd, layer.warmup, len(x), count)
        self.streams, _, _ = portable.scan_statistics(self.m, self.v, mean, var, alphas, self.training)
        self.inv = (self.streams.s2 + layer.eps).rsqrt()

    def yhat(self, block: tuple[slice, slice]) -> Tensor:
        """The normalised input of some samples and channels."""
        streams = portable.Streams(*(stream[block] for stream in self.streams))
        return portable.normalise(self.planes[block].to(self.m.dtype), streams, self.inv[block])


def _blocks(planes: Tensor) -> Iterator[tuple[slice, slice]]:
    """Samples and channels to look at together, so that the copies made for it stay small."""
    samples, channels, scalars = planes.shape
    width = min(channels, max(1, _BLOCK // scalars))
    height = max(1, _BLOCK // (width * scalars))
    for sample in range(0, samples, height):
        for channel in range(0, channels, width):
            yield slice(sample, sample + height), slice(channel, channel + width)


class Sums:
    """Streaming sums over all that one layer did in one mode. Tensors of C numbers, or one, on the layer's device."""

    def __init__(self, layer: OnlineNorm) -> None:
        self.layer = layer
        zeros, zero = torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_mean[0])
        self.calls = self.samples = self.outputs = 0
        self.planes, self.y, self.yy, self.within = (zeros.clone() for _ in range(4))
        self.skipped, self.zetas, self.zeta, self.zeta_max, self.clamped = (zero.clone() for _ in range(5))
        self.zeta_min = zero + torch.inf

        self.backward_samples = 0
        self.grad_planes, self.g, self.gy, self.gg, self.back_yy, self.scalars = (zeros.clone() for _ in range(6))
        self.skipped_gradients, self.overshoot = zero.clone(), zero.clone()
        self.control_1: Tensor | None = None
        self.control_y: Tensor | None = None
        self.bound_1: Tensor | None = None
        self.bound_y: Tensor | None = None

    def add_forward(self, call: Call) -> None:
        """Count a call."""
        layer, y = call.layer, (call.m - call.streams.mu) * call.inv
        finite = call.m.isfinite() & call.v.isfinite()
        within = torch.where(finite, call.v * call.inv * call.inv, 0)
        kept = torch.where(finite, y, 0)
        self.calls += 1
        self.samples += len(y)
        self.skipped += (~finite).any(1).sum()
        self.planes += finite.sum(0)
        self.y += kept.sum(0)
        self.yy += kept.square().sum(0)
        self.within += within.sum(0)
        if layer.guard is None:
            return
        gamma = torch.ones_like(y[0]) if layer.weight is None else layer.weight.to(y.dtype)
        beta = torch.zeros_like(y[0]) if layer.bias is None else layer.bias.to(y.dtype)
        if layer.guard == "layer_scaling":
            zeta = ((gamma * gamma * within + (gamma * y + beta).square()).mean(1) + layer.guard_eps).sqrt()
            good = zeta.isfinite()
            self.zetas += good.sum()
            self.zeta += torch.where(good, zeta, 0).sum()
            self.zeta_min = torch.minimum(self.zeta_min, torch.where(good, zeta, torch.inf).min())
            self.zeta_max = torch.maximum(self.zeta_max, torch.where(good, zeta, 0).max())
        else:
            self.outputs += call.planes.numel()
            for block in _blocks(call.planes):
                channels = block[1]
                u = call.yhat(block) * gamma[channels, None] + beta[channels, None]
                self.clamped += (u.abs() > layer.clamp_value).sum()

    def add_backward(self, call: Call, grad: Tensor) -> None:
        """Count the gradient that a call returned for its input."""
        layer = call.layer
        grads = grad.reshape(call.planes.shape)
        g, gy, gg, y, yy = (torch.empty_like(call.m) for _ in range(5))
        for block in _blocks(call.planes):
            yhat, part = call.yhat(block), grads[block].to(g.dtype)
            g[block], gy[block], gg[block] = part.mean(2), (part * yhat).mean(2), part.square().mean(2)
            y[block], yy[block] = yhat.mean(2), yhat.square().mean(2)
        self.skipped_gradients += (~gg.isfinite()).any(1).sum()
        finite = gg.isfinite() & yy.isfinite()
        g, gy, gg, y, yy = (torch.where(finite, t, 0) for t in (g, gy, gg, y, yy))
        size = call.planes.shape[2]
        self.backward_samples += len(g)
        self.grad_planes += finite.sum(0)
        self.scalars += finite.sum(0) * size
        self.g += g.sum(0) * size
        self.gy += gy.sum(0) * size
        self.gg += gg.sum(0) * size
        self.back_yy += yy.sum(0) * size
        if call.training:
            self._add_control(layer, g, gy, y, yy, torch.where(finite, call.inv, 1))

    def _add_control(self, layer: OnlineNorm, g: Tensor, gy: Tensor, y: Tensor, yy: Tensor, inv: Tensor) -> None:
        """Repeat the control process from what came out of it, and bound it.

        By eqs. 11 and 12, control_1 grows by mean(x'), control_y by mean(x~' yhat), and x~' = (x' + pull_1) / inv. With
        what went in, i1 = mean(x~') inv and iy = mean(y' yhat), the same equations read

            control_1 <- alpha_bwd control_1 + i1        control_y <- (1 - (1 - alpha_bwd) mean(yhat^2)) control_y + iy

        and with absolute values all over, these bound them, whatever the signs.
        """
        decay = 1 - layer.alpha_bwd
        before_1 = layer.control_1 - g.flip(0).cumsum(0).flip(0)  # before each sample, back from the state afterwards
        step_y = (gy + decay * before_1 * y) / inv
        before_y = layer.control_y - step_y.flip(0).cumsum(0).flip(0)
        into_1 = (g + decay * before_1).abs()
        into_y = (step_y + decay * before_y * yy).abs()
        keep_y = (1 - decay * yy).abs()
        bound_1 = before_1[0].abs() if self.bound_1 is None else self.bound_1
        bound_y = before_y[0].abs() if self.bound_y is None else self.bound_y
        for t in range(len(g)):
            bound_1 = layer.alpha_bwd * bound_1 + into_1[t]
            bound_y = keep_y[t] * bound_y + into_y[t]
        self.bound_1, self.bound_y = bound_1, bound_y
        self.control_1, self.control_y = layer.control_1.clone(), layer.control_y.clone()
        self.overshoot += (decay * yy > 1).sum()

    def result(self) -> dict[str, Any]:
        """Everything of `Diagnosis.as_dict` for this layer and mode but the advice."""
        seen = self.planes > 0
        planes = self.planes[seen]
        mean = self.y[seen] / planes
        between = (self.yy[seen] / planes - mean.square()).clamp(min=0)  # variance of the samples' means
        variance = between + self.within[seen] / planes
        length = self.gg.sqrt()
        cos_1, cos_y = self.g / (length * self.scalars.sqrt()), self.gy / (length * self.back_yy.sqrt())
        clamp, scaling = self.layer.guard == "clamp", self.zetas > 0
        return {
            "calls": self.calls,
            "samples": self.samples,
            "skipped_samples": int(self.skipped),
            "mean_rms": _rms(mean),
            "mean_worst": _worst(mean),
            "mean_by_chance": _rms((between / planes).sqrt()),
            "variance": _number(variance.mean()),
            "variance_min": _number(variance.min()) if len(variance) else None,
            "variance_max": _number(variance.max()) if len(variance) else None,
            "dead_channels": int((variance < DEAD).sum()),
            "zeta_mean": _number(self.zeta / self.zetas) if scaling else None,
            "zeta_min": _number(self.zeta_min) if scaling else None,
            "zeta_max": _number(self.zeta_max) if scaling else None,
            "clamped": _number(self.clamped / self.outputs) if clamp and self.outputs else None,
            "backward_samples": self.backward_samples,
            "skipped_gradients": int(self.skipped_gradients),
            "cos_1": _rms(cos_1),
            "cos_1_worst": _worst(cos_1),
            "cos_y": _rms(cos_y),
            "cos_y_worst": _worst(cos_y),
            "control_1": _rms(self.control_1),
            "control_1_bound": _rms(self.bound_1),
            "control_y": _rms(self.control_y),
            "control_y_bound": _rms(self.bound_y),
            "overshoot": None if self.control_y is None else _number(self.overshoot / self.grad_planes.sum()),
        }


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _rms(values: Tensor | None) -> float | None:
    """Root mean square over the channels that have a value."""
    return None if values is None else _number(values[values.isfinite()].square().mean().sqrt())


def _worst(values: Tensor) -> float | None:
    known = values[values.isfinite()].abs()
    return _number(known.max()) if len(known) else None
