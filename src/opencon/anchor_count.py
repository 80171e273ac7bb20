"""How many classes are in here, as DTC and GCD count them: cluster for many k, and see how the labeled rows fare.

    gcd   k-means of all rows for each k that a bounded search asks for; the k with the most labeled rows in the group of
          their class (Vaze et al. 2022, arXiv:2201.02609, and the code released with it)
    dtc   some seen classes stay anchors, the labels of the others, the probe classes, are hidden; constrained k-means for
          every k; halfway between the k at which the probe classes come out best and the k at which the unlabeled rows
          stand apart best; tiny groups do not count (Han et al. 2019, arXiv:1908.09884, and the code released with it)
    orca  dtc: ORCA's number for CIFAR-100 is DTC's estimate (124 classes), and OpenCon took it over
    tree  ours, `class_count.estimate_classes`; the default everywhere

They are here to compare with. Both look at the seen classes, and both papers assume that novel classes are like them.

Letters: M rows, F features, K groups, S seen classes, A anchor classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from sklearn.metrics import silhouette_score
from torch import Tensor

from opencon.class_count import CountEstimate, check_rows, estimate_classes, nothing_to_find, search_range
from opencon.cluster import kmeans
from opencon.errors import DataError
from opencon.metrics import match, open_world_accuracy
from opencon.registry import Registry
from opencon.runtime import generator as random_stream

Ints = NDArray[np.int64]
Told = Callable[[int, int], None]

ANCHORS = 0.6  # share of the seen classes that stay anchors: DTC's code for CIFAR-100; 0.9 for ImageNet
SMALLEST = 0.01  # share of the largest group, in unlabeled rows, that a group must exceed: the same; 0.3 for ImageNet
MOST_APART = 5_000  # unlabeled rows that a silhouette looks at (ours: all pairs of more would not fit a small machine)
SPLIT, CLUSTER, SAMPLE = range(3)  # what random numbers are for


class Counter(Protocol):
    """A way to count: seen and novel classes together, at least `num_seen`."""

    def __call__(
        self,
        x: Tensor,
        labels: Tensor,
        *,
        num_seen: int,
        seed: int = 0,
        max_classes: int | None = None,
        progress: Told = lambda done, total: None,
    ) -> CountEstimate:
        """`x` (M, F), `labels` (M,) with -1 for unlabeled; the rest as in `estimate_classes`."""


def count_by_accuracy(
    x: Tensor,
    labels: Tensor,
    *,
    num_seen: int,
    seed: int = 0,
    max_classes: int | None = None,
    progress: Told = lambda done, total: None,
) -> CountEstimate:
    """GCD's count: the k whose k-means groups hold the most labeled rows in the group of their class.

        k = argmax_k  max over one-to-one namings of groups by classes of  share of labeled rows named rightly

    k-means on all rows at unit length, ten starts; k from Brent's bounded search (scipy) over [S, most], rounded (the
    released code cuts the fraction off), and from there to the next k while that is better: a rounded curve is made of
    steps, on which Brent's search may stop early (ours). Merging or splitting novel classes moves no labeled row, so the
    score may be flat where it matters, and then the answer is what the search happens to meet.
    low and high: the k tried whose share is within one standard error of the best, sqrt(p (1 - p) / labeled rows) (ours).
    """
    easy = _easy(x, labels, num_seen, max_classes, "gcd", at_least=1)
    if easy is not None:
        return easy
    low, wanted, high = search_range(len(x), num_seen, max_classes)
    rows, known = F.normalize(x.detach().float(), dim=1), labels.cpu().numpy()
    tried: dict[int, float] = {}

    def wrong(place: float) -> float:
        k = round(float(place))
        if k not in tried:
            # Seeded by the seed alone: the answer for k does not depend on which k came before.
            found = kmeans(rows, k, generator=random_stream(torch.device("cpu"), seed, CLUSTER))
            tried[k] = _accuracy(found.assignment.cpu().numpy()[known >= 0], known[known >= 0])
            progress(len(tried), high - low + 1)
        return -tried[k]

    best = 0
    better = round(float(minimize_scalar(wrong, bounds=(low, high), method="bounded").x))
    while better != best:
        best = better
        better = min((best, max(best - 1, low), min(best + 1, high)), key=wrong)  # the first of equals
    share, num_labeled = tried[best], int((known >= 0).sum())
    error = math.sqrt(share * (1 - share) / num_labeled)
    near = [k for k, value in tried.items() if value >= share - error]
    why = (
        f"By GCD: of {len(tried)} numbers tried from {low} to {high}, {best} puts the most of {num_labeled} labeled rows, "
        f"{share:.0%}, into the group of their class."
    )
    return CountEstimate(best, min(near), max(near), tuple(sorted(tried.items())), why + _more(best, wanted))


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
    easy = _easy(x, labels, num_seen, max_classes, "dtc", at_least=2)
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
        shares[k], gaps[k] = _accuracy(groups[k][probe], known[probe]), apart.silhouette(groups[k])
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
    return CountEstimate(answer, min(ends), max(ends), curve, why + _more(halfway, wanted))


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


COUNTERS: Registry[Counter] = Registry("way to count")
COUNTERS.add("tree", estimate_classes)
COUNTERS.add("gcd", count_by_accuracy)
COUNTERS.add("dtc", count_by_probes)
COUNTERS.add("orca", count_by_probes)


def _easy(
    x: Tensor, labels: Tensor, num_seen: int, max_classes: int | None, name: str, *, at_least: int
) -> CountEstimate | None:
    """Refuse what cannot be counted; the answer where there is no choice, else None."""
    check_rows(x, labels, num_seen, max_classes)
    if num_seen < at_least:
        raise DataError(
            f"{name} counts by labeled rows of at least {at_least} seen classes, and there are {num_seen}. "
            f"Label more, or count by 'tree'."
        )
    if bool((labels >= 0).all()):
        return nothing_to_find(num_seen, f"All {len(labels)} rows are labeled, so the {num_seen} seen classes are all.")
    low, wanted, high = search_range(len(x), num_seen, max_classes)
    if high <= low:
        return nothing_to_find(low, f"{len(x)} rows and at most {wanted} classes leave no choice above {low}.")
    return None


def _accuracy(group: Ints, truth: Ints) -> float:
    """Share of the rows that the best one-to-one naming of groups by classes gets right."""
    return open_world_accuracy(group, truth, num_seen=0, protocol="gcd").all


def _last_best(scores: dict[int, float]) -> int:
    top = max(scores.values())
    return max(k for k, value in scores.items() if value >= top - 1e-9)


def _more(best: int, wanted: int) -> str:
    return f" It is the most that was tried: look further with max_classes above {wanted}." if best == wanted else ""
