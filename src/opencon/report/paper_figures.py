"""Look-alikes of the figures in the OpenCon paper, and the confusion matrix, for a run whose truth is known.

    class_figure      figures 2 and 5: the embedding of 10 or 20 classes, half of them seen, by UMAP
    novelty_figure    figure 4: the novelty score of seen and of novel images, and the mistakes
    distribution_figure  the same from counts, on the paper's axis
    confusion_figure  ours: which classes are taken for which, once groups have names

Each is one PNG whose size follows its words, so that long class names fit. Letters: M images, D embedding size,
S = num_seen; true classes below S are seen, the others novel.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opencon.errors import ConfigError, DataError
from opencon.metrics import match
from opencon.report.figures import (
    COLORS,
    FAINT,
    INK,
    NAMED_CLASSES,
    NOVEL,
    SEEN,
    Points,
    Projection,
    blank_figure,
    draw_novelty,
    label_of,
    legend,
    novelty_bins,
    project,
    save_png,
)

NAME_WIDTH = 26  # letters of a class name on one line; longer names go on below (ours)
CELL_NUMBERS = 14  # classes up to which the cells of a confusion matrix hold a number that can be read (ours)


def class_figure(
    z: ArrayLike,
    truth: ArrayLike,
    *,
    num_seen: int,
    class_names: Sequence[str],
    title: str,
    path: Path,
    classes: Sequence[int] | None = None,
    colored_by: str = "true class",
    projection: Projection | Literal["umap"] = "umap",
    seed: int = 0,
) -> Path:
    """Draw the embedding of some classes in two dimensions, one color per true class; return the path of the PNG.

    Args:
        z: (M, D) unit rows.
        truth: (M,) true classes.
        num_seen: true classes below it are seen: circles. The others are novel: triangles.
        class_names: one name for each true class, by number.
        title: a line above.
        path: where the PNG goes; its folder must exist.
        classes: which true classes; None: ten, by `choose_classes`.
        colored_by: what `truth` is, in words; without any truth the groups themselves can stand in for it.
        projection: "umap" as in the paper, or one of `figures.project`, which is also used without umap-learn.
        seed: of the projection.
    """
    z, truth = np.asarray(z, dtype=np.float64), np.asarray(truth)
    _check_lengths(len(z), truth=truth)
    _check_names(truth, class_names)
    class_names = [label_of(name) for name in class_names]
    chosen = choose_classes(truth, num_seen) if classes is None else sorted(classes)
    missing = sorted(set(chosen) - set(truth.tolist()))
    if missing or not chosen:
        raise ConfigError(f"classes = {list(chosen)} must be among those with images; {missing} have none.")
    figure = blank_figure((7.2, 6.0))
    rows = np.isin(truth, chosen)
    how, xy = project_classes(z[rows], projection, seed)
    axes = figure.add_axes((0.0, 0.0, 1.0, 0.9))
    marks, area = draw_classes(axes, xy, truth[rows], chosen, num_seen, [_wrapped(class_names[c]) for c in chosen])
    figure.text(0.02, 0.95, label_of(title), fontsize=14, fontweight="bold", color=INK)
    figure.text(0.02, 0.91, f"Embedding, colored by {colored_by} ({how})", fontsize=11, color=INK)
    _class_legends(figure, list(zip(marks, chosen, strict=True)), num_seen, marker_scale=(40 / area) ** 0.5)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


def draw_classes(
    axes: Any, xy: Points, truth: NDArray[Any], classes: Sequence[int], num_seen: int, names: Sequence[str]
) -> tuple[list[Any], float]:
    """Draw the points (M, 2) of some classes, seen ones as circles, novel ones as triangles; returns marks and size."""
    area = float(np.clip(22000 / len(xy), 6, 50))
    style: dict[str, Any] = {"s": area, "linewidths": 0, "alpha": 0.8}
    marks = [
        axes.scatter(
            *xy[truth == c].T, c=COLORS[i % len(COLORS)], marker="o" if c < num_seen else "^", label=name, **style
        )
        for i, (c, name) in enumerate(zip(classes, names, strict=True))
    ]
    axes.axis("off")
    axes.margins(0.03)
    return marks, area


def _class_legends(figure: Any, handles: list[tuple[Any, int]], num_seen: int, *, marker_scale: float) -> None:
    """Name the classes beside the picture: the seen ones, then the novel ones below. `handles` are (mark, class)."""
    kinds = (
        ("seen", SEEN, [mark for mark, c in handles if c < num_seen]),
        ("novel", NOVEL, [mark for mark, c in handles if c >= num_seen]),
    )
    top = 0.9
    for name, color, marks in kinds:
        if marks:
            position = {"loc": "upper left", "bbox_to_anchor": (1.0, top), "alignment": "left"}
            style = {"fontsize": 10, "frameon": False, "labelcolor": INK, "markerscale": marker_scale}
            block = figure.legend(handles=marks, title=name, **position, **style)
            block.get_title().set(color=color, fontweight="bold", fontsize=11)
            figure.draw_without_rendering()
            top = block.get_window_extent().transformed(figure.transFigure.inverted()).y0  # the next goes below


def choose_classes(truth: ArrayLike, num_seen: int, *, number: int = 10) -> list[int]:
    """`number` true classes with images, half of them seen where there are enough, evenly over each half.

    10 and 20 are the paper's numbers (figures 2 and 5); it does not say which classes it took.
    """
    present = np.unique(np.asarray(truth))
    seen, novel = present[present < num_seen], present[present >= num_seen]
    few = min(len(novel), number - min(len(seen), number // 2))
    parts = ((seen, min(len(seen), number - few)), (novel, few))
    return [int(c) for part, count in parts for c in part[np.arange(count) * len(part) // max(count, 1)]]


def novelty_figure(
    novelty: ArrayLike, truth: ArrayLike, *, num_seen: int, threshold: float | None, title: str, path: Path
) -> Path:
    """Draw the distribution of the novelty of seen and of novel images; hatched: novel, but taken for seen.

    The paper's axis is the similarity to the nearest seen prototype, which is larger for seen images; ours is novelty.

    Args:
        novelty: (M,) larger is newer.
        truth: (M,) true classes; below `num_seen` they are seen.
        num_seen: see `truth`.
        threshold: novelty above which an image counts as novel; None draws no line and nothing hatched.
        title: a line above.
        path: where the PNG goes; its folder must exist.
    """
    novelty, truth = np.asarray(novelty, dtype=np.float64), np.asarray(truth)
    _check_lengths(len(truth), novelty=novelty)
    figure = blank_figure((7.2, 4.4))
    axes = figure.add_axes((0.12, 0.14, 0.85, 0.68))
    is_novel = truth >= num_seen
    handles = draw_novelty(axes, novelty, is_novel, threshold)
    if threshold is not None and is_novel.any():
        is_mistaken = is_novel & (novelty <= threshold)
        weights = np.full(int(is_mistaken.sum()), 100 / is_novel.sum())  # shares of the novel, as the bars below
        bars = {"bins": novelty_bins(novelty, threshold), "weights": weights, "histtype": "stepfilled"}
        share = is_mistaken.sum() / is_novel.sum()
        _, _, patches = axes.hist(
            novelty[is_mistaken], **bars, facecolor="none", edgecolor=NOVEL, hatch="////", linewidth=0
        )
        patches[0].set_label(f"taken for seen ({share:.0%})")
        legend(axes, [*handles, patches[0]])
    figure.text(0.02, 0.93, label_of(title), fontsize=14, fontweight="bold", color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


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
    figure.text(0.02, 0.93, label_of(title), fontsize=12, fontweight="bold", color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.1)


def confusion(predicted: ArrayLike, truth: ArrayLike) -> tuple[NDArray[np.int64], list[int], list[int]]:
    """Counts of (true class, group), the classes of the rows and of the columns, once groups are named by `match`.

    Rows are the true classes in order. Columns are the groups in the order of the classes they are matched to, then
    those without a match, as -1; a class without a group has an empty column. So the diagonal holds what is right, and
    its sum over all counts is the accuracy "all".
    """
    predicted, truth = np.asarray(predicted), np.asarray(truth)
    naming = match(predicted, truth)
    classes = [int(c) for c in np.unique(truth)]
    others = [int(g) for g in np.unique(predicted) if int(g) not in naming]
    column = {g: classes.index(c) for g, c in naming.items()} | {g: len(classes) + i for i, g in enumerate(others)}
    counts = np.zeros((len(classes), len(classes) + len(others)), dtype=np.int64)
    np.add.at(counts, (np.searchsorted(classes, truth), np.array([column[int(g)] for g in predicted])), 1)
    return counts, classes, [*classes, *[-1] * len(others)]


def confusion_figure(
    predicted: ArrayLike, truth: ArrayLike, *, num_seen: int, class_names: Sequence[str], title: str, path: Path
) -> Path:
    """Draw which share of each true class went where, with the seen and the novel block marked.

    Args:
        predicted: (M,) classes or groups from the model.
        truth: (M,) true classes; below `num_seen` they are seen.
        num_seen: see `truth`.
        class_names: one name for each true class, by number.
        title: a line above.
        path: where the PNG goes; its folder must exist.
    """
    predicted, truth = np.asarray(predicted), np.asarray(truth)
    _check_lengths(len(truth), predicted=predicted)
    _check_names(truth, class_names)
    class_names = [label_of(name) for name in class_names]
    counts, classes, columns = confusion(predicted, truth)
    shares = counts / counts.sum(axis=1, keepdims=True)  # (true classes, groups)
    side = float(np.clip(0.42 * len(columns), 4.0, 9.0))
    figure = blank_figure((side + 2, side + 2))
    axes = figure.add_axes((1 / (side + 2), 1 / (side + 2), side / (side + 2), side / (side + 2)))
    image = draw_shares(axes, shares, sum(c < num_seen for c in classes))
    bar = figure.colorbar(image, cax=axes.inset_axes((1.02, 0, 0.03, 1)), format=lambda share, _: f"{share:.0%}")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, color=FAINT, labelcolor=INK)
    if len(columns) <= CELL_NUMBERS:
        for (i, j), share in np.ndenumerate(shares):
            if round(100 * share) >= 1:
                color = "white" if share > 0.5 else INK
                axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=9, color=color)
    _name_axes(axes, classes, columns, class_names, num_seen)
    right = counts[: len(classes), : len(classes)].trace() / counts.sum()
    axes.set_title(f"{label_of(title)}\n", fontsize=14, fontweight="bold", color=INK, loc="left")
    words = f"% of each true class; one matching of groups to classes: {right:.1%} on the diagonal"
    axes.annotate(words, (0, 1), (0, 9), "axes fraction", "offset points", fontsize=10.5, color=INK)
    return save_png(figure, path, bbox_inches="tight", pad_inches=0.15)


def draw_shares(axes: Any, shares: NDArray[np.float64], seen: int) -> Any:
    """Draw shares (true classes, groups), a line around the block of the first `seen` classes and that of the others."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    blues = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#9ecae8", SEEN, "#00324f"])
    image = axes.imshow(shares, cmap=blues, vmin=0, vmax=1, interpolation="nearest")
    for start, size, color in ((0, seen, SEEN), (seen, len(shares) - seen, NOVEL)):
        if size:
            corner = (start - 0.5, start - 0.5)
            axes.add_patch(
                Rectangle(corner, size, size, fill=False, edgecolor=color, linewidth=2, clip_on=False, zorder=3)
            )
    axes.tick_params(length=0)
    return image


