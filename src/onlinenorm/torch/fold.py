"""Merge layers into the convolution or linear layer before them, for inference."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch._C import _is_tracing  # by torch.jit.trace
from torch.compiler import is_compiling
from torch.nn.modules.conv import _ConvNd

from onlinenorm.torch.compiled import guarded
from onlinenorm.torch.functional import normalise
from onlinenorm.torch.layers import (
    OnlineNorm,
    OnlineNorm1d,
    OnlineNorm2d,
    OnlineNorm3d,
    OnlineNormAct,
    OnlineNormAct1d,
    OnlineNormAct2d,
    OnlineNormAct3d,
)
from onlinenorm.torch.portable import accumulate_in, activated

_FOLDABLE = (
    OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d,
    OnlineNormAct, OnlineNormAct1d, OnlineNormAct2d, OnlineNormAct3d,
)  # fmt: skip
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_DIMS: dict[type[nn.Module], int] = {  # dimensions of what each puts out, N and C included
    nn.Linear: 2,
    nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5,
    nn.ConvTranspose1d: 3, nn.ConvTranspose2d: 4, nn.ConvTranspose3d: 5,
}  # fmt: skip


def fold(model: nn.Module, *, report: Callable[[str], None] | None = print) -> nn.Module:
    """Merge Online Normalization into the convolutions and linear layers before it, for inference.

    Statistics, weight and bias of a layer go into the convolution (also a transposed one) or linear layer that it
    follows. What stays is the guard: nothing for None, a clip for "clamp", and for "layer_scaling" the division by the
    root mean square of each sample. The result is that of eval mode up to rounding.

    A layer is left as it is where something stands between the two, or where the convolution is used elsewhere too.
    What follows what is found by `torch.fx`, in a call with positional arguments only.

    Args:
        model: in eval mode; it stays as it is.
        report: called with one line that says which layers were folded, and one for each that was left. None for
            silence.

    Returns:
        A copy of the model with fewer operations, in eval mode. It is for inference: `train()` would not train the
        folded layers.
    """
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode: call model.eval() before folding")
    model = copy.deepcopy(model)
    names = {name: layer for name, layer in model.named_modules() if isinstance(layer, OnlineNorm)}
    graph = fx.Graph() if set(names) <= {""} else _trace(model)
    folded, left = [], {}
    for name, layer in names.items():
        before = _what_it_follows(layer, name, model, graph)
        if isinstance(before, str):
            left[name] = before
            continue
        _absorb(before, layer)
        guard = _Guard(layer, _DIMS[type(before)]).eval()
        for parent in model.modules():  # wherever the layer is registered
            parent._modules.update({child: guard for child, module in parent._modules.items() if module is layer})
        folded.append(name)
    if report is not None:
        what = f"{len(folded)} layer{'s' * (len(folded) > 1)}: {', '.join(folded)}" if folded else "no layers"
        report(f"onlinenorm.torch.fold folded {what}")
        for name, why in left.items():
            report(f"onlinenorm.torch.fold left {name or 'the model itself'}: {why}")
    return model


class _Guard(nn.Module):
    """What stays of a folded layer."""

    def __init__(self, layer: OnlineNorm, dims: int) -> None:
        super().__init__()
        self.dims = dims
        self.guard = layer.guard
        self.guard_eps = layer.guard_eps
        self.clamp_value = layer.clamp_value
        self.act = layer._act
        # Mean 0 and variance 1, for the engine; no buffers, as they are neither saved nor moved nor cast.
        self._neutral = torch.zeros(layer.num_features).double(), torch.ones(layer.num_features).double()

    def forward(self, u: Tensor) -> Tensor:
        """Apply the guard, and the activation, to the output of the convolution or linear layer."""
        if u.dim() != self.dims:
            raise ValueError(f"this layer was folded for {self.dims}D input (got {u.dim()}D input)")
        if self.guard is None and self.act is None:
            return u
        if self.guard == "layer_scaling" and u.is_cpu and not is_compiling() and not _is_tracing():
            mean, var = self._neutral
            values = 0.0, 0.0, 0.0, self.guard, self.guard_eps, self.clamp_value, False, False, self.act
            return normalise(values, False, u, mean, var, mean, mean, None, None, None)  # faster than plain operations
        z = guarded(u.to(accumulate_in(u)), self.guard, self.guard_eps, self.clamp_value)
        return activated(z, self.act).to(u.dtype)

    def extra_repr(self) -> str:
        """Say which guard it is."""
        guard = f"{self.guard!r}" + (f", clamp_value={self.clamp_value}" if self.guard == "clamp" else "")
        return guard + (f", act={self.act!r}" if self.act else "")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, OnlineNorm) or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.Graph:
    parameters = inspect.signature(model.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        return _Tracer().trace(model, concrete_args=defaults)
    except Exception as error:
        raise ValueError(
            f"fold can't see which layer follows which in this {type(model).__name__}, as torch.fx can't trace it: "
            f"{error}. Fold the parts that can be traced, as in model.backbone = fold(model.backbone)."
        ) from error


def _what_it_follows(layer: OnlineNorm, name: str, model: nn.Module, graph: fx.Graph) -> "nn.Linear | _ConvNd | str":
    """The convolution or linear layer that a layer can be merged into, or why there is none."""
    if not name:
        return "nothing is before it"
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    if type(layer) not in _FOLDABLE:
        return f"it is of type {type(layer).__name__}"
    if calls[name] != 1:
        return f"it is called {calls[name]} times"
    (node,) = (node for node in graph.nodes if node.op == "call_module" and node.target == name)
    before = (*node.args, *node.kwargs.values())[0]
    if not isinstance(before, fx.Node) or before.op == "placeholder":
        return "it follows an input of the model"
    if before.op != "call_module":
        return f"it follows {before.name}, an operation"
    module = model.get_submodule(str(before.target))
    if not isinstance(module, nn.Linear | _ConvNd) or type(module) not in _DIMS:
        return f"it follows {before.target}, of type {type(module).__name__}"
    if calls[before.target] != 1:
        return f"{before.target} before it is called {calls[before.target]} times"
    if len(before.users) != 1:
        return f"the output of {before.target} before it is used elsewhere too"
    read = {str(n.target).rpartition(".")[0] for n in graph.nodes if n.op == "get_attr"}
    for at, of in ((str(before.target), module), (name, layer)):
        if at in read:
            return f"the model reads the parameters of {at}"
        if of._forward_hooks or of._forward_pre_hooks or of._backward_hooks or of._backward_pre_hooks:
            return f"{at} has hooks"
    channels = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    if channels != layer.num_features:
        return f"{before.target} puts out {channels} channels, and it normalises {layer.num_features}"
    return module


@torch.no_grad()
def _absorb(module: nn.Linear | _ConvNd, layer: OnlineNorm) -> None:
    """Let the convolution or linear layer put out what the layer would make of its output, but for the guard."""
    mean, var = layer.running_mean.double(), layer.running_var.double()
    scale = (var + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight
    shift = -mean if module.bias is None else module.bias - mean
    bias = shift * scale if layer.bias is None else shift * scale + layer.bias
    weight = module.weight.double()
    if isinstance(module, _TRANSPOSED):  # (in, out / groups, ...), the groups along `in`
        grouped = weight.unflatten(0, (module.groups, -1))  # type: ignore[no-untyped-call]
        by_group = scale.view(module.groups, 1, -1, *[1] * (weight.dim() - 2))
        weight = (grouped * by_group).flatten(0, 1)
    else:
        weight = weight * scale.view(-1, *[1] * (weight.dim() - 1))
    old = module.weight
    module.weight = nn.Parameter(weight.to(old.dtype), old.requires_grad)
    module.bias = nn.Parameter(bias.to(old.dtype), old.requires_grad)
