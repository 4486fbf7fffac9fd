"""`torch.compile`: one graph, and in it the eager path's results, bit for bit, and its state."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import GUARDS, assert_same_state, channels_last, layer_and_reference, state_of
from torch import nn
from torch._dynamo.utils import counters
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from onlinenorm.experiments.resnet import resnet20
from onlinenorm.torch import OnlineNorm, OnlineNorm1d, OnlineNorm2d, functional, ops

BACKENDS = ["native", "portable"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)


def compiled(model, **options):
    """A copy of the model, and the copy compiled: one graph or an error."""
    twin = copy.deepcopy(model)
    return twin, torch.compile(twin, fullgraph=True, **{"backend": "aot_eager", **options})


def number_of_graphs():
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def one_step(model, x, grad, needs_x=True):
    x = x.detach().requires_grad_(needs_x)
    z = model(x)
    z.backward(grad)
    return [z.detach(), *([x.grad] if needs_x else [])]


def assert_same_step(model, twin, run, x, grad, equal=torch.equal, needs_x=True):
    """One step of both: outputs, gradients and state."""
    for left, right in zip(one_step(model, x, grad, needs_x), one_step(run, x, grad, needs_x), strict=True):
        assert left.dtype == right.dtype
        assert left.stride() == right.stride()
        assert equal(left, right)
    assert_same_gradients_and_state(model, twin, equal)


def assert_same_gradients_and_state(model, twin, equal=torch.equal):
    for (name, left), right in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None), name
        assert left.grad is None or equal(left.grad, right.grad), name
    for (name, left), right in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert equal(left, right), name


def almost(left, right):
    return torch.allclose(left, right, rtol=1e-6, atol=1e-6 * max(1, float(left.abs().max())))


# the layer alone


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_ten_steps_of_changing_size_are_one_graph_and_the_eager_bits(guard, affine, name):
    layer, _ = layer_and_reference(5, guard=guard, affine=affine)
    twin, run = compiled(layer, dynamic=True)
    with functional.backend(name):
        for n in (4, 7, 2, 3, 33, 4, 2, 9, 5, 6):
            assert_same_step(layer, twin, run, torch.randn(n, 5, 6), torch.randn(n, 5, 6))
    assert number_of_graphs() == 1


@pytest.mark.parametrize("guard", GUARDS)
def test_the_same_by_inductor(guard):
    layer, _ = layer_and_reference(5, guard=guard)
    twin, run = compiled(layer, dynamic=True, backend="inductor")
    for n in (4, 7, 2, 33, 1):
        assert_same_step(layer, twin, run, torch.randn(n, 5, 6), torch.randn(n, 5, 6))
    assert number_of_graphs() <= 2, "only size 1 may cost another graph"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 17), (4, 17, 3), (4, 17, 3, 2), (2, 17, 1, 1), (2, 17, 2, 3, 2)])
def test_shapes_and_dtypes(shape, dtype, name):
    layer, _ = layer_and_reference(17)
    twin, run = compiled(layer)
    with functional.backend(name):
        assert_same_step(layer, twin, run, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: channels_last(torch.randn(4, 6, 5, 5)),
        lambda: torch.randn(4, 6, 5, 5).transpose(2, 3),
        lambda: torch.randn(4, 6, 5, 10)[..., ::2],
        lambda: torch.randn(4, 1, 1, 1).expand(4, 6, 5, 5),
        lambda: torch.randn(8, 6, 5, 5)[::2],
    ],
)
def test_layouts_of_inputs_and_gradients(make, name):
    layer, _ = layer_and_reference(6)
    twin, run = compiled(layer)
    with functional.backend(name):
        for x, grad in [(make(), torch.randn(4, 6, 5, 5)), (torch.randn(4, 6, 5, 5), make()), (make(), make())]:
            # the compiler may hand over the gradient in another layout; the engine's sums don't depend on it
            assert_same_step(layer, twin, run, x, grad, torch.equal if name == "native" else almost)


@pytest.mark.parametrize("needs", ["x", "weight", "bias", "weight bias", "x bias", ""])
def test_what_needs_no_gradient_gets_none(needs):
    layer, _ = layer_and_reference(4)
    layer.weight.requires_grad_("weight" in needs)
    layer.bias.requires_grad_("bias" in needs)
    twin, run = compiled(layer)
    x, grad = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    if needs:
        assert_same_step(layer, twin, run, x, grad, needs_x="x" in needs)
    else:
        assert torch.equal(layer(x), run(x))
    assert_same_state(state_of(layer), state_of(twin))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_training_forward_without_gradients_moves_the_statistics(context):
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer)
    with context():
        x = torch.randn(3, 4, 5)
        assert torch.equal(layer(x), run(x))
    assert_same_state(state_of(layer), state_of(twin))
    assert_same_step(layer, twin, run, torch.randn(3, 4, 5), torch.randn(3, 4, 5))


@pytest.mark.parametrize("shape", [(0, 4), (0, 4, 3), (2, 4, 0)])
def test_empty_batches_leave_the_state_alone(shape):
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer)
    assert_same_step(layer, twin, run, torch.randn(shape), torch.randn(shape))
    assert_same_state(state_of(layer), state_of(twin))


def test_the_order_of_calls_is_free():
    """Forwards of a compiled layer may all come first, as in a recurrent network that is compiled layer by layer."""
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer)
    inputs, grads = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (3, 0, 4)):
        for model, own in ((layer, inputs.clone().requires_grad_()), (run, inputs.clone().requires_grad_())):
            outputs = [model(x) for x in own]
            for i in order:
                outputs[i].backward(grads[i])
        assert_same_gradients_and_state(layer, twin)


def test_backward_twice_moves_the_control_twice():
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer)
    x, grad = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    for model in (layer, run):
        own = x.clone().requires_grad_()
        z = model(own)
        z.backward(grad, retain_graph=True)
        z.backward(grad)
    assert_same_gradients_and_state(layer, twin)


def test_a_forward_without_its_backward():
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer)
    for model in (layer, run):
        model(torch.ones(3, 4, requires_grad=True))
    assert_same_step(layer, twin, run, torch.randn(3, 4), torch.randn(3, 4))


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_eval_agrees_and_changes_nothing(guard, affine, dtype):
    layer, _ = layer_and_reference(6, guard=guard, affine=affine)
    one_step(layer, torch.randn(20, 6, 4) * 3 + 100, torch.randn(20, 6, 4))
    layer.zero_grad()
    layer.eval()
    twin, run = compiled(layer, dynamic=True)
    before = state_of(layer)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    for n in (5, 2, 3):
        x, grad = (torch.randn(n, 6, 4) * 3 + 100).to(dtype), torch.randn(n, 6, 4).to(dtype)
        assert_same_step(
            layer,
            twin,
            run,
            x,
            grad,
            lambda left, right: bool((left - right).abs().max() <= tolerance * (1 + left.abs().max())),
        )
    assert_same_state(before, state_of(twin))
    assert number_of_graphs() == 1


def test_switching_between_train_and_eval():
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer)
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    for training in (True, False, True, False):
        layer.train(training)
        twin.train(training)
        assert_same_step(layer, twin, run, x, grad, almost)


def test_attributes_take_effect_when_they_are_changed():
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer, dynamic=True)
    for alpha in (0.9, 0.5):
        layer.alpha_fwd = twin.alpha_fwd = alpha
        assert_same_step(layer, twin, run, torch.randn(3, 4), torch.randn(3, 4))


def test_the_backend_is_the_one_of_the_call():
    """Chosen when the layer is called, as in eager mode, wherever it was compiled and wherever its backward runs."""
    layer, _ = layer_and_reference(4)
    twin, run = compiled(layer)
    for name in ("native", "portable", "native"):
        x, grad = torch.randn(3, 4, 50) * 7, torch.randn(3, 4, 50)
        for model in (layer, run):
            with functional.backend(name):
                z = model(x)
            z.backward(grad)
        assert_same_gradients_and_state(layer, twin)
    assert number_of_graphs() == 2
    with functional.backend("native"), pytest.raises(RuntimeError, match="no kernel for"):
        torch.compile(OnlineNorm(3, device="meta"), backend="eager")(torch.randn(2, 3, device="meta"))


def test_any_number_of_threads_at_any_time():
    layer, _ = layer_and_reference(8)
    twin, run = compiled(layer)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same_step(layer, twin, run, torch.randn(4, 8, 40, 40), torch.randn(4, 8, 40, 40))
    finally:
        torch.set_num_threads(before)


def test_the_functional_form():
    layer, _ = layer_and_reference(3)
    state = [t.clone() for name, t in state_of(layer).items() if name != "num_samples_tracked"]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x, *tensors):
        return functional.online_norm(x, *tensors, alpha_fwd=0.9, alpha_bwd=0.8).relu()

    x = torch.randn(5, 3, 4)
    assert torch.equal(run(x, *state, layer.weight, layer.bias), layer(x).relu())
    assert torch.equal(state[0], layer.running_mean)
    assert torch.equal(state[1], layer.running_var)


@pytest.mark.parametrize(
    ("layer", "x", "error", "message"),
    [
        (OnlineNorm2d(3), torch.randn(2, 3), ValueError, "expected 4D input (got 2D input)"),
        (
            OnlineNorm(3),
            torch.randn(2, 5),
            ValueError,
            "expected input with 3 channels in dimension 1, got shape (2, 5)",
        ),
        (OnlineNorm(3), torch.ones(2, 3).int(), TypeError, "the input must be floating point, got torch.int32"),
        (OnlineNorm(3).double(), torch.randn(2, 3), TypeError, "weight must be torch.float32, got torch.float64"),
        (OnlineNorm(3, device="meta"), torch.randn(2, 3), RuntimeError, "running_mean is on meta, but"),
    ],
)
def test_errors_say_the_same(layer, x, error, message):
    before = state_of(layer)
    with pytest.raises(error, match=re.escape(message)):
        torch.compile(layer, backend="aot_eager")(x)
    with pytest.raises(Exception, match=re.escape(message.split(" (")[0].split(", got shape")[0])):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    if not layer.running_mean.is_meta:
        assert_same_state(before, state_of(layer))


def test_a_setting_out_of_range_is_refused():
    layer = OnlineNorm(3)
    layer.alpha_fwd = 1.5
    with pytest.raises(ValueError, match="alpha_fwd must be in"):
        torch.compile(layer, backend="aot_eager")(torch.randn(2, 3))


# networks


def small_network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        OnlineNorm2d(8, alpha_fwd=0.9, alpha_bwd=0.8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        OnlineNorm2d(16, alpha_fwd=0.9, alpha_bwd=0.8, guard="clamp"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 6, bias=False),
        OnlineNorm1d(6, alpha_fwd=0.9, alpha_bwd=0.8, guard=None),
    )


def train_both(
    model, twin, run, *, steps=10, size=14, batches=(4, 2, 7), format_=torch.contiguous_format, equal=almost
):
    # In float64 so that rounding, which a compiler may do differently, can't grow over the steps
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, twin)]
    for step in range(steps):
        n = batches[step % len(batches)]
        x = torch.randn(n, 3, size, size, dtype=torch.float64).to(memory_format=format_)
        target = torch.randint(6, (n,))
        losses = []
        for call, optimizer in zip((model, run), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert equal(*losses)
        assert_same_gradients_and_state(model, twin, equal)


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}], ids=["default", "reduce-overhead"])
def test_a_network_by_inductor(format_, options):
    model = small_network().double().to(memory_format=format_)
    twin = copy.deepcopy(model)
    run = torch.compile(twin, fullgraph=True, dynamic=True, **options)
    train_both(model, twin, run, format_=format_)
    assert number_of_graphs() == 1


def test_resnet20():
    model = resnet20(lambda c: OnlineNorm2d(c, alpha_fwd=0.9, alpha_bwd=0.8), num_classes=6).double()
    twin, run = compiled(model)
    train_both(model, twin, run, size=16, batches=(2,))
    assert number_of_graphs() == 1


def test_autocast():
    model = small_network()
    twin, run = compiled(model)
    x = torch.randn(2, 3, 14, 14)
    for call in (model, run):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = call(x)
        assert z.dtype == torch.bfloat16
        z.float().square().mean().backward()
    assert_same_gradients_and_state(model, twin, lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-3))


class Cell(nn.Module):
    """A recurrent network whose every step normalises by the same layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = OnlineNorm1d(8, alpha_fwd=0.9, alpha_bwd=0.8)

    def forward(self, h):
        for _ in range(5):
            h = torch.tanh(self.norm(self.linear(h)))
        return h


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_layer_called_several_times_in_one_graph(backend):
    model = Cell().double()
    twin, run = compiled(model, backend=backend, dynamic=True)
    for n in (3, 2, 4):
        x, grad = torch.randn(n, 8).double(), torch.randn(n, 8).double()
        assert_same_step(model, twin, run, x, grad, almost)
    assert twin.norm.num_samples_tracked == 45
    assert number_of_graphs() == 1


