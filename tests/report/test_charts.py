import re

import numpy as np
import pytest

from opencon.report.charts import BOTTOM, HEIGHT, LEFT, NUM_BINS, RIGHT, TOP, WIDTH, count_curve, histogram, ticks


def numbers(svg, pattern):
    return [tuple(map(float, found)) for found in re.findall(pattern, svg)]


BAR = r'<rect class="{}" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/>'
MARK = r'<line class="mark" x1="([\d.]+)" x2="([\d.]+)"'


@pytest.mark.parametrize(
    ("low", "high", "whole", "want"),
    [
        (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.31, 0.29, False, [-0.3, -0.2, -0.1, 0, 0.1, 0.2]),
        (0, 3, True, [0, 1, 2, 3]),
        (0, 1, True, [0, 1]),
        (0, 4321, True, [0, 1000, 2000, 3000, 4000]),
        (7, 24, True, [10, 15, 20]),
    ],
)
def test_ticks_are_round_and_inside(low, high, whole, want):
    assert ticks(low, high, whole=whole) == pytest.approx(want)


def test_bars_are_as_high_as_the_counts_and_stand_on_one_another():
    values = np.array([0.0] * 6 + [1.0] * 3)
    is_new = np.array([False] * 4 + [True] * 5)
    svg = histogram(values, is_new, threshold=0.5)
    (seen,), new = numbers(svg, BAR.format("seen")), numbers(svg, BAR.format("novel"))
    unit = (HEIGHT - BOTTOM - TOP) / 6
    assert seen[3] == pytest.approx(4 * unit, abs=0.1)
    assert [bar[3] for bar in new] == pytest.approx([2 * unit, 3 * unit], abs=0.1)
    assert new[0][1] + new[0][3] == pytest.approx(seen[1], abs=0.11)  # on top of the seen ones
    assert new[1][1] + new[1][3] == pytest.approx(HEIGHT - BOTTOM, abs=0.11)
    assert seen[0] == LEFT
    assert new[1][0] == pytest.approx(WIDTH - RIGHT - (WIDTH - LEFT - RIGHT) / NUM_BINS, abs=0.1)
    ((line, _),) = numbers(svg, MARK)
    assert line == pytest.approx((LEFT + WIDTH - RIGHT) / 2, abs=0.1)
    assert "3 lie above the threshold 0.5." in svg


def test_a_threshold_beyond_the_values_is_in_the_picture():
    svg = histogram(np.array([0.0, 1.0]), np.array([False, True]), threshold=4.0)
    assert numbers(svg, MARK) == [(WIDTH - RIGHT, WIDTH - RIGHT)]
    assert "threshold" not in histogram(np.zeros(3), np.zeros(3, bool), threshold=None)


def test_the_curve_peaks_at_its_best_and_the_band_is_the_interval():
    svg = count_curve([(4, 0.1), (2, 0.0), (6, 0.4), (8, float("nan")), (10, 0.2)], chosen=6, low=4, high=10)
    dots = numbers(svg, r'<circle class="dot" cx="([\d.]+)" cy="([\d.]+)"')
    assert len(dots) == 4  # in order, without the one that has no score
    assert [x for x, _ in dots] == sorted(x for x, _ in dots)
    assert min(dots, key=lambda dot: dot[1]) == dots[2]
    assert numbers(svg, MARK) == [(dots[2][0], dots[2][0])]
    ((left, _, wide, _),) = numbers(
        svg, r'<rect class="band" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"'
    )
    assert (left, left + wide) == pytest.approx((dots[1][0], dots[3][0]), abs=0.11)
    assert "6 was chosen, likely 4 to 10" in svg


@pytest.mark.parametrize("curve", [[], [(3, 0.5)], [(3, 0.5), (4, 0.5)]])
def test_short_and_flat_curves_can_be_drawn(curve):
    svg = count_curve(curve, chosen=3, low=3, high=3)
    assert "nan" not in svg
    assert "chosen: 3" in svg
