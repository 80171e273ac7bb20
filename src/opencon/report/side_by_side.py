"""Several runs in one picture: their embeddings, or their confusion matrices, over the same classes.

Letters: M images, D embedding size, S = num_seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opencon.errors import DataError
from opencon.report.figures import COLORS, INK, NOVEL, SEEN, blank_figure, project, save_png
from opencon.report.paper_figures import choose_classes, confusion

PANEL = 4.6  # inches
MOST_IN_A_ROW = 3  # panels, ours: four would be too small to read on a page
MOST_ROWS = 1500  # images drawn in a panel, ours: more hide each other, and t-SNE takes its time


@dataclass(frozen=True, eq=False)
class Panel:
    """One run."""

    title: str
    z: ArrayLike  # (M, D)
    predicted: ArrayLike  # (M,)
    truth: ArrayLike  # (M,)


def maps_figure(
    panels: Sequence[Panel], *, num_seen: int, class_names: Sequence[str], path: Path, number: int = 10
) -> Path:
    """Draw the embeddings of `number` classes, the same ones in every panel; returns the path of the PNG."""
    chosen = _chosen(panels, num_seen, number)
    figure, axes = _grid(len(panels))
    handles: list[Any] = []
    for panel, ax in zip(panels, axes, strict=True):
        truth = np.asarray(panel.truth)
        rows = np.flatnonzero(np.isin(truth, chosen))
        rows = rows[:: -(-len(rows) // MOST_ROWS)]
        how, xy = project(np.asarray(panel.z, dtype=np.float64)[rows])
        area = float(np.clip(22000 / len(xy), 6, 50))
        handles = [
            ax.scatter(
                *xy[truth[rows] == c].T,
                s=area,
                c=COLORS[i % len(COLORS)],
                marker="o" if c < num_seen else "^",
                linewidths=0,
                alpha=0.8,
                label=class_names[c],
            )
            for i, c in enumerate(chosen)
        ]
        ax.axis("off")
        ax.set_title(f"{panel.title} ({how})", fontsize=12, color=INK)
    legend = figure.legend(handles=handles, loc="lower center", ncols=min(5, len(chosen)), frameon=False, fontsize=9)
    for text, c in zip(legend.get_texts(), chosen, strict=True):
        text.set_color(SEEN if c < num_seen else NOVEL)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


def confusions_figure(
    panels: Sequence[Panel], *, num_seen: int, class_names: Sequence[str], path: Path, number: int = 10
) -> Path:
    """Draw which share of each of `number` classes went where, for every run; returns the path of the PNG."""
    from matplotlib.patches import Rectangle

    chosen = _chosen(panels, num_seen, number)
    figure, axes = _grid(len(panels))
    for at, (panel, ax) in enumerate(zip(panels, axes, strict=True)):
        predicted, truth = np.asarray(panel.predicted), np.asarray(panel.truth)
        counts, classes, _ = confusion(predicted, truth)  # matched over all classes, then some of them are shown
        shown = [classes.index(c) for c in chosen]
        shares = counts[np.ix_(shown, shown)] / counts[shown].sum(axis=1, keepdims=True)
        ax.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        right = counts[: len(classes), : len(classes)].trace() / counts.sum()
        ax.set_title(f"{panel.title}: {right:.1%}", fontsize=12, color=INK)
        names = [class_names[c] for c in chosen]
        ax.set_xticks(range(len(chosen)), names, rotation=90, fontsize=8)
        ax.set_yticks(range(len(chosen)), names if at % MOST_IN_A_ROW == 0 else [""] * len(names), fontsize=8)
        for text, c in zip([*ax.get_xticklabels(), *ax.get_yticklabels()], [*chosen, *chosen], strict=True):
            text.set_color(SEEN if c < num_seen else NOVEL)
        ax.tick_params(length=0)
        seen = sum(c < num_seen for c in chosen)
        for start, size, color in ((0, seen, SEEN), (seen, len(chosen) - seen, NOVEL)):
            ax.add_patch(Rectangle((start - 0.5, start - 0.5), size, size, fill=False, edgecolor=color, linewidth=2))
    words = "Which share of each true class (rows) went to which group (columns, by the class it is matched to)"
    figure.text(0.125, 0.97, words, fontsize=11, color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


def _chosen(panels: Sequence[Panel], num_seen: int, number: int) -> list[int]:
    """Classes that every run has images of."""
    common = set.intersection(*({int(c) for c in np.asarray(panel.truth)} for panel in panels))
    if not common:
        raise DataError("the runs share no class with images, so they cannot be shown side by side.")
    return choose_classes(np.array(sorted(common)), num_seen, number=number)


def _grid(number: int) -> tuple[Any, list[Any]]:
    """A figure with this many panels."""
    columns = min(number, MOST_IN_A_ROW)
    rows = -(-number // columns)
    figure = blank_figure((PANEL * columns, (PANEL + 0.7) * rows + 0.6))
    grid: NDArray[Any] = np.asarray(figure.subplots(rows, columns, squeeze=False)).ravel()
    for ax in grid[number:]:
        ax.axis("off")
    figure.subplots_adjust(wspace=0.12, hspace=0.45, bottom=0.16)
    return figure, list(grid[:number])
