"""Ticks, thinning and drawing, against what was put in."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.observability.report.charts import BARS_WIDTH, LEFT, Line, line_chart, nice_ticks, stacked_bars, thinned

finite = st.floats(-1e12, 1e12, allow_nan=False)


def shapes(svg: str, tag: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag == tag]


@given(low=finite, spread=st.floats(1e-6, 1e6))
def test_ticks_are_round_few_and_inside(low: float, spread: float) -> None:
    high = low + spread * max(1.0, abs(low) * 1e-3)
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    room = (high - low) * 1e-6
    assert all(low - room <= tick <= high + room for tick in ticks)
    gaps = np.diff(ticks)
    if len(gaps):
        leading = float(f"{gaps[0]:.3e}".split("e")[0])
        assert leading == pytest.approx(min((1, 2, 5, 10), key=lambda nice: abs(nice - leading)), rel=1e-2)


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 12_345, 100_000])
def test_thinning_keeps_peaks_and_order(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[count // 3], values[count // 2] = 50.0, -60.0
    thin = thinned(Line("a", list(range(count)), values.tolist()))
    assert len(thin.values) <= 1000
    assert {values.max(), values.min()} <= set(thin.values)
    assert list(thin.steps) == sorted(set(thin.steps))
    assert all(values[step] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_a_curve_is_where_its_values_are() -> None:
    """Linear values make a straight line that rises to the right."""
    svg = line_chart([Line("a", [1, 2, 3, 4, 5], [0.0, 1.0, 2.0, 3.0, 4.0])], range(6))
    (polyline,) = shapes(svg, "polyline")
    points = np.array([[float(number) for number in point.split(",")] for point in polyline.attrib["points"].split()])
    assert np.allclose(np.diff(points, axis=0), np.diff(points, axis=0)[0], atol=0.02)
    assert points[-1, 0] > points[0, 0] and points[-1, 1] < points[0, 1]
    assert points[0, 0] - LEFT > np.diff(points[:2, 0]) > 0  # the axis begins at the run's first step, 0


@pytest.mark.parametrize(
    ("values", "bad", "flat"),
    [
        ([0.0], [], True),
        ([5.0], [], True),
        ([-3.0, -3.0], [], True),
        ([1e-300, 1e300], [], False),
        ([], [7], True),
        ([0.9, 0.9 + 2e-16, 0.9 - 2e-16], [], True),  # but for rounding
    ],
)
def test_any_values_can_be_drawn(values: list[float], bad: list[int], flat: bool) -> None:
    svg = line_chart([Line("a", range(1, len(values) + 1), values)] if values else [], range(1, 8), bad)
    assert "nan" not in svg and "inf" not in svg
    assert len(shapes(svg, "path")) == len(bad)
    points = [point for line in shapes(svg, "polyline") for point in line.attrib["points"].split()]
    heights = {float(point.split(",")[1]) for point in points}
    assert all(10 <= height <= 190 for height in heights)
    assert (len(heights) <= 1) == flat


def test_bars_are_as_tall_as_their_share() -> None:
    svg = stacked_bars([1, 2], [("generate", [3.0, 1.0]), ("train", [1.0, 1.0])], "s", "phases")
    height = {(rect.attrib["class"], rect.attrib["x"]): float(rect.attrib["height"]) for rect in shapes(svg, "rect")}
    first, second = sorted({x for _, x in height}, key=float)
    unit = height["part-train", first]
    assert height["part-generate", first] == pytest.approx(3 * unit, rel=0.01)
    assert height["part-generate", second] == pytest.approx(unit, rel=0.01)
    titles = [rect[0].text for rect in shapes(svg, "rect")]
    assert "step 1: generate 3 s" in titles


def test_a_tall_first_bar_is_cut_and_says_so() -> None:
    svg = stacked_bars([1, 2, 3, 4], [("train", [100.0, 1.0, 1.0, 1.0])], "s", "phases")
    (mark,) = shapes(svg, "path")
    assert mark.attrib["class"] == "cut" and "100 s in all" in str(mark[0].text)
    assert min(float(rect.attrib["height"]) for rect in shapes(svg, "rect")) > 40


def test_a_long_run_has_few_bars_of_means() -> None:
    steps = list(range(1, 1001))
    svg = stacked_bars(steps, [("train", [float(step % 2) for step in steps])], "s", "phases")
    rects = shapes(svg, "rect")
    assert len(rects) == 250
    assert rects[0][0].text == "steps 1 to 4, mean: train 0.5 s"
    assert max(float(rect.attrib["x"]) for rect in rects) < BARS_WIDTH


def test_labels_are_escaped() -> None:
    svg = line_chart([Line("a", [1], [1.0])], [1], label='"><script>')
    assert not re.search("<script", svg) and ElementTree.fromstring(svg).attrib["aria-label"] == '"><script>'
