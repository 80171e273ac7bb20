"""What can be asked about the groups of a fitted estimator: typical rows, a tree, how stable they are, a picture.

Letters: M rows, D embedding size, C classes and groups together, P prototypes: one for each class and group, more where
some were merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from opencon.errors import MissingExtraError
from opencon.report.map import map_positions

Array = npt.NDArray[Any]
KEPT = 0.8  # ours: share of the rows in a resample; half loses small classes, all but a few would change nothing
SURELY, DIVISIONS = 0.01, 999  # ours: how rare chance must make it, and random divisions to tell
MOST_COMPARED, FEWEST_COMPARED = 500, 5  # rows of a class, ours: all pairs are compared; fewer tell nothing
# Twenty colors of which neighbors differ (Kelly, Color Engineering 1965, without black and white), then again.
COLORS = (
    *("#f3c300", "#875692", "#f38400", "#a1caf1", "#be0032", "#c2b280", "#848482", "#008856", "#e68fac", "#0067a5"),
    *("#f99379", "#604e97", "#f6a600", "#b3446c", "#dcd300", "#882d17", "#8db600", "#654522", "#e25822", "#2b3d26"),
)


def typical_rows(z: Array, member: Array, prototypes: Array, owner: Array, num: int) -> list[Array]:
    """For each class the numbers of its `num` most typical rows, the most typical first.

    Typical is the row whose embedding (M, D) has the largest cosine to a prototype (P, D) of its class.

    Args:
        z: (M, D).
        member: (M,) class of each row, -1 for none.
        prototypes: (P, D).
        owner: (P,) class of each prototype.
        num: rows of each class, at most.
    """
    cosine = z @ prototypes.T
    found = []
    for c in range(int(owner.max()) + 1):
        rows = np.flatnonzero(member == c)
        nearest = cosine[np.ix_(rows, np.flatnonzero(owner == c))].max(axis=1, initial=-1.0)
        found.append(rows[np.argsort(-nearest, kind="stable")[:num]])
    return found


def tree_of_classes(prototypes: Array, share: Array, owner: Array) -> Array:
    """SciPy's linkage matrix (C - 1, 4) of the classes, by average cosine distance of their mean prototypes."""
    from scipy.cluster.hierarchy import linkage

    num_classes = int(owner.max()) + 1
    mean = np.zeros((num_classes, prototypes.shape[1]))
    np.add.at(mean, owner, prototypes * share[:, None])
    mean /= np.linalg.norm(mean, axis=1, keepdims=True).clip(min=1e-12)
    if num_classes < 2:
        return np.zeros((0, 4))
    apart = (1 - mean @ mean.T).clip(min=0)
    return np.asarray(linkage(apart[np.triu_indices(num_classes, k=1)], method="average"))


def agreement(
    member: Array, num_classes: int, num_seen: int, labeled: Array, refit: Callable[[Array, int], Array], num: int
) -> Array:
    """How much of each class comes back when a part of the rows is fitted again: (C,) in [0, 1].

    The mean over resamples of the Jaccard index, rows in both / rows in either, of the class and what became of it: the same
    seen class, or of all groups the one with the largest index (Hennig, CSDA 2007, with subsets in place of bootstraps).

    Args:
        member: (M,) class of each row, -1 for none.
        num_classes: C.
        num_seen: the first so many of them are seen classes.
        labeled: (M,) number of the class of a labeled row, -1 elsewhere.
        refit: called with the rows of a resample and a seed; their classes, numbered likewise.
        num: resamples.
    """
    total = np.zeros(num_classes)
    for seed in range(num):
        kept = np.random.default_rng(seed).random(len(member)) < KEPT
        for c in set(labeled[labeled >= 0]) - set(labeled[kept]):
            kept[np.flatnonzero(labeled == c)[0]] = True  # a seen class needs a labeled row
        rows = np.flatnonzero(kept)
        again = refit(rows, seed)
        for c in range(num_classes):
            own = member[rows] == c
            candidates = [c] if c < num_seen else set(again[own]) - set(range(-1, num_seen))
            total[c] += max(
                ((own & (again == k)).sum() / (own | (again == k)).sum().clip(1) for k in candidates), default=0
            )
    return total / num


def unlike_their_labels(x: Array, member: Array, labeled: Array) -> list[int]:
    """Seen classes whose unlabeled rows do not look like their labeled ones, so that another class may be among them.

    For each class, the energy distance of the two sets of rows (Szekely and Rizzo, 2013) is compared with that of 999 random
    divisions of the same rows; classes are few enough, or nothing is said.

    Args:
        x: (M, F).
        member: (M,) class that each row was given.
        labeled: (M,) number of the class of a labeled row, -1 elsewhere.
    """
    from scipy.spatial.distance import cdist

    rng, found = np.random.default_rng(0), []
    num_seen = int(labeled.max(initial=-1)) + 1
    for c in range(num_seen if num_seen < SURELY * (DIVISIONS + 1) else 0):  # beyond, no outcome would be rare enough
        rows = np.flatnonzero((labeled == c) | ((labeled < 0) & (member == c)))
        rows = rows[:: -(-len(rows) // MOST_COMPARED)]
        own = labeled[rows] == c
        num, others = own.sum(), (~own).sum()
        if min(num, others) >= FEWEST_COMPARED:
            apart = cdist(x[rows], x[rows])
            first = np.stack([own, *(rng.permutation(own) for _ in range(DIVISIONS))]).astype(float)
            second = 1 - first
            across = 2 * ((first @ apart) * second).sum(axis=1) / (num * others)
            within = ((first @ apart) * first).sum(axis=1) / num**2 + ((second @ apart) * second).sum(
                axis=1
            ) / others**2
            energy = across - within
            if (energy >= energy[0] * (1 - 1e-9)).mean() * num_seen < SURELY:  # Bonferroni, over the classes
                found.append(c)
    return found


def draw_map(z: Array, member: Array, names: Sequence[Any], num_seen: int, axes: Any) -> Any:
    """Rows as points in the plane, a color for each class; seen classes are dots, new groups triangles."""
    try:
        from matplotlib import pyplot
    except ImportError as err:
        raise MissingExtraError("matplotlib", "plots", "the plot", err) from err
    axes = pyplot.gca() if axes is None else axes
    projection, xy = map_positions(z, seed=0)
    for c, name in [*enumerate(names), (-1, "unlike everything")]:
        of = xy[member == c]
        if len(of):
            color, marker = (COLORS[c % len(COLORS)], "o" if c < num_seen else "^") if c >= 0 else ("black", "x")
            axes.scatter(*of.T, s=12, color=color, marker=marker, label=f"{name} ({len(of):,})", linewidths=0.5)
    axes.set(title=f"{projection} of {len(z):,} rows", xticks=[], yticks=[])
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return axes