def _name_axes(axes: Any, classes: list[int], columns: list[int], class_names: Sequence[str], num_seen: int) -> None:
    """Class names in the color of their kind; of many classes only how many are seen and novel."""
    seen, novel = sum(c < num_seen for c in classes), sum(c >= num_seen for c in classes)
    if len(columns) <= NAMED_CLASSES:  # the rows carry the names in full, the columns repeat their beginnings
        axes.set_xticks(range(len(columns)), [_short(class_names[c]) if c >= 0 else "no match" for c in columns])
        axes.set_yticks(range(len(classes)), [class_names[c] for c in classes])
        for text, c in zip([*axes.get_xticklabels(), *axes.get_yticklabels()], [*columns, *classes], strict=True):
            text.set(color=FAINT if c < 0 else SEEN if c < num_seen else NOVEL, fontsize=9)
        for text in axes.get_xticklabels():
            text.set(rotation=90)
    else:
        middles = [
            (start + (size - 1) / 2, f"{name} ({size})")
            for start, size, name in ((0, seen, "seen"), (seen, novel, "novel"))
            if size
        ]
        axes.set_xticks(*zip(*middles, strict=True), fontsize=11, color=INK)
        axes.set_yticks(*zip(*middles, strict=True), fontsize=11, color=INK, rotation=90, va="center")
    axes.set_xlabel("group, by the class it is matched to", fontsize=11, color=INK)
    axes.set_ylabel("true class", fontsize=11, color=INK)
    for spine in axes.spines.values():
        spine.set_color("#dddddd")


