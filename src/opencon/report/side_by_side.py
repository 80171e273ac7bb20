"""Several runs in one picture: their embeddings, or their confusion matrices, over the same classes.

Letters: M images, D embedding size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opencon.errors import DataError
from opencon.report.figures import INK, NOVEL, SEEN, blank_figure, label_of, save_png
from opencon.report.paper_figures import choose_classes, confusion, draw_classes, draw_shares, project_classes

PANEL = 4.6  # inches
MOST_IN_A_ROW = 3  # panels, ours: four would be too small to read on a page
MOST_ROWS = 1500  # images drawn in a panel, ours: more hide each other, and t-SNE takes its time


@dataclass(frozen=True, eq=False)
class Panel:
    """One run."""

    title: str
    z: ArrayLike  # (M, D)
    truth: ArrayLike  # (M,)
    num_seen: int
    class_names: Mapping[int, str]  # of the classes in `truth`, at least
    predicted: ArrayLike = ()  # (M,) for a confusion matrix


def maps_figure(panels: Sequence[Panel], *, path: Path, number: int = 10, title: str = "") -> Path:
    """Draw the embeddings of `number` classes, seen ones as circles, novel ones as triangles; returns the path of the PNG.

    Panels of the same data show the same classes, and their names stand below where all are of the same data.
    """
    figure, axes = _grid(len(panels))
    handles: list[Any] = []
    same = [[other for other in panels if other.class_names == panel.class_names] for panel in panels]
    for panel, alike, ax in zip(panels, same, axes, strict=True):
        chosen, num_seen = _chosen(alike, number), panel.num_seen
        truth = np.asarray(panel.truth)
        rows = np.flatnonzero(np.isin(truth, chosen))
        rows = rows[:: -(-len(rows) // MOST_ROWS)]
        how, xy = project_classes(np.asarray(panel.z, dtype=np.float64)[rows])
        handles, _ = draw_classes(
            ax, xy, truth[rows], chosen, num_seen, [label_of(panel.class_names[c]) for c in chosen]
        )
        ax.set_title(f"{label_of(panel.title)}\n({how})", fontsize=11, color=INK)
    if len(same[0]) == len(panels):
        legend = figure.legend(
            handles=handles, loc="lower center", ncols=min(5, len(handles)), frameon=False, fontsize=9
        )
        for text, c in zip(legend.get_texts(), chosen, strict=True):
            text.set_color(SEEN if c < num_seen else NOVEL)
    figure.text(0.125, 0.97, label_of(title), fontsize=13, fontweight="bold", color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


def confusions_figure(panels: Sequence[Panel], *, path: Path, number: int = 10) -> Path:
    """Draw which share of each of `number` classes went where, for runs of the same data; returns the path of the PNG."""
    chosen, num_seen, class_names = _chosen(panels, number), panels[0].num_seen, panels[0].class_names
    figure, axes = _grid(len(panels))
    for at, (panel, ax) in enumerate(zip(panels, axes, strict=True)):
        predicted, truth = np.asarray(panel.predicted), np.asarray(panel.truth)
        counts, classes, _ = confusion(predicted, truth)  # matched over all classes, then some of them are shown
        shown = [classes.index(c) for c in chosen]
        shares = counts[np.ix_(shown, shown)] / counts[shown].sum(axis=1, keepdims=True)
        draw_shares(ax, shares, sum(c < num_seen for c in chosen))
        right = counts[: len(classes), : len(classes)].trace() / counts.sum()
        ax.set_title(f"{label_of(panel.title)}: {right:.1%}", fontsize=12, color=INK)
        names = [label_of(class_names[c]) for c in chosen]
        ax.set_xticks(range(len(chosen)), names, rotation=90, fontsize=8)
        ax.set_yticks(range(len(chosen)), names if at % MOST_IN_A_ROW == 0 else [""] * len(names), fontsize=8)
        for text, c in zip([*ax.get_xticklabels(), *ax.get_yticklabels()], [*chosen, *chosen], strict=True):
            text.set_color(SEEN if c < num_seen else NOVEL)
    words = "Which share of each true class (rows) went to which group (columns, by the class it is matched to)"
    figure.text(0.125, 0.97, words, fontsize=11, color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


def _chosen(panels: Sequence[Panel], number: int) -> list[int]:
    """Classes that every run has images of."""
    common = set.intersection(*({int(c) for c in np.asarray(panel.truth)} for panel in panels))
    if not common:
        raise DataError("the runs share no class with images, so they cannot be shown side by side.")
    return choose_classes(np.array(sorted(common)), panels[0].num_seen, number=number)


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
