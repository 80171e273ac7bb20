"""A sweep as a picture: lines over a setting that is a number, else bars; or bars in groups, one for each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opencon.report.figures import COLORS, FAINT, INK, blank_figure, label_of, save_png

Point = tuple[str, float, float | None]  # value of the setting as text, mean, standard deviation


def sweep_chart(
    series: Mapping[str, Sequence[Point]], *, x_title: str, y_title: str, title: str, path: Path, y_zero: bool = False
) -> Path:
    """Draw one line, or one color of bars, for each series; return the path of the PNG.

    Args:
        series: name to points, in the order they are drawn. Where every value of the setting is a number, x is to scale.
        x_title: the setting.
        y_title: the measure.
        title: a line above.
        path: where the PNG goes; its folder must exist.
        y_zero: whether the y axis begins at zero; bars always do.
    """
    figure = blank_figure((6.4, 4.2))
    axes = figure.add_axes((0.11, 0.15, 0.86, 0.72))
    values = list(dict.fromkeys(value for points in series.values() for value, _, _ in points))
    draw = _lines if len(values) > 1 and all(map(_is_number, values)) else _bars
    draw(axes, series, values)
    axes.set_xlabel(x_title, color=INK)
    axes.set_ylabel(y_title, color=INK)
    if y_zero or draw is _bars:
        axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    if len(series) > 1 or "" not in series:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.text(0.02, 0.93, label_of(title), fontsize=12, fontweight="bold", color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.1)


def bars_chart(series: Mapping[str, Sequence[Point]], *, y_title: str, title: str, path: Path) -> Path:
    """Draw bars in groups, one for each series, whose values have nothing to do with those of the others."""
    figure = blank_figure((6.4, 4.2))
    axes = figure.add_axes((0.11, 0.15, 0.86, 0.72))
    ticks: list[int] = []
    names: list[str] = []
    for i, (name, points) in enumerate(series.items()):
        ordered = sorted(points, key=lambda point: float(point[0]))
        places = [len(ticks) + i + j for j in range(len(ordered))]  # a gap of one bar between groups
        heights, error = [mean for _, mean, _ in ordered], [std or 0.0 for _, _, std in ordered]
        axes.bar(places, heights, 0.85, yerr=error, color=_color(i), ecolor=INK, capsize=2)
        for place, height, more in zip(places, heights, error, strict=True):
            axes.annotate(
                f"{height:.1f}",
                (place, height + more),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=INK,
            )
        axes.annotate(
            name, (sum(places) / len(places), 0), xytext=(0, -30), textcoords="offset points", ha="center", color=INK
        )
        ticks += places
        names += [value for value, _, _ in ordered]
    axes.set_xticks(ticks, names, fontsize=8)
    axes.set_ylabel(y_title, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.02, 0.93, title, fontsize=12, fontweight="bold", color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.1)


def _lines(axes: Any, series: Mapping[str, Sequence[Point]], values: Sequence[str]) -> None:
    for i, (name, points) in enumerate(series.items()):
        ordered = sorted(points, key=lambda point: float(point[0]))
        x, y = [float(value) for value, _, _ in ordered], [mean for _, mean, _ in ordered]
        error = [std or 0.0 for _, _, std in ordered]
        axes.errorbar(
            x, y, yerr=error, color=_color(i), marker="o", markersize=4, capsize=2, linewidth=1.4, label=label_of(name)
        )


def _bars(axes: Any, series: Mapping[str, Sequence[Point]], values: Sequence[str]) -> None:
    width = 0.8 / len(series)
    for i, (name, points) in enumerate(series.items()):
        places = [values.index(value) + (i - (len(series) - 1) / 2) * width for value, _, _ in points]
        error = [std or 0.0 for _, _, std in points]
        heights = [mean for _, mean, _ in points]
        axes.bar(places, heights, width * 0.9, yerr=error, color=_color(i), ecolor=INK, capsize=2, label=label_of(name))
    axes.set_xticks(range(len(values)), [label_of(value) for value in values], rotation=30 if len(values) > 6 else 0)


def _color(i: int) -> str:
    return COLORS[(7 * i) % len(COLORS)]  # neighbors in the list are alike: 7 steps lead to every color


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
