"""The reference against numbers worked by hand, finite differences, and what the paper claims of it."""

import ast
import copy
import inspect
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from onlinenorm import hyperparameters, reference
from onlinenorm.reference import Array, Guard, OnlineNorm

pytestmark = pytest.mark.filterwarnings("error")  # no NumPy warning may leak

GUARDS: list[Guard] = ["layer_scaling", "clamp", None]
SHAPES = [(4, 3), (3, 3, 5), (2, 3, 2, 4)]
STATE = ["running_mean", "running_var", "control_y", "control_1", "weight_grad", "bias_grad"]

properties = settings(max_examples=40, deadline=None)
decays = st.floats(0.05, 0.999)
slow_decays = st.floats(0.99, 0.9999)  # for the backward, where 1 - decay is the gain of a control loop


@st.composite
def inputs_and_grads(draw: st.DrawFn) -> tuple[Array, Array]:
    """Draw an input and a gradient of one shape (N, C, *), the * of 0 to 2 dimensions."""
    features = draw(st.lists(st.integers(1, 3), max_size=2))
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 3)), *features)
    values = arrays(np.float64, shape, elements=st.floats(-10, 10, allow_subnormal=False))
    return draw(values), draw(values)


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def planes(x: Array) -> Array:
    """View (N, C, *) as (N, C, D)."""
    return x.reshape(*x.shape[:2], -1)


def state_of(layer: OnlineNorm) -> dict[str, Array | None]:
    return {name: copy.copy(getattr(layer, name)) for name in STATE}


def assert_same_state(layer: OnlineNorm, expected: dict[str, Array | None], why: str) -> None:
    for name, value in expected.items():
        assert_array_equal(getattr(layer, name), value, err_msg=f"{name}: {why}")


def with_random_parameters(layer: OnlineNorm, seed: int = 1) -> OnlineNorm:
    """Give the layer parameters and statistics that no default or symmetry could stand in for."""
    rng = np.random.default_rng(seed)
    layer.running_mean = rng.normal(size=layer.num_features)
    layer.running_var = rng.uniform(0.5, 3, layer.num_features)
    if layer.affine:
        layer.weight = rng.uniform(0.5, 2, layer.num_features)
        layer.bias = rng.normal(size=layer.num_features)
    return layer


# Worked by hand.


def test_two_samples_by_hand() -> None:
    layer = OnlineNorm(1, alpha_fwd=0.5, alpha_bwd=0.5, eps=0.0, guard=None)
    layer.weight, layer.bias = np.array([2.0]), np.array([1.0])

    z = layer.forward([[[4, 0, 0, 0]], [[2, -1, 0.5, 0.5]]])
    # Sample 1: μ_0 = 0, σ_0 = 1, so y = (4, 0, 0, 0) and z = 2y + 1 = (9, 1, 1, 1).
    # Its mean is 1 and its variance (3² + 1 + 1 + 1)/4 = 3; so μ_1 = 0/2 + 1/2 = 1/2
    # and σ_1² = 1/2 + 3/2 + (1/2)(1/2)(1 - 0)² = 9/4, σ_1 = 3/2.
    assert_allclose(z[0, 0], [9, 1, 1, 1], err_msg="output of sample 1, by the initial statistics")
    # Sample 2: y = (x - 1/2)/(3/2) = (1, -1, 0, 0) and z = (3, -1, 1, 1).
    # Its mean is 1/2 and its variance (9/4 + 9/4)/4 = 9/8; so μ_2 = 1/2 and σ_2² = 9/8 + 9/16 + 0 = 27/16.
    assert_allclose(z[1, 0], [3, -1, 1, 1], err_msg="output of sample 2, by the statistics after sample 1")
    assert_allclose(layer.running_mean, 1 / 2)
    assert_allclose(layer.running_var, 27 / 16)

    dx = layer.backward([[[1, 0, 0, 1]], [[3, 1, 0, 2]]])
    # Sample 1: y' = 2z' = (2, 0, 0, 2). Both errors are 0, so x̃' = y' and x' = x̃'/σ_0 = (2, 0, 0, 2);
    # then ε^(y) = 4·2/4 = 2 and ε^(1) = (2 + 2)/4 = 1. weight' = 4·1 = 4 and bias' = 2.
    assert_allclose(dx[0, 0], [2, 0, 0, 2], err_msg="gradient of sample 1, no control error yet")
    # Sample 2: y' = (6, 2, 0, 4). x̃' = y' - (1/2)·2·y = (5, 3, 0, 4); x' = x̃'/(3/2) - (1/2)·1.
    # ε^(y) = 2 + (5 - 3)/4 = 5/2 and ε^(1) = 1 + (17 + 9 - 3 + 13)/6/4 = 5/2.
    # weight' = 4 + (3·1 - 1·1) = 6 and bias' = 2 + (3 + 1 + 0 + 2) = 8.
    assert_allclose(dx[1, 0], [17 / 6, 3 / 2, -1 / 2, 13 / 6], err_msg="gradient of sample 2, both errors acting")
    assert_allclose(layer.control_y, 5 / 2)
    assert_allclose(layer.control_1, 5 / 2)
    assert_allclose(layer.weight_grad, 6)
    assert_allclose(layer.bias_grad, 8)


