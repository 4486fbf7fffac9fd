"""Who is measured on one layer's activations: OnlineNorm, PyTorch's normalisers, and the floor."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch
from torch import Tensor, nn

from onlinenorm import _native
from onlinenorm.bench.cases import LayerCase, Mode
from onlinenorm.bench.measure import Contestant, Samples, Times
from onlinenorm.torch import OnlineNorm1d, OnlineNorm2d, OnlineNorm3d
from onlinenorm.torch.functional import backend

PEERS = ("online", "batch", "group", "instance", "layer", "portable", "floor")
SELDOM = {"instance": 3, "layer": 3, "portable": 3}  # slow, or beside the point: one round in three

_ONLINE = {2: OnlineNorm1d, 3: OnlineNorm1d, 4: OnlineNorm2d, 5: OnlineNorm3d}
_BATCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


def make_norm(name: str, channels: int, dims: int) -> nn.Module | None:
    """The normaliser `name` for activations of so many dimensions, N and C included; None where there is none."""
    if name == "group":
        groups = 32 if channels >= 64 and channels % 32 == 0 else 8
        return nn.GroupNorm(groups, channels) if channels % groups == 0 else None
    if name == "instance":
        return _INSTANCE[dims](channels, affine=True) if dims in _INSTANCE else None
    return _BATCH[dims](channels) if name == "batch" else _ONLINE[dims](channels)


def layout(mode: Mode, dims: int) -> torch.memory_format:
    """The mode's memory layout for tensors of so many dimensions."""
    if not mode.channels_last:
        return torch.contiguous_format
    return torch.channels_last if dims == 4 else torch.channels_last_3d


class Normaliser:
    """Forward and backward of one normaliser: y = module(x), y.backward(grad)."""

    def __init__(
        self, name: str, module: nn.Module, x: Tensor, grad: Tensor,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self.name = name
        self.every = SELDOM.get(name, 1)
        self.module = module
        self.x = x
        self.grad = grad
        self.context = context

    def run(self, passes: int) -> Times:
        """Time so many passes; gradients are dropped between them, outside the clock."""
        module, x, grad = self.module, self.x, self.grad
        forward = backward = 0.0
        with self.context():
            for _ in range(passes):
                start = perf_counter()
                y = module(x)
                middle = perf_counter()
                y.backward(grad)
                end = perf_counter()
                forward += middle - start
                backward += end - middle
                del y
                self.clear()
        return Times(forward / passes, backward / passes)

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None


class Floor:
    """The least any normaliser could take: read x and write y; read x and y's gradient and write x's.

    Both without (`streaming=False`) and with stores that bypass the cache; `best_floor` takes the better of the two.
    """

    every = 1

    def __init__(self, streaming: bool, x: Tensor, grad: Tensor, threads: int) -> None:
        self.name = "floor, streaming" if streaming else "floor, plain"
        self.streaming = streaming
        self.x = x
        self.grad = grad
        self.out = torch.empty_like(grad)
        self.threads = threads

    def run(self, passes: int) -> Times:
        """Time so many forward loops, then so many backward loops."""
        x, grad, out = self.x.data_ptr(), self.grad.data_ptr(), self.out.data_ptr()
        size = self.out.numel() * self.out.element_size()
        start = perf_counter()
        for _ in range(passes):
            _native.floor_forward(x, out, size, self.threads, self.streaming)
        middle = perf_counter()
        for _ in range(passes):
            _native.floor_backward(x, grad, out, size, self.threads, self.streaming)
        end = perf_counter()
        return Times((middle - start) / passes, (end - middle) / passes)


def contestants(case: LayerCase, names: list[str], threads: int) -> list[Contestant]:
    """Those of the named peers that can normalise this shape, on the same input and output gradient."""
    dims, channels = len(case.shape), case.shape[1]
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        values = torch.randn(case.shape, generator=generator)
        return values.to(getattr(torch, case.mode.dtype), memory_format=layout(case.mode, dims))

    x, grad = normal().requires_grad_(), normal()
    found: list[Contestant] = []
    for name in names:
        if name == "floor":
            found += [Floor(False, x, grad, threads), Floor(True, x, grad, threads)]
        elif name == "layer":
            found.append(Normaliser(name, nn.LayerNorm(case.shape[1:]), x, grad))
        elif name == "portable":
            found.append(Normaliser(name, _ONLINE[dims](channels), x, grad, lambda: backend("portable")))
        elif name == "batch" and math.prod(case.shape) == channels:
            continue  # BatchNorm refuses one value per channel
        elif module := make_norm(name, channels, dims):
            found.append(Normaliser(name, module, x, grad))
    return found


def best_floor(samples: dict[str, Samples]) -> dict[str, Samples]:
    """Join the two floors into one: for each direction, the kind of stores with the lower median."""
    floors = [samples[name] for name in samples if name.startswith("floor")]
    if not floors:
        return samples
    best = {}
    for phase in ("forward", "backward"):
        best[phase] = min(([getattr(t, phase) for t in floor.times if t] for floor in floors), key=_median)
    joined = Samples([Times(*pair) for pair in zip(best["forward"], best["backward"], strict=True)])
    return {name: s for name, s in samples.items() if not name.startswith("floor")} | {"floor": joined}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
