"""How many classes there are and which rows are whose, from several starts and by one judge.

Letters: M rows given, N rows looked at, F features, D directions kept, K classes and groups, S seen classes.

No single start is good on every pile. Ward's tree in which the labeled rows of a class are together from the beginning finds
classes of like size that overlap; without labels it is surer where they are few; the tree of average distances finds classes
of very unlike size. So:

    rows --> main directions, twins left out                     counting.tree.directions
         --> three trees, cut at many numbers                    counting.tree.ward, average distances
         --> around the best number, semi-supervised k-means     cluster.kmeans
         --> each becomes a mixture with shares of its own       mixture.fit_gaussians
         --> the one with the most evidence is the answer        evidence

Evidence, of a partition with shares p_k of N rows:

    neighbors   share of the 5 nearest rows that are in the class of the row: falls where a class is cut
    silhouette  how much nearer a row is to its own class than to the next one: best where classes stand apart
    surprise    - sum_k p_k log p_k: a single class has the best neighbors, and says nothing
    price       K log(N) / N: what another class costs
    labels      mean log probability of a labeled row's own class, by a mixture fitted to the other half of the rows

Measured (benchmarks/worlds.py, development part): alone, none of these chooses well. Nor does the likelihood of the mixture,
held out or with a penalty for each class: it grows as classes are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.cluster.hierarchy import cut_tree, linkage
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.cluster.numbering import by_size
from opencon.counting.base import CountEstimate, nothing_to_find, refuse_bad_rows
from opencon.counting.tree import directions, draw_rows, ward
from opencon.openworld.mixture import fit_gaussians
from opencon.openworld.model import in_parts
from opencon.openworld.row_encoder import RowEncoder
from opencon.runtime import generator, seeded

CPU = torch.device("cpu")
NETWORK, CLUSTERS, ROWS, FOLDS = 1, 3, 5, 6  # purposes of random streams

# All numbers are ours, chosen on the development scenarios of benchmarks/worlds.py.
MOST_ROWS = 4000  # of more rows so many are drawn: trees compare all with all
NEIGHBORS = 5  # 10 and 20 are 1 point worse
SURPRISE, PRICE, LABELS = 0.08, 0.4, 0.05  # to 1 for neighbors and silhouette; a third more or less is within a point
FEW = 10  # so many labels have half their say
LEAST_SAID = -10.0  # log probability of a label, at least
NEAR = 32  # directions in which silhouette and labels are measured
POWER, DIMS = 0.5, (32, 128)  # as in `fit`
ROUNDS = 10  # of expectation maximization for each start
LARGEST, PER_SEEN = 100, 2  # groups at most when nothing is said, or so many times the seen classes
PER_AVERAGE = (
    3  # groups of the tree of averages, to one of Ward's: many of them are single rows, which the mixture takes back
)
STEP = 1.12  # from one number to try to the next
PER_CLASS = 3  # rows for each group at least
AROUND = 2  # numbers below and above the best that k-means tries
MOST_STARTS, START_WORK = 50, 2e8  # of k-means: fewer for many rows
TWIN, FARTHER = 0.1, 20  # a copy is nearer than a tenth of the usual distance to the 20th nearest row
# How far below the best evidence a smaller and a larger number may be to be in the interval, so that it holds the truth
# in nine of ten scenarios. Classes of a few rows are missed more often than classes are cut.
SLACK_BELOW, SLACK_ABOVE = 0.03, 0.12


@dataclass(frozen=True)
class _Rows:
    """What is known of the rows that are looked at."""

    tree: Tensor  # (N, 64) float64, in which trees grow
    turned: Tensor  # (N, 128) directions of which the first are taken, see `at`
    labels: Tensor  # (N,)
    neighbors: Tensor  # (N, 5)
    num_seen: int
    fold: Tensor  # (N,) bool
    seed: int

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
    x: Tensor, labels: Tensor, *, num_seen: int, seed: int = 0, max_classes: int | None = None
) -> tuple[Tensor, CountEstimate]:
    """A class for every row (M,), seen ones first, and how many there are.

    Args:
        x: (M, F), any device; the work is done on the CPU. Of more than 4,000 rows a sample is explained, and the others
            go to the class whose mean is nearest.
        labels: (M,) class in [0, S) of a labeled row, -1 elsewhere.
        num_seen: S; 0: no labels.
        seed: same seed, same answer.
        max_classes: the most to look for; None: 100, or twice the seen classes if that is more.
    """
    refuse_bad_rows(x, labels, num_seen, max_classes)
    x, labels = x.detach().to(CPU, torch.float32), labels.to(CPU, torch.long)
    if bool((labels >= 0).all()):
        why = f"All {len(labels)} rows are labeled, so the {num_seen} seen classes are all."
        return labels, nothing_to_find(num_seen, why)
    drawn = draw_rows(labels, MOST_ROWS, generator(CPU, seed, ROWS))
    with seeded(seed, NETWORK):
        encoder = RowEncoder(x.shape[1], min(DIMS[1], max(x.shape[1], 2)))
        encoder.fit(x, power=POWER)
    kept, rows = _look(x[drawn], encoder.rotate(x[drawn] - encoder.mean), labels[drawn], num_seen, seed)
    drawn = drawn[kept]
    wanted = max_classes or max(LARGEST, PER_SEEN * num_seen)
    low, high = max(num_seen, 1), min(wanted, max(len(drawn) // PER_CLASS, num_seen, 1))
    found = _candidates(rows, low, high)
    best = max(found, key=lambda candidate: candidate.evidence)
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


def _look(x: Tensor, turned: Tensor, labels: Tensor, num_seen: int, seed: int) -> tuple[Tensor, _Rows]:
    """Which rows are no copies of others, and what is known of them."""
    tree = directions(x)
    apart = torch.cdist(tree.float(), tree.float()).fill_diagonal_(math.inf)  # (N, N)
    usual = apart.kthvalue(min(FARTHER, len(x) - 1), dim=1).values.median() if len(x) > 1 else 0.0
    close = (apart < TWIN * usual).tril()  # with an earlier row
    kept = (~close.any(dim=1) | (labels >= 0)).nonzero()[:, 0]
    if len(kept) < 2:
        kept = torch.arange(len(x))
    apart = apart[kept][:, kept]
    neighbors = apart.topk(min(NEIGHBORS, len(kept) - 1), largest=False).indices
    order = torch.randperm(len(kept), generator=generator(CPU, seed, FOLDS))
    return kept, _Rows(tree[kept], turned[kept], labels[kept], neighbors, num_seen, order % 2 == 0, seed)


def _candidates(rows: _Rows, low: int, high: int) -> list[_Candidate]:
    """Every start, as a mixture, with its evidence."""
    numbers = _numbers(low, high)
    unlabeled = torch.full_like(rows.labels, -1)
    starts = list(_cuts(rows.tree, rows.labels, rows.num_seen, numbers))
    if rows.num_seen:
        starts += _cuts(rows.tree, unlabeled, 0, numbers)
    starts += _average_cuts(rows.at(NEAR), _numbers(low, min(PER_AVERAGE * high, len(rows.tree) // 2)))
    found: dict[bytes, _Candidate] = {}

    def add(start: Tensor) -> None:
        named = _named(start, rows.labels, rows.num_seen)
        key = named.numpy().tobytes()
        if key not in found:
            z = rows.at(_dims(int(named.max()) + 1))
            _, classes = fit_gaussians(z, named, rows.labels, num_seen=rows.num_seen, rounds=ROUNDS)
            classes = by_size(classes, rows.num_seen)
            num_classes = max(int(classes.max()) + 1, rows.num_seen)
            if num_classes <= high or not found:  # naming can leave more classes than there were groups
                found[key] = _Candidate(evidence(rows, classes), num_classes, classes)

    for start in starts:
        add(start)
    # A tree cannot take a merge back: around the best number, k-means has a try as well.
    tried: set[int] = set()
    while True:
        best = max(found.values(), key=lambda candidate: candidate.evidence).num_classes
        todo = [k for k in range(best - AROUND, best + AROUND + 1) if low <= k <= high and k not in tried]
        if not todo:
            return list(found.values())
        for k in todo:
            tried.add(k)
            z = rows.at(_dims(k))
            num_starts = int(min(max(START_WORK / (z.numel() * k), 4), MOST_STARTS))
            labels = rows.labels if rows.num_seen else None
            stream = generator(CPU, rows.seed, CLUSTERS)
            add(kmeans(z, k, labels=labels, num_seen=rows.num_seen, num_starts=num_starts, generator=stream).assignment)


def _dims(num_classes: int) -> int:
    """Directions that so many classes are told apart in."""
    return min(max(2 * num_classes, DIMS[0]), DIMS[1])


def _numbers(low: int, high: int) -> set[int]:
    """Numbers to try: each one first, then in steps of an eighth."""
    found, k = {low}, float(low)
    while k < high:
        k = max(k * STEP, k + 1)
        found.add(min(round(k), high))
    return found


def _cuts(z: Tensor, labels: Tensor, num_seen: int, numbers: set[int]) -> Iterator[Tensor]:
    """Groups (N,) for each of the numbers, from one tree in which labeled rows of a class are together from the start."""
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
    """Groups (N,) for each of the numbers, from the tree of average distances: a small class far away stays apart."""
    if len(z) > 1:
        tree = linkage(z.double().numpy(), "average")
        for groups in cut_tree(tree, sorted(k for k in numbers if k <= len(z))).T:
            yield torch.from_numpy(groups).long()


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
    num_rows = len(classes)
    share = torch.bincount(classes).double() / num_rows
    share = share[share > 0]
    z = rows.at(NEAR)
    neighbors = float((classes[rows.neighbors] == classes[:, None]).float().mean())
    said = (
        neighbors - SURPRISE * float((share * share.log()).sum()) - PRICE * len(share) * math.log(num_rows) / num_rows
    )
    said += _silhouette(z, classes)
    num_labeled = int((rows.labels >= 0).sum())
    if num_labeled:
        said += LABELS * num_labeled / (num_labeled + FEW) * _told(z, classes, rows)
    return said


def _silhouette(z: Tensor, classes: Tensor) -> float:
    """Mean of (b - a) / max(a, b), for squared distances a to the own class, without the row itself, and b to the next.

    The mean of two: with distances to the means of the classes, and with mean distances to their rows. The latter alone
    favors large loose classes, from which the others seem farther; the former alone, small tight ones (measured).
    """
    size = torch.bincount(classes).float()  # (K,)
    if int((size > 0).sum()) < 2:
        return 0.0
    mean = torch.zeros(len(size), z.shape[1]).index_add_(0, classes, z) / size.clamp(min=1)[:, None]
    apart = torch.cdist(z, mean).square()  # (N, K)
    apart[:, size == 0] = math.inf
    own = classes[:, None]
    loose = torch.zeros(len(size)).index_add_(0, classes, apart.gather(1, own)[:, 0]) / size.clamp(min=1)
    others = size[classes] / (size[classes] - 1).clamp(min=1)  # takes the row itself out
    total = 0.0
    for distance, out in ((apart, others.square()), (apart + loose, others)):
        a = distance.gather(1, own)[:, 0] * out
        b = distance.scatter(1, own, math.inf).amin(dim=1)
        value = (b - a) / torch.maximum(a, b).clamp(min=1e-9)
        total += float(torch.where(size[classes] > 1, value, 0.0).mean())
    return total / 2


def _told(z: Tensor, classes: Tensor, rows: _Rows) -> float:
    """Mean log probability of each label, by a mixture of the half of the rows that the labeled row is not in."""
    num_classes, said = max(int(classes.max()) + 1, rows.num_seen), 0.0
    for own in (rows.fold, ~rows.fold):
        asked = ~own & (rows.labels >= 0)
        size = torch.bincount(classes[own], minlength=num_classes).float()
        mean = torch.zeros(num_classes, z.shape[1]).index_add_(0, classes[own], z[own]) / size.clamp(min=1)[:, None]
        away = z[own] - mean[classes[own]]
        cov = away.T @ away / max(len(away), 1)
        ball = torch.eye(len(cov)) * (cov.trace() / len(cov)).clamp(min=1e-8)
        matrix = torch.linalg.cholesky(torch.linalg.inv((0.9 * cov + 0.1 * ball).double())).float()
        logits = (size + 1e-3).log() - torch.cdist(z[asked] @ matrix, mean @ matrix).square() / 2
        own_class = logits.log_softmax(dim=1).gather(1, rows.labels[asked][:, None])
        said += float(own_class.clamp(min=LEAST_SAID).sum())
    return said / int((rows.labels >= 0).sum())


def _count(found: list[_Candidate], best: _Candidate, wanted: int) -> CountEstimate:
    """The number, the numbers of what fits about as well, and why."""
    top: dict[int, float] = {}
    for candidate in found:
        top[candidate.num_classes] = max(top.get(candidate.num_classes, -math.inf), candidate.evidence)
    low = min(k for k, said in top.items() if k <= best.num_classes and said >= best.evidence - SLACK_BELOW)
    high = max(k for k, said in top.items() if k >= best.num_classes and said >= best.evidence - SLACK_ABOVE)
    others = f"{low} to {high} fit nearly as well" if high > low else "no other number fits nearly as well"
    tried = f"{len(found)} ways to divide the rows into {min(top)} to {max(top)} classes were tried"
    why = f"{tried}, and {best.num_classes} fit best: neighbors share a class, and classes stand apart; {others}."
    if best.num_classes >= wanted:
        why += f" It is the most that was tried: look further with max_classes above {wanted}."
    return CountEstimate(best.num_classes, low, high, tuple(sorted(top.items())), why)
