"""The layers behave as `nn.BatchNorm*` users expect, in every habit that PyTorch has."""

import copy
import io
import pickle

import pytest
import torch
from helpers import GUARDS, STATE, assert_close, assert_same_state, channels_last, layer_and_reference, state_of, step
from torch import nn

from onlinenorm import hyperparameters as default
from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, OnlineNorm3d, functional

BACKENDS = ["native", "portable"]


def test_defaults_are_the_paper_s():
    layer = OnlineNorm2d(3)
    assert (layer.alpha_fwd, layer.alpha_bwd) == (default.ALPHA_FWD, default.ALPHA_BWD) == (0.999, 0.99)
    assert (layer.eps, layer.guard, layer.guard_eps) == (1e-5, "layer_scaling", 1e-5)
    assert torch.equal(layer.weight, torch.ones(3))
    assert torch.equal(layer.bias, torch.zeros(3))
    assert torch.equal(layer.running_var, torch.ones(3, dtype=torch.float64))
    assert [name for name, _ in layer.named_buffers()] == [*STATE, "num_samples_tracked"]
    for name in ("running_mean", "control_y", "control_1"):
        assert torch.equal(getattr(layer, name), torch.zeros(3, dtype=torch.float64))


def test_repr_says_what_was_set():
    assert repr(OnlineNorm2d(64, alpha_fwd=0.9)) == (
        "OnlineNorm2d(64, eps=1e-05, alpha_fwd=0.9, alpha_bwd=0.99, affine=True, guard='layer_scaling')"
    )
    assert "guard='clamp', clamp_value=5.0" in repr(OnlineNorm1d(2, guard="clamp"))
    assert "guard=None" in repr(OnlineNorm1d(2, guard=None))


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (OnlineNorm1d, [(2, 4), (2, 4, 5)]),
        (OnlineNorm2d, [(2, 4, 5, 6)]),
        (OnlineNorm3d, [(2, 4, 5, 6, 3)]),
        (OnlineNorm, [(2, 4), (2, 4, 5), (2, 4, 5, 6), (2, 4, 5, 6, 3), (2, 4, 1, 2, 3, 2)]),
    ],
)
def test_shapes_that_each_layer_takes(kind, shapes):
    for shape in shapes:
        assert kind(4)(torch.randn(shape)).shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_size_may_change_from_call_to_call(backend):
    layer, reference = layer_and_reference(3, guard="layer_scaling")
    torch.manual_seed(0)
    with functional.backend(backend):
        for n in (1, 7, 2, 1, 30):
            x, grad = torch.randn(n, 3, 4), torch.randn(n, 3, 4)
            z, grad_x = step(layer, x, grad)
            assert_close("z", z, reference.forward(x.double().numpy()), 1e-5)
            assert_close("grad_x", grad_x, reference.backward(grad.double().numpy()), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_forwards_before_the_backwards(backend):
    """As in a recurrent network: the backwards come in the opposite order of the forwards."""
    layer, reference = layer_and_reference(4)
    torch.manual_seed(0)
    with functional.backend(backend):
        inputs = [torch.randn(3, 4).requires_grad_() for _ in range(5)]
        grads = [torch.randn(3, 4) for _ in range(5)]
        outputs = [layer(x) for x in inputs]
        sum((z * g).sum() for z, g in zip(outputs, grads, strict=True)).backward()
    for x in inputs:
        reference.forward(x.detach().double().numpy())
    for x, g in reversed(list(zip(inputs, grads, strict=True))):
        assert_close("grad_x", x.grad, reference.backward(g.double().numpy()), 1e-5)
    assert_close("weight.grad", layer.weight.grad, reference.weight_grad, 1e-5)
    for name in STATE:
        assert_close(name, getattr(layer, name), getattr(reference, name), 1e-5)


def test_a_cell_that_feeds_itself():
    layer = OnlineNorm1d(8)
    linear = nn.Linear(8, 8)
    h = torch.randn(2, 8)
    for _ in range(6):
        h = torch.tanh(layer(linear(h)))
    h.sum().backward()
    assert layer.num_samples_tracked == 12
    assert linear.weight.grad.isfinite().all()


def test_gradients_accumulate_over_backwards():
    layer, reference = layer_and_reference(3)
    torch.manual_seed(0)
    for _ in range(4):
        x, grad = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
        step(layer, x, grad)
        reference.forward(x.double().numpy())
        reference.backward(grad.double().numpy())
    assert_close("weight.grad", layer.weight.grad, reference.weight_grad, 1e-5)
    assert_close("bias.grad", layer.bias.grad, reference.bias_grad, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 7)])
