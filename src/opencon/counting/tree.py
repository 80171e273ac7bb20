"""Our count: how many classes there are, from features and some labels.

DTC, ORCA and GCD (arXiv:1908.09884, 2102.03526, 2201.02609) cluster everything for many k and keep the k whose groups agree
best with the labeled rows. That is blind to classes without labels: on well separated data every k that keeps the seen
classes apart scores the same. Here the groups of all rows must also stand apart (silhouette), and one tree gives the groups
for all k instead of one clustering for each:

    1. k-means to G grains, several per class; small data: every row is a grain. No label is used.
    2. Ward's merging of the grains, G - 1 merges: groups for every k at once. Each grain then goes to its nearest mean.
    3. score(k) = share of the labeled rows right under the best one-to-one naming + 2 * mean silhouette.
    4. The mean score of several trees decides. To see how sure it is, we build more trees on random halves of the rows and
       score them on two thirds of the seen classes; the interval takes in their answers. It also takes in every k whose
       score is close to the best, the more generously the worse the labeled rows fit their groups.

Measured (benchmarks/class_count.py), on data that also chose the numbers below: 12 of 12 classes of 720 photos in every draw
of the 6 seen ones that was tried; 9 to 12 for the ten digits; mixtures of 3 to 50 classes of similar size to within 2.
It counts too few where class sizes differ by orders of magnitude, because Ward merges small groups first. The interval can
then miss the truth as well: 25 to 47 of 50. It also counts too few where the features blur the classes: 56 to 75 of 100 for
CIFAR-100 in SimCLR features. The score hardly depends on k there, and the interval, 50 to 200, says so.

Letters: M rows passed in, N rows used, F features, D dimensions kept, G grains, K groups, S seen classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.counting.base import (
    CountEstimate,
    Progress,
    hint_of_a_limit,
    nothing_to_find,
    refuse_bad_rows,
    search_range,
)
from opencon.runtime import generator as random_stream

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# All numbers are ours. "Measured" means: tried on photo features, digits and mixtures, several draws of the labels each.
MAX_ROWS = 20_000  # drawn where there are more: this bounds the cost, and 100 classes still have 200 rows each
DIMS = 64  # principal directions kept; 32 and 128 give the same count
FEW_FEATURES = 16  # with fewer, rows keep their length: it tells classes apart as well as direction
GRAINS = 300  # at least; 150 to 600 give the same count
GRAINS_PER_CLASS = 3  # at the largest k tried, so that groups are made of several grains
WEIGHT = 2.0  # of the silhouette; 2 to 4 give the same count, but from 3 on a single class is cut in two
TREES, HALVES = 10, 10  # trees of all rows (mean score), trees of half the rows (interval)
KEPT_CLASSES = 2 / 3  # share of the seen classes whose labels score a tree of half the rows
BLUR = 0.1  # times the share of labeled rows that are wrong: the interval takes in every k this close to the best
APART = 0.1  # silhouette from which we say that groups stand apart; noise has 0.01, photos 0.5
ROUNDING = 1e-6  # float32: lengths below this share of the longest row are rounding


@dataclass(frozen=True)
class Grains:
    """Small groups of rows that stay together: all that a tree needs to know of the rows."""

    counts: Floats  # (G,) rows
    sums: Floats  # (G, D)
    squares: Floats  # (G,) sum of the squared lengths
    labeled: Floats  # (G, S) labeled rows of each class


def estimate_classes(
    x: Tensor,
    labels: Tensor,
    *,
    num_seen: int,
    seed: int = 0,
    max_classes: int | None = None,
    progress: Progress = lambda done, total: None,
) -> CountEstimate:
    """Count seen and novel classes together; the answer is at least `num_seen`.

    Without any label the silhouette alone decides, which is less sure. When every row is labeled, there is nothing to count.

    Args:
        x: (M, F) features, any device; the work is done on the CPU. Rows beyond 20,000 are sampled.
        labels: (M,) class in [0, S) of a labeled row, -1 elsewhere.
        num_seen: S; 0 without labels.
        seed: same seed, same answer.
        max_classes: the most to look for; None means 50, or four times the seen classes if that is more.
        progress: called as progress(trees done, trees in all).
    """
    refuse_bad_rows(x, labels, num_seen, max_classes)
    labels = labels.to("cpu", torch.long)
    num_labeled = int((labels >= 0).sum())
    if num_labeled == len(labels):
        return nothing_to_find(num_seen, f"All {num_labeled} rows are labeled, so the {num_seen} seen classes are all.")
    stream = random_stream(torch.device("cpu"), seed)
    rows = draw_rows(labels, MAX_ROWS, stream)
    z, labels = directions(x.detach()[rows.to(x.device)]), labels[rows]
    low, wanted, high = search_range(len(z), num_seen, max_classes)
    if high <= low:
        return nothing_to_find(low, f"{len(z)} rows and at most {wanted} classes leave no choice above {low}.")

    tracks = []
    for tree in range(TREES + HALVES):
        tracks.append(_score_tree(z, labels, num_seen, low, high, stream, on_half=tree >= TREES))
        progress(tree + 1, TREES + HALVES)

    # k-means leaves grains empty where rows coincide, so a tree may have fewer groups: compare the k that all have.
    tried = sorted(set.intersection(*(set(track) for track in tracks[:TREES])))
    if not tried:
        return nothing_to_find(low, f"Fewer than {low} rows differ, so no group beyond the seen classes can be found.")
    means = {k: np.mean([track[k] for track in tracks[:TREES]], axis=0) for k in tried}
    curve = tuple((k, score(*means[k])) for k in tried)
    best = _best(curve)
    slack = BLUR * (1 - means[best][0])
    answers = [k for k, value in curve if value >= dict(curve)[best] - slack]
    answers += [_best(tuple((k, score(*both)) for k, both in track.items())) for track in tracks[TREES:] if track]
    why = _reason(best, tried, means[best], min(answers), max(answers), int((labels >= 0).sum()))
    return CountEstimate(best, min(answers), max(answers), curve, why + hint_of_a_limit(best, wanted))


def _score_tree(
    z: Tensor, labels: Tensor, num_seen: int, low: int, high: int, stream: torch.Generator, *, on_half: bool
) -> dict[int, tuple[float, float]]:
    """Build one tree; for every k in [low, high], the share of labeled rows that are right and the silhouette.

    A tree on half of the rows is scored on two thirds of the seen classes.
    """
    part = torch.arange(len(z))
    if on_half:
        part = torch.randperm(len(z), generator=stream)[: math.ceil(len(z) / 2)].sort().values
        labels = drop_classes(labels, num_seen, stream)
    grains = make_grains(z[part], labels[part], num_seen, max(GRAINS, GRAINS_PER_CLASS * high), stream)
    return {
        k: (labeled_share(grains.labeled, group, k), silhouette(grains, group, k))
        for k, group in groupings(grains, low, high)
    }


def score(share: float, separation: float) -> float:
    """The score of one k: the share of labeled rows named rightly, plus twice the silhouette."""
    return float(share + WEIGHT * separation)


def draw_rows(labels: Tensor, most: int, stream: torch.Generator) -> Tensor:
    """Ascending indices of at most `most` rows. Labeled rows keep their share; where they are rare they get a tenth."""
    if len(labels) <= most:
        return torch.arange(len(labels))
    order = torch.randperm(len(labels), generator=stream)
    labeled, other = order[labels[order] >= 0], order[labels[order] < 0]
    take = min(len(labeled), max(round(most * len(labeled) / len(labels)), most // 10))
    return torch.cat([labeled[:take], other[: most - take]]).sort().values


def drop_classes(labels: Tensor, num_seen: int, stream: torch.Generator) -> Tensor:
    """The labels of a random two thirds of the seen classes; the others count as unlabeled."""
    kept = torch.randperm(num_seen, generator=stream)[: math.ceil(KEPT_CLASSES * num_seen)]
    return torch.where(torch.isin(labels, kept), labels, -1)


def directions(x: Tensor) -> Tensor:
    """(N, D) float64: rows of unit length, centered, of unit length again, in their first principal directions.

    Centered cosines give the right count of photos and digits more often than plain cosines or raw or standardized
    features (measured). Unit length also comes first, so that a few very long rows cannot move the center. Rows of few
    features keep their length.
    """
    by_direction = x.shape[1] >= FEW_FEATURES
    z = x.to("cpu", torch.float32)
    z = z / (z.abs().max() or 1.0)  # so that squares neither overflow nor vanish
    if by_direction:
        z = F.normalize(z, dim=1)
    longest = z.norm(dim=1).max()
    z = z - z.mean(dim=0)
    z = torch.where(z.norm(dim=1, keepdim=True) > ROUNDING * longest, z, 0)  # a row at the center is rounding
    if by_direction:
        z = F.normalize(z, dim=1)
        z = z - z.mean(dim=0)
    z = z / (z.square().sum(dim=1).mean().sqrt() or 1.0)  # mean squared length 1
    dims = min(DIMS, *z.shape)
    if dims == z.shape[1]:
        return z.double()
    if z.shape[1] <= len(z):
        _, axes = torch.linalg.eigh((z.T @ z).double())
        turned: Tensor = z @ axes[:, -dims:].float()
    else:  # more features than rows: the smaller product
        values, axes = torch.linalg.eigh((z @ z.T).double())
        turned = axes[:, -dims:] * values[-dims:].clamp(min=0).sqrt()
    return turned.double()


def make_grains(z: Tensor, labels: Tensor, num_seen: int, size: int, stream: torch.Generator) -> Grains:
    """At most `size` grains, by k-means; where there are no more rows than that, every row is a grain."""
    grain = np.arange(len(z))
    if len(z) > size:
        # One start and 30 iterations: the trees are averaged, so the grains need not be the best.
        clusters = kmeans(z, size, num_starts=1, max_iterations=30, generator=stream)
        grain = np.unique(clusters.assignment.numpy(), return_inverse=True)[1]
    num_grains, rows, is_labeled = int(grain.max()) + 1, z.numpy(), labels.numpy() >= 0
    sums = np.zeros((num_grains, rows.shape[1]))
    np.add.at(sums, grain, rows)
    labeled = np.zeros((num_grains, num_seen))
    np.add.at(labeled, (grain[is_labeled], labels.numpy()[is_labeled]), 1)
    counts = np.bincount(grain).astype(np.float64)
    squares = np.bincount(grain, weights=np.square(rows).sum(axis=1)).astype(np.float64)
    return Grains(counts, sums, squares, labeled)


def groupings(grains: Grains, low: int, high: int) -> Iterator[tuple[int, Ints]]:
    """For k from `high` (or as many as there are grains) down to `low`: k and the group of each grain, (G,) in [0, k).

    These are Ward's groups after one step of k-means (each grain to its nearest mean), because a tree cannot undo a merge.
    """
    means = grains.sums / grains.counts[:, None]
    owner = np.arange(len(means))
    merges = ward(means, grains.counts)
    for k in range(len(means), low - 1, -1):
        if k < len(means):
            kept, gone = next(merges)
            owner[owner == gone] = kept
        if k > high:
            continue
        group = np.unique(owner, return_inverse=True)[1]
        inside = _one_hot(group, k)  # (K, G)
        centers = (inside @ grains.sums) / (inside @ grains.counts)[:, None]
        yield k, (np.square(centers).sum(axis=1) - 2 * means @ centers.T).argmin(axis=1)


def ward(means: Floats, counts: Floats) -> Iterator[tuple[int, int]]:
    """Yield merges (kept, gone), kept < gone, until one group is left. Each raises the inertia least.

        cost(a, b) = n_a n_b / (n_a + n_b) |m_a - m_b|^2

    Every group remembers its nearest partner; only groups whose partner has just changed look again. For the others the
    union is no nearer than its nearer part was (Ward's cost is reducible).
    """
    m, n, size = means.copy(), counts.copy(), len(means)
    square = np.square(m).sum(axis=1)
    cost = np.maximum(square[:, None] + square - 2 * m @ m.T, 0) * (n[:, None] * n / (n[:, None] + n))  # (G, G)
    np.fill_diagonal(cost, np.inf)
    partner = cost.argmin(axis=1)
    least = cost[np.arange(size), partner]
    for _ in range(size - 1):
        a = int(least.argmin())
        a, b = sorted((a, int(partner[a])))
        yield a, b
        m[a] = (n[a] * m[a] + n[b] * m[b]) / (n[a] + n[b])
        n[a] += n[b]
        row = np.square(m - m[a]).sum(axis=1) * (n[a] * n / (n[a] + n))
        row[np.isinf(cost[a])] = np.inf  # a itself, and the groups that are gone
        row[b] = np.inf
        cost[b], cost[:, b], cost[a], cost[:, a] = np.inf, np.inf, row, row
        again = ((partner == a) | (partner == b)).nonzero()[0]
        partner[again] = cost[again].argmin(axis=1)
        partner[a] = row.argmin()
        again = np.append(again, [a, b])
        least[again] = cost[again, partner[again]]


def silhouette(grains: Grains, group: Ints, num_groups: int) -> float:
    """Mean over the rows of (b - a) / max(a, b), in squared distances; 0 for a row alone in its group, and for one group.

        a  mean squared distance to the other rows of its own group
        b  the least mean squared distance to the rows of another group

    Squared distances need only sums: the mean over a group is |x|^2 + mean |y|^2 - 2 x . mean y. The rows of a grain share
    their average a and b; where every row is a grain this is the silhouette exactly.
    """
    if num_groups == 1:
        return 0.0
    inside = _one_hot(group, num_groups)  # (K, G)
    size = inside @ grains.counts  # (K,), 0 for a group that lost its grains
    per_row = 1 / np.maximum(size, 1)
    means = grains.sums / grains.counts[:, None]  # (G, D)
    distance = (grains.squares / grains.counts)[:, None] + (inside @ grains.squares) * per_row
    distance -= 2 * means @ (inside @ grains.sums * per_row[:, None]).T  # (G, K)
    distance[distance < ROUNDING**2] = 0.0
    distance[:, size == 0] = np.inf
    each = np.arange(len(group))
    own = distance[each, group] * size[group] / np.maximum(size[group] - 1, 1)  # without the row itself
    distance[each, group] = np.inf
    other = distance.min(axis=1)
    other = np.where(np.isinf(other), own, other)  # all rows in one group after all
    larger = np.maximum(own, other)
    value = np.where((size[group] > 1) & (larger > 0), (other - own) / np.where(larger > 0, larger, 1), 0.0)
    return float((value * grains.counts).sum() / grains.counts.sum())


def labeled_share(labeled: Floats, group: Ints, num_groups: int) -> float:
    """Share of the labeled rows that the best one-to-one naming of groups by seen classes gets right; 0 without labels."""
    from scipy.optimize import linear_sum_assignment  # late: slow to import

    shared = _one_hot(group, num_groups) @ labeled  # (K, S)
    rows, columns = linear_sum_assignment(shared, maximize=True)
    return float(shared[rows, columns].sum() / max(labeled.sum(), 1))


def _one_hot(group: Ints, num_groups: int) -> Floats:
    inside = np.zeros((num_groups, len(group)))
    inside[group, np.arange(len(group))] = 1
    return inside


def _best(curve: tuple[tuple[int, float], ...]) -> int:
    """The smallest k of the largest score, where rounding makes no difference."""
    top = max(value for _, value in curve)
    return min(k for k, value in curve if value >= top - 1e-9)


def _reason(best: int, tried: list[int], means: Any, low: int, high: int, num_labeled: int) -> str:
    share, separation = (float(value) for value in means)
    how = "stand apart" if separation >= APART else "hardly stand apart, so this is little more than a guess"
    apart = f"the groups {how} (silhouette {separation:.2f}; 0 is not at all, 1 is perfectly)"
    others = f"{low} to {high} fit nearly as well" if high > low else "no other number fits nearly as well"
    tries = f"{tried[0]} to {tried[-1]} groups were tried"
    if not num_labeled:
        return f"{tries}, and without labels {best} separate best: {apart}; {others}."
    fits = f"{share:.0%} of {num_labeled:,} labeled ones lie in the group of their class"
    return f"{tries}, and {best} fit best: {fits}, and {apart}; {others}."
