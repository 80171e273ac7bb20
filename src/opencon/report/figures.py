"""Pictures of a run. matplotlib is an extra: it is imported only to draw, and its global state does not change.

Letters: M images, D embedding size, S = num_seen. True classes below S are seen, the others novel.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opencon.errors import ConfigError, DataError, MissingExtraError
from opencon.files import explained, write_whole
from opencon.metrics import match, novelty_detection
from opencon.report.embed import readable

Projection = Literal["auto", "pca", "tsne"]
Points = NDArray[np.float64]
Mask = NDArray[np.bool_]

SIZE = (11.0, 5.2)  # inches; 1100 x 520 pixels, the width of a README page
LEFT = 0.605  # of the width: the part of the embedding, which stands alone where there is no novelty score
DPI = 100
TSNE_IMAGES = (31, 5000)  # t-SNE needs more images than its perplexity, 30; with more than 5000 (ours) it takes minutes
NAMED_CLASSES = 40  # ours, because more names than this hide the picture
# Ten colors that stay apart under common color blindness (Paul Tol's qualitative scheme); further classes go round.
COLORS = ("#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#661100", "#cc6677", "#882255", "#aa4499")
SEEN, NOVEL = "#0072b2", "#d55e00"  # blue and vermilion of Okabe and Ito, made for the same purpose
INK, FAINT = "#222222", "#767676"


def embedding_figure(
    z: ArrayLike,
    truth: ArrayLike,
    predicted: ArrayLike,
    novelty: ArrayLike | None,
    *,
    num_seen: int,
    threshold: float | None,
    class_names: Sequence[str],
    title: str,
    path: Path,
    projection: Projection = "auto",
    seed: int = 0,
) -> Path:
    """Draw what the embedding looks like and how the novelty score splits it; return the path of the PNG.

    Left: the embedding in two dimensions, one color per true class, seen and novel classes with different marks,
    hollow ones for images outside the group that is matched to their class (one matching over everything, so the share
    of filled ones is the accuracy "all"). Right: the novelty score of seen and of novel images.

    Args:
        z: (M, D) unit rows.
        truth: (M,) true classes.
        predicted: (M,) classes or groups from the model.
        novelty: (M,) larger is newer; None, where a method has no score: the right panel is left out.
        num_seen: true classes below it are seen.
        threshold: novelty above which an image counts as novel; None draws no line.
        class_names: one name for each true class, by number.
        title: a line above both panels.
        path: where the PNG goes; its folder must exist.
        projection: "pca", "tsne", or "auto": t-SNE for 31 to 5000 images, else PCA.
        seed: of t-SNE.
    """
    has_score = novelty is not None
    figure = blank_figure(SIZE if has_score else (SIZE[0] * LEFT, SIZE[1]))
    z = np.asarray(z, dtype=np.float64)
    truth, predicted = np.asarray(truth), np.asarray(predicted)
    novelty = np.asarray(novelty, dtype=np.float64) if has_score else np.zeros(len(truth))
    _check(z, truth, predicted, novelty, class_names)
    class_names = [label_of(name) for name in class_names]

    edge = 0.02 if has_score else 0.02 / LEFT
    figure.text(edge, 0.945, label_of(title), fontsize=14, fontweight="bold", color=INK)
    naming = match(predicted, truth)
    is_right = np.array([naming.get(int(p), -1) for p in predicted]) == truth
    name_of_projection, xy = project(z, projection=projection, seed=seed)
    left = figure.add_axes((edge, 0.02, 0.565 if has_score else 1 - 2 * edge, 0.79))
    _draw_embedding(left, xy, truth, is_right, num_seen, class_names)
    figure.text(edge, 0.88, f"Embedding, colored by true class ({name_of_projection})", fontsize=12, color=INK)
    if has_score:
        right = figure.add_axes((0.65, 0.125, 0.335, 0.685))
        draw_novelty(right, novelty, truth >= num_seen, threshold)
        figure.text(0.65, 0.88, "Novelty score", fontsize=12, color=INK)
    return save_png(figure, path)


def blank_figure(size: tuple[float, float]) -> Any:
    """A white figure of this size in inches, drawn by Agg, without pyplot and its global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise MissingExtraError("matplotlib", "plots", "drawing the figure", err) from err
    figure = Figure(figsize=size, dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def label_of(text: object) -> str:
    """Text for a picture as it is: no bytes that are no text, no formulas, and nothing that a legend would leave out."""
    plain = readable(text).replace("$", r"\$")
    return f" {plain}" if plain.startswith("_") else plain


def save_png(figure: Any, path: Path, **options: Any) -> Path:
    """Write the picture under a temporary name, then rename it: nothing half drawn stays behind."""
    options |= {"format": "png", "metadata": {"Software": None}}  # same picture, same bytes
    drawn = io.BytesIO()
    figure.savefig(drawn, **options)
    with explained(path):
        return write_whole(path, lambda partial: partial.write_bytes(drawn.getvalue()))


def project(z: ArrayLike, *, projection: Projection = "auto", seed: int = 0) -> tuple[str, Points]:
    """(M, D) rows -> the name of the projection and (M, 2) points."""
    from sklearn.manifold import TSNE  # late: slow to import

    z = np.asarray(z, dtype=np.float64)
    least, most = TSNE_IMAGES
    fits = least <= len(z) <= most
    if projection == "tsne" and not fits:
        raise ConfigError(
            f"projection = 'tsne' needs {least} to {most} images, not {len(z)}. Use 'pca', or draw fewer images."
        )
    if projection == "pca" or not fits:
        return "PCA", _pca(z)
    # The start is ours, on the scale that scikit-learn recommends, so that the picture does not depend on its PCA solver.
    start = _pca(z)
    start *= 1e-4 / max(float(start[:, 0].std()), 1e-12)
    points = TSNE(init=start.astype(np.float32), random_state=seed).fit_transform(z.astype(np.float32))
    return "t-SNE", np.asarray(points, dtype=np.float64)


def _pca(z: Points) -> Points:
    """(M, D) -> (M, 2): the two directions of the largest variance, signs fixed so that runs agree."""
    centered = z - z.mean(axis=0)
    _, _, directions = np.linalg.svd(centered, full_matrices=False)
    directions = directions[:2] * np.sign(directions[:2].sum(axis=1, keepdims=True) + 1e-12)
    xy = centered @ directions.T
    return np.pad(xy, ((0, 0), (0, 2 - xy.shape[1])))  # one image or one dimension: a line


def _draw_embedding(
    axes: Any, xy: Points, truth: NDArray[Any], is_right: Mask, num_seen: int, class_names: Sequence[str]
) -> None:
    from matplotlib.patheffects import withStroke

    area = float(np.clip(22000 / len(xy), 6, 50))  # 100 dots can be seen, 5000 do not cover one another
    is_seen = truth < num_seen
    classes = np.unique(truth)
    for c in classes:
        color, marker = COLORS[c % len(COLORS)], "o" if c < num_seen else "^"
        here = (truth == c) & is_right
        axes.scatter(*xy[here].T, s=area, c=color, marker=marker, linewidths=0, alpha=0.8, zorder=2)
        here = (truth == c) & ~is_right
        axes.scatter(*xy[here].T, s=area, facecolors="none", edgecolors=color, marker=marker, linewidths=0.8, zorder=2)
    size, rise = (16, 0) if len(classes) <= 12 else (9, 10)  # many small groups: the name stands above each, not on it
    stroke = withStroke(linewidth=size / 4, foreground="white")
    for c in classes if len(classes) <= NAMED_CLASSES else []:
        text = axes.annotate(class_names[c], np.median(xy[truth == c], axis=0), (0, rise), textcoords="offset points")
        text.set(fontsize=size, fontweight="bold", color=SEEN if c < num_seen else NOVEL, path_effects=[stroke])
        text.set(ha="center", va="center", zorder=3)
    axes.axis("off")
    axes.margins(0.03)
    entries = [
        ("o", SEEN, SEEN, _count("seen", truth[is_seen])),
        ("^", NOVEL, NOVEL, _count("novel", truth[~is_seen])),
        ("o", "none", FAINT, f"hollow: in another group ({(~is_right).mean():.1%})"),
    ]
    legend(axes, [axes.scatter([], [], s=32, marker=m, fc=face, ec=edge, label=t) for m, face, edge, t in entries])


def novelty_bins(novelty: Points, threshold: float | None) -> Points:
    """The 36 edges of the 35 bars, threshold included."""
    values = novelty if threshold is None else np.append(novelty, threshold)
    low, high = float(values.min()), float(values.max())
    return np.linspace(low, high, 36) if high > low else np.linspace(low - 0.5, low + 0.5, 36)


def draw_novelty(axes: Any, novelty: Points, is_novel: Mask, threshold: float | None) -> list[Any]:
    """Draw the novelty of seen and of novel images, each as shares; return what the legend names."""
    handles = []
    bins = novelty_bins(novelty, threshold)
    for name, rows, color in (("seen", ~is_novel, SEEN), ("novel", is_novel, NOVEL)):
        if rows.any():
            # Shares of each kind, so that many seen images do not flatten few novel ones.
            weights = np.full(rows.sum(), 100 / rows.sum())
            common = {"bins": bins, "weights": weights, "histtype": "stepfilled"}
            _, _, (patch,) = axes.hist(novelty[rows], **common, facecolor=color, alpha=0.55, label=name)
            axes.hist(novelty[rows], **{**common, "histtype": "step"}, color=color, linewidth=1.4)
            handles.append(patch)
    if threshold is not None:
        line = axes.axvline(threshold, color=INK, linestyle=(0, (4, 3)), linewidth=1.4, label="threshold")
        handles.append(line)
    auroc = novelty_detection(novelty, is_novel).auroc
    if not np.isnan(auroc):
        (nothing,) = axes.plot([], [], " ", label=f"AUROC {auroc:.3f}")
        handles.append(nothing)
    axes.set_xlabel("novelty (larger is newer)", fontsize=11, color=INK)
    axes.set_ylabel("% of each kind of image", fontsize=11, color=INK)
    axes.tick_params(labelsize=10, color=FAINT, labelcolor=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom" or side == "left")
        spine.set_color(FAINT)
    axes.margins(x=0.02)
    legend(axes, handles)
    return handles


def legend(axes: Any, handles: list[Any]) -> None:
    """Put the legend on one line between the head of a panel and its drawing, where it covers nothing."""
    position = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.0, "borderpad": 0.4}
    space = {"ncol": len(handles), "handlelength": 1.3, "handletextpad": 0.4, "columnspacing": 1.0}
    axes.legend(handles=handles, fontsize=10, frameon=False, labelcolor=INK, **position, **space)


def _count(name: str, truth: NDArray[Any]) -> str:
    number = len(np.unique(truth))
    return f"{name} ({number} class{'' if number == 1 else 'es'}, {len(truth):,})"


def _check(
    z: Points, truth: NDArray[Any], predicted: NDArray[Any], novelty: Points, class_names: Sequence[str]
) -> None:
    if z.ndim != 2 or not len(z):
        raise DataError(f"z has shape {z.shape}; a figure needs at least one row of an (images, dimensions) array.")
    for name, values in (("truth", truth), ("predicted", predicted), ("novelty", novelty)):
        if values.shape != (len(z),):
            raise DataError(f"{name} has shape {values.shape}, but z has {len(z)} rows. Give one entry per row.")
    if not (np.isfinite(z).all() and np.isfinite(novelty).all()):
        raise DataError("z or novelty holds entries that are not finite numbers; they cannot be drawn.")
    if truth.max() >= len(class_names):
        raise DataError(f"truth holds class {truth.max()}, but class_names has {len(class_names)} names, from 0.")
