"""`diagnose` sees the truth, changes nothing, and leaves nothing behind."""

import builtins
import copy
import io
import json
import pickle
import weakref

import numpy as np
import pytest
import torch
from helpers import GUARDS, assert_same_state, channels_last, layer_and_reference, state_of, step
from torch import nn
from torch.utils.checkpoint import checkpoint

from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, diagnose
from onlinenorm.torch.layers import online_norm_layers


def network(guard="layer_scaling"):
    torch.manual_seed(0)
    norm = {"alpha_fwd": 0.95, "alpha_bwd": 0.9, "guard": guard}
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), OnlineNorm2d(8, **norm), nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, 3, bias=False), OnlineNorm2d(6, **norm), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(6 * 36, 5, bias=False), OnlineNorm1d(5, **norm),
    )  # fmt: skip


def train(model, steps=4, watch=False):
    """Outputs, gradients of inputs and parameters after some steps of SGD."""
    torch.manual_seed(1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(steps):
        x = torch.randn(3, 3, 8, 8, requires_grad=True)
        if watch:
            with diagnose(model) as outer, diagnose(model):
                z = model(x)
                z.square().sum().backward()
            assert outer.as_dict()["1"]["train"]["samples"] == 3
        else:
            z = model(x)
            z.square().sum().backward()
        seen += [z.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        optimiser.step()
        optimiser.zero_grad()
    return seen


@pytest.mark.parametrize("guard", GUARDS)
def test_nothing_changes(guard):
    plain, watched = network(guard), network(guard)
    for expected, got in zip(train(plain), train(watched, watch=True), strict=True):
        assert torch.equal(expected, got)
    for left, right in zip(online_norm_layers(plain), online_norm_layers(watched), strict=True):
        assert_same_state(state_of(left), state_of(right))


def test_an_input_with_several_consumers_keeps_its_gradient():
    def run(watch):
        layer = OnlineNorm1d(4)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        h = x * 3.1
        with diagnose(layer) if watch else torch.enable_grad():
            (h.sin() * layer(h) + layer(h).exp() * h.tanh() + h / 7).square().sum().backward()
        return x.grad

    assert torch.equal(run(False), run(True))


def nothing_left_in(model):
    return all(not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks for m in model.modules())


def test_nothing_is_left_behind():
    model = network()
    with diagnose(model):
        assert not nothing_left_in(model)
    assert nothing_left_in(model)
    with pytest.raises(ZeroDivisionError), diagnose(model):
        raise ZeroDivisionError
    assert nothing_left_in(model)
    with pytest.raises(ValueError, match="expected 4D input"), diagnose(model) as diagnosis:
        model[1](torch.zeros(2, 8))
    assert diagnosis.as_dict()["1"] == {}
    model(torch.randn(1, 3, 8, 8))
    assert diagnosis.as_dict()["1"] == {}


def test_a_backward_after_the_context_is_not_seen_and_memory_goes_with_the_graph():
    model = network()
    with diagnose(model) as diagnosis:
        z = model(torch.randn(2, 3, 8, 8))
    calls = weakref.WeakSet()
    z.sum().backward()
    assert diagnosis.as_dict()["1"]["train"]["backward_samples"] == 0
    with diagnose(model) as diagnosis:
        model[4].register_forward_hook(lambda m, a, z: calls.add(a[0]))
        for _ in range(3):
            model(torch.randn(2, 3, 8, 8)).sum().backward()
        assert len(calls) == 0, "inputs of finished steps are still there"
        assert not diagnosis._calls


def test_stationary_normal_data_approach_zero_and_one():
    torch.manual_seed(0)
    layer = OnlineNorm1d(6, alpha_fwd=0.99, alpha_bwd=0.9, guard=None)
    stream = torch.randn(3000, 6, 20) * torch.rand(6, 1).add(0.5) + torch.randn(6, 1) * 5
    layer(stream[:1000])
    with diagnose(layer) as diagnosis:
        for x in stream[1000:].split(10):
            step(layer, x, torch.randn_like(x) + 0.5)
    (result,) = diagnosis.as_dict()["OnlineNorm1d"].values()
    assert result["samples"] == 2000
    assert result["mean_worst"] < 0.02
    assert 0.98 < result["variance_min"] < result["variance"] < result["variance_max"] < 1.02
    assert result["cos_1_worst"] < 0.01
    assert result["cos_y_worst"] < 0.01
    assert 0 < result["control_1"] < result["control_1_bound"]
    assert 0 < result["control_y"] < result["control_y_bound"]
    assert result["control_1"] < 2 * 0.5 / (1 - 0.9), "the mean of the gradients, times the horizon"
    assert (result["overshoot"], result["skipped_samples"], result["advice"]) == (0, 0, {})


def direct(layer, reference, xs, grads):
    """Every number once more by the reference, one scalar at a time: yhat and x' of all samples, side by side."""
    ys, dxs = [], []
    for x, grad in zip(xs, grads, strict=True):
        for one, one_grad in zip(x.double().numpy(), grad.double().numpy(), strict=True):
            mean, var = reference.running_mean.copy(), reference.running_var.copy()
            shape = (-1, *[1] * (one.ndim - 1))
            ys.append(((one - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + layer.eps)).reshape(len(mean), -1))
            reference.forward(one[None])
            dxs.append(reference.backward(one_grad[None]).reshape(len(mean), -1))
    return ys, dxs


@pytest.mark.parametrize("layout", [torch.contiguous_format, channels_last])
@pytest.mark.parametrize("guard", GUARDS)
def test_every_number_against_a_direct_computation(guard, layout):
    torch.manual_seed(0)
    layer, reference = layer_and_reference(4, guard=guard, alpha_bwd=0.7)
    xs = [torch.randn(n, 4, *size) * 2 + 1 for n, size in ((3, (5, 2)), (1, (4, 4)), (5, (1, 1)))]
    grads = [torch.randn_like(x) for x in xs]
    with diagnose(nn.Sequential(layer)) as diagnosis:
        for x, grad in zip(xs, grads, strict=True):
            step(layer, x if layout is torch.contiguous_format else channels_last(x), grad)
    result = diagnosis.as_dict()["0"]["train"]
    ys, dxs = direct(layer, reference, xs, grads)
    mean = np.mean([y.mean(1) for y in ys], 0)
    var = np.mean([(y**2).mean(1) for y in ys], 0) - mean**2
    y, dx = np.concatenate(ys, 1), np.concatenate(dxs, 1)
    cos_1 = dx.sum(1) / np.linalg.norm(dx, axis=1) / np.sqrt(dx.shape[1])
    cos_y = (dx * y).sum(1) / np.linalg.norm(dx, axis=1) / np.linalg.norm(y, axis=1)
    expected = {
        "calls": 3,
        "samples": 9,
        "backward_samples": 9,
        "mean_rms": np.sqrt((mean**2).mean()),
        "mean_worst": np.abs(mean).max(),
        "variance": var.mean(),
        "variance_min": var.min(),
        "variance_max": var.max(),
        "cos_1": np.sqrt((cos_1**2).mean()),
        "cos_1_worst": np.abs(cos_1).max(),
        "cos_y": np.sqrt((cos_y**2).mean()),
        "cos_y_worst": np.abs(cos_y).max(),
        "control_1": np.sqrt((reference.control_1**2).mean()),
        "control_y": np.sqrt((reference.control_y**2).mean()),
        "overshoot": np.mean([0.3 * (y**2).mean(1) > 1 for y in ys]),
    }
    u = [y * reference.weight[:, None] + reference.bias[:, None] for y in ys]
    if guard == "layer_scaling":
        zeta = [np.sqrt((u**2).mean() + layer.guard_eps) for u in u]
        expected |= {"zeta_mean": np.mean(zeta), "zeta_min": np.min(zeta), "zeta_max": np.max(zeta)}
    elif guard == "clamp":
        expected["clamped"] = np.mean(np.abs(np.concatenate(u, 1)) > 1.5)
        assert 0 < expected["clamped"] < 1
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    for key in {"zeta_mean", "clamped"} - set(expected):
        assert result[key] is None


def test_the_bounds_are_those_of_errors_that_never_cancel():
    layer = OnlineNorm1d(1, alpha_bwd=0.75, guard=None, affine=False, eps=0, dtype=torch.float64)
    layer.alpha_fwd = 1 - 1e-12  # yhat = x
    x, grad = torch.tensor([[1.0], [2.0], [-1.0]]).double(), torch.tensor([[1.0], [-3.0], [2.0]]).double()
    with diagnose(layer) as diagnosis:
        step(layer, x, grad)
    result = diagnosis.as_dict()["OnlineNorm1d"]["train"]
    ey = e1 = bound_y = bound_1 = 0.0
    for (y,), (g,) in zip(x.tolist(), grad.tolist(), strict=True):
        into_1 = g - 0.25 * ey * y
        bound_y = abs(1 - 0.25 * y * y) * bound_y + abs(g * y)
        ey += g * y - 0.25 * ey * y * y
        bound_1 = 0.75 * bound_1 + abs(into_1)
        e1 += into_1 - 0.25 * e1
    expected = {"control_1": abs(e1), "control_y": abs(ey), "control_1_bound": bound_1, "control_y_bound": bound_y}
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, rel=1e-9), key


def test_an_input_that_jumps_shows_its_offset():
    torch.manual_seed(0)
    layer = OnlineNorm1d(3, alpha_fwd=0.999)
    for x in torch.randn(4000, 3, 8).split(100):
        layer(x)
    with diagnose(layer) as diagnosis:
        layer(torch.randn(50, 3, 8) + 4)
    result = diagnosis.as_dict()["OnlineNorm1d"]["train"]
    off, var, seen = 4.0, 1.0, []
    for _ in range(50):
        seen.append(off / var**0.5)
        var = 0.999 * var + 0.001 + 0.001 * off**2
        off *= 0.999
    assert result["mean_rms"] == pytest.approx(np.mean(seen), rel=0.05)
    assert list(result["advice"]) == ["off_centre"]
    assert "Lower alpha_fwd" in result["advice"]["off_centre"]
    layer.reset_running_stats()
    with diagnose(layer) as diagnosis:
        layer(torch.randn(50, 3, 8) + 4)
    assert list(diagnosis.as_dict()["OnlineNorm1d"]["train"]["advice"]) == ["warm_up"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 3, 4)])
