"""The unit of the control errors: that of the gradients. When the loss is scaled anew, they have to be as well."""

from collections.abc import Iterable
from math import isfinite

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from onlinenorm.torch.layers import OnlineNorm, online_norm_layers


def scale_control_errors(model: nn.Module, factor: float) -> None:
    """Multiply the control errors of every OnlineNorm layer: to be called when the loss is scaled by this factor.

    The control errors `control_y` and `control_1` add up gradients, so they are linear in the loss. When from one step
    to the next the same samples would give `factor` times the gradients, because a loss is scaled, weighed or averaged
    in another way, this converts what the model remembers of the old ones. With a power of two it is exact.

    Args:
        model: a model, a part of one, or a layer. A layer that stands in several places is scaled once.
        factor: new gradients divided by old gradients.
    """
    if not isfinite(factor):
        raise ValueError(f"factor must be finite, got {factor}: it would destroy the control errors")
    _scale(online_norm_layers(model), factor)


def follow_scaler(scaler: GradScaler, model: nn.Module) -> None:
    """Keep the control errors of a model in the unit of a gradient scaler: one line after both are made.

    From now on, whenever `scaler.update()` changes the scale, the control errors of the model's OnlineNorm layers are
    multiplied by the new scale divided by the old one. Loading a state dict into the scaler changes nothing in the
    model: load the state that the model had at that time along with it.

    The control errors are taken to be in the scaler's unit already, which is so for a new model (they are zero), and
    for one that was saved with the scaler. A model that was trained without a scaler needs
    `scale_control_errors(model, scaler.get_scale())` once; one that leaves its scaler, `1 / scaler.get_scale()`.

    Args:
        scaler: a `torch.amp.GradScaler`, enabled or not.
        model: call once for each model, if several share a scaler. A model that is there already is not added again.
    """
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    online_norm_layers(model)  # complains if there are none
    update = vars(scaler).get("update")
    if not isinstance(update, _UpdateAndConvert):
        update = scaler.update = _UpdateAndConvert(scaler)  # type: ignore[method-assign]
    if model not in update.models:
        update.models.append(model)


class _UpdateAndConvert:
    """Stands in for `scaler.update`. An object rather than a function, so that the scaler can be copied and pickled."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.models: list[nn.Module] = []

    def __call__(self, new_scale: float | Tensor | None = None) -> None:
        before = self.scaler.get_scale()
        type(self.scaler).update(self.scaler, new_scale)
        after = self.scaler.get_scale()
        if after != before != 0:  # a scale of 0 has wiped them out
            _scale({layer for model in self.models for layer in online_norm_layers(model)}, after / before)


def _scale(layers: Iterable[OnlineNorm], factor: float) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.control_y.mul_(factor)
            layer.control_1.mul_(factor)
