"""Autocast, and gradient scaling: the control errors stay in the unit of the gradients, whatever the scaler does."""

import copy
import pickle

import pytest
import torch
from helpers import GUARDS, STATE, assert_same_state, layer_and_reference, state_of, step
from torch import nn
from torch.amp import GradScaler

from onlinenorm.torch import OnlineNorm1d, OnlineNorm2d, follow_scaler, scale_control_errors

WIDTH = 8
CONTROL = ("control_y", "control_1")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        *[m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), OnlineNorm1d(WIDTH, 1e-5, 0.95, 0.9), nn.Tanh())],
        nn.Linear(WIDTH, 1),
    )


def layers(model):
    return [module for module in model.modules() if isinstance(module, OnlineNorm1d)]


def states(model):
    return [state_of(layer) for layer in layers(model)]


def batches(count, size=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, WIDTH, generator=generator)
        yield x, x[:, :1] * x[:, 1:2] + x[:, 2:3]


def train(model, steps, scaler=None, dtype=None, *, follow=True, before_step=lambda i, scaler: 1.0, skipped=()):
    """Train; the losses, the scale of every step, and which steps the scaler skipped.

    Steps that are listed as skipped are forwards only: what is left of a step that overflows everywhere.
    """
    optimiser = torch.optim.SGD(model.parameters(), 0.02)
    if scaler is not None and follow:
        follow_scaler(scaler, model)
    losses, scales, overflows = [], [], []
    for i, (x, y) in enumerate(batches(steps)):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
        loss = (out.float() - y).square().mean()
        losses.append(loss.item())
        if scaler is None:
            if i not in skipped:
                loss.backward()
                optimiser.step()
            continue
        loss = loss * before_step(i, scaler)
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        weights = model[0].weight.detach().clone()
        scaler.step(optimiser)
        if torch.equal(weights, model[0].weight):
            overflows.append(i)
        scaler.update()
    return losses, scales, overflows


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_type_and_keeps_the_state_wide(dtype):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), OnlineNorm2d(4)).train()
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype):
        z = model(x)
    assert z.dtype == dtype
    z.float().square().sum().backward()
    assert x.grad.dtype == model[1].weight.grad.dtype == torch.float32
    assert all(getattr(model[1], name).dtype == torch.float64 for name in STATE)
    assert model[1].control_y.count_nonzero() == 4


def test_bfloat16_needs_no_scaler():
    losses, expected = train(mlp(), 60, dtype=torch.bfloat16)[0], train(mlp(), 60)[0]
    assert abs(sum(losses[-20:]) - sum(expected[-20:])) < 0.02 * sum(expected[-20:])


# ---- one factor


@pytest.mark.parametrize("guard", GUARDS)
def test_scaled_gradients_give_scaled_results(guard):
    """The same stream with and without a loss that becomes 64 times as large in the middle, and 1/4 later."""
    x, grad = torch.randn(30, WIDTH, 4), torch.randn(30, WIDTH, 4)
    plain, scaled = (layer_and_reference(WIDTH, guard=guard)[0] for _ in range(2))
    scale = 1.0
    for i, (one, g) in enumerate(zip(x.split(3), grad.split(3), strict=True)):
        factor = {4: 64.0, 7: 1 / 256}.get(i, 1.0)
        scale_control_errors(scaled, factor)
        scale *= factor
        expected, got = step(plain, one, g), step(scaled, one, g * scale)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1] * scale)
    assert all(torch.equal(getattr(scaled, name), getattr(plain, name) * scale) for name in CONTROL)


def test_each_layer_is_scaled_once_and_nothing_else_is():
    shared = OnlineNorm1d(3)
    model = nn.ModuleList([shared, nn.Sequential(shared, OnlineNorm1d(3)), nn.BatchNorm1d(3)])
    for layer in layers(model):
        step(layer, torch.randn(4, 3), torch.randn(4, 3))
    before = copy.deepcopy(model.state_dict())
    scale_control_errors(model, 0.5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] * 0.5 if name.endswith(CONTROL) else before[name]), name


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_factor_that_would_destroy(factor):
    layer = OnlineNorm1d(3)
    step(layer, torch.randn(4, 3), torch.randn(4, 3))
    before = state_of(layer)
    with pytest.raises(ValueError, match="factor must be finite"):
        scale_control_errors(layer, factor)
    assert_same_state(state_of(layer), before)


