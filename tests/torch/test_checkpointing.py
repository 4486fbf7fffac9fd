"""Activation checkpointing changes nothing: losses and state are bit for bit those of the run without."""

import copy
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from helpers import assert_same_state, state_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, checkpointing, functional

WIDTH = 6
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of a region in a region
MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def plain(function, *args):
    return function(*args)


def region(reentrant):
    return partial(checkpoint, use_reentrant=reentrant)


def layers(model):
    return [module for module in model.modules() if isinstance(module, OnlineNorm)]


def states(model):
    return [state_of(layer) for layer in layers(model)]


def assert_same_run(left, right):
    assert left[0] == right[0], "the losses differ"
    assert len(left[1]) == len(right[1]) > 0
    for a, b in zip(left[1], right[1], strict=True):
        assert_same_state(a, b)


def assert_same_gradients(left, right):
    for a, b in zip(left[2], right[2], strict=True):
        assert torch.equal(a, b), f"a gradient differs by {(a - b).abs().max()}"


def assert_close_gradients(left, right):
    """For a parameter in several reentrant regions: PyTorch adds its gradients up in another order than without."""
    for a, b in zip(left[2], right[2], strict=True):
        torch.testing.assert_close(a, b)


def mlp():
    return nn.Sequential(
        *[m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), OnlineNorm1d(WIDTH, 1e-5, 0.9, 0.8), nn.Tanh())]
    )