def test_planted_samples_are_counted_exactly(shape, bad):
    torch.manual_seed(0)
    layer = OnlineNorm(5, guard="layer_scaling")
    x, grad = torch.randn(shape), torch.randn(shape)
    for plane in ((1, 0), (1, 3), (6, 4)):
        x[plane] = bad
    with diagnose(layer) as diagnosis:
        step(layer, x, grad)
        step(layer, x[:1], grad[:1] * bad)
    result = diagnosis.as_dict()["OnlineNorm"]["train"]
    assert result["skipped_samples"] == 2
    assert result["skipped_gradients"] == 3
    assert all(value is None or np.isfinite(value) for key, value in result.items() if key != "advice")
    assert "2 samples were not finite" in result["advice"]["skipped_samples"]


def test_many_calls_a_step():
    """A recurrent cell: the backward comes in the order opposite to the forward."""
    layer = OnlineNorm1d(4, alpha_fwd=0.9, alpha_bwd=0.8)
    h = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    start = h
    with diagnose(layer) as diagnosis:
        for _ in range(7):
            h = layer(h * 1.3).tanh()
        h.square().sum().backward()
    result = diagnosis.as_dict()["OnlineNorm1d"]["train"]
    assert (result["calls"], result["samples"], result["backward_samples"]) == (7, 21, 21)
    assert result["control_1"] == pytest.approx(float(layer.control_1.square().mean().sqrt()))
    assert start.grad is not None


