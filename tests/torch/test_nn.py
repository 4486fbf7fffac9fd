"""Recurrent layers: against the paper's equations unrolled by hand, and against torch.nn."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import STATE, assert_close, assert_same_state, state_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onlinenorm.reference import OnlineNorm as Reference
from onlinenorm.torch import OnlineNorm
from onlinenorm.torch.nn import LSTM, RNN, LSTMCell, RNNCell

SETTINGS = {"alpha_fwd": 0.97, "alpha_bwd": 0.9}
LAYERS = {"rnn": RNN, "lstm": LSTM}
CELLS = {"rnn": RNNCell, "lstm": LSTMCell}
TORCH = {"rnn": nn.RNN, "lstm": nn.LSTM, "rnn cell": nn.RNNCell, "lstm cell": nn.LSTMCell}
OURS = {"rnn": RNN, "lstm": LSTM, "rnn cell": RNNCell, "lstm cell": LSTMCell}
TOLERANCE = 1e-10


def normalisers(layer):
    """Of the gates, in the order of their rows in the weights."""
    return list(layer.norm.values()) if isinstance(layer.norm, nn.ModuleDict) else [layer.norm]


def randomised(layer, seed=0):
    """The layer with a gain and a bias in its normalisers that can be told from none."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for norm in normalisers(layer):
            norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
            norm.bias.copy_(torch.randn(norm.bias.shape, generator=generator))
    return layer


def references(layer):
    """One for each normaliser, with its settings and parameters."""
    made = []
    for norm in normalisers(layer):
        reference = Reference(norm.num_features, norm.alpha_fwd, norm.alpha_bwd, norm.eps, guard=norm.guard)
        reference.weight, reference.bias = norm.weight.detach().numpy().copy(), norm.bias.detach().numpy().copy()
        made.append(reference)
    return made


def tensors(hx):
    return () if hx is None else (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)


def as_hx(kind, states):
    return states[0] if kind == "rnn" else tuple(states)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


class Unrolled:
    """An RNN or LSTM in NumPy around references: forward over time, and backward through it, one step at a time."""

    def __init__(self, layer):
        self.gates = references(layer)
        parameters = {name: p.detach().numpy() for name, p in layer.named_parameters(recurse=False)}
        self.w_ih, self.w_hh = parameters["weight_ih_l0"], parameters["weight_hh_l0"]
        self.bias = sum((p for name, p in parameters.items() if name.startswith("bias")), np.zeros(len(self.w_ih)))
        self.relu = getattr(layer, "nonlinearity", None) == "relu"
        self.grads = {name: np.zeros_like(p) for name, p in parameters.items()}

    def forward(self, x, states):
        """Every h for x of (L, N, *), and the last states."""
        self.steps, outputs = [], []
        for at_t in x:
            h = states[0]
            a = np.split(at_t @ self.w_ih.T + h @ self.w_hh.T + self.bias, len(self.gates), axis=1)
            n = [norm.forward(part) for norm, part in zip(self.gates, a, strict=True)]
            if len(n) == 1:
                new = (np.maximum(n[0], 0) if self.relu else np.tanh(n[0]),)
                act = new
            else:
                i, f, g, o = act = sigmoid(n[0]), sigmoid(n[1]), np.tanh(n[2]), sigmoid(n[3])
                c = f * states[1] + i * g
                new = (o * np.tanh(c), c)
            self.steps.append((at_t, states, act, new))
            states = new
            outputs.append(states[0])
        return np.stack(outputs), states

    def backward(self, grad_outputs, grad_states):
        """The gradients of x and of the states that the forward started from."""
        grad_x = []
        for grad_h, (x, old, act, new) in zip(grad_outputs[::-1], self.steps[::-1], strict=True):
            dh = grad_states[0] + grad_h
            if len(self.gates) == 1:
                slopes = [dh * (new[0] > 0 if self.relu else 1 - new[0] ** 2)]
            else:
                i, f, g, o = act
                tanh_c = np.tanh(new[1])
                dc = grad_states[1] + dh * o * (1 - tanh_c**2)
                slopes = [
                    dc * g * i * (1 - i),
                    dc * old[1] * f * (1 - f),
                    dc * i * (1 - g**2),
                    dh * tanh_c * o * (1 - o),
                ]
            da = np.concatenate([norm.backward(s) for norm, s in zip(self.gates, slopes, strict=True)], axis=1)
            for name in self.grads:
                self.grads[name] += da.sum(0) if name.startswith("bias") else da.T @ (x if "ih" in name else old[0])
            grad_x.append(da @ self.w_ih)
            grad_states = (da @ self.w_hh, *([dc * f] if len(self.gates) > 1 else []))
        return np.stack(grad_x[::-1]), grad_states


