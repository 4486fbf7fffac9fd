"""Several processes, each with streams of its own: merge them, and keep DistributedDataParallel from mixing them."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from onlinenorm.torch.layers import STATE, OnlineNorm, online_norm_layers


def sync_statistics(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Merge the streams of all processes, so that every OnlineNorm layer has the same state on all of them.

    Each process weighs the same. Means and control errors are averaged; the variance is that of the mixture: the mean
    of the variances plus the variance of the means. Afterwards all processes hold bit for bit the same state, except
    `num_samples_tracked`, which stays each process's own count. The statistics of all layers, frozen ones included,
    travel in one all-reduce.

    Every process of the group has to call it, at the same point of its work.

    Args:
        model: plain, in DistributedDataParallel, or sharded by `fully_shard`.
        group: whose processes take part; None for all.
    """
    world_size = _world_size(group)
    layers = online_norm_layers(model)
    device = _device_of_state(layers)
    _check_same_everywhere(layers, device, group)

    mean, var, control_y, control_1 = (_joined(layers, name, device) for name in STATE)
    sums = torch.stack((mean, mean.square(), var, control_y, control_1))
    dist.all_reduce(sums, group=group)
    mean, square, var, control_y, control_1 = sums / world_size
    # The difference of squares is off by some 1e-15 of mean^2, which the rounding of float32 inputs adds to their
    # variance anyway. The clamp keeps the merged variance from falling below the mean one, so it is never negative.
    var = var + (square - mean.square()).clamp(min=0)
    sizes = [layer.num_features for layer in layers]
    for name, merged in zip(STATE, (mean, var, control_y, control_1), strict=True):
        for layer, part in zip(layers, merged.split(sizes), strict=True):
            layer.get_buffer(name).copy_(part)


def sync_every(
    optimizer: Optimizer,
    model: nn.Module,
    steps: int,
    group: dist.ProcessGroup | None = None,
    *,
    done: int = 0,
) -> RemovableHandle:
    """Call `sync_statistics(model, group)` after every so many steps of the optimiser.

    What counts is `optimizer.step()`: a step that a GradScaler skips does not, if it does not call the optimiser.
    All processes have to take the same steps, as they do where their gradients are averaged.

    Args:
        optimizer: whose steps are counted.
        model, group: as in `sync_statistics`.
        steps: from one merging to the next.
        done: steps that were taken before this call. A run that is resumed says how many, and goes on to merge after
            the same steps as if it had not been interrupted.

    Returns:
        A handle; its `remove()` ends it.
    """
    for name, value, least in (("steps", steps, 1), ("done", done, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    _world_size(group)
    online_norm_layers(model)

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done % steps == 0:
            sync_statistics(model, group)

    return optimizer.register_step_post_hook(count)


def keep_streams_apart(model: nn.Module) -> nn.Module:
    """Let each process have its own streams under DistributedDataParallel: `DDP(keep_streams_apart(model))`.

    DistributedDataParallel overwrites all buffers with those of process 0: once when it wraps the model, and again
    before a forward. After this it leaves the state of the OnlineNorm layers alone, and treats parameters and other
    buffers as before.

    A state that is to be the same everywhere at the start has to be loaded on every process, not only on process 0.

    Args:
        model: the very module that will be wrapped, with its OnlineNorm layers in place.

    Returns:
        The model.
    """
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "the model is wrapped already, and DistributedDataParallel has read what to leave alone: "
            "call DistributedDataParallel(keep_streams_apart(model)) instead"
        )
    streams = {
        f"{prefix}.{name}".lstrip(".")
        for layer in online_norm_layers(model)
        for prefix, module in model.named_modules(remove_duplicate=False)
        if module is layer
        for name, _ in layer.named_buffers()
    }
    ignored = streams.union(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return model


def _world_size(group: dist.ProcessGroup | None) -> int:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group to merge statistics in: call torch.distributed.init_process_group() before, "
            "in a program started by torchrun"
        )
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(f"process {dist.get_rank()} is not in the group that it was given")
    return size


def _device_of_state(layers: dict[OnlineNorm, str]) -> torch.device:
    for layer, name in layers.items():
        if any(buffer.is_meta for buffer in layer.buffers()):
            raise ValueError(
                f"the state of {name or 'the model'} is on the meta device: give it memory by "
                "model.to_empty(device=...), then values by reset_parameters() or load_state_dict()"
            )
    return next(iter(layers)).running_mean.device


def _check_same_everywhere(
    layers: dict[OnlineNorm, str], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Compare a fingerprint first: an all-reduce of different sizes would hang, crash or mix up channels."""
    described = ", ".join(f"{name or 'the model'} ({layer.num_features})" for layer, name in layers.items())
    digest = hashlib.blake2b(described.encode(), digest_size=7).digest()
    fingerprint = int.from_bytes(digest, "big")  # fits in an int64 with either sign
    largest = torch.tensor([fingerprint, -fingerprint], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    if largest[0] != -largest[1]:  # the largest and the smallest of all processes
        raise RuntimeError(
            "the processes have different OnlineNorm layers, so their statistics can't be merged; process "
            f"{dist.get_rank()} has these (and their channels): {described}"
        )


def _joined(layers: dict[OnlineNorm, str], name: str, device: torch.device) -> Tensor:
    return torch.cat([layer.get_buffer(name).to(device, torch.float64) for layer in layers])