def test_bfloat16_is_close_to_float32():
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = OnlineNorm2d(4, alpha_fwd=0.9, alpha_bwd=0.8, dtype=dtype)
        with diagnose(layer) as diagnosis:
            for _ in range(10):
                x = torch.randn(4, 4, 6, 6).to(dtype)
                step(layer, x.contiguous(memory_format=torch.channels_last), torch.randn_like(x))
        results.append(diagnosis.as_dict()["OnlineNorm2d"]["train"])
    for key in ("mean_rms", "variance", "cos_1", "cos_y", "control_1", "control_y", "control_y_bound", "zeta_mean"):
        assert results[1][key] == pytest.approx(results[0][key], rel=0.05, abs=0.02), key


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_does_not_count_twice(reentrant):
    results = []
    for checkpointed in (False, True):
        model = network()
        torch.manual_seed(2)
        with diagnose(model) as diagnosis:
            for _ in range(2):
                x = torch.randn(3, 3, 8, 8, requires_grad=True)
                z = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
                z.square().sum().backward()
        results.append(diagnosis.as_dict())
    if reentrant:  # its gradients are held against later statistics
        for modes in results[1].values():
            assert [modes["train"][key] for key in ("calls", "samples", "backward_samples")] == [2, 6, 6]
    else:
        assert results[0] == results[1]