def train(model, forward, steps=3, shape=(4, WIDTH), lr=0.05):
    """A few steps of SGD on fixed data; the losses, the state and the last gradients."""
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for _ in range(steps):
        x = torch.randn(shape).requires_grad_()
        optimiser.zero_grad()
        loss = (forward(model, x) - 0.5).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(layer.num_samples_tracked > 0 for layer in layers(model))
    assert all(layer.control_y.count_nonzero() > 0 for layer in layers(model))
    return losses, states(model), [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp()


# ---- one region, several, one in another


@MODES
@pytest.mark.parametrize("backend", ["native", "portable"])
def test_one_region(model, reentrant, backend):
    with functional.backend(backend):
        expected = train(model, lambda m, x: m(x))
        got = train(model, lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    assert_same_run(got, expected)
    assert_same_gradients(got, expected)


@MODES
def test_a_statistics_update_too_many_would_show(model, reentrant, monkeypatch):
    expected = train(model, lambda m, x: m(x))
    monkeypatch.setattr(checkpointing, "may_be_near", lambda: False)
    losses, final, _ = train(model, lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    assert losses != expected[0]
    assert final[0]["num_samples_tracked"] == 2 * expected[1][0]["num_samples_tracked"]


@MODES
@pytest.mark.parametrize("segments", [1, 2, 3, 9])
def test_checkpoint_sequential(model, reentrant, segments):
    expected = train(model, lambda m, x: m(x))
    got = train(model, lambda m, x: checkpoint_sequential(m, segments, x, use_reentrant=reentrant))
    assert_same_run(got, expected)
    assert_same_gradients(got, expected)


@pytest.mark.parametrize("impl", list(CheckpointImpl), ids=lambda impl: impl.name)
def test_checkpoint_wrapper(model, impl):
    def wrapped(m, x):
        for i in (1, 4):
            if isinstance(m[i], OnlineNorm):
                m[i] = checkpoint_wrapper(m[i], checkpoint_impl=impl)
        return m(x)

    got, expected = train(model, wrapped), train(model, lambda m, x: m(x))
    assert_same_run(got, expected)
    assert_same_gradients(got, expected)


REGIONS = {"plain": plain, "non-reentrant": region(False), "reentrant": region(True)}


def nested(m, x, outside, between, inside):
    def innermost(x):
        return m[4](m[3](m[1](x)))  # layers that are also called outside of this region

    def middle(x):
        return m[7](inside(innermost, m[1](m[0](x))))

    def outermost(x):
        x = between(middle, m[1](x))
        return between(m[4], x) + between(m[4], x)  # equal inputs, but not equal calls

    return outside(outermost, m[2](x))


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("inside", REGIONS)
@pytest.mark.parametrize("between", REGIONS)
@pytest.mark.parametrize("outside", REGIONS)
def test_regions_in_regions(model, outside, between, inside, early_stop):
    names = outside, between, inside
    lr = 0.0 if "reentrant" in names else 0.05
    with set_checkpoint_early_stop(early_stop):
        got = train(model, lambda m, x: nested(m, x, *(REGIONS[name] for name in names)), lr=lr)
    expected = train(model, lambda m, x: nested(m, x, plain, plain, plain), lr=lr)
    assert_same_run(got, expected)
    (assert_same_gradients if lr else assert_close_gradients)(got, expected)


# ---- a cell that is called again and again


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(2 * WIDTH, WIDTH), OnlineNorm1d(WIDTH, 1e-5, 0.9, 0.8)

    def forward(self, x, h):
        return torch.tanh(self.norm(self.linear(torch.cat((x, h), 1))))


@MODES
@pytest.mark.parametrize("steps_per_region", [1, 3])
def test_recurrent_cell(reentrant, steps_per_region):
    torch.manual_seed(0)
    cell, time = Cell(), 6

    def unrolled(m, x, run):
        def several(x, h):
            for _ in range(steps_per_region):
                h = m(x, h)
            return h

        h = x
        for _ in range(time // steps_per_region):
            h = run(several, x * 0, h)  # the inputs of all steps are the same
        return h

    lr = 0.0 if reentrant else 0.05
    got = train(cell, lambda m, x: unrolled(m, x, region(reentrant)), lr=lr)
    expected = train(cell, lambda m, x: unrolled(m, x, plain), lr=lr)
    assert_same_run(got, expected)
    (assert_close_gradients if reentrant else assert_same_gradients)(got, expected)


@MODES
def test_calls_with_identical_inputs_are_told_apart(reentrant):
    """Each repetition must take its own state: with the newest for both, the first activations would differ."""
    torch.manual_seed(0)
    x, grads = torch.randn(5, WIDTH), torch.randn(3, 5, WIDTH)

    def run(call):
        layer = OnlineNorm1d(WIDTH, 1e-5, 0.5, 0.5)
        inputs = [x.clone().requires_grad_() for _ in grads]
        outputs = [call(layer, one) for one in inputs]
        for i in (1, 0, 2):  # neither the order of the calls nor its reverse
            outputs[i].backward(grads[i])
        return [t.grad for t in inputs], state_of(layer)

    got, expected = run(region(reentrant)), run(plain)
    assert_same_state(got[1], expected[1])
    for a, b in zip(got[0], expected[0], strict=True):
        assert torch.equal(a, b)


# ---- what else goes on around a region


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@MODES
def test_autocast_inside_and_around(model, reentrant, dtype):
    def inside(m, x, run):
        def forward(x):
            with torch.autocast("cpu", dtype):
                return m(x).float()

        return run(forward, x)

    def around(m, x, run):
        with torch.autocast("cpu", dtype):
            return run(m, x).float()

    for forward in (inside, around):
        got = train(model, lambda m, x, forward=forward: forward(m, x, region(reentrant)))
        expected = train(model, lambda m, x, forward=forward: forward(m, x, plain))
        assert_same_run(got, expected)
        assert_same_gradients(got, expected)


@MODES
def test_dropout_beside(model, reentrant):
    noisy = nn.Sequential(*[m for layer in model for m in (layer, nn.Dropout(0.3))])
    got = train(noisy, lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    expected = train(noisy, lambda m, x: m(x))
    assert_same_run(got, expected)


POLICIES = {
    "save everything": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "recompute everything": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
    "save products": lambda ctx, op, *args, **kwargs: (
        CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE
    ),
}


@pytest.mark.parametrize("backend", ["native", "portable"])
@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing(model, policy, backend):
    mutation = policy == "save everything" and backend == "portable"  # which fills in place what it allocated
    context = partial(create_selective_checkpoint_contexts, POLICIES[policy], allow_cache_entry_mutation=mutation)
    with functional.backend(backend):
        got = train(model, lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=context))
        expected = train(model, lambda m, x: m(x))
    assert_same_run(got, expected)
    assert_same_gradients(got, expected)


@MODES
def test_debug_and_offloading(model, reentrant):
    def forward(m, x):
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(m, x, use_reentrant=reentrant, **({} if reentrant else {"debug": True}))

    assert_same_run(train(model, forward, steps=1), train(model, lambda m, x: m(x), steps=1))


@MODES
@pytest.mark.parametrize("backward", [False, True])
def test_eval_and_frozen_layers(model, reentrant, backward):
    for change in (nn.Module.eval, lambda m: setattr(m[4], "freeze_statistics", True)):
        changed = copy.deepcopy(model)
        change(changed)
        other = copy.deepcopy(changed)
        x = torch.randn(4, WIDTH, requires_grad=True)
        a, b = checkpoint(changed, x, use_reentrant=reentrant), other(x)
        assert torch.equal(a, b)
        if backward:
            a.sum().backward()
            b.sum().backward()
        for left, right in zip(states(changed), states(other), strict=True):
            assert_same_state(left, right)
        assert int(changed[4].num_samples_tracked) == 0


@MODES
@pytest.mark.parametrize(("first", "then"), [("eval", "train"), ("train", "eval")])
def test_mode_switched_and_state_moved_before_the_backward(reentrant, first, then):
    """What counts is how the layer was called, not how it is when the call is repeated."""
    torch.manual_seed(0)
    x, grad = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

    def run(call):
        layer = OnlineNorm1d(WIDTH, 1e-5, 0.5, 0.5)
        layer(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3)) + 1)
        one = x.clone().requires_grad_()
        z = call(getattr(layer, first)(), one)
        layer.train()(x * 3 + 2)
        getattr(layer, then)()
        z.backward(grad)
        return one.grad, layer.weight.grad, state_of(layer)

    got, expected = run(region(reentrant)), run(plain)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert_same_state(got[2], expected[2])


@MODES
def test_forward_without_backward(model, reentrant):
    other = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.equal(checkpoint(model, x, use_reentrant=reentrant), other(x))
    with torch.inference_mode():
        assert torch.equal(checkpoint(model, x, use_reentrant=reentrant), other(x))
    for left, right in zip(states(model), states(other), strict=True):
        assert_same_state(left, right)


@MODES
def test_no_grad_inside_a_region(model, reentrant):
    def forward(m, x, run):
        def inside(x):
            with torch.no_grad():
                teacher = m[:3](x)
            return m(x) - teacher

        return run(inside, x)

    got, expected = (train(model, lambda m, x, run=run: forward(m, x, run)) for run in (region(reentrant), plain))
    assert_same_run(got, expected)
    assert_same_gradients(got, expected)


@MODES
def test_two_backwards_through_one_graph(model, reentrant):
    def run(call):
        m = copy.deepcopy(model)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
        z = call(m, x)
        for _ in range(3):
            z.sum().backward(retain_graph=True)
        return x.grad, states(m)

    got, expected = run(region(reentrant)), run(plain)
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[1], expected[1], strict=True):
        assert_same_state(a, b)


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="newer than the oldest PyTorch")
def test_two_backwards_that_share_a_repetition(model):
    def run(call):
        m = copy.deepcopy(model)
        x, grad = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(2))

        def forward(x):
            middle = m[:3](x)
            return middle, m[3:](middle)

        x.requires_grad_()
        middle, z = call(forward, x)
        with torch.utils.checkpoint.GraphExecGroup():
            (slope,) = torch.autograd.grad(z, middle, grad, retain_graph=True)
            (x_grad,) = torch.autograd.grad(middle, x, slope)
        return x_grad, states(m)

    got, expected = run(region(False)), run(plain)
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[1], expected[1], strict=True):
        assert_same_state(a, b)