@given(
    kind=st.sampled_from(["rnn", "relu rnn", "lstm"]),
    steps=st.integers(1, 6),
    samples=st.integers(1, 4),
    inputs=st.integers(1, 5),
    hidden=st.integers(2, 20),
    bias=st.booleans(),
    batch_first=st.booleans(),
    given_state=st.booleans(),
    guard=st.sampled_from(["layer_scaling", None]),
)
def test_layers_are_the_reference_unrolled(kind, steps, samples, inputs, hidden, bias, batch_first, given_state, guard):
    """Two calls, the second from the first one's state, detached, as truncated backpropagation through time has it."""
    torch.manual_seed(0)
    more = {"nonlinearity": "relu"} if kind == "relu rnn" else {}
    kind = kind.removeprefix("relu ")
    layer = LAYERS[kind](
        inputs, hidden, bias=bias, batch_first=batch_first, guard=guard, dtype=torch.float64, **SETTINGS, **more
    )
    unrolled = Unrolled(randomised(layer))
    size = 1 if kind == "rnn" else 2
    zeros = [np.zeros((samples, hidden))] * size
    states = [torch.randn(1, samples, hidden, dtype=torch.float64).requires_grad_() for _ in range(size)]
    for call in range(2):
        x = torch.randn(steps, samples, inputs, dtype=torch.float64).requires_grad_()
        hx = as_hx(kind, states) if given_state or call else None
        output, last = layer(x.transpose(0, 1) if batch_first else x, hx)
        output = output.transpose(0, 1) if batch_first else output
        numbers = zeros if hx is None else [h.detach().numpy()[0] for h in states]
        expected, expected_last = unrolled.forward(x.detach().numpy(), numbers)
        assert_close("output", output, expected, TOLERANCE)
        for h, wanted in zip(tensors(last), expected_last, strict=True):
            assert_close("last state", h, wanted[None], TOLERANCE)

        grads = [torch.randn_like(t) for t in (output, *tensors(last))]
        torch.autograd.backward([output, *tensors(last)], grads)
        grad_x, grad_states = unrolled.backward(grads[0].numpy(), [g.numpy()[0] for g in grads[1:]])
        assert_close("gradient of the input", x.grad, grad_x, TOLERANCE)
        if hx is not None:
            for h, wanted in zip(states, grad_states, strict=True):
                assert_close("gradient of the state", h.grad, wanted[None], TOLERANCE)
        states = [h.detach().requires_grad_() for h in tensors(last)]

    for name, wanted in unrolled.grads.items():
        assert_close(f"{name}.grad", getattr(layer, name).grad, wanted, TOLERANCE)
    for norm, reference in zip(normalisers(layer), unrolled.gates, strict=True):
        assert_close("gradient of the gain", norm.weight.grad, reference.weight_grad, TOLERANCE)
        assert_close("gradient of the normaliser's bias", norm.bias.grad, reference.bias_grad, TOLERANCE)
        for name in STATE:
            assert_close(name, getattr(norm, name), getattr(reference, name), TOLERANCE)
        assert norm.num_samples_tracked == 2 * steps * samples


def with_weights_of(ours, theirs):
    """Our layer or cell with torch.nn's parameters; the normalisers keep theirs."""
    unexpected = ours.load_state_dict(theirs.state_dict(), strict=False).unexpected_keys
    assert not unexpected, f"torch.nn has parameters that we have not: {unexpected}"
    return ours


def outcome(module, x, hx):
    """Outputs, last states and all gradients of one call."""
    x = x.clone().requires_grad_()
    hx = (
        None
        if hx is None
        else as_hx("rnn" if isinstance(hx, torch.Tensor) else "lstm", [h.clone() for h in tensors(hx)])
    )
    for h in tensors(hx):
        h.requires_grad_()
    result = module(x, hx)
    outputs = [t for part in tensors(result) for t in tensors(part)]
    generator = torch.Generator().manual_seed(1)
    sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in outputs).backward()
    grads = {name: p.grad for name, p in module.named_parameters(recurse=False)}
    return [t.detach() for t in outputs], [x.grad, *(h.grad for h in tensors(hx))], grads