def test_a_context_that_ends_between_a_checkpoints_passes():
    model = network()
    with diagnose(model):
        z = checkpoint(model, torch.randn(3, 3, 8, 8), use_reentrant=False)
    z.sum().backward()


def test_eval_and_frozen_layers_and_layers_without_a_backward():
    model = network()
    model[4].freeze_statistics = True
    with diagnose(model) as diagnosis:
        model(torch.randn(2, 3, 8, 8))
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 3, 8, 8))
    results = diagnosis.as_dict()
    assert {mode: result["samples"] for mode, result in results["1"].items()} == {"train": 2, "eval": 4}
    assert {mode: result["samples"] for mode, result in results["4"].items()} == {"eval": 6}
    for result in results["1"].values():
        assert result["backward_samples"] == 0
        assert result["cos_1"] is result["cos_y"] is result["control_1"] is result["overshoot"] is None


def test_a_frozen_layers_gradient_is_seen_and_its_control_is_not():
    layer = OnlineNorm1d(3)
    layer.freeze_statistics = True
    with diagnose(layer) as diagnosis:
        step(layer, torch.randn(5, 3), torch.randn(5, 3))
    (result,) = diagnosis.as_dict()["OnlineNorm1d"].values()
    assert result["backward_samples"] == 5
    assert result["cos_1"] is not None
    assert result["control_1"] is None


def test_an_input_without_gradient_and_one_by_keyword():
    layer = OnlineNorm1d(3)
    with diagnose(layer) as diagnosis:
        layer(torch.randn(5, 3)).sum().backward()
        layer(x=torch.randn(5, 3, requires_grad=True)).sum().backward()
        layer(torch.zeros(0, 3))
    result = diagnosis.as_dict()["OnlineNorm1d"]["train"]
    assert (result["samples"], result["backward_samples"]) == (10, 5)


@pytest.mark.parametrize("guard", GUARDS)
def test_inference_mode_may_come_first_or_last(guard):
    layer = OnlineNorm1d(3, guard=guard).eval()
    with diagnose(layer) as diagnosis:
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                layer(torch.randn(5, 3))
    assert diagnosis.as_dict()["OnlineNorm1d"]["eval"]["samples"] == 20


def test_a_layer_that_was_never_called():
    model = nn.ModuleDict({"used": OnlineNorm1d(3), "unused": OnlineNorm1d(3)})
    with diagnose(model) as diagnosis:
        model["used"](torch.randn(2, 3))
    assert diagnosis.as_dict()["unused"] == {}
    assert "never called" in str(diagnosis)
    assert "Never called: unused." in str(diagnosis)


def test_copies_made_inside_are_not_watched():
    model = network()
    with diagnose(model) as diagnosis:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        torch.save(model, io.BytesIO())
        for other in copies:
            other(torch.randn(1, 3, 8, 8)).sum().backward()
    assert diagnosis.as_dict() == {"1": {}, "4": {}, "8": {}}


