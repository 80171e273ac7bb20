"""GCD's count: cluster for many k and keep the k that puts the most labeled rows into the group of their class.

Vaze et al. 2022, arXiv:2201.02609, and the code released with it.

Letters: M rows, F features, S seen classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.counting.base import (
    CountEstimate,
    Progress,
    accuracy,
    answer_without_choice,
    hint_of_a_limit,
    search_range,
)
from opencon.runtime import generator as random_stream

CLUSTER = 1  # purpose of the random stream


def count_by_accuracy(
    x: Tensor,
    labels: Tensor,
    *,
    num_seen: int,
    seed: int = 0,
    max_classes: int | None = None,
    progress: Progress = lambda done, total: None,
) -> CountEstimate:
    """GCD's count: the k whose k-means groups hold the most labeled rows in the group of their class.

        k = argmax_k  max over one-to-one namings of groups by classes of  share of labeled rows named rightly

    k-means runs on all rows at unit length, with ten starts. Brent's bounded search (scipy) over [S, most] proposes k,
    which is rounded (the released code cuts the fraction off). A rounded curve is made of steps, on which Brent's search
    may stop early, so we walk on to a neighboring k while that is better (ours).

    Merging or splitting novel classes moves no labeled row. So the score may be flat where it matters, and the answer is
    then whatever k the search happens to meet.

    low and high span the tried k whose share is within one standard error, sqrt(p (1 - p) / labeled rows), of the best
    (ours).
    """
    from scipy.optimize import minimize_scalar  # late: slow to import

    easy = answer_without_choice(x, labels, num_seen, max_classes, "gcd", at_least=1)
    if easy is not None:
        return easy
    low, wanted, high = search_range(len(x), num_seen, max_classes)
    rows, row_labels = F.normalize(x.detach().float(), dim=1), labels.cpu().numpy()
    tried: dict[int, float] = {}

    def minus_share(number: float) -> float:
        k = round(float(number))
        if k not in tried:
            # The stream depends on the seed alone, so the score of k does not depend on which k came before.
            groups = kmeans(rows, k, generator=random_stream(torch.device("cpu"), seed, CLUSTER)).assignment
            tried[k] = accuracy(groups.cpu().numpy()[row_labels >= 0], row_labels[row_labels >= 0])
            progress(len(tried), high - low + 1)
        return -tried[k]

    best = 0
    better = round(float(minimize_scalar(minus_share, bounds=(low, high), method="bounded").x))
    while better != best:
        best = better
        better = min((best, max(best - 1, low), min(best + 1, high)), key=minus_share)  # the first of equals
    share, num_labeled = tried[best], int((row_labels >= 0).sum())
    error = math.sqrt(share * (1 - share) / num_labeled)
    near = [k for k, value in tried.items() if value >= share - error]
    why = (
        f"By GCD: of {len(tried)} numbers tried from {low} to {high}, {best} puts the most of {num_labeled} labeled rows, "
        f"{share:.0%}, into the group of their class."
    )
    return CountEstimate(best, min(near), max(near), tuple(sorted(tried.items())), why + hint_of_a_limit(best, wanted))
