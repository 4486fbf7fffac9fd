"""What the paper reports, and comparisons with it."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.experiments.experiment import Metric
from onlinenorm.experiments.paper import (
    FIGURES,
    MEMORY,
    REPORTED,
    Reported,
    best,
    compare_order,
    verdict,
)

ACCURACY = Metric("accuracy", "accuracy, %", "highest", "{:.1f}")
LOSS = Metric("loss", "loss", "lowest", "{:.3f}")
RANGE = Reported(92.3, 91.8, 92.5, runs=5)
LABELS = {name: name.title() for name in ("online", "batch", "layer", "none")}
curves = st.lists(st.floats(0, 100), min_size=1, max_size=6)


def rows(values, key="accuracy"):
    return [{"epoch": epoch, key: value} for epoch, value in enumerate(values, 1)]


# The data


def test_every_spread_holds_its_median():
    for experiment, metrics in REPORTED.items():
        for metric, table in metrics.items():
            for norm, reported in table.items():
                if reported.low is not None:
                    assert reported.low <= reported.median <= reported.high, (experiment, metric, norm)
                    assert reported.runs > 1, (experiment, metric, norm)


def test_what_the_paper_claims_is_in_the_data():
    for name in ("cifar10", "cifar100", "unet", "mlp"):
        (metric, table), *_ = REPORTED[name].items()
        assert table["online"].median == max(reported.median for reported in table.values()), (name, metric)
    for name in ("rnn", "lstm"):
        table = REPORTED[name]["perplexity"]
        assert table["online"].median < table["layer"].median < table["none"].median
    assert all(memory.online < memory.batch32 < memory.batch128 for memory in MEMORY.values())
    assert {"mlp", "cifar10", "memory", "decay-sweep"} <= set(FIGURES)


def test_a_reported_number_reads_as_in_the_paper():
    assert str(REPORTED["unet"]["jaccard"]["none"]) == "0.961 (0.000 to 0.973, 50 runs)"
    assert str(REPORTED["imagenet"]["accuracy"]["online"]) == "76.3 (1 run)"
    assert str(REPORTED["imagenet"]["accuracy"]["weight"]) == "67 (quoted)"


# Best: on the epoch at which the median curve is best


def test_best_is_on_one_epoch_for_all_runs():
    runs = [rows([50, 90, 60]), rows([50, 70, 80]), rows([50, 71, 70])]
    found = best(runs, ACCURACY)  # medians 50, 71, 70
    assert (found.epoch, found.values, found.median) == (2, (90, 70, 71), 71)
    assert found.describe("{:.1f}") == "71.0 (70.0 to 90.0, 3 runs)"
    assert best([rows([3, 1, 2], "loss")], LOSS).describe("{:.2f}") == "1.00 (1 run)"


@given(st.lists(st.lists(st.floats(0, 100), min_size=4, max_size=4), min_size=1, max_size=7))
def test_no_epoch_has_a_better_median(runs):
    for metric, extreme in ((ACCURACY, max), (LOSS, min)):
        found = best([rows(values, metric.key) for values in runs], metric)
        medians = [statistics.median(column) for column in zip(*runs, strict=True)]
        assert found.median == extreme(medians)
        assert found.values == tuple(values[found.epoch - 1] for values in runs)


def test_the_first_of_equal_epochs_is_best():
    assert best([rows([1, 2, 2])], ACCURACY).epoch == 2


def test_a_run_that_diverged_is_worst_and_counts():
    good, bad = rows([3.0, 2.0, 1.0], "loss"), rows([3.0, None], "loss")
    found = best([good, good, bad], LOSS)
    assert (found.epoch, found.values) == (3, (1, 1, math.inf))
    assert found.describe("{:.1f}") == "1.0 (1.0 to diverged, 3 runs)"
    assert best([good, bad, bad], LOSS).epoch == 1
    assert best([rows([20.0, 10.0]), rows([30.0, 40.0, 50.0])], ACCURACY).values == (10.0, 50.0)


def test_other_indices_than_epochs():
    assert best([[{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.0}]], LOSS, x="step").epoch == 20


def test_no_number_anywhere():
    assert best([rows([None, None], "loss")], LOSS).median == math.inf
    with pytest.raises(ValueError, match="'loss'"):
        best([rows([1.0])], LOSS)


# Verdicts


@given(st.floats(91.8, 92.5))
def test_inside(value):
    assert verdict([value], RANGE, ACCURACY).agrees is True


@pytest.mark.parametrize(
    ("values", "metric", "agrees", "text"),
    [
        ([91.76], ACCURACY, True, "inside the paper's range"),  # the paper rounds to tenths
        ([91.7], ACCURACY, False, "0.1 below the paper's range (worse)"),
        ([90, 91.3, 99], ACCURACY, False, "0.5 below the paper's range (worse)"),
        ([93], ACCURACY, False, "0.5 above the paper's range (better)"),
        ([93], LOSS, False, "0.5 above the paper's range (worse)"),
        ([-math.inf], ACCURACY, False, "diverged"),
        ([math.inf], LOSS, False, "diverged"),
    ],
)
def test_against_a_range(values, metric, agrees, text):
    found = verdict(values, RANGE, metric)
    assert (found.agrees, found.text) == (agrees, text)


@pytest.mark.parametrize(
    ("value", "reported", "text"),
    [
        (90.34, Reported(90.3), "equal to the paper's one run"),
        (90.8, Reported(90.3), "0.5 above the paper's one run (better)"),
        (66.4, Reported(67, runs=0, digits=0), "1 below what the paper quotes (worse)"),
        (1.13, Reported(1.12, runs=5, digits=2), "0.01 above the paper's median (better)"),
    ],
)
def test_without_a_range_there_is_only_a_difference(value, reported, text):
    found = verdict([value], reported, ACCURACY)
    assert (found.agrees, found.text) == (None, text)


MLP = REPORTED["mlp"]["accuracy"]


def order(**values):
    found = compare_order(values, MLP, ACCURACY, LABELS)
    return found.agrees, found.text


def test_order():
    in_order = {"online": [88.0, 88.2], "batch": [87.0, 87.2], "layer": [86.0, 86.2], "none": [85.0, 85.2]}
    assert order(**in_order) == (True, "the paper's order: Online, Batch, Layer, None")
    swapped = in_order | {"online": [86.5, 86.7]}
    assert order(**swapped) == (False, "not the paper's order: Batch before Online")


def test_order_is_not_judged_where_runs_overlap_or_are_alone():
    assert order(online=[87.0, 89.0], batch=[88.1, 88.2]) == (
        None,
        "not the paper's order: Batch before Online (not clearly)",
    )
    assert order(online=[87.0], batch=[88.0])[0] is None


def test_order_needs_two_that_the_paper_tells_apart():
    assert order(online=[1.0])[0] is None
    equal = {"online": Reported(68.6), "batch": Reported(68.6)}
    found = compare_order({"online": [1.0], "batch": [2.0]}, equal, ACCURACY, LABELS)
    assert found.agrees is None
    assert "no two" in found.text


def test_the_lower_is_better_for_a_loss():
    reported = {"online": Reported(1.0), "none": Reported(2.0)}
    assert compare_order({"online": [3.0], "none": [4.0]}, reported, LOSS, LABELS).agrees is True