def test_compiled_code_is_left_alone_and_said_so():
    layer = OnlineNorm1d(3).eval()
    model = nn.Sequential(nn.Linear(3, 3), layer)
    x = torch.randn(4, 3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with diagnose(model) as diagnosis:
        z = compiled(x)
    assert torch.allclose(z, model(x), atol=1e-6)
    assert "torch.compile are not seen" in str(diagnosis)
    with diagnose(model) as diagnosis, torch.compiler.set_stance("force_eager"):
        compiled(x)
    assert diagnosis.as_dict()["1"]["eval"]["samples"] == 4


def test_blocks_do_not_change_the_numbers(monkeypatch):
    results = []
    for size in (1 << 20, 16):
        monkeypatch.setattr("onlinenorm.torch.observation._BLOCK", size)
        torch.manual_seed(0)
        layer = OnlineNorm2d(5, guard="clamp", clamp_value=1.0)
        with diagnose(layer) as diagnosis:
            step(layer, torch.randn(3, 5, 2, 3), torch.randn(3, 5, 2, 3))
        results.append(diagnosis.as_dict()["OnlineNorm2d"]["train"])
    assert results[0] == results[1]


# ---- advice


def advice(layer, xs, grads=None):
    with diagnose(layer) as diagnosis:
        for x, grad in zip(xs, xs if grads is None else grads, strict=True):
            step(layer, x, grad)
    return diagnosis.as_dict()[type(layer).__name__]["train"]["advice"]


def test_advice_on_what_is_alarming():
    torch.manual_seed(0)
    stream = torch.randn(60, 10, 4)
    kinds = {"alpha_fwd": 0.9, "guard": None}
    other = torch.randn(60, 10, 4)
    assert advice(OnlineNorm1d(4, **kinds), stream, other) == {}
    short = OnlineNorm1d(4, alpha_fwd=0.7, guard=None)
    advice(short, stream, other)
    assert "short" in advice(short, torch.randn(60, 10, 4), other)
    assert list(advice(OnlineNorm1d(4, alpha_fwd=0.9, guard="clamp", clamp_value=1.0), stream, other)) == ["clamped"]
    assert list(advice(OnlineNorm1d(4, **kinds, alpha_bwd=0.3), stream, other)) == ["overshoot"]
    outlier = stream.clone()
    outlier[50, 3] *= 1e3
    assert "zeta" in advice(OnlineNorm1d(4, alpha_fwd=0.9), outlier, other)
    dead = stream.clone()
    dead[:, :, 2] = 0
    assert "1 of 4 channels" in advice(OnlineNorm1d(4, **kinds), dead, other)["dead_channels"]
    layer = OnlineNorm1d(4, **kinds, alpha_bwd=0.99)
    assert advice(layer, stream, 65536 * (other + 1)) == {}
    assert list(advice(layer, stream, other + 1)) == ["cos_1"], "the loss scale fell by 65536"
    layer.eval()
    with diagnose(layer) as diagnosis:
        layer(torch.randn(50, 4) + 5)
    assert "these data differ" in diagnosis.as_dict()["OnlineNorm1d"]["eval"]["advice"]["off_centre"]


def test_few_samples_allow_no_conclusion():
    assert advice(OnlineNorm1d(2), [torch.randn(1, 2) + 3]) == {}


# ---- the ways out


class Recorder:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        assert isinstance(value, int | float)
        self.scalars[tag] = value, step


def test_as_json_to_tensorboard_and_as_a_table():
    model = network()
    with diagnose(model) as diagnosis:
        model(torch.randn(40, 3, 8, 8) * 5).sum().backward()
        assert "open" in repr(diagnosis)
    results = diagnosis.as_dict()
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    writer = Recorder()
    diagnosis.to_tensorboard(writer, 7)
    assert writer.scalars["onlinenorm/4/train/zeta_mean"] == (results["4"]["train"]["zeta_mean"], 7)
    assert not any(tag.endswith(("clamped", "advice")) for tag in writer.scalars)
    text = str(diagnosis)
    assert "zeta" in text
    assert "clamped" not in text
    assert "40" in text
    assert "warm_up" in results["1"]["train"]["advice"]
    assert results["1"]["train"]["advice"]["warm_up"][:20] in text
    assert "closed" in repr(diagnosis)


def test_one_alarm_of_many_layers_is_one_line():
    layers = nn.ModuleList(OnlineNorm1d(2) for _ in range(5))
    with diagnose(layers) as diagnosis:
        for layer in layers:
            layer(torch.randn(40, 2) + 9)
    lines = [line for line in str(diagnosis).splitlines() if "off centre" in line]
    assert len(lines) == 1
    assert lines[0].startswith("0, train: the outputs are")
    assert "So 4 more." in " ".join(str(diagnosis).split())


def test_a_model_named_like_markup_prints():
    model = nn.ModuleDict({"[red]": OnlineNorm1d(2)})
    with diagnose(model) as diagnosis:
        model["[red]"](torch.randn(2, 2))
    assert "[red]" in str(diagnosis)


def test_without_rich(monkeypatch):
    real = builtins.__import__

    def no_rich(name, *args, **kwargs):
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    layer = OnlineNorm1d(2)
    with diagnose(layer) as diagnosis:
        layer(torch.randn(2, 2))
    monkeypatch.setattr(builtins, "__import__", no_rich)
    with pytest.raises(ImportError, match=r'pip install "onlinenorm\[cli\]"'):
        str(diagnosis)
    assert diagnosis.as_dict()["OnlineNorm1d"]["train"]["samples"] == 2


def test_what_cannot_be_diagnosed():
    with pytest.raises(ValueError, match="Linear has no OnlineNorm layers"), diagnose(nn.Linear(2, 2)):
        pass
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got str"), diagnose("model"):
        pass