def test_layer_scaling_by_hand() -> None:
    # σ = sqrt(1 + 3) = 2, so y = (1, 7); ζ = sqrt((1 + 49)/2 + 11) = 6, so z = (1/6, 7/6).
    layer = OnlineNorm(2, eps=3.0, guard_eps=11.0)
    assert_allclose(layer.forward([[2, 14]]), [[1 / 6, 7 / 6]], err_msg="eps and guard_eps are under the roots")
    # z' = (12, 0): μ({z z'}) = (12/6)/2 = 1, so u' = ((12 - 1/6)/6, (0 - 7/6)/6) = (71/36, -7/36).
    # The control errors are 0, so x' = u'/2; weight' = u'·y = (71/36, -49/36) and bias' = u'.
    assert_allclose(layer.backward([[12, 0]]), [[71 / 72, -7 / 72]])
    assert_allclose(layer.weight_grad, [71 / 36, -49 / 36])
    assert_allclose(layer.bias_grad, [71 / 36, -7 / 36])


def test_clamp_by_hand() -> None:
    layer = OnlineNorm(1, eps=0.0, guard="clamp")
    z = layer.forward([[[-6, -5, 0, 5, 6]]])
    assert_array_equal(z, [[[-5, -5, 0, 5, 5]]], err_msg="outputs are clipped at ±5")
    dx = layer.backward([[[1, 2, 3, 4, 5]]])
    assert_array_equal(dx, [[[0, 2, 3, 4, 0]]], err_msg="the gradient passes on the bounds and not beyond")
    assert_array_equal(layer.weight_grad, [-5 * 2 + 5 * 4], err_msg="clipped elements give weight no gradient")
    assert_array_equal(layer.bias_grad, [2 + 3 + 4], err_msg="clipped elements give bias no gradient")


# The forward process.


@properties
@given(inputs_and_grads(), decays)
def test_statistics_are_weighted_sums_over_history(x_and_grad: tuple[Array, Array], alpha: float) -> None:
    x = planes(x_and_grad[0])
    layer = OnlineNorm(x.shape[1], alpha_fwd=alpha)
    layer.forward(x_and_grad[0])

    # A mixture of every sample and of the initial N(0, 1), with weights that decay into the past.
    n = len(x)
    weights = (1 - alpha) * alpha ** np.arange(n - 1, -1, -1.0)
    mean = np.einsum("n,ncd->c", weights, x) / x.shape[2]
    square = np.einsum("n,ncd->c", weights, x**2) / x.shape[2] + alpha**n * 1.0
    assert_allclose(layer.running_mean, mean, atol=1e-12, err_msg="the exponentially weighted mean of elements")
    assert_allclose(layer.running_var, square - mean**2, atol=1e-11, err_msg="their variance about that mean")