def test_what_needs_no_gradient_gets_none_and_changes_nothing(backend, guard, shape):
    torch.manual_seed(0)
    x, grad = torch.randn(shape), torch.randn(shape)
    layers = {}
    with functional.backend(backend):
        for needs in ("x weight bias", "x", "weight", "bias", "weight bias"):
            layer, _ = layer_and_reference(3, guard=guard)
            layer.weight.requires_grad_("weight" in needs)
            layer.bias.requires_grad_("bias" in needs)
            own = x.clone().requires_grad_("x" in needs)
            layer(own).backward(grad)
            got = {"x": own.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
            for name, value in got.items():
                assert (value is not None) == (name in needs.split()), (needs, name)
            layers[needs] = (got, state_of(layer))
    whole, state = layers["x weight bias"]
    for got, other in layers.values():
        assert_same_state(state, other)
        for name, value in got.items():
            assert value is None or torch.equal(value, whole[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_grad_gives_the_same_output_and_statistics(backend):
    x = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    left, _ = layer_and_reference(3)
    right = copy.deepcopy(left)
    with functional.backend(backend):
        z = left(x.clone().requires_grad_())
        with torch.no_grad():
            assert torch.equal(right(x), z)
    assert_same_state(state_of(left), state_of(right))


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_uses_the_statistics_and_keeps_all_state(backend):
    layer, _ = layer_and_reference(3)
    with functional.backend(backend):
        step(layer, torch.randn(20, 3, 4) + 2, torch.randn(20, 3, 4))
        before = state_of(layer)
        layer.eval()
        x = torch.randn(4, 3, 4)
        together, grad_x = step(layer, x, torch.randn(4, 3, 4))
        alone = torch.cat([layer(one) for one in x.split(1)])
    assert_same_state(before, state_of(layer))
    assert torch.allclose(together, alone, atol=1e-6), "in eval samples must not see each other"
    assert grad_x.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6, 5, 5).transpose(2, 3),
        lambda: torch.randn(4, 6, 5, 10)[..., ::2],
        lambda: torch.randn(6, 4, 5, 5).transpose(0, 1),
        lambda: torch.randn(4, 1, 1, 1).expand(4, 6, 5, 5),
        lambda: torch.randn(4, 6, 5, 5)[:, :, 1:, 1:],
        lambda: torch.randn(8, 6, 5, 5)[::2],
    ],
)
def test_strided_inputs(backend, make):
    torch.manual_seed(0)
    x, grad = make(), make()
    with functional.backend(backend):
        layer, _ = layer_and_reference(6)
        expected = step(copy.deepcopy(layer), x.contiguous(), grad.contiguous())
        for got, wanted in zip(step(layer, x, grad), expected, strict=True):
            assert torch.allclose(got, wanted, rtol=0, atol=0 if backend == "native" else 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 8, 5), (3, 8, 5, 6), (1, 8, 5, 6), (2, 8, 3, 4, 5), (3, 8, 1, 1)])
def test_memory_format_is_kept_and_gradients_in_another_are_taken(backend, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    grad = torch.randn(shape)
    with functional.backend(backend):
        layer, _ = layer_and_reference(8)
        other = copy.deepcopy(layer)
        z, grad_x = step(layer, channels_last(x), grad)  # an upstream gradient in the plain format
        assert z.stride() == channels_last(x).stride()
        plain, plain_grad = step(other, x, channels_last(grad))
        assert plain.is_contiguous()
    assert torch.allclose(z, plain, atol=1e-5)
    assert torch.allclose(grad_x, plain_grad, atol=1e-5)


def test_an_expanded_gradient():
    layer = OnlineNorm2d(4)
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4), (2, 3, 0, 4)])
def test_empty_batches_leave_the_state_alone(backend, shape):
    layer, _ = layer_and_reference(3)
    before = state_of(layer)
    x = torch.randn(shape, requires_grad=True)
    with functional.backend(backend):
        z = layer(x)
        assert z.shape == shape
        z.sum().backward()
    assert x.grad.shape == shape
    assert_same_state(before, state_of(layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("convert", ["to", "half_or_bfloat16"])
def test_the_state_stays_float64(dtype, convert):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), OnlineNorm2d(4))
    step(model, torch.randn(5, 3, 6, 6), torch.randn(5, 4, 6, 6))
    before = state_of(model[1])
    if convert == "to":
        model.to(dtype)
    else:
        model.half() if dtype == torch.float16 else model.bfloat16()
    assert model[1].weight.dtype == dtype
    assert_same_state(before, state_of(model[1]))
    z, grad_x = step(model[1], torch.randn(5, 4, 6, 6).to(dtype), torch.randn(5, 4, 6, 6).to(dtype))
    assert z.dtype == grad_x.dtype == model[1].weight.grad.dtype == dtype
    for cast in (model.float, model.double, model.cpu):
        cast()
        assert all(getattr(model[1], name).dtype == torch.float64 for name in STATE)
    assert model[1].weight.dtype == torch.float64


