"""Figures of the paper from small data: embeddings of several methods side by side, and the seen score on its own axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from opencon.report.figures import COLORS, INK, NOVEL, SEEN, blank_figure, save_png
from opencon.report.paper_figures import choose_classes, project_classes


@dataclass(frozen=True)
class Panel:
    """The embedding of one method."""

    name: str
    z: ArrayLike  # (M, D) unit rows
    truth: Sequence[int]  # (M,)
    num_seen: int
    class_names: Mapping[str, str]  # class to name


def embedding_panels(panels: Sequence[Panel], *, number: int, title: str, path: Path, seed: int = 0) -> Path:
    """One picture for each method, the same classes in the same colors; seen ones are circles, novel ones triangles."""
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = blank_figure((4.2 * columns, 4.2 * lines + 0.4))
    for i, panel in enumerate(panels):
        truth, z = np.asarray(panel.truth), np.asarray(panel.z, dtype=np.float64)
        classes = choose_classes(truth, panel.num_seen, number=number)
        rows = np.isin(truth, classes)
        how, xy = project_classes(z[rows], seed=seed)
        axes = figure.add_subplot(lines, columns, i + 1)
        for j, c in enumerate(classes):
            here = truth[rows] == c
            mark = "o" if c < panel.num_seen else "^"
            axes.scatter(*xy[here].T, s=10, c=COLORS[j % len(COLORS)], marker=mark, linewidths=0, alpha=0.8)
        axes.axis("off")
        axes.set_title(f"{panel.name} ({how})", fontsize=11, color=INK)
    figure.suptitle(title, fontsize=13, fontweight="bold", color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.1)


def distribution_figure(
    seen: Sequence[float], novel: Sequence[float], *, threshold: float | None, title: str, path: Path
) -> Path:
    """The cosine with the nearest seen prototype: counts of seen and of novel images, in equal bins from -1 to 1."""
    figure = blank_figure((6.4, 4.0))
    axes = figure.add_axes((0.1, 0.14, 0.87, 0.73))
    edges = np.linspace(-1, 1, len(seen) + 1)
    used = np.nonzero(np.asarray(seen) + np.asarray(novel))[0]
    for name, counts, color in (("seen classes", seen, SEEN), ("novel classes", novel, NOVEL)):
        axes.stairs(np.asarray(counts) / max(1.0, sum(counts)), edges, fill=True, alpha=0.45, color=color, label=name)
    if threshold is not None:
        axes.axvline(threshold, color=INK, linewidth=1, linestyle="--", label="threshold")
    axes.set_xlim(edges[used[0]], edges[used[-1] + 1])
    axes.set_xlabel("cosine with the nearest seen prototype", color=INK)
    axes.set_ylabel("share of the images", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.text(0.02, 0.93, title, fontsize=12, fontweight="bold", color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.1)