KEEP = partial(create_selective_checkpoint_contexts, [torch.ops.onlinenorm.forward.default])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_checkpointing_inside_a_graph_that_saves_what_the_layer_returns(backend):
    model = Cell().double()
    twin = copy.deepcopy(model)

    @torch.compile(fullgraph=True, backend=backend)
    def run(x):
        return checkpoint(twin, x, use_reentrant=False, context_fn=KEEP)

    for _ in range(3):
        assert_same_step(model, twin, run, torch.randn(3, 8).double(), torch.randn(3, 8).double(), almost)


def test_checkpointing_inside_a_graph_that_saves_nothing_is_refused():
    """The compiler would repeat the layer from statistics that have moved on, and give wrong gradients silently."""
    model = Cell()
    run = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    z = run(torch.randn(3, 8, requires_grad=True))
    before = state_of(model.norm)
    with pytest.raises(RuntimeError, match=r"inside a backward pass.*create_selective_checkpoint_contexts"):
        z.sum().backward()
    assert_same_state(before, state_of(model.norm))


def test_checkpointing_around_a_graph():
    model = Cell().double()
    twin = copy.deepcopy(model)
    graph = torch.compile(twin, fullgraph=True)
    for _ in range(3):
        x, grad = torch.randn(3, 8).double(), torch.randn(3, 8).double()
        assert_same_step(model, twin, lambda x: checkpoint(graph, x, use_reentrant=False), x, grad, almost)


