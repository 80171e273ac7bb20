"""The two charts of the report page, as inline SVG: text and numbers only, colors from the page's style sheet.

They are drawn for a width of 440 CSS pixels and shrink to a phone's 360 with letters that can still be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 22, 44  # room for the tick labels, a label above, the axis title below
NUM_BINS = 36  # ours: as many as in the novelty panel of the figures

Scale = Callable[[float], float]


def histogram(values: NDArray[np.float64], is_new: NDArray[np.bool_], *, threshold: float | None) -> str:
    """How many photos have which novelty. Photos in new groups stand on those in seen classes; a line is the threshold.

    Args:
        values: (M,) novelty, at least one.
        is_new: (M,) whether the photo was put into a new group.
        threshold: position of the line; None draws none.
    """
    ends = values if threshold is None else np.append(values, threshold)
    low, high = float(ends.min()), float(ends.max())
    if high <= low:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, NUM_BINS + 1)
    seen, new = (np.histogram(values[rows], bins=edges)[0] for rows in (~is_new, is_new))
    most = int((seen + new).max())
    x, y = _scale(low, high, LEFT, WIDTH - RIGHT), _scale(0, most, HEIGHT - BOTTOM, TOP)
    parts = [_axes(ticks(low, high), x, ticks(0, most, whole=True), y, "novelty (larger is newer)", "photos")]
    for i in range(NUM_BINS):
        left, wide = x(float(edges[i])), x(float(edges[i + 1])) - x(float(edges[i])) - 1
        for kind, start, number in (("seen", 0, int(seen[i])), ("novel", int(seen[i]), int(new[i]))):
            if number:
                top, tall = y(start + number), y(start) - y(start + number)
                parts.append(
                    f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
                )
    if threshold is not None:
        at = x(threshold)
        end = "start" if at < WIDTH / 2 else "end"
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="strong" x="{at:.1f}" y="{TOP - 10}" text-anchor="{end}">threshold {threshold:.3g}</text>'
        )
    above = "" if threshold is None else f" {int((values > threshold).sum())} lie above the threshold {threshold:.3g}."
    return _svg(parts, f"Histogram of the novelty of {len(values)} photos, from {low:.3g} to {high:.3g}.{above}")


def count_curve(curve: Sequence[tuple[int, float]], *, chosen: int, low: int, high: int) -> str:
    """The score of every number of classes that was tried, the one chosen, and the interval as a band."""
    points = sorted((int(k), float(score)) for k, score in curve if math.isfinite(score))
    ks, scores = [k for k, _ in points] + [low, high, chosen], [score for _, score in points]
    first, last, worst, best = min(ks), max(ks), min(scores, default=0.0), max(scores, default=1.0)
    if first == last:
        first, last = first - 1, last + 1
    if best <= worst:
        worst, best = worst - 0.5, best + 0.5
    rim = 0.06 * (best - worst)
    x, y = _scale(first, last, LEFT + 8, WIDTH - RIGHT - 8), _scale(worst - rim, best + rim, HEIGHT - BOTTOM, TOP)
    axes = _axes(ticks(first, last, whole=True), x, ticks(worst, best), y, "classes, seen and new", "score")
    band = max(x(high) - x(low), 6.0)
    middle = (x(high) + x(low)) / 2
    parts = [
        f'<rect class="band" x="{middle - band / 2:.1f}" y="{TOP}" width="{band:.1f}" height="{HEIGHT - BOTTOM - TOP}"/>',
        axes,
        '<polyline class="curve" points="' + " ".join(f"{x(k):.1f},{y(score):.1f}" for k, score in points) + '"/>',
    ]
    if len(points) <= 40:  # more dots than this run together
        parts += [f'<circle class="dot" cx="{x(k):.1f}" cy="{y(score):.1f}" r="2.5"/>' for k, score in points]
    parts.append(f'<line class="mark" x1="{x(chosen):.1f}" x2="{x(chosen):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    end = "start" if x(chosen) < WIDTH / 3 else "end" if x(chosen) > WIDTH * 2 / 3 else "middle"
    parts.append(f'<text class="strong" x="{x(chosen):.1f}" y="{TOP - 8}" text-anchor="{end}">chosen: {chosen}</text>')
    return _svg(parts, f"Score for {len(points)} numbers of classes; {chosen} was chosen, likely {low} to {high}.")


def ticks(low: float, high: float, *, whole: bool = False, most: int = 6) -> list[float]:
    """At most `most` round numbers (1, 2 or 5 times a power of ten apart) that lie within [low, high]."""
    span = max(high - low, 1e-12)
    step = 10.0 ** math.floor(math.log10(span / most))
    while True:
        for factor in (1, 2, 5):
            width = step * factor
            first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
            if last - first + 1 <= most and not (whole and width < 1):
                return [round(i * width, 12) for i in range(first, last + 1)]
        step *= 10


def _scale(low: float, high: float, start: float, stop: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _axes(at_x: list[float], x: Scale, at_y: list[float], y: Scale, name_x: str, name_y: str) -> str:
    base = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>']
    for value in at_x:
        parts.append(f'<text x="{x(value):.1f}" y="{base + 17}" text-anchor="middle">{value:g}</text>')
    for value in at_y:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{name_x}</text>')
    middle = (TOP + base) / 2
    parts.append(f'<text transform="translate(11 {middle:.0f}) rotate(-90)" text-anchor="middle">{name_y}</text>')
    return "".join(parts)


def _svg(parts: list[str], words: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{"".join(parts)}</svg>'