@properties
@given(inputs_and_grads())
def test_layer_scaling_gives_unit_mean_square(x_and_grad: tuple[Array, Array]) -> None:
    x = x_and_grad[0] + 20.0  # away from zero, so that ζ is too
    z = OnlineNorm(x.shape[1], guard_eps=0.0).forward(x)
    squares = np.mean(planes(z) ** 2, axis=(1, 2))
    assert_allclose(squares, np.ones(len(z)), err_msg="each sample's mean square over all features")


@pytest.mark.parametrize("guard", GUARDS)
def test_infer_reads_the_state_and_leaves_it(guard: Guard) -> None:
    layer = with_random_parameters(OnlineNorm(3, guard=guard))
    layer.control_y, layer.control_1 = noise(3, seed=2), noise(3, seed=3)
    x, before = noise(4, 3, 5), state_of(layer)
    z = layer.infer(x)
    assert_same_state(layer, before, "infer changed it")
    for t in range(len(x)):
        alone = copy.deepcopy(layer).forward(x[t : t + 1])
        assert_array_equal(z[t : t + 1], alone, err_msg=f"sample {t} as the very next one of a forward pass")
    with pytest.raises(RuntimeError, match="no backward yet"):
        layer.backward(z)  # infer leaves nothing to go back through


# The gradients. Decays of 1 freeze the statistics and turn the control off: what remains is a plain function.


