"""The layers: parameters, streaming state, and the habits of `nn.BatchNorm*`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onlinenorm import hyperparameters as default
from onlinenorm.torch.functional import normalise
from onlinenorm.torch.settings import Act, Guard, checked_settings

STATE = ("running_mean", "running_var", "control_y", "control_1")


def _state_dtype(device: torch.device | str | None) -> torch.dtype:
    """With a decay near 1 float32 loses small updates to rounding. Apple's GPUs have nothing wider."""
    return torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64


class OnlineNorm(nn.Module):
    """Online Normalization of (N, C, *): BatchNorm's job, one sample at a time, at any batch size.

    A sample is normalised by mean and variance that stream over all samples before it; its own then join the stream.
    The gradient is corrected by a control process that streams likewise. Per channel and sample,

        yhat = (x - mu) / sqrt(var + eps)      z = (weight * yhat + bias) / zeta

    where zeta, the root mean square of `weight * yhat + bias` over the whole sample, is the guard against activations
    that grow from layer to layer ("layer scaling").

    Args:
        num_features: channels C.
        eps: added to the variance.
        alpha_fwd: decay of the statistics, a sample at a time: they average over some 1 / (1 - alpha_fwd) samples.
        alpha_bwd: decay of the control process of the backward.
        affine: whether there are `weight` and `bias` to learn.
        guard: "layer_scaling" (the paper's), "clamp" (clip at +-clamp_value, cheaper for large samples), or None.
        guard_eps: added to the second moment under layer scaling's root.
        clamp_value: where the guard "clamp" clips.
        warmup: start with short averages: sample t = 0, 1, ... averages with decay 1 - 1 / (t + 2), which counts it as
            much as each sample before it and as the initial state, until that reaches alpha_fwd.
        bound_control: let a sample take away no more of the control error in y than there is. By the paper's eq. 11b it
            takes the share (1 - alpha_bwd) mean(y²), which may exceed 1 and, beyond 2, makes the error grow: streams of
            single scalars, as in recurrent networks, and small alpha_bwd diverge without the bound.
        device, dtype: of the parameters. The state is float64 whatever happens to the model's dtype.

    In `eval()` the statistics are used and stay as they are; the guard still applies. With the attribute
    `freeze_statistics` set to True they do so in `train()` too, see `onlinenorm.torch.freeze_statistics`.

    A state dict of `nn.BatchNorm*` loads, and `onlinenorm.torch.convert` replaces BatchNorm in a whole model.

    !!! note
        The forward moves `running_mean` and `running_var`, the backward `control_y` and `control_1`. Every training
        forward counts, also one under `torch.no_grad()`.
    """

    num_features: int
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    control_y: Tensor
    control_1: Tensor
    num_samples_tracked: Tensor

    warmup: bool = default.WARMUP  # of layers pickled before there was a choice
    bound_control: bool = default.BOUND_CONTROL  # likewise
    _act: Act = None  # what follows the guard, see `OnlineNormAct`
    freeze_statistics = False  # of the class, so that layers pickled by an older version have it; see `freezing`

    _dims: tuple[int, ...] = ()  # numbers of input dimensions that are allowed; empty: 2 and more

    def __init__(
        self,
        num_features: int,
        eps: float = default.EPS,
        alpha_fwd: float = default.ALPHA_FWD,
        alpha_bwd: float = default.ALPHA_BWD,
        affine: bool = True,
        guard: Guard = default.GUARD,
        guard_eps: float = default.GUARD_EPS,
        clamp_value: float = default.CLAMP_VALUE,
        warmup: bool = default.WARMUP,
        bound_control: bool = default.BOUND_CONTROL,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checked_settings(alpha_fwd, alpha_bwd, eps, guard, guard_eps, clamp_value, warmup, bound_control)
        if num_features < 1:
            raise ValueError(f"num_features must be at least 1, got {num_features}")
        self.num_features = num_features
        self.eps = eps
        self.alpha_fwd = alpha_fwd
        self.alpha_bwd = alpha_bwd
        self.affine = affine
        self.guard: Guard = guard
        self.guard_eps = guard_eps
        self.clamp_value = clamp_value
        self.warmup = warmup
        self.bound_control = bound_control
        if affine:
            self.weight = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        for name in STATE:
            self.register_buffer(name, torch.empty(num_features, device=device, dtype=_state_dtype(device)))
        self.register_buffer("num_samples_tracked", torch.empty((), device=device, dtype=torch.int64))
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Start the streams again: mean 0, variance 1, control errors 0."""
        for name in STATE:
            getattr(self, name).zero_()
        self.running_var.fill_(1)
        self.num_samples_tracked.zero_()

    def reset_parameters(self) -> None:
        """Start the streams and the parameters again."""
        self.reset_running_stats()
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, and in training move the statistics on by its samples."""
        if isinstance(x, Tensor):
            self._check_shape(x)
        parameters, state = self._parameters, self._buffers  # a module's own attribute access takes longer
        affine = "weight" in parameters and "bias" in parameters  # not if they are parametrised
        return normalise(
            (
                self.alpha_fwd,
                self.alpha_bwd,
                self.eps,
                self.guard,
                self.guard_eps,
                self.clamp_value,
                self.warmup,
                self.bound_control,
                self._act,
            ),
            self.training and not self.freeze_statistics,
            x,
            state["running_mean"],  # type: ignore[arg-type]
            state["running_var"],  # type: ignore[arg-type]
            state["control_y"],  # type: ignore[arg-type]
            state["control_1"],  # type: ignore[arg-type]
            parameters["weight"] if affine else self.weight,
            parameters["bias"] if affine else self.bias,
            state["num_samples_tracked"],
        )

    def _check_shape(self, x: Tensor) -> None:
        if self._dims and x.dim() not in self._dims:
            allowed = " or ".join(f"{dims}D" for dims in self._dims)
            raise ValueError(f"expected {allowed} input (got {x.dim()}D input)")
        if x.dim() >= 2 and x.shape[1] != self.num_features:
            raise ValueError(
                f"expected input with {self.num_features} channels in dimension 1, got shape {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        """Say what was set, as BatchNorm does."""
        guard = f"guard={self.guard!r}"
        if self.guard == "clamp":
            guard += f", clamp_value={self.clamp_value}"
        return (
            f"{self.num_features}, eps={self.eps}, alpha_fwd={self.alpha_fwd}, alpha_bwd={self.alpha_bwd}, "
            f"affine={self.affine}, {guard}"
            f"{', warmup=True' * self.warmup}{', bound_control=True' * self.bound_control}"
            f"{', freeze_statistics=True' * self.freeze_statistics}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OnlineNorm":
        """Let the state follow the model to another device, but not to another dtype."""
        state = {name: self._buffers[name] for name in STATE}
        kept = {id(t) for t in state.values()}

        def keep_wide(t: Tensor) -> Tensor:
            if id(t) not in kept:
                return fn(t)
            try:
                moved = fn(t)
            except TypeError:  # no float64 on that device
                return fn(t.float())
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(keep_wide, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Also take the state dict of a BatchNorm: what it does not know starts anew."""
        batches = state_dict.pop(prefix + "num_batches_tracked", None)
        if prefix + "control_y" not in state_dict and prefix + "running_mean" in state_dict:
            for name in ("control_y", "control_1"):
                state_dict[prefix + name] = torch.zeros_like(state_dict[prefix + "running_mean"])
            if prefix + "num_samples_tracked" not in state_dict:
                state_dict[prefix + "num_samples_tracked"] = torch.as_tensor(0 if batches is None else batches)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class OnlineNorm1d(OnlineNorm):
    """Online Normalization of (N, C) or (N, C, L). See `OnlineNorm` for the arguments."""

    _dims = (2, 3)


class OnlineNorm2d(OnlineNorm):
    """Online Normalization of (N, C, H, W). See `OnlineNorm` for the arguments."""

    _dims = (4,)


class OnlineNorm3d(OnlineNorm):
    """Online Normalization of (N, C, D, H, W). See `OnlineNorm` for the arguments."""

    _dims = (5,)


class OnlineNormAct(OnlineNorm):
    """Online Normalization and an activation in one step, which is faster, and keeps no more than the first alone.

    Args:
        num_features, settings: as of `OnlineNorm`.
        act: "relu", "leaky_relu" (slope 0.01 below 0), "silu", "gelu" (the exact one), or None for no activation.
    """

    def __init__(self, num_features: int, *settings: Any, act: Act = "relu", **more_settings: Any) -> None:
        super().__init__(num_features, *settings, **more_settings)
        checked_settings(act=act)
        self._act = act

    @property
    def act(self) -> Act:
        """The activation."""
        return self._act

    def extra_repr(self) -> str:
        """Say what was set."""
        return f"{super().extra_repr()}, act={self._act!r}"


class OnlineNormAct1d(OnlineNormAct, OnlineNorm1d):
    """Online Normalization and activation of (N, C) or (N, C, L). See `OnlineNormAct` for the arguments."""


class OnlineNormAct2d(OnlineNormAct, OnlineNorm2d):
    """Online Normalization and activation of (N, C, H, W). See `OnlineNormAct` for the arguments."""


class OnlineNormAct3d(OnlineNormAct, OnlineNorm3d):
    """Online Normalization and activation of (N, C, D, H, W). See `OnlineNormAct` for the arguments."""


def online_norm_layers(model: nn.Module) -> dict[OnlineNorm, str]:
    """All layers of a model and their names, at least one. A layer that stands in several places comes once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = {layer: name for name, layer in model.named_modules() if isinstance(layer, OnlineNorm)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no OnlineNorm layers")
    return layers
