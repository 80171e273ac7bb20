"""How many classes there are and which rows are whose, from several starts and by one judge.

Letters: M rows given, N rows looked at, F features, D directions kept, K classes and groups, S seen classes.

No single start is good on every pile. Ward's tree in which the labeled rows of a class are together from the beginning finds
classes of like size that overlap; without labels it is surer where they are few. Both divide rows that have moved toward
their neighbors, most of which are of their class. The tree of average distances finds classes of very unlike size, among
rows as they are: a small class has few rows to move toward. The classes that the best of them finds show in which directions
classes vary within, and once these count less, the rows are divided again. So:

    rows --> main directions, twins left out                     counting.tree.directions
         --> moved toward their neighbors                        toward_neighbors
         --> three trees, cut at many numbers                    counting.tree.ward, average distances
         --> the best becomes a mixture, its classes balls       mixture.fit_gaussians
         --> there, moved again, another tree and k-means        cluster.kmeans
         --> the best dozen become mixtures                      mixture.fit_gaussians
         --> the one with the most evidence is the answer        evidence

Evidence, of a partition of N rows into K classes:

    neighbors   share of the 5 nearest rows that are in the class of the row: falls where a class is cut
    whole       share of the rows in the largest island of their class, where neighbors are joined: falls where a class
                holds another one far away
    silhouette  how much nearer a row is to its own class than to the next one: best where classes stand apart
    gain        how much likelier the rows are as K classes than as one: see `likelihood`
    price       K log(N) / N: what another class costs
    labels      what a row says of its label: mean log of the probability of a labeled row's own class, by a mixture of the
                other half of the rows, over the share of that class: falls where a seen class is cut, and where it
                swallows others. The first label of a class only names it, the others count

Measured on piles of the development classes of benchmarks/worlds.py, its scenarios and others, by seeds of their own: alone,
none of these chooses well. Nor does the likelihood of the mixture, held out or with a penalty for each class: it grows as
classes are cut. These add nothing: how far the labeled rows of a class lie apart, how steady groups are over halves of the
rows, whether a tree that does not know the labels finds them again, the silhouette of the moved rows, and choosing the
candidate that agrees most with the other good ones. Valleys between groups add too little for what they cost. Candidates
from HDBSCAN add nothing either. Weights that a linear rule learned from hundreds of piles, with silhouettes in other
directions beside these terms, chose better among candidates that the weights below had found, and no better where they
looked for their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.cluster.numbering import by_size
from opencon.counting import COUNTERS
from opencon.counting.base import CountEstimate, Progress, nothing_to_find, refuse_bad_rows
from opencon.counting.tree import directions, draw_rows, ward
from opencon.openworld.mixture import Whitening, fit_gaussians
from opencon.openworld.model import in_parts
from opencon.openworld.row_encoder import RowEncoder
from opencon.runtime import generator, seeded

__all__ = ["COUNTERS", "count_classes", "explain"]

CPU = torch.device("cpu")
NETWORK, CLUSTERS, ROWS, FOLDS = 1, 3, 5, 6  # purposes of random streams

# All numbers are ours, chosen on piles of the development classes of benchmarks/worlds.py, many more than it draws at once.
MOST_ROWS = 4000  # of more rows so many are drawn: trees compare all with all
NEIGHBORS = 5  # 10 and 20 are 1 point worse
# To 1 for neighbors. A third more or less is within a point.
WHOLE, SILHOUETTE, GAIN, PRICE, LABELS = 0.3, 1.0, 0.2, 0.75, 0.15
# What speaks for a single class, which can show neither silhouette nor gain: more than for the parts of most single classes
# (0 to 0.4), less than for two classes (0.18 to 0.7).
ONE = 0.17
FEW = 10  # so many labels beyond the first of each class have half their say
LEAST_SAID = -10.0  # log probability of a label, at least
NEAR = 32  # directions in which evidence is measured
STEPS, PULL = 3, 0.8  # of moving rows toward their neighbors; one plain mean is a point worse, number told
POWER, DIMS = 0.5, (32, 128)  # as in `fit`
SHRINKAGE = 0.1  # as in `mixture`
LEAST_APART = 1e-3  # variance of the means of classes in a direction, to 1 within classes
ROUNDS = 10  # of expectation maximization
FINALISTS = 12  # that become mixtures
LARGEST, PER_SEEN = 100, 2  # groups at most when nothing is said, or so many times the seen classes
# Groups of the tree of averages, to one of Ward's: many of them are single rows, which go to the others.
PER_AVERAGE = 3
# From one number to try to the next, in a tree and for k-means. Half as large steps lose half a point: of more tries the
# best is more often best by chance.
STEP, WIDE_STEP = 1.12, 1.25
AROUND = 2.0  # k-means tries numbers from a half to twice that of the best tree
NUM_STARTS = 4  # of k-means
PER_CLASS = 3  # rows for each group at least
TWIN, FARTHER = 0.1, 20  # a copy is nearer than a tenth of the usual distance to the 20th nearest row
# How far below the best evidence a smaller and a larger number may be to be in the interval, so that it holds the truth
# in nine of ten piles. Where the classes found have unequal sizes, classes of a few rows are missed: the third number, times
# how far the entropy of the shares is below that of equal ones, adds to the second.
SLACK_BELOW, SLACK_ABOVE, SLACK_UNEQUAL = 0.06, 0.06, 2.5


@dataclass(frozen=True)
class _Rows:
    """What is known of the rows that are looked at."""

    moved: Tensor  # (N, 64) unit rows, moved toward their neighbors: Ward's trees grow here
    turned: Tensor  # (N, 128) directions of which the first are taken, see `at`
    labels: Tensor  # (N,)
    neighbors: Tensor  # (N, 5)
    num_seen: int
    fold: Tensor  # (N,) bool
    seed: int
    as_one: float  # log likelihood of a row, with all rows as one class

    def at(self, dims: int) -> Tensor:
        """(N, dims) unit rows."""
        return F.normalize(self.turned[:, :dims], dim=1)


@dataclass(frozen=True)
class _Candidate:
    evidence: float
    num_classes: int
    classes: Tensor  # (N,)


@torch.no_grad()
def explain(
    x: Tensor,
    labels: Tensor,
    *,
    num_seen: int,
    seed: int = 0,
    min_classes: int = 1,
    max_classes: int | None = None,
) -> tuple[Tensor, CountEstimate]:
    """A class for every row (M,), seen ones first, and how many there are.

    Args:
        x: (M, F), any device; the work is done on the CPU. Of more than 4,000 rows a sample is explained, and the others
            go to the class whose mean is nearest.
        labels: (M,) class in [0, S) of a labeled row, -1 elsewhere.
        num_seen: S; 0: no labels.
        seed: same seed, same answer.
        min_classes: the fewest to look for; the seen classes count too.
        max_classes: the most to look for; None: `most_classes`.
    """
    refuse_bad_rows(x, labels, num_seen, max_classes)
    x, labels = x.detach().to(CPU, torch.float32), labels.to(CPU, torch.long)
    if bool((labels >= 0).all()):
        why = f"All {len(labels)} rows are labeled, so the {num_seen} seen classes are all."
        return labels, nothing_to_find(num_seen, why)
    drawn = draw_rows(labels, MOST_ROWS, generator(CPU, seed, ROWS))
    one_of_each = torch.stack([(labels == c).nonzero()[0] for c in range(num_seen)])[:, 0] if num_seen else drawn[:0]
    drawn = torch.unique(torch.cat([drawn, one_of_each]))  # no seen class is left without a label
    with seeded(seed, NETWORK):
        encoder = RowEncoder(x.shape[1], min(DIMS[1], max(x.shape[1], 2)))
        encoder.fit(x, power=POWER)
    kept, rows = _look(x[drawn], encoder.rotate(x[drawn] - encoder.mean), labels[drawn], num_seen, seed)
    drawn = drawn[kept]
    wanted = max_classes or most_classes(num_seen)
    high = min(wanted, max(len(drawn) // PER_CLASS, num_seen, 1))
    low = min(max(min_classes, num_seen, 1), high)
    found = _candidates(rows, low, high)
    fitting = [candidate for candidate in found if low <= candidate.num_classes <= high]
    best = max(fitting or found, key=lambda candidate: candidate.evidence)
    classes = labels.clone()
    classes[drawn] = best.classes
    rest = torch.ones(len(x), dtype=torch.bool)
    rest[drawn] = False
    rest &= labels < 0
    if bool(rest.any()):
        z = F.normalize(encoder.rotate(x[drawn] - encoder.mean), dim=1)
        mean = torch.zeros(best.num_classes, z.shape[1]).index_add_(0, best.classes, z)
        mean /= torch.bincount(best.classes, minlength=best.num_classes).clamp(min=1)[:, None]

        def nearest(part: Tensor) -> Tensor:
            z = F.normalize(encoder.rotate(part - encoder.mean), dim=1)
            return (z @ mean.T - mean.square().sum(dim=1) / 2).argmax(dim=1)

        classes[rest] = in_parts(nearest, x[rest])
    return by_size(classes, num_seen), _count(found, best, wanted)


def most_classes(num_seen: int) -> int:
    """The most classes to look for when nothing is said."""
    return max(LARGEST, PER_SEEN * num_seen)


def count_classes(
    x: Tensor,
    labels: Tensor,
    *,
    num_seen: int,
    seed: int = 0,
    max_classes: int | None = None,
    progress: Progress = lambda done, total: None,
) -> CountEstimate:
    """How many classes `explain` finds, as one of `COUNTERS`."""
    progress(0, 1)
    _, estimate = explain(x, labels, num_seen=num_seen, seed=seed, max_classes=max_classes)
    progress(1, 1)
    return estimate


COUNTERS.add("engine", count_classes)


def _look(x: Tensor, turned: Tensor, labels: Tensor, num_seen: int, seed: int) -> tuple[Tensor, _Rows]:
    """Which rows are no copies of others, and what is known of them."""
    main = directions(x).float()
    apart = torch.cdist(main, main).fill_diagonal_(math.inf)  # (N, N)
    usual = apart.kthvalue(min(FARTHER, len(x) - 1), dim=1).values.median() if len(x) > 1 else 0.0
    close = (apart < TWIN * usual).tril()  # with an earlier row
    kept = (~close.any(dim=1) | (labels >= 0)).nonzero()[:, 0]
    if len(kept) < 2:
        kept = torch.arange(len(x))
    neighbors = _nearest(apart[kept][:, kept])
    moved = toward_neighbors(F.normalize(main[kept], dim=1), neighbors)
    order = torch.randperm(len(kept), generator=generator(CPU, seed, FOLDS))
    fold, near = order % 2 == 0, F.normalize(turned[kept, :NEAR], dim=1)
    as_one = likelihood(near, torch.zeros(len(kept), dtype=torch.long), 1)
    return kept, _Rows(moved, turned[kept], labels[kept], neighbors, num_seen, fold, seed, as_one)


def _nearest(apart: Tensor) -> Tensor:
    """(N, 5) the nearest other rows, by distances (N, N) whose diagonal is infinite."""
    return apart.topk(min(NEIGHBORS, len(apart) - 1), largest=False).indices


def toward_neighbors(z: Tensor, neighbors: Tensor) -> Tensor:
    """(N, D) unit rows, each drawn to the mean of its neighbors (N, 5), and again to where these have moved.

        y <- (1 - a) z + a mean of y over the neighbors

    Noise of single rows averages out, while the part 1 - a keeps a row from drifting along a chain of neighbors (as in
    personalized PageRank: Gasteiger et al., ICLR 2019).
    """
    y = z
    for _ in range(STEPS):
        y = (1 - PULL) * z + PULL * y[neighbors].mean(dim=1)
    return F.normalize(y, dim=1)


def _candidates(rows: _Rows, low: int, high: int) -> list[_Candidate]:
    """Every start with its evidence, and the best ones once more, as mixtures."""
    found: dict[bytes, _Candidate] = {}
    numbers, unlabeled = _numbers(low, high, STEP), torch.full_like(rows.labels, -1)

    def add(classes: Tensor) -> None:
        key = classes.numpy().tobytes()
        num_classes = max(int(classes.max()) + 1, rows.num_seen)
        if key not in found and (num_classes <= high or not found):  # naming can leave more classes than groups
            found[key] = _Candidate(evidence(rows, classes), num_classes, classes)

    def best(number: int) -> list[_Candidate]:
        return sorted(found.values(), key=lambda candidate: -candidate.evidence)[:number]

    def settled(candidate: _Candidate) -> tuple[Whitening, Tensor]:
        z = rows.at(_dims(candidate.num_classes))
        return fit_gaussians(z, candidate.classes, rows.labels, num_seen=rows.num_seen, rounds=ROUNDS)

    starts = list(_cuts(rows.moved, rows.labels, rows.num_seen, numbers))
    if rows.num_seen:
        starts += _cuts(rows.moved, unlabeled, 0, numbers)
    starts += _average_cuts(rows.at(NEAR), _numbers(low, min(PER_AVERAGE * high, len(rows.moved) // 2), STEP))
    for start in starts:
        add(_named(start, rows.labels, rows.num_seen))

    (first,) = best(1)
    whitening, _ = settled(first)
    z = F.normalize(whitening(rows.at(_dims(first.num_classes))), dim=1)
    z = toward_neighbors(z, _nearest(torch.cdist(z, z).fill_diagonal_(math.inf)))
    for start in _cuts(z, rows.labels, rows.num_seen, numbers):
        add(_named(start, rows.labels, rows.num_seen))
    free = int((rows.labels < 0).sum())
    fewest = max(low, int(first.num_classes / AROUND))
    most = min(high, rows.num_seen + free, int(first.num_classes * AROUND))
    for k in _numbers(fewest, most, WIDE_STEP):
        labels, stream = rows.labels if rows.num_seen else None, generator(CPU, rows.seed, CLUSTERS)
        of = kmeans(z, k, labels=labels, num_seen=rows.num_seen, num_starts=NUM_STARTS, generator=stream).assignment
        add(_named(of, rows.labels, rows.num_seen))

    for candidate in best(FINALISTS):
        add(by_size(settled(candidate)[1], rows.num_seen))
    return list(found.values())


def _dims(num_classes: int) -> int:
    """Directions that so many classes are told apart in."""
    return min(max(2 * num_classes, DIMS[0]), DIMS[1])


def _numbers(low: int, high: int, step: float) -> set[int]:
    """Numbers to try: each one first, then in steps."""
    found, k = {low}, float(low)
    while k < high:
        k = max(k * step, k + 1)
        found.add(min(round(k), high))
    return found


def _cuts(z: Tensor, labels: Tensor, num_seen: int, numbers: set[int]) -> Iterator[Tensor]:
    """Groups (N,) for each of the numbers, from one tree in which labeled rows of a class are together from the start."""
    z = z.double()
    leaf = torch.where(labels >= 0, labels, num_seen + (labels < 0).long().cumsum(0) - 1)
    size = torch.bincount(leaf)
    mean = torch.zeros(len(size), z.shape[1], dtype=z.dtype).index_add_(0, leaf, z) / size[:, None]
    owner = np.arange(len(size))
    merges = ward(mean.numpy(), size.double().numpy())
    for k in range(len(size), 0, -1):
        if k in numbers:
            yield torch.from_numpy(np.unique(owner, return_inverse=True)[1])[leaf]
        if k > 1:
            kept, gone = next(merges)
            owner[owner == gone] = kept


def _average_cuts(z: Tensor, numbers: set[int]) -> Iterator[Tensor]:
    """Groups (N,) for each of the numbers, from the tree of average distances: a small class far away stays apart.

    So does a single row far away. Groups that are too small for a class go to the nearest of the others.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage  # late: slow to import

    if len(z) < 2:
        return
    tree = linkage(z.double().numpy(), "average")
    for column in cut_tree(tree, sorted(k for k in numbers if k <= len(z))).T:
        group = torch.from_numpy(column).long()
        size, mean = _means(z, group, int(group.max()) + 1)
        if bool((size >= PER_CLASS).any()):
            apart = torch.cdist(z, mean)
            apart[:, size < PER_CLASS] = math.inf
            group = torch.where(size[group] < PER_CLASS, apart.argmin(dim=1), group)
        yield group


