"""The charts that pages draw by hand."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinenorm.experiments.charts import (
    HEIGHT,
    WIDTH,
    Axis,
    Box,
    Line,
    box_chart,
    heat_map,
    line_chart,
    log_ticks,
    spread,
    ticks,
    two_ticks,
    whole_ticks,
)

numbers = st.floats(-1e6, 1e6)
positive = st.floats(1e-12, 1e12)
EPOCHS, VALUE = Axis("epochs", "whole"), Axis("value")


def parsed(figure: str) -> ET.Element:
    return ET.fromstring(figure)


def places(figure: str) -> list[float]:
    """Every coordinate of every path."""
    return [float(number) for path in parsed(figure).iter("path") for number in re.findall(r"-?[\d.]+", path.get("d"))]


def text(figure: str) -> str:
    return " ".join("".join(element.itertext()) for element in parsed(figure).iter("text"))


# Ticks and labels


def test_labels_are_spread():
    assert spread([10, 12, 11, 50], gap=16) == pytest.approx([-5, 27, 11, 50], abs=0.1)
    assert spread([100, 100, 100], gap=16, limits=(0, 100)) == pytest.approx([68, 84, 100], abs=0.1)
    assert spread([0, 0, 90], gap=16, limits=(0, 100)) == pytest.approx([0, 16, 90], abs=0.1)


@pytest.mark.parametrize(
    ("make", "values"),
    [(ticks, numbers), (log_ticks, positive), (two_ticks, positive), (whole_ticks, st.integers(0, 10**15))],
)
def test_ticks_enclose_the_values(make, values):
    @given(st.lists(values, min_size=1, max_size=5))
    def check(values):
        found = make(values)
        assert (1 if make is whole_ticks else 2) <= len(found) <= 13
        assert found == sorted(found)
        assert found[0] <= min(values) * (1 + 1e-9) or found[0] <= min(values)
        assert found[-1] >= max(values)

    check()


@pytest.mark.parametrize("values", [[0.5], [0.1, 0.95], [0.0, 0.0], [0.889, 0.9], [1e-12, 3.0]])
def test_there_are_few_ticks(values):
    assert 2 <= len(ticks(values)) <= 8


def test_round_ticks():
    assert ticks([0.12, 0.61]) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert log_ticks([3, 150]) == [2, 5, 10, 20, 50, 100, 200]
    assert log_ticks([1e-3, 1e30])[0] == 1e-3
    assert log_ticks([1.6, 2.7]) == [1.6, 1.8, 2, 2.2, 2.4, 2.6, 2.8]
    assert two_ticks([1, 128]) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert whole_ticks([1, 250]) == [1, 50, 100, 150, 200, 250]
    assert whole_ticks([1, 12]) == [1, 4, 6, 8, 10, 12]


# Charts


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 300), positive), min_size=1, max_size=50), min_size=1, max_size=9),
    st.sampled_from(["linear", "log"]),
)
def test_curves_stay_inside_the_picture(curves, scale):
    lines = [Line(f"curve {i}", "#0072b2", points) for i, points in enumerate(curves)]
    chart = line_chart("A title", lines, EPOCHS, Axis("", scale))
    for path in parsed(chart).iter("path"):
        if "curve" in path.get("class"):
            for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d")):
                assert 0 <= float(x) <= WIDTH
                assert 0 <= float(y) <= HEIGHT
    assert all(line.label in text(chart) for line in lines)


def test_the_higher_value_is_drawn_higher():
    chart = line_chart("", [Line("up", "#000", [(1, 1.0), (2, 2.0)])], EPOCHS, VALUE)
    (x1, y1), (x2, y2) = ((float(c.get("cx")), float(c.get("cy"))) for c in parsed(chart).iter("circle"))
    assert x1 < x2
    assert y1 > y2  # SVG counts downwards


def test_what_has_no_place_is_left_out_and_the_rest_is_drawn():
    points = [(1, 2.0), (2, math.inf), (3, math.nan), (4, 0.0), (5, 3.0)]
    band = [(1, 1.0, 3.0), (2, 1.0, math.inf)]
    chart = line_chart("", [Line("some", "#000", points, band)], EPOCHS, Axis("", "log"))
    assert len(list(parsed(chart).iter("circle"))) == 2
    assert all(math.isfinite(place) for place in places(chart))


def test_limits_cut_the_curve():
    curve = Line("curve", "#000", [(1, 0.0), (2, 95.0), (3, 96.0)])
    chart = line_chart("", [curve], EPOCHS, Axis("", limits=(90, 100)))
    ET_inner = [element for element in parsed(chart).iter("svg")]
    assert len(ET_inner) == 2  # the inner one clips
    assert "0" not in text(chart).split()


def test_long_curves_have_no_dots():
    chart = line_chart("", [Line("curve", "#000", [(i, float(i)) for i in range(250)])], EPOCHS, VALUE)
    assert not list(parsed(chart).iter("circle"))


@pytest.mark.parametrize(
    "draw", [lambda: line_chart("Title", [], EPOCHS, VALUE), lambda: box_chart("Title", [], VALUE)]
)
def test_nothing_to_draw(draw):
    assert "No number to draw" in draw()


def test_names_are_escaped():
    evil = '<script>"&'
    line = line_chart(evil, [Line(evil, "#000", [(1, 1.0)])], Axis(evil), Axis(evil))
    box = box_chart(evil, [Box(evil, "#000", [1.0])], Axis(evil))
    heat = heat_map(evil, {(2, 2): 1.0}, evil, evil, "{:.1f}")
    for chart in (line, box, heat):
        assert evil in "".join(parsed(chart).itertext())


def test_a_box_shows_every_value_and_counts_those_that_diverged():
    chart = box_chart("", [Box("some", "#000", [1.0, 2.0, 3.0, math.inf], (0.5, 2.0, 2.5))], VALUE)
    assert len(list(parsed(chart).iter("circle"))) == 3
    assert "1 diverged" in text(chart)
    assert len([path for path in parsed(chart).iter("path") if path.get("class") == "reference"]) == 1


def test_a_single_value_has_no_box():
    chart = box_chart("", [Box("one", "#000", [1.0])], VALUE)
    assert not list(parsed(chart).iter("rect"))


@pytest.mark.parametrize("highest", [True, False])
def test_the_best_cell_is_the_deepest(highest):
    cells = {(2.0**i, 2.0**j): float(10 * i + j) for i in range(1, 5) for j in range(1, 4)}
    chart = heat_map("", cells, "forward", "backward", "{:.0f}", highest=highest, marked=[(2.0, 2.0)])
    rects = [rect for rect in parsed(chart).iter("rect") if rect.get("fill")]
    depth = {
        float(rect.find("title").text.split()[-1]): -sum(map(int, re.findall(r"\d+", rect.get("fill"))))
        for rect in rects
    }
    assert len(depth) == 12
    assert max(depth, key=depth.get) == (43 if highest else 11)
    assert len([rect for rect in parsed(chart).iter("rect") if rect.get("class") == "mark"]) == 1


def test_zero_on_a_grid():
    assert text(heat_map("", {(0.0, 1024.0): 1.0}, "", "", "{:.1f}")).split()[1:] == ["0", "1k"]


def test_failures_in_a_heat_map_are_crosses():
    chart = heat_map("", {(2, 2): math.inf, (4, 2): 1.0}, "", "", "{:.1f}", highest=False)
    assert "×" in text(chart)
