"""Activation checkpointing: a call that is repeated starts from the state that the first one found, and moves nothing.

`torch.utils.checkpoint` drops what a function computed and, when the backward needs it, calls the function again. By
then the statistics have moved on. So every call inside such a region is noted there with the state that it found, and
the k-th call of a repetition starts from a copy of what the k-th call noted.

No public interface of PyTorch tells a layer that it is called again, nor which of its calls that repeats. The Python
stack does: torch.utils.checkpoint's own frames hold one object per region, in the first run and in each repetition. A
release of PyTorch that renames them can't make a repetition pass unnoticed: it runs inside a backward, and there a
training call that is no known repetition is refused.
"""

import sys
from collections import defaultdict
from collections.abc import Hashable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction


class Start(NamedTuple):
    """From where a call starts: its mode, and the state that its forward reads and moves."""

    training: bool
    running_mean: Tensor
    running_var: Tensor
    num_samples_tracked: Tensor | None

    def copy(self) -> "Start":
        """Make one whose state can be moved without moving this one's."""
        mean, var, count = self[1:]
        return Start(self.training, mean.clone(), var.clone(), None if count is None else count.clone())


class _Calls:
    """The calls inside one region, in order: whose state each worked on, and from where it started."""

    def __init__(self) -> None:
        self.noted: list[tuple[Tensor, Start]] = []
        self.repeated: defaultdict[Hashable, int] = defaultdict(int)

    @classmethod
    def inside(cls, region: Any) -> "_Calls":
        """Those of a region. They go when the region goes, which is when its graph goes."""
        calls: _Calls | None = getattr(region, "_onlinenorm_calls", None)
        if calls is None:
            calls = region._onlinenorm_calls = cls()
        return calls

    def next_repeated(self, repetition: Hashable, running_mean: Tensor) -> tuple[Tensor, Start]:
        k = self.repeated[repetition]
        if k >= len(self.noted):
            raise RuntimeError(
                f"a checkpointed function made {len(self.noted)} calls of Online Normalization in the forward, and now "
                "makes one more: what torch.utils.checkpoint repeats must make the same calls in the same order, and "
                "must be called through torch.utils.checkpoint.checkpoint itself"
            )
        if self.noted[k][0] is not running_mean:
            raise RuntimeError(
                f"call {k + 1} of Online Normalization inside a checkpointed function works on other statistics than "
                "in the forward: what torch.utils.checkpoint repeats must make the same calls in the same order, and "
                "the layers must not be moved, copied or made anew in between"
            )
        self.repeated[repetition] = k + 1
        return self.noted[k]


def may_be_near() -> bool:
    """Whether a call can be inside a region at all: a quick answer for all the calls that are not."""
    return (
        not torch.is_grad_enabled()  # a reentrant region's first run
        or torch._C._current_graph_task_id() != -1  # inside a backward
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # any other region
    )


def repeated_start(now: Start) -> Start | None:
    """From where a call has to start that repeats another: a copy of that one's start. None if it repeats none.

    Notes the call on every region that it is inside of.

    Args:
        now: from where the call would start as things are.
    """
    entered, repeated = _regions_around(sys._getframe(1))
    if repeated is not None:
        region, repetition = repeated
        call = _Calls.inside(region).next_repeated(repetition, now.running_mean)
    elif now.training and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "Online Normalization was called in training mode inside a backward pass, and torch.utils.checkpoint is "
            "not what called it. If this repeats an earlier call, its samples would enter the statistics twice: use "
            "torch.utils.checkpoint. If it is a call of its own, make it after the backward, or in eval mode."
        )
    elif entered:
        call = now.running_mean, now.copy()
    for region in entered:
        _Calls.inside(region).noted.append(call)
    return None if repeated is None else call[1].copy()


# torch.utils.checkpoint's own frames, by file and name. What they hold is one object per region, `ctx` or a "frame" of
# its own kind, in the first run and in every repetition.
_FILE = CheckpointFunction.forward.__code__.co_filename


def _regions_around(frame: FrameType | None) -> tuple[list[Any], tuple[Any, Hashable] | None]:
    """The regions around a frame that run for the first time, up to the nearest one that is repeated, and that one.

    The one that is repeated comes with what tells this repetition from the region's others.
    """
    entered = []
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            name, found = frame.f_code.co_name, frame.f_locals
            if name == "forward" and "ctx" in found:  # use_reentrant=True
                entered.append(found["ctx"])
            elif name == "backward" and "ctx" in found and "outputs" not in found:  # else the repetition is over
                return entered, (found["ctx"], torch._C._current_graph_task_id())
            elif name == "checkpoint" and "gen" in found:  # use_reentrant=False
                entered.append(found["gen"].gi_frame.f_locals["new_frame"])
            elif name == "unpack_hook" and "frame" in found:
                return entered, (found["frame"], found["gid"])
        frame = frame.f_back
    return entered, None