def test_what_is_no_model_or_has_no_layers():
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match="Linear has no OnlineNorm layers"):
        scale_control_errors(nn.Linear(2, 2), 2.0)
    with pytest.raises(ValueError, match="Linear has no OnlineNorm layers"):
        follow_scaler(scaler, nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got GradScaler"):
        follow_scaler(scaler, scaler)
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got Sequential"):
        follow_scaler(mlp(), mlp())
    assert "update" not in vars(scaler)


# ---- a scaler


def test_in_float32_a_scaler_changes_no_bit():
    """Every scale is a power of two, so the scaled run is the plain run; in all of its ups, downs and skipped steps."""
    bad = {5: float("inf"), 6: float("nan"), 23: float("inf")}
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=4, growth_factor=8.0, backoff_factor=0.25)
    scaled, plain = mlp(), mlp()
    losses, scales, overflows = train(scaled, 40, scaler, before_step=lambda i, _: bad.get(i, 1.0))
    assert overflows == list(bad)
    assert len(set(scales)) >= 8
    assert losses == train(plain, 40, skipped=overflows)[0]
    unit = scaler.get_scale()
    for a, b in zip(states(scaled), states(plain), strict=True):
        assert_same_state(a, {name: value * unit if name in CONTROL else value for name, value in b.items()})


def test_without_following_it_deviates():
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=4, growth_factor=8.0)
    losses, _, _ = train(mlp(), 12, scaler, follow=False)
    expected = train(mlp(), 12)[0]
    assert losses[:4] == expected[:4]  # until the scale changes
    assert losses[6:] != expected[6:]


def test_float16_matches_float32_through_changes_of_scale():
    """Steps at a scale of 2^24 overflow everywhere: the scale goes up, up and back, again and again."""
    settings = {"init_scale": 1.0, "growth_interval": 5, "growth_factor": 2.0**12, "backoff_factor": 2.0**-24}
    losses, scales, overflows = train(mlp(), 60, GradScaler("cpu", **settings), torch.float16)
    assert len(overflows) == scales.count(2.0**24) == 5
    expected = torch.tensor(train(mlp(), 60, skipped=overflows)[0])
    assert torch.allclose(torch.tensor(losses), expected, rtol=0.02)
    left_behind = train(mlp(), 60, GradScaler("cpu", **settings), torch.float16, follow=False)[0]
    assert not torch.allclose(torch.tensor(left_behind[:12]), expected[:12], rtol=0.2)


def test_overflow_of_some_samples_skips_those_alone():
    """The step is lost for the weights; the samples whose gradient is finite still count for the control errors."""
    x, grad = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    batch, single = OnlineNorm1d(WIDTH), OnlineNorm1d(WIDTH)
    overflowed = grad.clone()
    overflowed[1, 0] = float("inf")
    step(batch, x, overflowed)
    for i in (0, 1, 2):
        z = single(x[i : i + 1].clone().requires_grad_())
        if i != 1:
            z.backward(grad[i : i + 1])
    assert_same_state(state_of(batch), state_of(single))


@pytest.mark.parametrize("new_scale", [2.0**4, torch.tensor(2.0**4)])
def test_new_scale_by_hand(new_scale):
    model, scaler = mlp(), GradScaler("cpu", init_scale=2.0**10)
    train(model, 2, scaler)
    before = states(model)
    scaler.update(new_scale)
    for a, b in zip(states(model), before, strict=True):
        assert_same_state(a, {name: v / 2**6 if name in CONTROL else v for name, v in b.items()})


def test_scale_of_zero_ends_nothing():
    model, scaler = mlp(), GradScaler("cpu", init_scale=2.0)
    train(model, 2, scaler)
    scaler.update(0.0)
    scaler.update(4.0)
    for layer in layers(model):
        assert layer.control_y.count_nonzero() == 0
    train(model, 2, scaler)
    assert all(state[name].isfinite().all() for state in states(model) for name in STATE)