def project_classes(z: Points, projection: Projection | Literal["umap"] = "umap", seed: int = 0) -> tuple[str, Points]:
    """UMAP if it is asked for, installed, and has enough images; else `figures.project`. The name says which."""
    if projection != "umap":
        return project(z, projection=projection, seed=seed)
    try:
        umap: Any = import_module("umap")
    except ImportError:
        name, xy = project(z, seed=seed)
        return f"{name}; umap-learn is not installed", xy
    if len(z) < 4:  # its spectral start needs more rows than that
        return project(z, projection="pca")
    neighbors = min(15, len(z) - 1)  # 15: its own default; it needs fewer than there are images
    points = umap.UMAP(n_neighbors=neighbors, random_state=seed, n_jobs=1).fit_transform(z.astype(np.float32))
    return "UMAP", np.asarray(points, dtype=np.float64)


def _wrapped(name: str) -> str:
    return textwrap.fill(name, NAME_WIDTH, break_on_hyphens=False)


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def _check_lengths(M: int, **arrays: NDArray[Any]) -> None:
    if not M:
        raise DataError("there is no image to draw; a figure needs at least one.")
    for name, values in arrays.items():
        if values.shape != (M,):
            raise DataError(f"{name} has shape {values.shape}, but there are {M} images. Give one entry per image.")
        if not np.isfinite(values).all():
            raise DataError(f"{name} holds entries that are not finite numbers; they cannot be drawn.")


def _check_names(truth: NDArray[Any], class_names: Sequence[str]) -> None:
    if truth.max() >= len(class_names):
        raise DataError(f"truth holds class {truth.max()}, but class_names has {len(class_names)} names, from 0.")
