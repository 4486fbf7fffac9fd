"""Decay and horizon, and appendix F's rules for another batch size."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onlinenorm.hyperparameters import (
    Scaled,
    decay_of,
    horizon_of,
    scale_decay,
    scale_hyperparameters,
    scale_momentum,
)

batch_sizes = st.integers(1, 1024)
rates = st.floats(1e-5, 10)
momenta = st.just(0.0) | st.floats(0.5, 0.999)
conventions = st.sampled_from(["pytorch", "damped"])
rules = st.sampled_from(["text", "imagenet"])


def same(a: Scaled, b: Scaled) -> bool:
    return a.learning_rate == pytest.approx(b.learning_rate, rel=1e-9) and a.momentum == pytest.approx(b.momentum)


def without_underflow(momentum: float, *ratios: float) -> None:
    assume(all(momentum == 0 or momentum**ratio > 1e-100 for ratio in ratios))


# Decay and horizon


@given(st.floats(1, 1e6))
def test_horizon_and_decay_are_inverse(horizon):
    assert horizon_of(decay_of(horizon)) == pytest.approx(horizon, rel=1e-9)


@pytest.mark.parametrize(("decay", "horizon"), [(0, 1), (1 / 2, 2), (127 / 128, 128), (1023 / 1024, 1024)])
def test_horizons_of_the_paper(decay, horizon):
    assert horizon_of(decay) == horizon
    assert decay_of(horizon) == decay


# Another batch size


def test_the_imagenet_column_to_its_last_digit():
    scaled = scale_hyperparameters(256, 32, 0.1, 0.9, rule="imagenet")
    assert f"{scaled.momentum:.5f}" == "0.98692"
    assert f"{scaled.learning_rate:.5f}" == "0.01308"


def test_the_text_has_both_factors():
    scaled = scale_hyperparameters(256, 32, 0.1, 0.9)
    momentum = 0.9 ** (32 / 256)
    assert scaled.momentum == pytest.approx(momentum)
    assert scaled.learning_rate == pytest.approx(32 / 256 * (1 - momentum) / (1 - 0.9) * 0.1)
    assert scale_hyperparameters(256, 32, 0.1, 0.9, convention="damped").learning_rate == pytest.approx(0.1 / 8)


@given(batch_sizes, batch_sizes, rates, momenta, conventions, rules)
def test_there_and_back_is_identity(old, new, rate, momentum, convention, rule):
    without_underflow(momentum, new / old)
    there = scale_hyperparameters(old, new, rate, momentum, convention, rule)
    back = scale_hyperparameters(new, old, there.learning_rate, there.momentum, convention, rule)
    assert same(back, Scaled(rate, momentum))


@given(batch_sizes, batch_sizes, batch_sizes, rates, momenta, conventions, rules)
def test_two_steps_are_one(first, second, third, rate, momentum, convention, rule):
    without_underflow(momentum, second / first, third / first)
    via = scale_hyperparameters(first, second, rate, momentum, convention, rule)
    twice = scale_hyperparameters(second, third, via.learning_rate, via.momentum, convention, rule)
    assert same(twice, scale_hyperparameters(first, third, rate, momentum, convention, rule))


@given(batch_sizes, batch_sizes, rates, momenta, rules)
def test_both_conventions_take_the_same_steps(old, new, rate, momentum, rule):
    damped = scale_hyperparameters(old, new, rate, momentum, "damped", rule)
    pytorch = scale_hyperparameters(old, new, rate * (1 - momentum), momentum, "pytorch", rule)
    assert damped.momentum == pytorch.momentum
    assert pytorch.learning_rate == pytest.approx(damped.learning_rate * (1 - damped.momentum), rel=1e-9)


@given(batch_sizes, batch_sizes, rates, momenta, conventions)
def test_the_rules_differ_by_the_ratio_of_the_batch_sizes(old, new, rate, momentum, convention):
    text, column = (scale_hyperparameters(old, new, rate, momentum, convention, rule) for rule in ("text", "imagenet"))
    assert text.momentum == column.momentum
    assert text.learning_rate == pytest.approx(column.learning_rate * new / old)


@given(st.integers(0, 5), st.integers(0, 5), st.floats(0.5, 0.999))
def test_what_is_forgotten_per_sample_and_per_update(a, b, decay):
    old, new = 2**a, 2**b
    assert scale_momentum(old, new, decay) ** (1 / new) == pytest.approx(decay ** (1 / old))
    assert scale_decay(old, new, decay) ** new == pytest.approx(decay**old)


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_long_horizon_keeps_its_number_of_updates(old, new):
    horizon = horizon_of(scale_decay(old, new, decay_of(1e6)))
    assert horizon / new == pytest.approx(1e6 / old, rel=1e-3)


def test_the_weights_move_as_far_per_sample_by_the_text_as_before():
    """Momentum SGD with a constant gradient, the slow way."""

    def moved(batch_size: int, rate: float, momentum: float, samples: int) -> float:
        velocity = weight = 0.0
        for _ in range(samples // batch_size):
            velocity = momentum * velocity + 1
            weight += rate * velocity
        return weight

    scaled = scale_hyperparameters(32, 4, 0.1, 0.9)
    before, after = moved(32, 0.1, 0.9, 64_000), moved(4, scaled.learning_rate, scaled.momentum, 64_000)
    assert after == pytest.approx(before, rel=5e-3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: horizon_of(1.0), "decay is 1.0"),
        (lambda: horizon_of(-0.1), "decay is -0.1"),
        (lambda: decay_of(0.5), "horizon is 0.5"),
        (lambda: decay_of(math.inf), "horizon is inf"),
        (lambda: scale_hyperparameters(0, 32, 0.1), "batch_size_old is 0"),
        (lambda: scale_hyperparameters(32, 2.5, 0.1), "batch_size_new is 2.5"),
        (lambda: scale_hyperparameters(32, 16, 0.0), "learning_rate is 0.0"),
        (lambda: scale_hyperparameters(32, 16, math.nan), "learning_rate is nan"),
        (lambda: scale_hyperparameters(32, 16, 0.1, 1.0), "momentum is 1.0"),
        (lambda: scale_hyperparameters(32, 16, 0.1, convention="nesterov"), "'pytorch' or 'damped'"),
        (lambda: scale_hyperparameters(32, 16, 0.1, rule="linear"), "'text' or 'imagenet'"),
        (lambda: scale_momentum(32, -1, 0.9), "batch_size_new is -1"),
        (lambda: scale_decay(32, 16, math.nan), "decay is nan"),
    ],
)
def test_wrong_input(call, said):
    with pytest.raises(ValueError, match="it must be") as raised:
        call()
    assert said in str(raised.value)
