"""What people do in training loops: accumulate, clip, evaluate in between, freeze, fine-tune."""

import copy
import pickle

import pytest
import torch
from helpers import GUARDS, assert_same_state, layer_and_reference, state_of, step
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, freeze_statistics, scale_control_errors

WIDTH = 6


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        *[m for _ in range(2) for m in (nn.Linear(WIDTH, WIDTH), OnlineNorm1d(WIDTH, 1e-5, 0.9, 0.8), nn.Tanh())]
    )


def states(model):
    return [state_of(module) for module in model.modules() if isinstance(module, OnlineNorm)]


def assert_same_states(left, right):
    for a, b in zip(left, right, strict=True):
        assert_same_state(a, b)


# ---- accumulation


@given(
    micro_batches=st.integers(1, 6),
    size=st.integers(1, 5),
    plane=st.sampled_from([(), (3,), (4, 5), (9, 9)]),
    channels=st.integers(1, 20),
    guard=st.sampled_from(GUARDS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    backwards_at_the_end=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_micro_batches_are_one_batch(micro_batches, size, plane, channels, guard, dtype, backwards_at_the_end, seed):
    """Bit for bit, whether each one's backward comes before the next one's forward or after all forwards."""
    generator = torch.Generator().manual_seed(seed)
    shape = (micro_batches * size, channels, *plane)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    (whole, _), (parts, _) = (layer_and_reference(channels, guard=guard, seed=seed) for _ in range(2))
    expected = step(whole, x, grad)

    inputs = [part.clone().requires_grad_() for part in x.split(size)]
    outputs = []
    for one, g in zip(inputs, grad.split(size), strict=True):
        outputs.append(parts(one))
        if not backwards_at_the_end:
            outputs[-1].backward(g)
    if backwards_at_the_end:
        for z, g in zip(outputs, grad.split(size), strict=True):
            z.backward(g)

    assert torch.equal(torch.cat(outputs), expected[0])
    assert torch.equal(torch.cat([one.grad for one in inputs]), expected[1])
    assert_same_state(state_of(parts), state_of(whole))


def test_one_backward_for_all_micro_batches_takes_them_last_to_first():
    x, grad = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    together, backwards = OnlineNorm1d(WIDTH), OnlineNorm1d(WIDTH)
    outputs = [together(one.requires_grad_()) for one in x.split(2)]
    torch.autograd.backward(outputs, list(grad.split(2)))
    outputs = [backwards(one.requires_grad_()) for one in x.split(2)]
    for z, g in zip(outputs[::-1], grad.split(2)[::-1], strict=True):
        z.backward(g)
    assert_same_state(state_of(together), state_of(backwards))


def accumulate(model, x, micro_batches, divide=True):
    """The gradients of a step: of mean losses, each divided by their number."""
    model.zero_grad()
    for one in x.split(len(x) // micro_batches):
        loss = (model(one) - 0.5).square().mean()
        (loss / micro_batches if divide else loss).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_mean_loss_divided_by_the_number_of_micro_batches_is_the_large_batch(micro_batches):
    """Gradients and state agree but for the order in which sums are rounded."""
    large, small = mlp(), mlp()
    for _ in range(3):
        x = torch.randn(8, WIDTH)
        for a, b in zip(accumulate(small, x, micro_batches), accumulate(large, x, 1), strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip(states(small), states(large), strict=True):
        for name, value in a.items():
            torch.testing.assert_close(value, b[name], rtol=1e-5, atol=1e-6)


def test_not_dividing_is_another_unit_and_nothing_else():
    divided, plain = mlp(), mlp()
    for _ in range(3):
        x = torch.randn(8, WIDTH)
        for a, b in zip(accumulate(plain, x, 4, divide=False), accumulate(divided, x, 4), strict=True):
            assert torch.equal(a, 4 * b)
    scale_control_errors(plain, 1 / 4)
    assert_same_states(states(plain), states(divided))


@pytest.mark.parametrize("convert", [True, False])
def test_another_number_of_undivided_micro_batches_in_the_middle(convert):
    """From 2 micro-batches of 4 to 8 of 1: a sample's undivided gradient becomes 4 times what it was."""
    reference, changed = mlp(), mlp()
    batches = torch.randn(20, 8, WIDTH)
    for x in batches[:10]:
        accumulate(reference, x, 2, divide=False)
        accumulate(changed, x, 2, divide=False)
    if convert:
        scale_control_errors(changed, 4.0)
    expected = accumulate(reference, batches[10], 2, divide=False)
    got = accumulate(changed, batches[10], 8, divide=False)
    close = all(torch.allclose(a, 4 * b, rtol=1e-3, atol=1e-5) for a, b in zip(got, expected, strict=True))
    assert close == convert


@pytest.mark.parametrize("weighed", [True, False])
def test_short_last_batch(weighed):
    """A mean over 3 samples makes each one's gradient larger than a mean over 8: weighed by 3/8, it is the same."""
    split, whole = mlp(), mlp()
    x = torch.randn(19, WIDTH)
    for one in x.split(8):
        loss = (split(one) - 0.5).square().mean()
        (loss * len(one) / 8 if weighed else loss).backward()
    ((whole(x) - 0.5).square().mean() * 19 / 8).backward()
    same = all(
        torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6)
        for a, b in zip(states(split), states(whole), strict=True)
        for name in ("control_y", "control_1")
    )
    assert same == weighed


# ---- what stands between forward, backward and step


def test_clipping_does_not_reach_the_control_errors():
    model = mlp()
    (model(torch.randn(4, WIDTH)) * 1e3).square().sum().backward()
    before = states(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    nn.utils.clip_grad_value_(model.parameters(), 1e-6)
    assert_same_states(states(model), before)


def test_evaluation_in_the_middle_of_an_epoch():
    def run(evaluate):
        model = mlp()
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        for x in torch.randn(10, 4, WIDTH, generator=torch.Generator().manual_seed(1)):
            loss = model(x).square().mean()
            if evaluate:  # even between a forward and its backward
                model.eval()
                with torch.no_grad():
                    model(x + 100)
                model.train()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        return [*model.parameters()], states(model)

    got, expected = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(got[0], expected[0], strict=True))
    assert_same_states(got[1], expected[1])


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("inputs", [True, False])
def test_requires_grad_false_does_not_freeze_statistics(weights, inputs):
    """The forward's state always moves; the backward's moves where a backward comes through."""
    layer, reference = OnlineNorm1d(WIDTH), OnlineNorm1d(WIDTH)
    layer.requires_grad_(weights)
    x, grad = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    step(reference, x, grad)
    z = layer(x.clone().requires_grad_(inputs))
    assert z.requires_grad == (weights or inputs)
    if z.requires_grad:
        z.backward(grad)
        assert_same_state(state_of(layer), state_of(reference))
        assert (layer.weight.grad is not None) == weights
    else:
        assert torch.equal(layer.running_mean, reference.running_mean)
        assert int(layer.num_samples_tracked) == 4
        assert layer.control_y.count_nonzero() == 0


# ---- frozen statistics


@pytest.mark.parametrize("guard", GUARDS)
def test_frozen_layer_is_the_layer_in_eval(guard):
    frozen, _ = layer_and_reference(WIDTH, guard=guard)
    step(frozen, torch.randn(50, WIDTH, 3), torch.randn(50, WIDTH, 3))
    evaluated = copy.deepcopy(frozen).eval()
    before = state_of(frozen)
    assert freeze_statistics(frozen) is frozen
    x, grad = torch.randn(4, WIDTH, 3), torch.randn(4, WIDTH, 3)
    for layer in (frozen, evaluated):
        layer.zero_grad()
    for got, expected in zip(step(frozen.train(), x, grad), step(evaluated, x, grad), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(frozen.weight.grad, evaluated.weight.grad)
    assert torch.equal(frozen.bias.grad, evaluated.bias.grad)
    assert_same_state(state_of(frozen), before)


@pytest.mark.parametrize("guard", GUARDS)
def test_backward_of_a_frozen_layer_is_the_plain_derivative(guard):
    layer, _ = layer_and_reference(3, guard=guard, dtype=torch.float64)
    step(layer, torch.randn(50, 3, 4).double() * 2 + 1, torch.randn(50, 3, 4).double())
    freeze_statistics(layer)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)


def test_thawed_layer_goes_on_where_it_stopped():
    layer, other = OnlineNorm1d(WIDTH), OnlineNorm1d(WIDTH)
    x, grad = torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    step(layer, x[0], grad[0])
    freeze_statistics(layer)
    step(layer, x[1], grad[1])
    freeze_statistics(layer, frozen=False)
    got = step(layer, x[2], grad[2])
    step(other, x[0], grad[0])
    for a, b in zip(got, step(other, x[2], grad[2]), strict=True):
        assert torch.equal(a, b)
    assert_same_state(state_of(layer), state_of(other))


def test_frozen_between_forward_and_backward():
    """A backward belongs to its forward: a forward that moved the statistics has a backward that moves the control."""
    layer, other = OnlineNorm1d(WIDTH), OnlineNorm1d(WIDTH)
    x, grad = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    z = layer(x.clone().requires_grad_())
    freeze_statistics(layer)
    z.backward(grad)
    step(other, x, grad)
    assert_same_state(state_of(layer), state_of(other))
    z = layer(x.clone().requires_grad_())
    freeze_statistics(layer, frozen=False)
    z.backward(grad)
    assert_same_state(state_of(layer), state_of(other))


def test_a_part_of_a_model_can_be_frozen_and_goes_on_learning():
    model = mlp()
    freeze_statistics(model[:3])
    before, weight = states(model), model[1].weight.detach().clone()
    optimiser = torch.optim.SGD(model.train().parameters(), 0.1)
    model(torch.randn(4, WIDTH)).square().sum().backward()
    optimiser.step()
    assert_same_state(states(model)[0], before[0])
    assert int(states(model)[1]["num_samples_tracked"]) == 4
    assert not torch.equal(model[1].weight, weight)


def test_freezing_survives_copies_and_shows():
    layer = freeze_statistics(OnlineNorm2d(3))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.eval().train(), layer.double()):
        assert other.freeze_statistics is True
        assert repr(other).endswith("guard='layer_scaling', freeze_statistics=True)")
    assert "freeze" not in repr(freeze_statistics(layer, frozen=False))
    assert "freeze" not in str([*layer.state_dict()])


def test_pickles_from_before_there_was_freezing():
    layer = OnlineNorm1d(WIDTH)
    freeze_statistics(layer)
    del layer.__dict__["freeze_statistics"]
    old = pickle.loads(pickle.dumps(layer))
    assert old.freeze_statistics is False
    old(torch.randn(4, WIDTH))
    assert int(old.num_samples_tracked) == 4


def test_nothing_to_freeze():
    with pytest.raises(ValueError, match="Linear has no OnlineNorm layers"):
        freeze_statistics(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        freeze_statistics([OnlineNorm1d(2)])
