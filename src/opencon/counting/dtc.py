"""DTC's count: hide the labels of some seen classes and see which k recovers them.

Some seen classes, the kept classes, keep their labels; the others, the probe classes, lose them. k-means with the rows of
the kept classes fixed runs for every k. The answer lies halfway between the k that recovers the probe classes best and the k
at which the unlabeled rows stand apart best. Tiny groups do not count.

Han et al. 2019, arXiv:1908.09884, and the code released with it.

Letters: M rows, F features, S seen classes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.counting.base import (
    CountEstimate,
    Ints,
    Progress,
    accuracy,
    answer_without_choice,
    hint_of_a_limit,
    search_range,
)
from opencon.metrics import match
from opencon.runtime import generator as random_stream

KEPT_CLASSES = 0.6  # share of the seen classes that keep their labels: DTC's code for CIFAR-100; 0.9 for ImageNet
SMALLEST = 0.01  # a group counts above this share of the largest one's unlabeled rows: DTC's code; 0.3 for ImageNet
MOST_APART = 5_000  # unlabeled rows in a silhouette; ours: the pairs of more would not fit into a small machine
SPLIT, CLUSTER, SAMPLE = range(3)  # purposes of the random streams


def count_by_probes(
    x: Tensor,
    labels: Tensor,
    *,
    num_seen: int,
    seed: int = 0,
    max_classes: int | None = None,
    progress: Progress = lambda done, total: None,
) -> CountEstimate:
    """DTC's count, which is also ORCA's: hide the labels of some seen classes and see which k recovers them.

        k_a = argmax_k  accuracy of the probe rows under the best naming        (the largest k of equals, as released)
        k_s = argmax_k  silhouette of the unlabeled rows (Euclidean)
        k   = ceil((k_a + k_s) / 2)

    k-means runs for every k in [S, most], with the rows of the kept classes fixed. The answer is the number of groups at
    k that hold more than 1 % as many unlabeled rows as the largest, or belong to a seen class.

    In the paper the unlabeled rows are all novel, and only those are counted; here seen classes are among them. The paper
    also keeps the probe classes out of the training of the features; a trained run here has not done that.

    low and high span k_a, k_s and the answer. The curve is accuracy + silhouette, which does not decide.
    """
    easy = answer_without_choice(x, labels, num_seen, max_classes, "dtc", at_least=2)
    if easy is not None:
        return easy
    row_labels = labels.cpu().numpy()
    kept_labels, num_kept = keep_classes(row_labels, num_seen, seed)
    probe = (row_labels >= 0) & (kept_labels < 0)
    low, wanted, high = search_range(len(x), num_seen, max_classes)
    high = min(high, num_kept + int((kept_labels < 0).sum()))  # at most a group of its own for every free row

    apart = Apart(x, np.flatnonzero(row_labels < 0), seed)
    groups: dict[int, Ints] = {}
    shares: dict[int, float] = {}
    gaps: dict[int, float] = {}
    for k in range(low, high + 1):
        stream = random_stream(torch.device("cpu"), seed, CLUSTER)
        clusters = kmeans(x, k, generator=stream, labels=torch.from_numpy(kept_labels), num_seen=num_kept)
        groups[k] = clusters.assignment.cpu().numpy()
        shares[k], gaps[k] = accuracy(groups[k][probe], row_labels[probe]), apart.silhouette(groups[k])
        progress(k - low + 1, high - low + 1)

    by_probes, by_gaps = _last_best(shares), _last_best(gaps)
    halfway = math.ceil((by_probes + by_gaps) / 2)
    counted = groups_that_count(groups[halfway], row_labels, kept_labels)
    answer = max(num_seen, len(counted))
    ends = (by_probes, by_gaps, answer)
    why = (
        f"By DTC: {num_seen - num_kept} of {num_seen} seen classes were hidden, and are recovered best among {by_probes} "
        f"groups ({shares[by_probes]:.0%} of their rows). The unlabeled rows stand apart best in {by_gaps} groups "
        f"(silhouette {gaps[by_gaps]:.2f}). {halfway} lies halfway, and {len(counted)} of those groups are not tiny."
    )
    curve = tuple((k, shares[k] + gaps[k]) for k in groups)
    return CountEstimate(answer, min(ends), max(ends), curve, why + hint_of_a_limit(halfway, wanted))


def keep_classes(labels: Ints, num_seen: int, seed: int) -> tuple[Ints, int]:
    """Keep a random 60 % of the seen classes. Returns their labels, (M,), from 0 and -1 elsewhere; and their number."""
    order = torch.randperm(num_seen, generator=random_stream(torch.device("cpu"), seed, SPLIT)).numpy()
    num_kept = min(max(round(KEPT_CLASSES * num_seen), 1), num_seen - 1)
    number = np.full(num_seen + 1, -1)  # the last entry is for label -1
    number[order[:num_kept]] = np.arange(num_kept)
    return number[labels], num_kept


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
        from sklearn.metrics import silhouette_score  # late: slow to import

        own = group[self.rows]
        if not 2 <= len(np.unique(own)) < len(own):
            return 0.0
        return float(silhouette_score(self.distance, own, metric="precomputed"))


def groups_that_count(group: Ints, labels: Ints, kept_labels: Ints) -> set[int]:
    """Groups of a seen class (a kept class or a recovered probe class), and groups with enough unlabeled rows."""
    sizes = np.bincount(group[labels < 0], minlength=int(group.max()) + 1)
    counted = set(np.flatnonzero(sizes > SMALLEST * sizes.max()).tolist()) | set(kept_labels[kept_labels >= 0].tolist())
    probe = (labels >= 0) & (kept_labels < 0)
    return counted | set(match(group[probe], labels[probe]))


def _last_best(scores: dict[int, float]) -> int:
    """The largest k of the best score, where rounding makes no difference."""
    top = max(scores.values())
    return max(k for k, value in scores.items() if value >= top - 1e-9)
