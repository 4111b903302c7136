"""Charts: axes with round ends and ticks, lines that keep their extremes and their gaps."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from primal.report.svg import (
    MOST,
    Axis,
    Line,
    fit_axis,
    heatmap,
    lanes,
    line_chart,
    matrix,
    spread,
    thin_out,
)

numbers = st.floats(-1e12, 1e12, allow_subnormal=False)


@given(st.lists(numbers, min_size=1))
def test_an_axis_holds_its_values_and_its_ticks(values):
    axis = fit_axis(values)
    slack = 1e-9 * (axis.high - axis.low)
    assert all(axis.low - slack <= v <= axis.high + slack for v in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12
    assert all(-1e-9 <= axis.at(tick) <= 1 + 1e-9 for tick in ticks)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1))
@example([5.4006e11, 8.101e11])
@example([1.0])
def test_a_logarithmic_axis_holds_its_values_and_some_ticks(values):
    axis = fit_axis([*values, 0.0, -1.0, math.nan], log=True)
    assert all(axis.low <= v <= axis.high for v in values)
    assert 1 <= len(axis.ticks()) <= 8


@pytest.mark.parametrize(
    ("axis", "told"),
    [
        (fit_axis([0.05, 1.0048]), ["0", "0.2", "0.4", "0.6", "0.8", "1", "1.2"]),
        (fit_axis([0.978, 0.989], percent=True, steps=3), ["97.5 %", "98 %", "98.5 %", "99 %"]),
        (fit_axis([1e-7, 1.0], log=True), ["10⁻⁶", "10⁻⁴", "0.01", "1"]),
        (fit_axis([0.007, 0.1], log=True), ["0.01", "0.02", "0.05", "0.1"]),
        (fit_axis([-3.0, 3.0]), ["−4", "−2", "0", "2", "4"]),
        (Axis(1, 2, whole=True), ["1", "2"]),
        (Axis(0.5, 8.5, whole=True), ["2", "4", "6", "8"]),
        (fit_axis([math.nan]), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_ticks_are_round(axis, told):
    assert [axis.text(tick) for tick in axis.ticks()] == told


@given(st.lists(st.one_of(numbers, st.just(math.nan)), min_size=60, max_size=200))
def test_thinning_keeps_ends_and_extremes(values):
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = thin_out(points, 30)
    assert len(kept) <= 36
    assert [kept[0], kept[-1]] == [points[0], points[-1]]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    known = [v for v in values if math.isfinite(v)]
    shown = [v for _, v in kept if math.isfinite(v)]
    if known:
        assert (min(shown), max(shown)) == (min(known), max(known))


def test_thinning_keeps_a_long_gap():
    points = [(float(i), math.nan if 400 <= i < 600 else 1.0) for i in range(1000)]
    assert any(math.isnan(v) for _, v in thin_out(points, 100))


@given(st.lists(st.floats(0, 100), max_size=6).map(sorted))
def test_labels_do_not_touch(wanted):
    placed = spread(wanted, 13.0, 0.0, 100.0)
    assert all(b - a >= 13.0 - 1e-9 for a, b in pairwise(placed))
    assert all(p <= 100.0 for p in placed)


def test_a_gap_lifts_the_pen_and_a_lone_point_is_a_dot():
    line = Line("a", [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 1.0)])
    (d,) = re.findall(r'd="([^"]*)" class="line"', lanes("a", [line]))
    assert d.count("M") == 2
    assert d.endswith("h0")


def test_a_channel_that_never_moves_and_a_single_step_are_drawn():
    for points in ([(0.0, 5.0), (1.0, 5.0)], [(0.0, 5.0)]):
        assert "nan" not in lanes("a", [Line("a", points)], [0.0])


@pytest.mark.parametrize(
    ("classes", "cell", "rects"), [(2, "63", 4), (9, "32.3", 18), (26, "19", 52), (60, None, 0)]
)
def test_a_matrix_shows_counts_where_there_is_room(classes, cell, rects):
    counts = [[0] * classes for _ in range(classes)]
    for i in range(classes):
        counts[i][i], counts[i][i - 1] = 700, 30
    names = [f"sort {i}" for i in range(classes)]
    picture = matrix("all", counts, names, row_title="label", column_title="predicted")
    assert picture.count("<rect") == rects + 1  # and the ground
    assert picture.count(">700</text>") == (classes if rects else 0)
    assert f'width="{cell}"' in picture or cell is None
    assert ("sort 1 → sort 0: 30 of 730" in picture) == bool(rects)


def test_text_on_a_dark_cell_is_light():
    tenths = [[MOST, 10 - MOST], [10 - MOST, MOST]]
    picture = matrix("all", tenths, ["a", "b"], row_title="", column_title="")
    assert picture.count('class="on"') == picture.count('class="off"') == 2


def test_a_long_name_leaves_room_for_the_cells():
    picture = heatmap("all", [("x" * 500, "a", [0.5, 1.0])], [1, 2], x_title="count")
    assert "-" not in "".join(re.findall(r'(?:width|height)="([^"]*)"', picture))
    chart = line_chart("all", [Line("a", [(1, 1)])], Axis(0, 2), Axis(0, 1), x_title="epoch")
    assert "h0" in chart