def _named(groups: Tensor, labels: Tensor, num_seen: int) -> Tensor:
    """A group belongs to the class that most of its labeled rows have; the others are new. Labeled rows keep their class."""
    known, num_groups = labels >= 0, int(groups.max()) + 1
    name = torch.full((num_groups,), -1)
    if num_seen:
        counts = torch.zeros(num_groups, num_seen)
        counts.index_put_((groups[known], labels[known]), torch.ones(int(known.sum())), accumulate=True)
        name = torch.where(counts.sum(dim=1) > 0, counts.argmax(dim=1), -1)
    new = (name < 0).nonzero()[:, 0]
    name[new] = num_seen + torch.arange(len(new))
    return by_size(torch.where(known, labels, name[groups]), num_seen)


def evidence(rows: _Rows, classes: Tensor) -> float:
    """See the top of this file."""
    num_rows, z = len(classes), rows.at(NEAR)
    group = torch.unique(classes, return_inverse=True)[1]
    num_groups = int(group.max()) + 1
    same = group[rows.neighbors] == group[:, None]  # (N, 5)
    said = float(same.float().mean()) + WHOLE * _whole(rows.neighbors, same, group)
    said += ONE if num_groups == 1 else SILHOUETTE * _silhouette(z, group, num_groups)
    # Not in proportion: texts have classes within classes, and each explains the rows better.
    said += GAIN * math.sqrt(max(likelihood(z, group, num_groups) - rows.as_one, 0.0))
    said -= PRICE * num_groups * math.log(num_rows) / num_rows
    further = int((rows.labels >= 0).sum()) - rows.num_seen
    if further:
        said += LABELS * further / (further + FEW) * _told(z, classes, rows)
    return said