# the operators


FLOAT, DOUBLE, BFLOAT = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("use_native", [True, False])
@pytest.mark.parametrize("parameters", ["weight bias", "weight", ""])
@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "guard", "warmup", "act"),
    [
        ((4, 3), torch.clone, FLOAT, "layer_scaling", True, "relu"),
        ((4, 17, 5), torch.clone, DOUBLE, "layer_scaling", False, None),
        ((2, 16, 3, 4), torch.clone, BFLOAT, "clamp", False, None),
        ((2, 16, 7, 7), channels_last, FLOAT, "layer_scaling", True, "silu"),
        ((2, 3, 1, 1), torch.clone, FLOAT, None, False, "gelu"),
        ((2, 33, 2, 2, 2), channels_last, DOUBLE, None, True, None),
        ((2, 4, 6, 6), lambda x: x[..., ::2], FLOAT, "clamp", False, "leaky_relu"),
    ],
)
def test_the_operators_pass_opcheck(shape, layout, dtype, guard, warmup, act, parameters, use_native):
    layer, _ = layer_and_reference(shape[1], guard=guard)
    values = 0.9, 0.8, 1e-5, guard, 1e-5, 1.5, warmup, not warmup, act
    weight = layer.weight.detach() if "weight" in parameters else None
    bias = layer.bias.detach() if "bias" in parameters else None
    x, grad = (layout(torch.randn(shape).to(dtype)) for _ in range(2))
    state = layer.running_mean, layer.running_var, layer.num_samples_tracked
    for keep in (True, False):
        opcheck(ops.forward, (x, weight, bias, *state, use_native, keep, *values))
    _, replay = ops.forward(x, weight, bias, *state, use_native, True, *values)
    for needs in ((True, weight is not None, bias is not None), (False, weight is not None, False)):
        control = layer.control_y, layer.control_1
        opcheck(ops.backward, (x, grad, weight, bias, *control, replay, use_native, *needs, *values))
