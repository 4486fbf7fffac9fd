"""What each process of a torchrun does for test_distributed.py: all checks, one after the other.

    torchrun --standalone --nproc-per-node=2 distributed_checks.py FOLDER

A check that passes on process R leaves FOLDER/name.R; the first that fails ends the run.
"""

import copy
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import STATE, assert_same_state, state_of
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, keep_streams_apart, sync_every, sync_statistics

CHECKS = []


def check(function):
    CHECKS.append(function.__name__)
    return function


# ---- what the checks share


def rank():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def gathered(value):
    """Every process's value, in the order of the processes."""
    values = [None] * world()
    dist.all_gather_object(values, value)
    return values


def made_model(seed=0):
    """A small network. The layers' horizons are short, so that the streams matter within a few steps."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False),
        OnlineNorm2d(6, alpha_fwd=0.9, alpha_bwd=0.8),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, bias=False),
        OnlineNorm2d(5, alpha_fwd=0.9, alpha_bwd=0.8, guard="clamp", clamp_value=2.0),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4 * 4, 3),
    )


def batch(step, of=None, samples=3):
    """The inputs and targets of one process at one step: each process's differ in offset and spread."""
    of = rank() if of is None else of
    generator = torch.Generator().manual_seed(1000 * of + step)
    x = torch.randn(samples, 2, 8, 8, generator=generator) * (1 + of) + 2 * of
    return x, torch.randint(3, (samples,), generator=generator)


def loss_of(model, *data):
    return nn.functional.cross_entropy(model(data[0]), data[1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, steps, *, optimizer=None, first=0):
    optimizer = optimizer or sgd(model)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return model


def train_by_hand(model, steps, forwards=1):
    """What DistributedDataParallel has to equal: averaged gradients, and streams that nobody else touches."""
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, *batch(step * forwards + i)) for i in range(forwards)).backward()
        for parameter in model.parameters():
            parameter.grad /= world()
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return model