def _means(z: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Rows (K,) and mean (K, D) of each group."""
    size = torch.bincount(group, minlength=num_groups).to(z.dtype)
    return size, z.new_zeros(num_groups, z.shape[1]).index_add_(0, group, z) / size.clamp(min=1)[:, None]


def _whole(neighbors: Tensor, same: Tensor, group: Tensor) -> float:
    """Share of the rows in the largest island of their group; rows that are neighbors within a group are joined."""
    from scipy.sparse import coo_array  # late: slow to import
    from scipy.sparse.csgraph import connected_components

    row, column = same.nonzero(as_tuple=True)
    joined = coo_array((np.ones(len(row)), (row.numpy(), neighbors[row, column].numpy())), shape=(len(group),) * 2)
    _, island = connected_components(joined, directed=False)
    size = torch.from_numpy(np.bincount(island)[island])
    return float(torch.zeros(int(group.max()) + 1).scatter_reduce(0, group, size.float(), "amax").sum()) / len(group)


def _silhouette(z: Tensor, group: Tensor, num_groups: int) -> float:
    """Mean of (b - a) / max(a, b): mean squared distance a to the other rows of the own group, b to those of the next."""
    size, mean = _means(z, group, num_groups)
    apart, own = torch.cdist(z, mean).square(), group[:, None]  # (N, K)
    apart += (z.new_zeros(num_groups).index_add_(0, group, apart.gather(1, own)[:, 0]) / size)[None]
    others = size[group] / (size[group] - 1).clamp(min=1)  # takes the row itself out
    a = apart.gather(1, own)[:, 0] * others
    b = apart.scatter(1, own, math.inf).amin(dim=1)
    value = (b - a) / torch.maximum(a, b).clamp(min=1e-9)
    return float(torch.where(size[group] > 1, value, 0.0).mean())


def likelihood(z: Tensor, group: Tensor, num_groups: int) -> float:
    """Mean log likelihood of a row of z (N, D) in K groups, but for a constant.

    A group's mean is drawn from a Gaussian around the mean of all rows, its rows from a Gaussian around that, with one
    covariance for all (probabilistic linear discriminant analysis: Ioffe, ECCV 2006). The means are integrated out, so that
    a group of few rows explains little. In the directions in which the covariance within groups is 1, and that of the means
    is b_d, a group of n rows with mean m has

        sum_d [ n^2 b_d m_d^2 / (1 + n b_d) - log(1 + n b_d) ] / 2

    more than if its mean were that of all rows.
    """
    num_rows, dim = z.shape
    z = (z - z.mean(dim=0)).double()
    size, mean = _means(z, group, num_groups)
    away = z - mean[group]
    within = away.T @ away / max(num_rows - num_groups, 1)
    spread = (within.trace() / dim).clamp(min=1e-8)
    within = (1 - SHRINKAGE) * within + SHRINKAGE * spread * torch.eye(dim, dtype=z.dtype)
    root = torch.linalg.cholesky(within)
    flat, flat_mean = (torch.linalg.solve_triangular(root, rows.T, upper=False).T for rows in (z, mean))
    values, axes = torch.linalg.eigh((flat_mean * size[:, None]).T @ flat_mean / num_rows)
    b = (values - num_groups / num_rows).clamp(min=LEAST_APART)  # the means of groups vary a little by chance alone
    n = size[:, None]
    as_groups = n.square() * b * (flat_mean @ axes).square() / (1 + n * b) - (1 + n * b).log()
    alone = flat.square().sum() + 2 * num_rows * root.diagonal().log().sum()
    return float(as_groups.sum() - alone) / (2 * num_rows)


def _told(z: Tensor, classes: Tensor, rows: _Rows) -> float:
    """Mean of log p(c | z) / p(c) for the label c of each labeled row z, by the half of the rows that it is not in.

    Without the share p(c), few large classes would seem best: every further class is one more that a row may belong to.
    """
    num_classes, said = max(int(classes.max()) + 1, rows.num_seen), 0.0
    for own in (rows.fold, ~rows.fold):
        asked = ~own & (rows.labels >= 0)
        size, mean = _means(z[own], classes[own], num_classes)
        away = z[own] - mean[classes[own]]
        cov = away.T @ away / max(len(away), 1)
        ball = torch.eye(len(cov)) * (cov.trace() / len(cov)).clamp(min=1e-8)
        inverse = torch.linalg.inv(((1 - SHRINKAGE) * cov + SHRINKAGE * ball).double())
        matrix = torch.linalg.cholesky(inverse).float()
        logits = (size + 1e-3).log() - torch.cdist(z[asked] @ matrix, mean @ matrix).square() / 2
        own_class = logits.log_softmax(dim=1).gather(1, rows.labels[asked][:, None])
        said += float(own_class.clamp(min=LEAST_SAID).sum())
    share = torch.bincount(classes, minlength=num_classes) / len(classes)
    labeled = rows.labels[rows.labels >= 0]
    return said / len(labeled) - float(share[labeled].log().mean())


def _count(found: list[_Candidate], best: _Candidate, wanted: int) -> CountEstimate:
    """The number, the numbers of what fits about as well, and why."""
    top: dict[int, float] = {}
    for candidate in found:
        top[candidate.num_classes] = max(top.get(candidate.num_classes, -math.inf), candidate.evidence)
    share = torch.bincount(best.classes).double() / len(best.classes)
    entropy = -float(torch.special.xlogy(share, share).sum())
    unequal = 1 - entropy / math.log(best.num_classes) if best.num_classes > 1 else 0.0
    above = SLACK_ABOVE + SLACK_UNEQUAL * unequal
    low = min(k for k, said in top.items() if k <= best.num_classes and said >= best.evidence - SLACK_BELOW)
    high = max(k for k, said in top.items() if k >= best.num_classes and said >= best.evidence - above)
    others = f"{low} to {high} fit nearly as well" if high > low else "no other number fits nearly as well"
    tried = f"{len(found)} ways to divide the rows into {min(top)} to {max(top)} classes were tried"
    why = f"{tried}, and {best.num_classes} fit best: neighbors share a class, and classes stand apart; {others}."
    if best.num_classes >= wanted:
        why += f" It is the most that was tried: look further with max_classes above {wanted}."
    return CountEstimate(best.num_classes, low, high, tuple(sorted(top.items())), why)