def test_gradients_asked_for_inside_the_region(model):
    def forward(m, x, run):
        def inside(x):
            z = m[:3](x)
            (slope,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
            return m[3:](z) * slope.detach()

        return run(inside, x)

    got, expected = (train(model, lambda m, x, run=run: forward(m, x, run)) for run in (region(False), plain))
    assert got[0][0] == expected[0][0]
    assert [int(s["num_samples_tracked"]) for s in got[1]] == [int(s["num_samples_tracked"]) for s in expected[1]]


def test_saved_tensors_read_outside_a_backward(model):
    """It repeats the region with no backward going on."""
    x = torch.randn(4, WIDTH, requires_grad=True)
    z = checkpoint(model, x, use_reentrant=False)
    before = states(model)
    assert z.grad_fn._saved_result.shape == z.shape
    for left, right in zip(states(model), before, strict=True):
        assert_same_state(left, right)


def test_functional(model):
    def run(call):
        torch.manual_seed(0)
        state = [torch.zeros(3).double(), torch.ones(3).double(), torch.zeros(3).double(), torch.zeros(3).double()]
        x = torch.randn(4, 3, 5, requires_grad=True)
        call(lambda x: functional.online_norm(x, *state, alpha_fwd=0.5), x).square().sum().backward()
        return [x.grad, *state]

    for got, expected in zip(run(region(False)), run(plain), strict=True):
        assert torch.equal(got, expected)


@MODES
def test_functional_call(model, reentrant):
    """The state that counts is the one that the call was given."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    before = states(model)
    x = torch.randn(4, WIDTH, requires_grad=True)
    checkpoint(lambda x: torch.func.functional_call(model, buffers, x), x, use_reentrant=reentrant).sum().backward()
    assert int(buffers["1.num_samples_tracked"]) == 4
    for left, right in zip(states(model), before, strict=True):
        assert_same_state(left, right)


def test_convolutions_channels_last_and_empty_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), OnlineNorm2d(3, 1e-5, 0.9, 0.8), nn.ReLU()).to(
        memory_format=torch.channels_last
    )

    def forward(m, x, run):
        x = x.contiguous(memory_format=torch.channels_last)
        return run(lambda x: m(x[:0]).sum() + m(x), x)

    got, expected = (
        train(model, lambda m, x, run=run: forward(m, x, run), shape=(2, 3, 6, 6)) for run in (region(False), plain)
    )
    assert_same_run(got, expected)


@MODES
def test_threads_each_with_their_own_model(model, reentrant):
    expected = train(model, lambda m, x: m(x))
    results = {}

    def work(i):
        m = copy.deepcopy(model)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()
        for _ in range(20):
            checkpoint(m, x, use_reentrant=reentrant).sum().backward()
        results[i] = states(m)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for other in range(1, 4):
        for a, b in zip(results[0], results[other], strict=True):
            assert_same_state(a, b)
    assert_same_run(train(model, lambda m, x: checkpoint(m, x, use_reentrant=reentrant)), expected)


@MODES
def test_what_was_noted_goes_with_the_graph(model, reentrant, monkeypatch):
    alive = weakref.WeakSet()
    monkeypatch.setattr(checkpointing._Calls, "__init__", noting(checkpointing._Calls.__init__, alive))
    x = torch.randn(4, WIDTH, requires_grad=True)
    z = checkpoint(model, x, use_reentrant=reentrant)
    assert len(alive) == 1
    z.sum().backward()
    del z
    gc.collect()
    assert len(alive) == 0


def noting(init, made):
    def noted(self):
        init(self)
        made.add(self)

    return noted


# ---- what goes wrong


@MODES
def test_error_inside_a_region(model, reentrant):
    """What ran before the error has moved its state, as without a region; nothing else has."""
    x = torch.randn(4, WIDTH, requires_grad=True)

    def broken(x):
        model[:3](x)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        checkpoint(broken, x, use_reentrant=reentrant)
    assert [int(layer.num_samples_tracked) for layer in layers(model)] == [4, 0, 0]
    got = train(model, lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    assert_same_run(got, train(model, lambda m, x: m(x)))


@MODES
def test_error_in_the_repetition(model, reentrant):
    x = torch.randn(4, WIDTH, requires_grad=True)
    broken = []

    def forward(x):
        x = model[:3](x)
        if broken:
            raise ValueError("broken")
        return model[3:](x)

    z = checkpoint(forward, x, use_reentrant=reentrant)
    before = states(model)
    broken.append(True)
    with pytest.raises(ValueError, match="broken"):
        z.sum().backward(retain_graph=True)
    for left, right in zip(states(model)[:2], before[:2], strict=True):
        assert_same_state(left, right)


@MODES
def test_other_calls_in_the_repetition(reentrant):
    left, right = OnlineNorm1d(WIDTH), OnlineNorm1d(WIDTH)
    order = []

    def forward(x):
        a, b = (right, left) if order else (left, right)
        return b(a(x))

    z = checkpoint(forward, torch.randn(4, WIDTH, requires_grad=True), use_reentrant=reentrant)
    before = state_of(left), state_of(right)
    order.append("changed")
    with pytest.raises(RuntimeError, match=r"call 1 of Online Normalization .* works on other statistics"):
        z.sum().backward()
    assert_same_state(state_of(left), before[0])
    assert_same_state(state_of(right), before[1])


@MODES
def test_layer_made_anew_in_the_repetition(reentrant):
    x = torch.randn(4, WIDTH, requires_grad=True)
    z = checkpoint(lambda x: OnlineNorm1d(WIDTH)(x), x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="must not be moved, copied or made anew"):
        z.sum().backward()


def test_more_calls_in_the_repetition():
    layer = OnlineNorm1d(WIDTH)
    more = []

    def forward(x):
        for _ in (0, *more):
            x = layer(x)
        return x

    z = checkpoint(forward, torch.randn(4, WIDTH, requires_grad=True), use_reentrant=True)
    before = state_of(layer)
    more.append(1)
    with pytest.raises(RuntimeError, match=r"made 1 calls .* makes one more"):
        z.sum().backward()
    assert_same_state(state_of(layer), before)


def test_training_call_inside_a_backward():
    """A checkpointing of one's own would move the statistics twice; so nothing moves."""
    layer = OnlineNorm1d(WIDTH)

    class Repeat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                layer(x).backward(grad)
            return x.grad

    z = Repeat.apply(torch.randn(4, WIDTH, requires_grad=True))
    before = state_of(layer)
    with pytest.raises(RuntimeError, match=r"inside a backward pass, and torch\.utils\.checkpoint is not"):
        z.sum().backward(retain_graph=True)
    assert_same_state(state_of(layer), before)
    layer.eval()
    z.sum().backward()  # nothing would move
    assert_same_state(state_of(layer), before)


@MODES
def test_hook_that_calls_a_layer_inside_a_region_s_backward(model, reentrant):
    """The frames of the region are on the stack, but this is no repetition."""
    probe = OnlineNorm1d(WIDTH)

    def forward(x):
        z = model(probe(x))
        if z.requires_grad:
            z.register_hook(lambda grad: probe(grad))
        return z

    z = checkpoint(forward, torch.randn(4, WIDTH, requires_grad=True), use_reentrant=reentrant)
    before = state_of(probe)
    with pytest.raises(RuntimeError, match="inside a backward pass"):
        z.sum().backward()
    assert_same_state(state_of(probe), before)


def test_hook_in_eval_mode_is_fine(model):
    probe = OnlineNorm1d(WIDTH).eval()
    x = torch.randn(4, WIDTH, requires_grad=True)
    seen = []
    z = model(x)
    z.register_hook(lambda grad: seen.append(probe(grad)))
    z.sum().backward()
    assert len(seen) == 1