def plain(model):
    """The state dict of a model however it is wrapped, with whole tensors."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}


def assert_equal_models(left, right):
    """Bit for bit with two processes; more add up their gradients in an order that is not always the same."""
    left, right = plain(left), plain(right)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        if world() == 2:
            assert torch.equal(left[name], right[name]), f"{name}: {left[name]} and {right[name]}"
        else:
            torch.testing.assert_close(left[name].double(), right[name].double(), rtol=1e-4, atol=1e-5)


def layers_of(model):
    return [layer for layer in model.modules() if isinstance(layer, OnlineNorm)]


def states_of(model):
    return [{name: t for name, t in state_of(layer).items() if name in STATE} for layer in layers_of(model)]


def same_everywhere(model):
    """Whether the streams of a model are bit for bit the same on all processes."""
    first, *others = gathered([t for state in states_of(model) for t in state.values()])
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def assert_merged(before, after):
    """That `after` is the mixture of what the processes held before; `before` has a list of states for each process."""
    for index, state in enumerate(after):
        means = np.stack([states[index]["running_mean"].numpy() for states in before])
        variances = np.stack([states[index]["running_var"].numpy() for states in before])
        np.testing.assert_allclose(state["running_mean"], means.mean(0), rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(state["running_var"], variances.mean(0) + means.var(0), rtol=1e-12)
        for name in ("control_y", "control_1"):
            errors = np.stack([states[index][name].numpy() for states in before])
            np.testing.assert_allclose(state[name], errors.mean(0), rtol=1e-14, atol=1e-14)


# ---- sync_statistics


@check
def sync_merges_all_streams():
    model = train(made_model(), 4 + rank())
    assert not same_everywhere(model)
    before, weights = gathered(states_of(model)), copy.deepcopy(dict(model.named_parameters()))
    counts = [layer.num_samples_tracked.item() for layer in layers_of(model)]
    sync_statistics(model)
    assert same_everywhere(model)
    assert_merged(before, states_of(model))
    assert counts == [layer.num_samples_tracked.item() for layer in layers_of(model)] == [3 * (4 + rank())] * 2
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())


@check
def sync_of_equal_streams_keeps_every_bit():
    """The number of processes is a power of 2 here, so that the average of equal numbers is exact."""
    model = made_model()
    for step in range(5):
        loss_of(model, *batch(step, of=1)).backward()
    layers_of(model)[0].running_mean += 1e5  # a mean whose square swamps the variance
    before = states_of(model)
    sync_statistics(model)
    for old, new in zip(before, states_of(model), strict=True):
        assert_same_state(old, new)


@check
def sync_far_from_zero():
    """Means that are huge beside the spread lose no more than the rounding of float32 inputs would."""
    layer = OnlineNorm(1000)
    generator = torch.Generator().manual_seed(rank())
    layer.running_mean.copy_(1e4 + 1e-5 * torch.randn(1000, generator=generator, dtype=torch.float64))
    layer.running_var.copy_(torch.linspace(0, 1e-9, 1000))
    before = gathered(state_of(layer))
    sync_statistics(layer)
    means = np.stack([state["running_mean"].numpy() for state in before])
    exact = before[0]["running_var"].numpy() + means.var(0)
    assert np.abs(layer.running_var.numpy() - exact).max() <= 1e4**2 * 1e-15
    assert (layer.running_var >= before[0]["running_var"]).all()  # never less than the mean variance, so never negative


@check
def sync_takes_one_all_reduce_and_each_layer_once():
    shared = OnlineNorm1d(4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ModuleList([OnlineNorm1d(3), shared]))
    shared.running_mean += rank()
    sizes, real = [], dist.all_reduce

    def counted(tensor, *arguments, **options):
        sizes.append(tensor.numel())
        return real(tensor, *arguments, **options)

    dist.all_reduce = counted
    try:
        sync_statistics(model)
    finally:
        dist.all_reduce = real
    assert sizes == [2, 5 * (4 + 3)]  # the fingerprint of the layers, then all their statistics
    assert torch.equal(shared.running_mean, torch.full((4,), (world() - 1) / 2, dtype=torch.float64))


@check
def sync_of_different_models_is_refused_on_all_processes():
    with_one_more = nn.Sequential(OnlineNorm(4), OnlineNorm(3), *([OnlineNorm(3)] if rank() == 1 else []))
    other_sizes = nn.Sequential(OnlineNorm(4 + rank()), OnlineNorm(8))
    other_order = nn.Sequential(*[OnlineNorm(3), nn.ReLU(), OnlineNorm(3)][:: 1 if rank() else 2], OnlineNorm(3))
    for model in (with_one_more, other_sizes, other_order):
        model[0].running_mean += rank()
        before = states_of(model)
        with pytest.raises(RuntimeError, match=rf"different OnlineNorm layers.*process {rank()} has these.*: 0 \("):
            sync_statistics(model)
        for old, new in zip(before, states_of(model), strict=True):
            assert_same_state(old, new)
    sync_statistics(made_model())  # nothing is left behind that would disturb a good call


@check
def sync_in_a_group():
    groups = [list(range(0, world(), 2)), list(range(1, world(), 2))]
    handles = [dist.new_group(ranks) for ranks in groups]
    own = rank() % 2
    model = train(made_model(), 2)
    before = gathered(states_of(model))
    with pytest.raises(ValueError, match=f"process {rank()} is not in the group"):
        sync_statistics(model, handles[1 - own])
    with pytest.raises(ValueError, match=f"process {rank()} is not in the group"):
        sync_every(sgd(model), model, 1, handles[1 - own])
    sync_statistics(model, handles[own])
    assert_merged([before[i] for i in groups[own]], states_of(model))
    assert not same_everywhere(model)


@check
def sync_refuses_a_model_without_values():
    with torch.device("meta"):
        model = made_model()
    with pytest.raises(ValueError, match=r"the state of 1 is on the meta device: give it memory"):
        sync_statistics(model)
    with pytest.raises(ValueError, match="Linear has no OnlineNorm layers"):
        sync_statistics(nn.Linear(2, 2))


# ---- sync_every


@check
def sync_every_third_step():
    model = made_model()
    optimizer = sgd(model)
    handle = sync_every(optimizer, model, 3)
    synced = []
    for step in range(7):
        train(model, 1, optimizer=optimizer, first=step)
        synced.append(same_everywhere(model))
    assert synced == [False, False, True, False, False, True, False]
    handle.remove()
    train(model, 5, optimizer=optimizer)
    assert not same_everywhere(model)


@check
def sync_every_goes_on_counting_where_a_run_was_stopped():
    model = made_model()
    optimizer = sgd(model)
    sync_every(optimizer, model, 3, done=4)
    synced = []
    for step in range(4, 8):
        train(model, 1, optimizer=optimizer, first=step)
        synced.append(same_everywhere(model))
    assert synced == [False, True, False, False]


@check
def sync_every_counts_the_steps_that_a_scaler_takes():
    model = DistributedDataParallel(keep_streams_apart(made_model()))
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    sync_every(optimizer, model, 2)
    synced = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, *batch(step))).backward()
        if step == 1 and rank() == 1:  # an overflow on one process, which its gradients carry to the others
            model.module[-1].weight.grad.fill_(torch.inf)
        if step == 1:
            dist.all_reduce(model.module[-1].weight.grad)
        scaler.step(optimizer)
        scaler.update()
        synced.append(same_everywhere(model))
    assert synced == [False, False, True, False, True]  # steps 0, 2, 3, 4 were taken


# ---- DistributedDataParallel


@check
def ddp_by_default_starts_each_forward_from_the_streams_of_process_0():
    model = made_model(seed=rank())  # DistributedDataParallel makes them start alike
    model[1].running_mean += rank()
    model = DistributedDataParallel(model)
    optimizer = sgd(model)
    assert same_everywhere(model)
    for step in range(3):
        expected = copy.deepcopy(gathered(states_of(model))[0])  # of process 0
        alone = copy.deepcopy(model.module)
        for layer, state in zip(layers_of(alone), expected, strict=True):
            for name, value in state.items():
                getattr(layer, name).copy_(value)
        loss_of(alone, *batch(step)).backward()
        train(model, 1, optimizer=optimizer, first=step)
        for mine, wanted in zip(states_of(model), states_of(alone), strict=True):
            assert_same_state(wanted, mine)
        assert not same_everywhere(model)


@check
def ddp_with_streams_kept_apart_equals_averaging_by_hand():
    model = train(DistributedDataParallel(keep_streams_apart(made_model())), 6)
    by_hand = train_by_hand(made_model(), 6)
    assert_equal_models(model, by_hand)
    assert not same_everywhere(model)
    weights = gathered([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for other in weights for a, b in zip(weights[0], other, strict=True))


@check
def only_the_streams_are_kept_apart():
    """Buffers of others, a BatchNorm's among them, are broadcast as ever; so are the weights."""
    shared = OnlineNorm2d(2)
    model = nn.Sequential(shared, nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), shared, nn.Conv2d(2, 2, 1))
    model.register_buffer("left_alone", torch.tensor(float(rank())))
    model.register_buffer("broadcast", torch.tensor(float(rank())))
    model._ddp_params_and_buffers_to_ignore = ["left_alone"]  # what somebody else has asked for
    with torch.no_grad():
        model[1].weight.fill_(rank())
    shared.running_mean += rank()
    assert keep_streams_apart(model) is model
    model = DistributedDataParallel(model)
    assert shared.running_mean[0] == rank()
    model(torch.randn(2, 2, 3, 3) + 5 * rank()).sum().backward()
    model(torch.randn(2, 2, 3, 3) + 5 * rank()).sum().backward()
    values = gathered((model.module.left_alone.item(), model.module.broadcast.item(), model.module[1].weight.sum()))
    assert [left_alone for left_alone, _, _ in values] == list(range(world()))
    assert {broadcast for _, broadcast, _ in values} == {0.0}
    assert {weight.item() for _, _, weight in values} == {0.0}
    assert shared.num_samples_tracked == 8  # two places, two forwards, two samples
    with pytest.raises(TypeError, match="the model is wrapped already"):
        keep_streams_apart(model)
    with pytest.raises(ValueError, match="Linear has no OnlineNorm layers"):
        keep_streams_apart(nn.Linear(2, 2))