@pytest.mark.parametrize("norm", ["taken out", None])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", TORCH)
def test_without_a_normaliser_they_are_those_of_torch(kind, norm, batched, bias):
    torch.manual_seed(0)
    theirs = TORCH[kind](3, 5, bias=bias, dtype=torch.float64)
    ours = OURS[kind](3, 5, bias=bias, dtype=torch.float64, norm=norm and "online")
    with_weights_of(ours, theirs)
    if norm:  # our own loop, around nothing
        ours.norm = nn.Identity() if "rnn" in kind else nn.ModuleDict({gate: nn.Identity() for gate in ours.norm})
    cell = "cell" in kind
    batch = (2,) if batched else ()
    x = torch.randn(*(() if cell else (4,)), *batch, 3, dtype=torch.float64)
    states = [torch.randn(*(() if cell else (1,)), *batch, 5, dtype=torch.float64) for _ in range(2)]
    for hx in (None, states[0] if "rnn" in kind else tuple(states)):
        for module in (ours, theirs):
            module.zero_grad()
        (outputs, grads, own), (wanted, wanted_grads, wanted_own) = outcome(ours, x, hx), outcome(theirs, x, hx)
        assert [t.shape for t in outputs] == [t.shape for t in wanted]
        for got, expected in zip((*outputs, *grads), (*wanted, *wanted_grads), strict=True):
            assert_close("output or gradient", got, expected.numpy(), TOLERANCE)
        assert own.keys() == wanted_own.keys()
        for name, grad in own.items():
            assert_close(f"{name}.grad", grad, wanted_own[name].numpy(), TOLERANCE)


@pytest.mark.parametrize("kind", TORCH)
def test_initial_weights_are_those_of_torch(kind):
    for seed, norm in enumerate(("online", "layer", None)):
        torch.manual_seed(seed)
        theirs = TORCH[kind](3, 5).state_dict()
        torch.manual_seed(seed)
        ours = OURS[kind](3, 5, norm=norm).state_dict()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), f"{name} does not start as torch.nn draws it"


@pytest.mark.parametrize("kind", OURS)
def test_resetting_draws_the_weights_anew_and_leaves_the_normalisers_alone(kind):
    layer = OURS[kind](3, 5)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.reset_parameters()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("norm"), name


def test_layer_normalisation_stands_in_the_same_place():
    torch.manual_seed(0)
    layer = randomised(LSTM(3, 5, norm="layer", dtype=torch.float64))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    h = c = torch.zeros(2, 5, dtype=torch.float64)
    for at_t, output in zip(x, layer(x)[0], strict=True):
        a = at_t @ layer.weight_ih_l0.T + layer.bias_ih_l0 + h @ layer.weight_hh_l0.T + layer.bias_hh_l0
        i, f, g, o = (
            F.layer_norm(part, (5,), norm.weight, norm.bias)
            for part, norm in zip(a.chunk(4, 1), normalisers(layer), strict=True)
        )
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        assert_close("h", output, h.detach().numpy(), TOLERANCE)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_cell_called_step_by_step_is_the_layer(kind):
    torch.manual_seed(0)
    layer = randomised(LAYERS[kind](3, 5, dtype=torch.float64, **SETTINGS))
    cell = CELLS[kind](3, 5, dtype=torch.float64, **SETTINGS)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    grad = torch.randn(6, 2, 5, dtype=torch.float64)
    output, _ = layer(x)
    output.backward(grad)
    hx, outputs = None, []
    for at_t in x:
        hx = cell(at_t, hx)
        outputs.append(tensors(hx)[0])
    torch.stack(outputs).backward(grad)
    assert_close("outputs", output, torch.stack(outputs).detach().numpy(), TOLERANCE)
    for name, parameter in cell.named_parameters():
        other = dict(layer.named_parameters())[name if name.startswith("norm") else f"{name}_l0"]
        assert_close(f"{name}.grad", other.grad, parameter.grad.numpy(), TOLERANCE)
    for a, b in zip(normalisers(layer), normalisers(cell), strict=True):
        for name in STATE:
            assert_close(name, getattr(a, name), getattr(b, name).numpy(), TOLERANCE)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_stream_does_not_depend_on_how_it_is_cut_into_calls(kind):
    torch.manual_seed(0)
    whole = LAYERS[kind](3, 5, dtype=torch.float64, **SETTINGS)
    parts = copy.deepcopy(whole)
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        output, last = whole(x)
        hx, outputs = None, []
        for part in x.split((1, 5, 3)):
            out, hx = parts(part, hx)
            outputs.append(out)
    assert_close("outputs", torch.cat(outputs), output.numpy(), TOLERANCE)
    for a, b in zip(tensors(hx), tensors(last), strict=True):
        assert_close("last state", a, b.numpy(), TOLERANCE)
    for a, b in zip(normalisers(whole), normalisers(parts), strict=True):
        assert a.num_samples_tracked == b.num_samples_tracked == 18
        assert_close("running_mean", a.running_mean, b.running_mean.numpy(), TOLERANCE)


