"""Replace BatchNorm in a model that exists."""

import sys
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from onlinenorm import hyperparameters as default
from onlinenorm.torch.integrations import TimmNormAct2d
from onlinenorm.torch.layers import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d
from onlinenorm.torch.settings import Guard

_REPLACEMENTS: dict[type[nn.Module], type[OnlineNorm]] = {
    nn.BatchNorm1d: OnlineNorm1d,
    nn.BatchNorm2d: OnlineNorm2d,
    nn.BatchNorm3d: OnlineNorm3d,
    nn.SyncBatchNorm: OnlineNorm,
}


def _replacement(layer: nn.Module) -> type[OnlineNorm] | None:
    timm = sys.modules.get("timm.layers")  # imported, if the model has one of its layers
    if timm is not None and type(layer) in (timm.BatchNormAct2d, timm.SyncBatchNormAct):
        return TimmNormAct2d
    only_normalises = type(layer).forward is _BatchNorm.forward  # a subclass that does no more
    return _REPLACEMENTS.get(type(layer), OnlineNorm if only_normalises else None)


def convert(
    model: nn.Module,
    alpha_fwd: float = default.ALPHA_FWD,
    alpha_bwd: float = default.ALPHA_BWD,
    guard: Guard = default.GUARD,
    *,
    names: Collection[str] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    report: Callable[[str], None] | None = print,
) -> nn.Module:
    """Turn BatchNorm1d, 2d, 3d and SyncBatchNorm anywhere in a model into Online Normalization, in place.

    So become timm's layers of BatchNorm and activation, which keep their activation (`integrations.TimmNormAct2d`).
    Weights (the same Parameter objects, so that an optimiser keeps them), running statistics, eps, dtype, device and
    train/eval mode are carried over.

    Args:
        model: changed in place; a BatchNorm layer itself is answered with its replacement.
        alpha_fwd, alpha_bwd, guard: of the new layers.
        names: qualified names of the layers to convert, as `model.named_modules()` gives them; None for all.
        where: called with name and layer; says whether to convert it.
        report: called with one line that says what was replaced, and one for layers that look like BatchNorm but were
            left as they are (subclasses with a forward of their own may do more than normalise). None for silence.

    Returns:
        The model.
    """
    found = {
        name: layer for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, _BatchNorm)
    }
    if names is not None:
        unknown = set(names) - set(found)
        if unknown:
            raise ValueError(f"no BatchNorm layer is named {sorted(unknown)}; there are {sorted(found)}")
    wanted = {
        name: layer
        for name, layer in found.items()
        if (names is None or name in names) and (where is None or where(name, layer))
    }
    for name, layer in wanted.items():
        if isinstance(layer, LazyModuleMixin):
            kind = type(layer).__name__
            raise ValueError(f"{name or 'the model'}: {kind} has no shape yet; run the model once on real input before")
    kinds = {layer: new for layer in wanted.values() if (new := _replacement(layer)) is not None}
    convertible = {name: layer for name, layer in wanted.items() if layer in kinds}
    made: dict[_BatchNorm, OnlineNorm] = {}  # a layer that stands in several places stays one layer
    for layer in convertible.values():
        if layer not in made:
            made[layer] = _replace(layer, kinds[layer], alpha_fwd=alpha_fwd, alpha_bwd=alpha_bwd, guard=guard)
    for name, layer in convertible.items():
        if name == "":
            model = made[layer]
        else:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made[layer])
    if report is not None:
        report(_sentence("replaced", convertible))
        left = {name: layer for name, layer in wanted.items() if name not in convertible}
        if left:
            types = sorted({type(layer).__name__ for layer in left.values()})
            report(f"{_sentence('left', left)} (of type {', '.join(types)})")
    return model


def _replace(layer: _BatchNorm, kind: type[OnlineNorm], **settings: Any) -> OnlineNorm:
    like = layer.weight if layer.affine else layer.running_mean
    new = kind(
        layer.num_features,
        eps=layer.eps,
        affine=layer.affine,
        device=None if like is None else like.device,
        dtype=None if like is None else like.dtype,
        **settings,
    )
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    if layer.running_mean is not None and layer.running_var is not None:
        new.running_mean.copy_(layer.running_mean)
        new.running_var.copy_(layer.running_var)
        if layer.num_batches_tracked is not None:
            new.num_samples_tracked.copy_(layer.num_batches_tracked)
    if isinstance(new, TimmNormAct2d):
        new.drop, new.act = layer.get_submodule("drop"), layer.get_submodule("act")
    return new.train(layer.training)


def _sentence(verb: str, layers: Collection[str]) -> str:
    if not layers:
        return f"onlinenorm.torch.convert {verb} no layers"
    listed = ", ".join(name or "the model itself" for name in layers)
    return f"onlinenorm.torch.convert {verb} {len(layers)} layer{'s' * (len(layers) > 1)}: {listed}"
