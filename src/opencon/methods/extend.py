"""How methods that cannot do the whole task are extended to it, as the OpenCon paper does for its tables.

Methods that find no novel classes (marked with a dagger there: FixMatch, DS3L, CGDL): what they reject is clustered with
k-means into as many groups as there are novel classes. Methods that cannot name seen classes (marked with a star: DTC,
RankStats, SimCLR): cluster everything, then match clusters and seen classes on the labeled rows; that is
`cluster.name_clusters`.

Letters: M rows, F features, S seen classes, C all classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.config import MethodConfig
from opencon.errors import require
from opencon.methods.base import Assignment, FeatureBank, Task
from opencon.runtime import generator


def check_rejection(config: MethodConfig) -> None:
    """Require `reject_share` and `reject_threshold` of a method's settings to make sense; both None: the expected share."""
    share, threshold = getattr(config, "reject_share", None), getattr(config, "reject_threshold", None)
    require(
        share is None or threshold is None,
        f"method.reject_share = {share} and method.reject_threshold = {threshold} are two rules for one thing. Give one "
        f"of them, or none: as many as are expected to be novel.",
    )
    require(share is None or 0 <= share <= 1, f"method.reject_share = {share} must lie between 0 and 1.")
    require(
        threshold is None or 0 <= threshold <= 1,
        f"method.reject_threshold = {threshold} must lie between 0 and 1, as the scores do.",
    )


def expected_novel(task: Task, num_rows: int) -> int:
    """How many of M rows are of novel classes, if all classes are equally large."""
    return round(num_rows * (task.num_classes - task.num_seen) / task.num_classes)


def rejected(seen_score: Tensor, labels: Tensor, task: Task, *, share: float | None, threshold: float | None) -> Tensor:
    """(M,) bool: which rows count as novel. A labeled row never does.

    The paper does not say how it rejects. By default (`share` and `threshold` None) the lowest scores of the unlabeled
    rows are rejected, as many as are expected to be novel.

    Args:
        seen_score: (M,) larger is more likely seen.
        labels: (M,) class of a labeled row, -1 elsewhere.
        task: for the expected share.
        share: of the unlabeled rows, instead of the expected number.
        threshold: reject scores below it, however many.
    """
    free = labels < 0
    if threshold is not None:
        return free & (seen_score < threshold)
    rows = free.nonzero().flatten()  # host sync, as are the following lines: once a run
    num = expected_novel(task, len(labels)) if share is None else round(share * len(rows))
    lowest = seen_score[rows].argsort(stable=True)[:num]
    is_novel = torch.zeros_like(free)
    is_novel[rows[lowest]] = True
    return is_novel


def cluster_rejected(z: Tensor, classes: Tensor, is_novel: Tensor, task: Task, *, seed: int = 0) -> Tensor:
    """(M,) classes: seen ones where not rejected, elsewhere S + the k-means group among C - S."""
    classes = classes.clone()
    rows = z[is_novel]
    num_groups = min(task.num_classes - task.num_seen, len(rows))
    if num_groups:
        found = kmeans(rows, num_groups, generator=generator(torch.device("cpu"), seed))
        classes[is_novel] = task.num_seen + found.assignment.to(classes.device)
    return classes


def reject_and_cluster(
    bank: FeatureBank, logits: Tensor, task: Task, *, share: float | None, threshold: float | None
) -> Assignment:
    """The dagger for a classifier of the seen classes: what it is least sure of is clustered, by its unit features.

    The score is the largest of the S probabilities (Hendrycks and Gimpel, arXiv:1610.02136). Features are clustered as unit
    rows, as in the other methods that cluster; the paper does not say.

    Args:
        bank: z (M, F) features, of any length.
        logits: (M, S) of the seen classes.
        task, share, threshold: as for `rejected`.
    """
    confidence, classes = logits.softmax(dim=1).max(dim=1)
    is_novel = rejected(confidence, bank.labels, task, share=share, threshold=threshold)
    return Assignment(
        classes=cluster_rejected(F.normalize(bank.z, dim=1), classes, is_novel, task),
        seen_logits=logits,
        novelty=1 - confidence,
    )