def numerical_gradient(function: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    gradient = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        shift = np.zeros_like(at)
        shift[i] = step
        gradient[i] = (function(at + shift) - function(at - shift)) / (2 * step)
    return gradient


def loss(layer: OnlineNorm, x: Array, grad: Array, **parameters: Array) -> float:
    """A function of the layer's output whose gradient for that output is `grad`."""
    layer = copy.copy(layer)
    for name, value in parameters.items():
        setattr(layer, name, value)
    return float(np.sum(grad * layer.infer(x)))


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_finite_differences(guard: Guard, shape: tuple[int, ...]) -> None:
    layer = OnlineNorm(3, alpha_fwd=1, alpha_bwd=1, guard=guard, guard_eps=0.3, clamp_value=0.9)
    with_random_parameters(layer)
    x, grad = noise(*shape), noise(*shape, seed=2)
    layer.forward(x)
    dx = layer.backward(grad)
    near = {"rtol": 1e-6, "atol": 1e-8}
    assert_allclose(dx, numerical_gradient(lambda v: loss(layer, v, grad), x), **near, err_msg="x'")
    weight_grad = numerical_gradient(lambda v: loss(layer, x, grad, weight=v), layer.weight)
    assert_allclose(layer.weight_grad, weight_grad, **near, err_msg="weight'")
    bias_grad = numerical_gradient(lambda v: loss(layer, x, grad, bias=v), layer.bias)
    assert_allclose(layer.bias_grad, bias_grad, **near, err_msg="bias'")


@pytest.mark.parametrize("guard", GUARDS)
def test_backward_uses_what_its_sample_was_normalised_by(guard: Guard) -> None:
    layer = with_random_parameters(OnlineNorm(3, alpha_fwd=0.7, alpha_bwd=1, guard=guard, clamp_value=0.9))
    x, grad = noise(3, 3, 4), noise(3, 3, 4, seed=2)
    expected = np.empty_like(x)
    before = copy.deepcopy(layer)
    for t in range(len(x)):
        expected[t] = numerical_gradient(lambda v, g=grad[t]: loss(before, v[None], g), x[t])
        before.forward(x[t : t + 1])

    layer.forward(x)
    layer.weight += 1.0  # in place, between the passes
    dx = layer.backward(grad)
    assert_allclose(dx, expected, rtol=1e-6, atol=1e-8, err_msg="x' by each sample's own μ, σ and weight")


@properties
@given(inputs_and_grads())
def test_layer_scaling_passes_no_gradient_along_its_input(x_and_grad: tuple[Array, Array]) -> None:
    # z does not change when weight and bias grow by the same factor, so its derivative in that factor is 0.
    x, grad = x_and_grad
    x = x + 20.0
    layer = with_random_parameters(OnlineNorm(x.shape[1], guard_eps=0.0))
    layer.forward(x)
    layer.backward(grad)
    along = np.sum(layer.weight * layer.weight_grad) + np.sum(layer.bias * layer.bias_grad)
    assert abs(along) < 1e-9, f"derivative {along} in the common scale of weight and bias"


# The control process, with guard and affine transform out of its way: there z is y and z' is y'.


def bare(num_features: int, alpha_bwd: float) -> OnlineNorm:
    return OnlineNorm(num_features, alpha_fwd=0.9, alpha_bwd=alpha_bwd, affine=False, guard=None)


@properties
@given(inputs_and_grads(), slow_decays)
def test_control_errors_are_sums_over_time(x_and_grad: tuple[Array, Array], alpha: float) -> None:
    x, grad = x_and_grad
    layer = bare(x.shape[1], alpha)
    sum_y, sum_1 = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for t in range(len(x)):
        sigma, control_1 = np.sqrt(layer.running_var + layer.eps)[:, None], layer.control_1[:, None]
        y = planes(layer.forward(x[t : t + 1]))[0]
        dx = planes(layer.backward(grad[t : t + 1]))[0]
        dx_tilde = sigma * (dx + (1 - alpha) * control_1)  # (12a), read backwards
        sum_y += np.mean(dx_tilde * y, axis=1)
        sum_1 += np.mean(dx, axis=1)
    assert_allclose(layer.control_y, sum_y, rtol=1e-9, atol=1e-9, err_msg="ε^(y) is the sum of μ(x̃' y)")
    assert_array_equal(layer.control_1, sum_1, err_msg="ε^(1) is the sum of μ(x'), to the last bit")


@properties
@given(inputs_and_grads(), slow_decays)
def test_control_is_an_estimator_of_projections(x_and_grad: tuple[Array, Array], alpha: float) -> None:
    x, grad = x_and_grad
    layer = bare(x.shape[1], alpha)
    estimate_y, estimate_1 = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for t in range(len(x)):
        sigma = np.sqrt(layer.running_var + layer.eps)
        y, dy = planes(layer.forward(x[t : t + 1]))[0], planes(grad)[t]
        layer.backward(grad[t : t + 1])
        # The estimators that the paper's appendix shows it equivalent to, for samples of D elements.
        dx_tilde = dy - estimate_y[:, None] * y
        estimate_y = (1 - (1 - alpha) * np.mean(y**2, 1)) * estimate_y + (1 - alpha) * np.mean(dy * y, 1)
        estimate_1 = alpha * estimate_1 + (1 - alpha) * np.mean(dx_tilde, 1) / sigma
    tolerance = {"rtol": 1e-8, "atol": 1e-8}
    assert_allclose((1 - alpha) * layer.control_y, estimate_y, **tolerance, err_msg="estimate along y")
    assert_allclose((1 - alpha) * layer.control_1, estimate_1, **tolerance, err_msg="estimate along 1")


def test_long_run_is_exact_normalisation_of_the_data_set() -> None:
    # A fixed data set, shown over and over: what equations (1) and (5) say of the whole set must come out.
    n, alpha = 8, 0.998
    x = noise(n, 2, 3) * np.array([[[0.5], [3.0]]]) + np.array([[[2.0], [-1.0]]])
    layer = OnlineNorm(2, alpha_fwd=alpha, alpha_bwd=alpha, eps=0.0, affine=False, guard=None)
    mean, std = x.mean(axis=(0, 2), keepdims=True), x.std(axis=(0, 2), keepdims=True)
    y = (x - mean) / std  # (1)
    grad = noise(*x.shape, seed=2) + 0.7 * y - 0.8  # not orthogonal to y, nor to 1
    for _ in range(600):
        z = layer.forward(x)
        dx = layer.backward(grad)

    projected = grad - y * np.mean(grad * y, axis=(0, 2), keepdims=True)
    projected -= projected.mean(axis=(0, 2), keepdims=True)
    exact = projected / std  # (5)

    def distance(a: Array, b: Array) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    assert distance(z, y) < 0.03, "the output is not the normalised data set"
    assert distance(dx, exact) < 0.03, "the gradient is not the projected one"
    assert distance(grad / std, exact) > 0.5, "the test is too weak: without projections it would pass too"


# Order, splits and pairing of passes.


@pytest.mark.parametrize("guard", GUARDS)
@properties
@given(inputs_and_grads(), st.lists(st.integers(0, 6)), decays, slow_decays)
def test_any_split_of_a_batch_gives_the_same_bits(
    guard: Guard, x_and_grad: tuple[Array, Array], cuts: list[int], alpha_fwd: float, alpha_bwd: float
) -> None:
    x, grad = x_and_grad
    whole = with_random_parameters(OnlineNorm(x.shape[1], alpha_fwd, alpha_bwd, guard=guard, clamp_value=2.0))
    parts = copy.deepcopy(whole)
    z, dx = whole.forward(x), whole.backward(grad)

    chunks = list(zip(np.split(x, sorted(cuts)), np.split(grad, sorted(cuts)), strict=True))  # some are empty
    pairs = [(parts.forward(chunk), parts.backward(chunk_grad)) for chunk, chunk_grad in chunks]
    assert_array_equal(np.concatenate([z for z, _ in pairs]), z, err_msg="outputs")
    assert_array_equal(np.concatenate([dx for _, dx in pairs]), dx, err_msg="gradients")
    assert_same_state(parts, state_of(whole), "differs between the batch and its parts")


def test_backward_takes_the_last_forward_first() -> None:
    # Two scalar samples in two forwards, as in a recurrent network. ε is 0 until b, the last, has gone back.
    layer = OnlineNorm(1, alpha_fwd=0.5, alpha_bwd=0.75, eps=0.0, affine=False, guard=None)
    # μ_0 = 0, σ_0 = 1: y_a = 2. Then μ_1 = 1 and σ_1² = 1/2 + 0 + (1/4)·2² = 3/2; x_b = 4 gives y_b = 3/σ_1.
    sigma = np.sqrt(1.5)
    layer.forward([[2.0]])
    layer.forward([[4.0]])
    # b: x̃' = y' = 1, so ε^(y) = y_b = 3/σ_1; x' = 1/σ_1 = ε^(1).
    assert_allclose(layer.backward([[1.0]]), [[1 / sigma]], err_msg="b goes back first, under no control error")
    # a: x̃' = 5 - (1/4)(3/σ_1)·2 and x' = x̃'/1 - (1/4)/σ_1, in all 5 - (7/4)/σ_1.
    assert_allclose(layer.backward([[5.0]]), [[5 - 1.75 / sigma]], err_msg="a second, under what b left")
    assert_allclose(layer.control_1, 5 - 0.75 / sigma)
    with pytest.raises(RuntimeError, match="no backward yet"):
        layer.backward([[1.0]])


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    layer = with_random_parameters(OnlineNorm(3))
    x, grad = noise(2, 3, 4), noise(2, 3, 4, seed=2)
    layer.forward(x)
    before, empty = state_of(layer), np.zeros(shape)
    assert layer.infer(empty).shape == shape
    assert layer.forward(empty).shape == shape
    assert layer.backward(empty).shape == shape
    assert_same_state(layer, before, "an input with no elements changed it")
    assert layer.backward(grad).shape == x.shape, "the empty pass took another's place"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_feature_dimensions_are_one(shape: tuple[int, ...]) -> None:
    x, grad = noise(*shape), noise(*shape, seed=2)
    layer, flat = (OnlineNorm(3, alpha_fwd=0.9, alpha_bwd=0.9) for _ in range(2))
    z, dx = layer.forward(x), layer.backward(grad)
    assert z.shape == dx.shape == shape
    assert_array_equal(planes(z), flat.forward(planes(x)), err_msg="outputs, all elements in one dimension")
    assert_array_equal(planes(dx), flat.backward(planes(grad)), err_msg="gradients, likewise")
    assert_same_state(layer, state_of(flat), "depends on how the elements are arranged")


def test_memory_order_does_not_matter() -> None:
    x, grad = noise(3, 3, 40), noise(3, 3, 40, seed=2)
    layer, transposed = OnlineNorm(3), OnlineNorm(3)
    assert_array_equal(transposed.forward(np.asfortranarray(x)), layer.forward(x), err_msg="outputs")
    assert_array_equal(transposed.backward(np.asfortranarray(grad)), layer.backward(grad), err_msg="gradients")
    assert_same_state(transposed, state_of(layer), "depends on the memory order of the input")


def test_arguments_are_read_once_and_left_alone() -> None:
    x, grad = noise(3, 3, 4), noise(3, 3, 4, seed=2)
    layer, other = OnlineNorm(3), OnlineNorm(3)
    kept_x, kept_grad = x.copy(), grad.copy()
    other.forward(x)
    z = layer.forward(x)
    assert_array_equal(x, kept_x, err_msg="forward changed its input")
    x[:], z[:] = 0.0, 0.0  # as an in-place operation after the layer would
    assert_array_equal(layer.backward(grad), other.backward(grad), err_msg="backward shares its caller's memory")
    assert_array_equal(grad, kept_grad, err_msg="backward changed its gradient")


def test_everything_is_float64() -> None:
    x, grad = noise(3, 3, 4).astype(np.float32), noise(3, 3, 4, seed=2).astype(np.float32)
    layer, other = OnlineNorm(3), OnlineNorm(3)
    z, dx = layer.forward(x), layer.backward(grad)
    assert z.dtype == dx.dtype == np.float64
    assert_array_equal(z, other.forward(x.astype(np.float64)), err_msg="float32 input must be widened first")
    assert_array_equal(dx, other.backward(grad.astype(np.float64)), err_msg="float32 gradient, likewise")


# What is not finite.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bad_feature_keeps_its_statistics(bad: float, guard: Guard, shape: tuple[int, ...]) -> None:
    x = noise(*shape)
    bad_x = x.copy()
    bad_x.reshape(planes(x).shape)[1, 2, 0] = bad  # sample 1, feature 2, one element
    clean, skipped, layer = (with_random_parameters(OnlineNorm(3, alpha_fwd=0.9, guard=guard)) for _ in range(3))
    clean_z = clean.forward(x)
    skipped.forward(np.delete(x, 1, axis=0))
    z = layer.forward(bad_x)

    for name in ("running_mean", "running_var"):
        got = getattr(layer, name)
        assert_array_equal(got[:2], getattr(clean, name)[:2], err_msg=f"{name}: good features must advance")
        assert_array_equal(got[2], getattr(skipped, name)[2], err_msg=f"{name}: as if the sample had not been")
    assert_array_equal(z[0], clean_z[0], err_msg="the sample before")
    if guard == "layer_scaling":
        assert np.isnan(z[1]).all(), "under layer scaling the bad sample must be NaN in every feature"
    else:
        assert_array_equal(z[1, :2], clean_z[1, :2], err_msg="the good features of the bad sample")
    if guard is None:
        assert not np.abs(planes(z)[1, 2, 0]) < 1e100, "the bad element must come out as it went in"
    assert np.isfinite(np.delete(z, 1, axis=0)).all(), "the samples after"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_layer_scaling_infers_nan_throughout(bad: float) -> None:
    x = noise(2, 3, 4)
    x[1, 2, 0] = bad
    z = OnlineNorm(3).infer(x)
    assert np.isfinite(z[0]).all(), "the good sample"
    assert np.isnan(z[1]).all(), "the bad sample"


@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("guard", GUARDS)
def test_bad_feature_keeps_its_control_errors(where: str, bad: float, guard: Guard) -> None:
    x, grad = noise(3, 3, 4), noise(3, 3, 4, seed=2)
    bad_x, bad_grad = x.copy(), grad.copy()
    (bad_x if where == "input" else bad_grad)[2, 2, 0] = bad  # the last sample
    clean, layer = (OnlineNorm(3, alpha_fwd=0.9, alpha_bwd=0.9, guard=guard) for _ in range(2))
    clean.forward(x[:2])
    clean.backward(grad[:2])
    after_two = state_of(clean)
    clean.forward(x[2:])
    clean.backward(grad[2:])

    layer.forward(bad_x)
    dx = layer.backward(bad_grad)
    good = slice(0, 0 if guard == "layer_scaling" else 2)  # layer scaling spreads it to every feature
    for name in ("control_y", "control_1"):
        got, kept, advanced = getattr(layer, name), after_two[name], getattr(clean, name)
        assert_array_equal(got[good], advanced[good], err_msg=f"{name}: good features must advance")
        assert_array_equal(got[good.stop :], kept[good.stop :], err_msg=f"{name}: bad features must keep it")
    assert not np.isfinite(dx[2, good.stop :]).all(axis=1).any(), "what is not finite must show in the gradient"


@pytest.mark.parametrize(
    ("var", "x", "grad"),
    [
        (1.0, 1e200, 1e200),  # y' y overflows, y'/σ does not
        (1e-10, 1e-305, 1e308),  # y'/σ overflows, y' y does not: σ = 1e-5, y = 1e-300
    ],
    ids=["control_y", "control_1"],
)
def test_one_bad_control_error_keeps_both(var: float, x: float, grad: float) -> None:
    layer = OnlineNorm(1, eps=0.0, guard=None)
    layer.running_var, layer.control_y, layer.control_1 = np.array([var]), np.array([2.0]), np.array([3.0])
    layer.forward([[x]])
    layer.backward([[grad]])
    assert_array_equal(layer.control_y, 2.0)
    assert_array_equal(layer.control_1, 3.0)


# The interface.


def test_initial_state() -> None:
    layer = OnlineNorm(3)
    for name in ["weight", "bias", *STATE]:
        value = getattr(layer, name)
        assert value.shape == (3,), name
        assert value.dtype == np.float64, name
        assert (value == (name in ("weight", "running_var"))).all(), name


def test_defaults_are_those_of_hyperparameters() -> None:
    parameters = inspect.signature(OnlineNorm).parameters
    for name in ("alpha_fwd", "alpha_bwd", "eps", "guard", "guard_eps", "clamp_value"):
        assert parameters[name].default == getattr(hyperparameters, name.upper()), name


def test_imports_nothing_of_the_package() -> None:
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(reference))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))
    assert imported == {"typing", "numpy", "numpy.typing"}