def test_disabled_scaler():
    model, plain, scaler = mlp(), mlp(), GradScaler("cpu", enabled=False)
    assert train(model, 5, scaler)[0] == train(plain, 5)[0]
    for a, b in zip(states(model), states(plain), strict=True):
        assert_same_state(a, b)


def test_models_that_share_a_scaler_and_a_layer_are_converted_once():
    a, b, other = mlp(), mlp(), mlp()
    b[1] = a[1]
    scaler = GradScaler("cpu", init_scale=2.0)
    train(other, 1, scaler, follow=False)
    for model in (a, b, a, a[:2]):
        follow_scaler(scaler, model)
    for layer in {*layers(a), *layers(b), *layers(other)}:
        for name in CONTROL:
            getattr(layer, name).fill_(1.0)
    scaler.update(16.0)
    assert all((getattr(layer, name) == 8).all() for layer in {*layers(a), *layers(b)} for name in CONTROL)
    assert all((getattr(layer, name) == 1).all() for layer in layers(other) for name in CONTROL)


def test_several_optimisers():
    def run(scaler):
        model = mlp()
        halves = [torch.optim.SGD(part.parameters(), 0.05) for part in (model[:4], model[4:])]
        if scaler is not None:
            follow_scaler(scaler, model)
        losses = []
        for x, y in batches(20):
            loss = (model(x) - y).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            for half in halves:
                half.step() if scaler is None else scaler.step(half)
                half.zero_grad()
            if scaler is not None:
                scaler.update()
            losses.append(loss.item())
        return losses

    assert run(GradScaler("cpu", init_scale=4.0, growth_interval=3)) == run(None)


def test_clipping_between_unscaling_and_step():
    def run(scaler):
        model = mlp()
        optimiser = torch.optim.SGD(model.parameters(), 0.5)
        if scaler is not None:
            follow_scaler(scaler, model)
        losses = []
        for x, y in batches(20):
            optimiser.zero_grad()
            loss = (model(x) - y).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimiser.step() if scaler is None else scaler.step(optimiser)
            if scaler is not None:
                scaler.update()
            losses.append(loss.item())
        return losses

    assert run(GradScaler("cpu", init_scale=4.0, growth_interval=3)) == run(None)


# ---- from one run to the next


@pytest.mark.parametrize("follow_first", [True, False])
def test_state_dicts_of_both_resume_without_another_conversion(follow_first):
    settings = {"init_scale": 2.0**4, "growth_interval": 3, "growth_factor": 4.0}
    model, scaler = mlp(), GradScaler("cpu", **settings)
    train(model, 10, scaler)
    saved = copy.deepcopy((model.state_dict(), scaler.state_dict()))
    expected = train(model, 10, scaler)[0]

    resumed, other = mlp(), GradScaler("cpu", **settings)
    train(resumed, 1, other, follow=False)  # a scale that is in use, and another one
    if follow_first:
        follow_scaler(other, resumed)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    optimiser_restarts = train(resumed, 10, other)[0]
    assert optimiser_restarts == expected


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_of_both_go_on_alone(copied):
    model, scaler = mlp(), GradScaler("cpu", init_scale=2.0**4, growth_interval=3, growth_factor=4.0)
    train(model, 10, scaler)
    other, other_scaler = copied((model, scaler))
    before = states(model)
    other_losses = train(other, 10, other_scaler)[0]
    for a, b in zip(states(model), before, strict=True):
        assert_same_state(a, b)
    assert train(model, 10, scaler)[0] == other_losses
    for a, b in zip(states(model), states(other), strict=True):
        assert_same_state(a, b)


def test_from_float32_to_a_scaler_and_back():
    expected_model, model = mlp(), mlp()
    for _ in range(3):
        expected = train(expected_model, 5)[0]
    train(model, 5)
    scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    scale_control_errors(model, scaler.get_scale())
    train(model, 5, scaler)
    scale_control_errors(model, 1 / scaler.get_scale())
    assert train(model, 5)[0] == expected
    for a, b in zip(states(model), states(expected_model), strict=True):
        assert_same_state(a, b)