@pytest.mark.parametrize("kind", LAYERS)
def test_unbatched_and_batch_first_are_the_same_numbers_in_another_shape(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind](3, 5, dtype=torch.float64).eval()
    first = LAYERS[kind](3, 5, dtype=torch.float64, batch_first=True).eval()
    first.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    output, last = layer(x)
    swapped, swapped_last = first(x.transpose(0, 1))
    assert_close("batch_first", swapped.transpose(0, 1), output.detach().numpy(), TOLERANCE)
    for each in (layer, first):  # batch_first says nothing about what has no batch
        for sample in range(2):
            alone, alone_last = each(x[:, sample])
            assert_close("unbatched", alone, output[:, sample].detach().numpy(), TOLERANCE)
            for h, of_all, also in zip(tensors(alone_last), tensors(last), tensors(swapped_last), strict=True):
                assert_close("unbatched state", h, of_all[:, sample].detach().numpy(), TOLERANCE)
                assert_close("batch_first state", h, also[:, sample].detach().numpy(), TOLERANCE)


def test_each_gate_is_scaled_by_itself():
    """A gain that is the same for a whole gate is divided out again by that gate's zeta, and touches no other gate."""
    for gate in "ifgo":
        torch.manual_seed(0)
        plain, scaled = LSTM(3, 8), LSTM(3, 8)
        scaled.load_state_dict(plain.state_dict())
        with torch.no_grad():
            scaled.norm[gate].weight.mul_(7)
        x = torch.randn(5, 4, 3)
        error = (scaled(x)[0] - plain(x)[0]).abs().max()
        assert error < 1e-4, f"the gain of gate {gate} changes the output by {error:.1e}"


def test_the_memory_cell_is_not_normalised():
    """It adds up, beyond what any normalised value could be, while the forget gate is open."""
    lstm = LSTM(3, 8, guard=None)
    with torch.no_grad():
        lstm.norm["f"].bias.fill_(20)
        lstm.norm["i"].bias.fill_(20)
        lstm.norm["g"].bias.fill_(20)
        _, (_, c) = lstm(torch.randn(50, 2, 3))
    assert torch.allclose(c, torch.full_like(c, 50), atol=0.5)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("through", ["deepcopy", "state_dict"])
def test_copies_continue_alike(kind, through):
    torch.manual_seed(0)
    layer = LAYERS[kind](3, 5, **SETTINGS)
    layer(torch.randn(6, 2, 3))[0].sum().backward()
    layer.zero_grad()
    if through == "deepcopy":
        other = copy.deepcopy(layer)
    else:
        other = LAYERS[kind](3, 5, **SETTINGS)
        other.load_state_dict(layer.state_dict())
    x = torch.randn(6, 2, 3)
    a, b = outcome(layer, x, None), outcome(other, x, None)
    for left, right in zip((*a[0], *a[1], *a[2].values()), (*b[0], *b[1], *b[2].values()), strict=True):
        assert torch.equal(left, right)
    for one, two in zip(normalisers(layer), normalisers(other), strict=True):
        assert_same_state(state_of(one), state_of(two))


@pytest.mark.parametrize("kind", LAYERS)
def test_eval_keeps_all_state_and_samples_apart(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind](3, 5, dtype=torch.float64, **SETTINGS)
    layer(torch.randn(20, 2, 3, dtype=torch.float64))[0].sum().backward()
    before = [state_of(norm) for norm in normalisers(layer)]
    layer.eval()
    x = torch.randn(4, 3, 3, dtype=torch.float64).requires_grad_()
    together, _ = layer(x)
    together.sum().backward()
    alone = torch.cat([layer(one)[0] for one in x.split(1, dim=1)], dim=1)
    assert_close("one sequence at a time", alone, together.detach().numpy(), TOLERANCE)
    for norm, state in zip(normalisers(layer), before, strict=True):
        assert_same_state(state, state_of(norm))