def test_a_device_without_float64_gets_float32_state():
    """Such devices refuse the move; the layer then moves a float32 copy."""

    def refuses_float64(t):
        if t.dtype == torch.float64:
            raise TypeError("no float64 on this device")
        return t.clone()

    layer = OnlineNorm(3)
    layer(torch.randn(10, 3))
    mean = layer.running_mean.clone()
    layer._apply(refuses_float64)
    assert layer.running_mean.dtype == torch.float32
    assert torch.equal(layer.running_mean, mean.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), OnlineNorm2d(8), nn.ReLU())
    x = torch.randn(2, 3, 9, 9)
    with torch.autocast("cpu", dtype=dtype):
        z = model(x)
        assert z.dtype == dtype
        loss = z.float().square().mean()
    loss.backward()
    assert model[1].weight.grad.dtype == torch.float32
    assert model[0].weight.grad.isfinite().all()


def test_float32_parameters_serve_every_input_dtype():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        layer = OnlineNorm(3)
        z, grad_x = step(layer, torch.randn(4, 3, 5).to(dtype), torch.randn(4, 3, 5).to(dtype))
        assert z.dtype == grad_x.dtype == dtype
        assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("through", ["deepcopy", "pickle", "torch.save", "state_dict"])
def test_copies_continue_alike(through):
    layer, _ = layer_and_reference(3, guard="clamp")
    torch.manual_seed(0)
    step(layer, torch.randn(5, 3, 4), torch.randn(5, 3, 4))
    if through == "deepcopy":
        other = copy.deepcopy(layer)
    elif through == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    elif through == "torch.save":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other, _ = layer_and_reference(3, guard="clamp", seed=9)
        other.load_state_dict(layer.state_dict())
    x, grad = torch.randn(4, 3, 4), torch.randn(4, 3, 4)
    for a, b in zip(step(layer, x, grad), step(other, x, grad), strict=True):
        assert torch.equal(a, b)
    assert_same_state(state_of(layer), state_of(other))


def test_a_batchnorm_checkpoint_loads():
    source = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    for _ in range(3):
        source(torch.randn(5, 3, 6, 6) * 2 + 1)
    target = nn.Sequential(nn.Conv2d(3, 4, 1), OnlineNorm2d(4))
    checkpoint = source.state_dict()
    names = list(checkpoint)
    assert str(target.load_state_dict(checkpoint)) == "<All keys matched successfully>"
    assert list(checkpoint) == names, "loading changed the caller's dictionary"
    assert torch.equal(target[1].running_mean, source[1].running_mean.double())
    assert torch.equal(target[1].running_var, source[1].running_var.double())
    assert target[1].num_samples_tracked == 3
    assert torch.equal(target[1].control_y, torch.zeros(4, dtype=torch.float64))
    x = torch.randn(2, 3, 6, 6)
    target[1].guard = None
    assert torch.allclose(target.eval()(x), source.eval()(x), atol=1e-5)


def test_a_checkpoint_that_lacks_something_else_is_still_refused():
    layer = OnlineNorm(3)
    checkpoint = layer.state_dict()
    del checkpoint["running_mean"]
    with pytest.raises(RuntimeError, match="running_mean"):
        OnlineNorm(3).load_state_dict(checkpoint)


def test_meta_device():
    layer = OnlineNorm2d(4, device="meta")
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.running_mean.dtype == torch.float64
    assert_same_state(state_of(OnlineNorm2d(4)), state_of(layer))


def test_double_backward_says_why_not():
    layer = OnlineNorm(3)
    x = torch.randn(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    assert grad.isfinite().all()
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.square().sum().backward()


def test_parametrised_weights():
    layer = OnlineNorm(3)
    nn.utils.parametrizations.weight_norm(layer, "weight", dim=None)
    step(layer, torch.randn(4, 3), torch.randn(4, 3))
    assert layer.parametrizations.weight.original1.grad is not None


def test_attributes_take_effect_when_they_are_changed():
    layer = OnlineNorm(1, alpha_fwd=0.999)
    layer.alpha_fwd = 0.5
    layer(torch.ones(1, 1))
    assert layer.running_mean.item() == 0.5


def test_compiled_models_run():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), OnlineNorm2d(4))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="eager")
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(compiled(x), model(x))
    assert_same_state(state_of(model[1]), state_of(other[1]))


def test_the_functional_form_is_the_layer():
    layer, _ = layer_and_reference(3)
    state = [t.clone() for name, t in state_of(layer).items() if name != "num_samples_tracked"]
    x = torch.randn(5, 3, 4)
    z = functional.online_norm(
        x, *state, layer.weight, layer.bias, alpha_fwd=layer.alpha_fwd, alpha_bwd=layer.alpha_bwd
    )
    assert torch.equal(z, layer(x))
    assert torch.equal(state[0], layer.running_mean)