@check
def ddp_of_a_model_that_is_a_layer():
    layer = OnlineNorm(2)
    layer.running_mean += rank()
    model = DistributedDataParallel(keep_streams_apart(layer))
    model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    assert layer.running_mean[0] > 0.9 * rank()


@check
def ddp_options_change_nothing():
    by_hand = train_by_hand(made_model(), 5)
    for options in (
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"forward_sync_buffers": False},
    ):
        model = train(DistributedDataParallel(keep_streams_apart(made_model()), **options), 5)
        assert_equal_models(model, by_hand)


@check
def ddp_with_several_forwards_for_one_backward():
    by_hand = train_by_hand(made_model(), 3, forwards=2)
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}):
        model = DistributedDataParallel(keep_streams_apart(made_model()), **options)
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            (loss_of(model, *batch(2 * step)) + loss_of(model, *batch(2 * step + 1))).backward()
            optimizer.step()
        assert_equal_models(model, by_hand)


@check
def ddp_by_default_with_several_forwards_for_one_backward():
    """Streams are overwritten between the two forwards; the first backward replays from what its forward saw."""
    model = DistributedDataParallel(made_model())
    (loss_of(model, *batch(0)) + loss_of(model, *batch(1))).backward()
    by_hand = made_model()
    loss = loss_of(by_hand, *batch(0))
    for layer, state in zip(layers_of(by_hand), gathered(states_of(by_hand))[0], strict=True):
        for name, value in state.items():
            getattr(layer, name).copy_(value)
    (loss + loss_of(by_hand, *batch(1))).backward()
    for layer, state in zip(layers_of(by_hand), states_of(model), strict=True):
        assert_same_state(state_of(layer), {**state, "num_samples_tracked": layer.num_samples_tracked})
    for got, wanted in zip(model.parameters(), by_hand.parameters(), strict=True):
        dist.all_reduce(wanted.grad)
        torch.testing.assert_close(got.grad, wanted.grad / world(), rtol=1e-5, atol=1e-6)


