"""How methods that cannot do the whole task are extended to it, as the OpenCon paper does for its tables.

Methods that find no novel classes (marked with a dagger there: FixMatch, DS3L, CGDL): what they reject is clustered with
k-means into as many groups as there are novel classes. Methods that cannot name seen classes (marked with a star: DTC,
RankStats, SimCLR): cluster everything, then match clusters and seen classes on the labeled rows; that is
`cluster.name_clusters`.

Letters: M rows, S seen classes, C all classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opencon.cluster import kmeans
from opencon.methods.base import Task
from opencon.runtime import generator


def expected_novel_share(task: Task) -> float:
    """Of the unlabeled images, if all classes are equally large: a seen class has lost its labeled images."""
    novel = task.num_classes - task.num_seen
    return novel / (novel + task.num_seen * (1.0 - task.labeled_ratio))


def rejected(seen_score: Tensor, labels: Tensor, task: Task, *, share: float | None, threshold: float | None) -> Tensor:
    """(M,) bool: which rows count as novel. A labeled row never does.

    The paper does not say how it rejects. By default (`share` and `threshold` None) the lowest scores of the unlabeled
    rows are rejected, as many as are expected to be novel.

    Args:
        seen_score: (M,) larger is more likely seen.
        labels: (M,) class of a labeled row, -1 elsewhere.
        task: for the expected share.
        share: of the unlabeled rows, instead of the expected one.
        threshold: reject scores below it instead of a share.
    """
    free = labels < 0
    if threshold is None:
        share = expected_novel_share(task) if share is None else share
        candidates = seen_score[free]
        if len(candidates) == 0:
            return torch.zeros_like(free)
        rank = seen_score.new_full(seen_score.shape, float("inf"))
        rank[free] = candidates.argsort().argsort().to(rank.dtype)
        return rank < round(share * len(candidates))
    return free & (seen_score < threshold)


def cluster_rejected(z: Tensor, classes: Tensor, is_novel: Tensor, task: Task, *, seed: int = 0) -> Tensor:
    """(M,) classes: seen ones where not rejected, elsewhere S + the k-means group among C - S."""
    classes = classes.clone()
    rows = z[is_novel]
    num_groups = min(task.num_classes - task.num_seen, len(rows))
    if num_groups:
        found = kmeans(rows, num_groups, generator=generator(torch.device("cpu"), seed))
        classes[is_novel] = task.num_seen + found.assignment.to(classes.device)
    return classes
