"""DTC's count: some seen classes are hidden, and the k at which they are found again is looked for.

Some seen classes stay anchors; the labels of the others, the probe classes, are hidden. k-means with the anchors fixed runs
for every k. The answer lies halfway between the k at which the probe classes come out best and the k at which the unlabeled rows
stand apart best; tiny groups do not count (Han et al. 2019, arXiv:1908.09884, and the code released with it).

Letters: M rows, F features, K groups, S seen classes, A anchor classes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from sklearn.metrics import silhouette_score
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.counting.base import (
    CountEstimate,
    Ints,
    Told,
    accuracy,
    answer_without_choice,
    hint_of_a_limit,
    search_range,
)
from opencon.metrics import match
from opencon.runtime import generator as random_stream

ANCHORS = 0.6  # share of the seen classes that stay anchors: DTC's code for CIFAR-100; 0.9 for ImageNet
SMALLEST = 0.01  # share of the largest group, in unlabeled rows, that a group must exceed: the same; 0.3 for ImageNet
MOST_APART = 5_000  # unlabeled rows that a silhouette looks at (ours: all pairs of more would not fit a small machine)
SPLIT, CLUSTER, SAMPLE = range(3)  # what random numbers are for


def count_by_probes(
    x: Tensor,
    labels: Tensor,
    *,
    num_seen: int,
    seed: int = 0,
    max_classes: int | None = None,
    progress: Told = lambda done, total: None,
) -> CountEstimate:
    """DTC's count, which is ORCA's: some seen classes are hidden, to see at which k they are found again.

        k_a = argmax_k  accuracy of the probe rows under the best naming        (the largest k of equals, as released)
        k_s = argmax_k  silhouette of the unlabeled rows (Euclidean)
        k   = ceil((k_a + k_s) / 2)

    for every k in [S, most], constrained k-means with the rows of the anchor classes fixed. The answer is the number of
    groups at k that hold more than 1 % as many unlabeled rows as the largest, or belong to a seen class. In the paper the
    unlabeled rows are all novel, and only those are counted; here seen classes are among them. The paper also keeps the
    probe classes out of the training of the features, which a trained run here has not done.
    low and high: k_a and k_s and the answer. The curve is accuracy + silhouette, which is not what decides.
    """
    easy = answer_without_choice(x, labels, num_seen, max_classes, "dtc", at_least=2)
    if easy is not None:
        return easy
    known = labels.cpu().numpy()
    anchored, num_anchors = keep_anchors(known, num_seen, seed)
    probe = (known >= 0) & (anchored < 0)
    low, wanted, high = search_range(len(x), num_seen, max_classes)
    high = min(high, num_anchors + int((anchored < 0).sum()))  # a group of its own for every free row, at most

    apart = Apart(x, np.flatnonzero(known < 0), seed)
    groups: dict[int, Ints] = {}
    shares: dict[int, float] = {}
    gaps: dict[int, float] = {}
    for k in range(low, high + 1):
        stream = random_stream(torch.device("cpu"), seed, CLUSTER)
        found = kmeans(x, k, generator=stream, labels=torch.from_numpy(anchored), num_seen=num_anchors)
        groups[k] = found.assignment.cpu().numpy()
        shares[k], gaps[k] = accuracy(groups[k][probe], known[probe]), apart.silhouette(groups[k])
        progress(k - low + 1, high - low + 1)

    by_probes, by_gaps = _last_best(shares), _last_best(gaps)
    halfway = math.ceil((by_probes + by_gaps) / 2)
    kept = groups_that_count(groups[halfway], known, anchored)
    answer = max(num_seen, len(kept))
    ends = (by_probes, by_gaps, answer)
    why = (
        f"By DTC: {num_seen - num_anchors} of {num_seen} seen classes, hidden, are found again best among {by_probes} "
        f"groups ({shares[by_probes]:.0%} of their rows), the unlabeled rows stand apart best in {by_gaps} (silhouette "
        f"{gaps[by_gaps]:.2f}); of the {halfway} halfway, {len(kept)} are not tiny."
    )
    curve = tuple((k, shares[k] + gaps[k]) for k in groups)
    return CountEstimate(answer, min(ends), max(ends), curve, why + hint_of_a_limit(halfway, wanted))


def keep_anchors(labels: Ints, num_seen: int, seed: int) -> tuple[Ints, int]:
    """Which rows keep a label, (M,) with -1 elsewhere, and A: of a random 60 % of the seen classes, numbered from 0."""
    order = torch.randperm(num_seen, generator=random_stream(torch.device("cpu"), seed, SPLIT)).numpy()
    num_anchors = min(max(round(ANCHORS * num_seen), 1), num_seen - 1)
    number = np.full(num_seen + 1, -1)  # the last place is for -1
    number[order[:num_anchors]] = np.arange(num_anchors)
    return number[labels], num_anchors


class Apart:
    """The silhouette of the unlabeled rows for many groupings: all distances are computed once."""

    def __init__(self, x: Tensor, unlabeled: Ints, seed: int) -> None:
        stream = random_stream(torch.device("cpu"), seed, SAMPLE)
        drawn = torch.randperm(len(unlabeled), generator=stream)[:MOST_APART].sort().values
        self.rows = unlabeled[drawn.numpy()]
        # In float64: the product form of distances loses the digits of small ones.
        z = x.detach()[torch.from_numpy(self.rows).to(x.device)].cpu().double()
        self.distance = torch.cdist(z, z).fill_diagonal_(0).float().numpy()

    def silhouette(self, group: Ints) -> float:
        """Mean over rows of (b - a) / max(a, b); 0 where all are one group, or each is its own."""
        mine = group[self.rows]
        if not 2 <= len(np.unique(mine)) < len(mine):
            return 0.0
        return float(silhouette_score(self.distance, mine, metric="precomputed"))


def groups_that_count(group: Ints, labels: Ints, anchored: Ints) -> set[int]:
    """Groups of a seen class (anchor or found probe class), and those with enough unlabeled rows."""
    sizes = np.bincount(group[labels < 0], minlength=int(group.max()) + 1)
    kept = set(np.flatnonzero(sizes > SMALLEST * sizes.max()).tolist()) | set(anchored[anchored >= 0].tolist())
    probe = (labels >= 0) & (anchored < 0)
    return kept | set(match(group[probe], labels[probe]))


def _last_best(scores: dict[int, float]) -> int:
    top = max(scores.values())
    return max(k for k, value in scores.items() if value >= top - 1e-9)