@check
def ddp_no_sync():
    model = DistributedDataParallel(keep_streams_apart(made_model()))
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            with model.no_sync() if micro < 3 else nullcontext():
                loss_of(model, *batch(4 * step + micro)).backward()
        optimizer.step()
    accumulated = made_model()
    optimizer = sgd(accumulated)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            loss_of(accumulated, *batch(4 * step + micro)).backward()
        for parameter in accumulated.parameters():
            parameter.grad /= world()
            dist.all_reduce(parameter.grad)
        optimizer.step()
    model, accumulated = plain(model), plain(accumulated)
    for name, value in model.items():  # the reducer divides each gradient, by hand the sum was divided
        torch.testing.assert_close(value.double(), accumulated[name].double(), rtol=1e-4, atol=1e-5, msg=name)
    assert model["1.num_samples_tracked"] == 3 * 4 * 3


@check
def ddp_by_default_broadcasts_before_the_first_forward_only_under_no_sync():
    model = DistributedDataParallel(made_model())
    layer = model.module[1]
    for step in range(2):
        tracked = []
        for micro in range(3):
            layer.running_mean += 100 * rank()  # a mark that a broadcast wipes out
            with model.no_sync() if micro < 2 else nullcontext():
                loss_of(model, *batch(3 * step + micro)).backward()
            tracked.append(layer.running_mean.mean().item() > 50)
        assert tracked == [False] + [rank() > 0] * 2, (step, tracked)


@check
def ddp_by_default_overwrites_streams_in_eval_too():
    model = train(DistributedDataParallel(made_model()), 2)
    of_process_0 = gathered(states_of(model))[0]
    model.eval()
    with torch.no_grad():
        model(batch(9)[0])
    for wanted, got in zip(of_process_0, states_of(model), strict=True):
        assert_same_state(wanted, got)


@check
def evaluation_under_ddp_moves_nothing_that_is_kept_apart():
    model = train(DistributedDataParallel(keep_streams_apart(made_model())), 3)
    before = states_of(model)
    model.eval()
    with torch.no_grad():
        model(batch(9)[0])
    for old, new in zip(before, states_of(model), strict=True):
        assert_same_state(old, new)


# ---- fully_shard


def sharded(seed=0, **options):
    model = made_model(seed)
    for part in (model[0], model[1], model[3], model[4], model[7]):
        fully_shard(part, **options)
    return fully_shard(model, **options)


@check
def sharded_training_equals_ddp():
    with_ddp = train(DistributedDataParallel(keep_streams_apart(made_model())), 6)
    for options in ({"reshard_after_forward": True}, {"reshard_after_forward": False}):
        model = train(sharded(**options), 6)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert not any(isinstance(b, DTensor) for b in model.buffers())
        assert_equal_models(model, with_ddp)
    assert_equal_models(train(fully_shard(made_model()), 6), with_ddp)  # one group for the whole model