def test_in_eval_the_gradient_is_the_derivative():
    torch.manual_seed(0)
    layer = randomised(LSTM(2, 3, dtype=torch.float64)).eval()
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (x,))


@pytest.mark.parametrize("kind", LAYERS)
def test_autocast(kind):
    layer = LAYERS[kind](16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, last = layer(torch.randn(4, 2, 16))
        output, _ = layer(torch.randn(4, 2, 16), last)
    output.float().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("kind", OURS)
def test_settings_reach_every_normaliser(kind):
    layer = OURS[kind](3, 5, alpha_fwd=0.5, alpha_bwd=0.25, guard="clamp", clamp_value=2.0, warmup=True, eps=1e-3)
    for norm in normalisers(layer):
        assert isinstance(norm, OnlineNorm)
        assert (norm.alpha_fwd, norm.alpha_bwd, norm.guard, norm.clamp_value) == (0.5, 0.25, "clamp", 2.0)
        assert (norm.warmup, norm.eps, norm.num_features) == (True, 1e-3, 5)
    assert all(norm.eps == 1e-3 for norm in normalisers(OURS[kind](3, 5, norm="layer", eps=1e-3)))


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"norm": "batch"}, ValueError, "norm must be"),
        ({"norm": None, "alpha_fwd": 0.9}, TypeError, "norm=None takes no settings, got alpha_fwd"),
        ({"norm": "layer", "alpha_fwd": 0.9}, TypeError, "alpha_fwd"),
        ({"alpha_fwd": 1.0}, ValueError, "alpha_fwd must be in"),
        ({"num_layers": 2}, TypeError, "num_layers"),
    ],
)
def test_bad_settings(kind, arguments, error, says):
    with pytest.raises(error, match=says):
        OURS[kind](3, 5, **arguments)


@pytest.mark.parametrize("kind", [RNN, RNNCell])
def test_bad_nonlinearity(kind):
    with pytest.raises(ValueError, match="Unknown nonlinearity 'sine'"):
        kind(3, 5, nonlinearity="sine")


@pytest.mark.parametrize(
    ("kind", "x", "hx", "error", "says"),
    [
        ("rnn", (4, 2, 3, 1), None, ValueError, "RNN: Expected input to be 2D or 3D, got 4D"),
        ("rnn", (4, 2, 4), None, RuntimeError, "input_size. Expected 3, got 4"),
        ("rnn", (0, 2, 3), None, RuntimeError, "sequence length"),
        ("rnn", (4, 2, 3), (2, 5), RuntimeError, r"Expected hidden size \(1, 2, 5\), got \(2, 5\)"),
        ("rnn", (4, 2, 3), (1, 3, 5), RuntimeError, r"Expected hidden size \(1, 2, 5\), got \(1, 3, 5\)"),
        ("rnn", (4, 3), (1, 1, 5), RuntimeError, r"Expected hidden size \(1, 5\), got \(1, 1, 5\)"),
        ("lstm", (4, 2, 3), (1, 2, 5), RuntimeError, "LSTM: Expected hx to be a tuple of h and c"),
        ("lstm", (4, 2, 3), ((1, 2, 5), (1, 2, 4)), RuntimeError, r"Expected hidden size \(1, 2, 5\), got \(1, 2, 4\)"),
        ("rnn cell", (4, 2, 3), None, ValueError, "RNNCell: Expected input to be 1D or 2D, got 3D"),
        ("lstm cell", (2, 4), None, RuntimeError, "LSTMCell: Expected input of 3 features, got 4"),
        ("lstm cell", (2, 3), ((2, 5), (5,)), RuntimeError, r"Expected hidden size \(2, 5\), got \(5,\)"),
    ],
)
def test_bad_input_changes_nothing(kind, x, hx, error, says):
    layer = OURS[kind](3, 5)
    if hx is not None:
        hx = torch.zeros(hx) if isinstance(hx[0], int) else tuple(torch.zeros(shape) for shape in hx)
    with pytest.raises(error, match=says):
        layer(torch.zeros(x), hx)
    assert all(norm.num_samples_tracked == 0 for norm in normalisers(layer))


def test_input_that_is_no_tensor_or_of_another_dtype():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 3), torch.tensor([4, 2]))
    with pytest.raises(TypeError, match="LSTM: Expected input to be a tensor, got PackedSequence"):
        LSTM(3, 5)(packed)
    with pytest.raises(ValueError, match="dtype"):
        RNN(3, 5)(torch.randn(4, 2, 3, dtype=torch.float64))
