"""Memory of a training step, counted tensor by tensor: what the backward keeps, and the most that is alive at once.

Both count on real tensors and on the meta device alike, where tensors have shapes but no memory: a step that no
machine here could take can still be counted.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def count_saved(module: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] | None = None) -> tuple[int, int]:
    """Bytes that one forward saves for its backward: all, and those beside the module's parameters and buffers.

    Each storage counts once, however many tensors share it.

    Args:
        module: called once; in training its running statistics move.
        x: its input.
        loss: of its output, if it is part of what is counted.
    """
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
        if loss is not None:
            loss(output)
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    return (
        sum(storage.nbytes() for storage in storages.values()),
        sum(storage.nbytes() for address, storage in storages.items() if address not in own),
    )


class Alive:
    """Bytes of the tensors that were made inside `count_alive` and are still there, and the most that ever were."""

    def __init__(self) -> None:
        self.now = self.peak = 0


@contextmanager
def count_alive() -> Iterator[Alive]:
    """Count every tensor that PyTorch's operators return meanwhile, until the last reference to its memory goes.

    Tensors made before do not count. Scratch memory within an operator, such as a convolution's, is not seen.
    """
    alive = Alive()
    with _Watch(alive):
        yield alive


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, alive: Alive) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive = alive
        self._made: set[int] = set()
        self._given: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:
                self._given[storage._cdata] = storage
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._given:
                self._made.add(storage._cdata)
                self._alive.now += storage.nbytes()
                weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        self._alive.peak = max(self._alive.peak, self._alive.now)
        return result

    def _release(self, address: int, size: int) -> None:
        self._made.discard(address)
        self._alive.now -= size


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))