@pytest.mark.parametrize("guard", GUARDS)
def test_no_affine_is_the_identity_affine(guard: Guard) -> None:
    x, grad = noise(3, 3, 4), noise(3, 3, 4, seed=2)
    layer, identity = OnlineNorm(3, affine=False, guard=guard), OnlineNorm(3, guard=guard)
    assert_array_equal(layer.forward(x), identity.forward(x))
    assert_array_equal(layer.backward(grad), identity.backward(grad))
    for name in ("weight", "bias", "weight_grad", "bias_grad"):
        assert getattr(layer, name) is None, name


@pytest.mark.parametrize("method", ["forward", "infer"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [((3,), r"at least 2 dimensions, got shape \(3,\)"), ((3, 2, 4), r"expected 3 features .* \(3, 2, 4\)")],
)
def test_wrong_shapes_are_refused(method: str, shape: tuple[int, ...], message: str) -> None:
    layer = OnlineNorm(3)
    before = state_of(layer)
    with pytest.raises(ValueError, match=message):
        getattr(layer, method)(np.ones(shape))
    assert_same_state(layer, before, "a refused input changed it")


def test_wrong_gradient_shape_is_refused() -> None:
    layer = OnlineNorm(3)
    x = noise(2, 3, 4)
    layer.forward(x)
    with pytest.raises(ValueError, match=r"output's shape \(2, 3, 4\), got \(2, 3, 5\)"):
        layer.backward(noise(2, 3, 5))
    assert layer.backward(x).shape == x.shape, "a refused gradient used up its forward pass"


def test_unknown_guard_is_refused() -> None:
    with pytest.raises(ValueError, match="'layer_scaling', 'clamp' or None, got 'none'"):
        OnlineNorm(3, guard="none")