@check
def sharded_training_in_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = train(sharded(mp_policy=policy), 5)
    assert all(layer.running_mean.dtype == torch.float64 for layer in layers_of(model))
    master = made_model()
    streams = {name: t for name, t in master.named_buffers()}
    optimizer = sgd(master)
    for step in range(5):
        low = copy.deepcopy(master).bfloat16()
        for name, stream in low.named_buffers():
            stream.copy_(streams[name])
        x, target = batch(step)
        nn.functional.cross_entropy(low(x.bfloat16()), target).backward()
        for name, stream in low.named_buffers():
            streams[name].copy_(stream)
        for parameter, rounded in zip(master.parameters(), low.parameters(), strict=True):
            parameter.grad = rounded.grad.float() / world()
            dist.all_reduce(parameter.grad)
        optimizer.step()
    assert_equal_models(model, master)


@check
def sharded_state_dict_round_trip():
    model = sharded()
    optimizer = sgd(model)
    train(model, 4, optimizer=optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    own = copy.deepcopy(dict(model.named_buffers()))
    if rank() == 0:  # a plain model takes it
        whole = made_model(seed=1)
        whole.load_state_dict(weights)
        for left, right in zip(states_of(whole), states_of(model), strict=True):
            assert_same_state(left, right)
    loaded = sharded(seed=2)
    new_optimizer = sgd(loaded)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded, weights, options=options)
    set_optimizer_state_dict(loaded, new_optimizer, moments, options=options)
    assert same_everywhere(loaded)  # a full state dict holds the streams of process 0
    of_process_0 = gathered(states_of(model))[0]
    for left, right in zip(of_process_0, states_of(loaded), strict=True):
        assert_same_state(left, right)
    assert all(layer.running_mean.dtype == torch.float64 for layer in layers_of(loaded))
    loaded.load_state_dict(own, strict=False)  # its own streams, which each process has saved for itself
    train(model, 3, optimizer=optimizer, first=4)
    train(loaded, 3, optimizer=new_optimizer, first=4)
    left, right = plain(model), plain(loaded)
    for name in left:
        assert torch.equal(left[name], right[name]), name


@check
def sharded_checkpoint_with_the_streams_of_every_process():
    """Of what is whole on each process, as buffers are, a distributed checkpoint holds one process's only."""

    def contents(model, optimizer):
        streams = {name: t.clone() for name, t in model.named_buffers()}
        weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, f"streams of {rank()}": streams}

    folder = Path(sys.argv[1], "checkpoint")
    model, loaded = sharded(), sharded(seed=1)
    optimizer, new_optimizer = sgd(model), sgd(loaded)
    train(model, 3, optimizer=optimizer)
    checkpoint.save(contents(model, optimizer), checkpoint_id=folder)
    read = contents(loaded, new_optimizer)
    checkpoint.load(read, checkpoint_id=folder)
    set_model_state_dict(loaded, read["model"])
    set_optimizer_state_dict(loaded, new_optimizer, read["optimizer"])
    assert same_everywhere(loaded)
    loaded.load_state_dict(read[f"streams of {rank()}"], strict=False)
    train(model, 3, optimizer=optimizer, first=3)
    train(loaded, 3, optimizer=new_optimizer, first=3)
    left, right = plain(model), plain(loaded)
    for name in left:
        assert torch.equal(left[name], right[name]), name


@check
def sharded_models_sync():
    model = sharded()
    optimizer = sgd(model)
    train(model, 3, optimizer=optimizer)
    before = gathered(states_of(model))
    sync_statistics(model)
    assert same_everywhere(model)
    assert_merged(before, states_of(model))
    sync_every(optimizer, model, 2)
    train(model, 1, optimizer=optimizer)
    assert not same_everywhere(model)
    train(model, 1, optimizer=optimizer)
    assert same_everywhere(model)


@check
def sharded_from_the_meta_device():
    with torch.device("meta"):
        model = made_model()
    fully_shard(model)
    with pytest.raises(ValueError, match=r"the state of 1 is on the meta device"):
        sync_statistics(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    layer = layers_of(model)[0]
    assert layer.running_mean.dtype == torch.float64
    assert torch.equal(layer.running_var, torch.ones(6, dtype=torch.float64))
    train(model, 2)
    sync_statistics(model)
    assert same_everywhere(model)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in CHECKS:
        globals()[name]()
        dist.barrier()
        Path(folder, f"{name}.{rank()}").touch()
    dist.destroy_process_group()
    time.sleep(1)  # see LINGER in test_distributed.py


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # no wait for gloo's threads
