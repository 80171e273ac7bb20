"""Clusters to classes: each seen class gets the cluster that holds most of its labeled rows.

Letters: M rows, D features, K clusters, S seen classes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.runtime import generator as random_stream


def cluster_and_name(z: Tensor, labels: Tensor, *, num_clusters: int, num_seen: int, seed: int) -> Tensor:
    """k-means on all rows; then each seen class is matched with the cluster that holds most of its labeled rows.

    The matching is one-to-one (Hungarian method on labeled rows, as the OpenCon paper extends methods that cannot name
    seen classes). The other clusters are numbered from S on.

    Args:
        z: (M, D).
        labels: (M,) class of a labeled row, -1 elsewhere.

    Returns:
        (M,) classes in [0, K), on the CPU.
    """
    clusters = kmeans(z, num_clusters, generator=random_stream(torch.device("cpu"), seed)).assignment
    return name_clusters(clusters.cpu(), labels.cpu(), num_clusters=num_clusters, num_seen=num_seen)


def name_clusters(clusters: Tensor, labels: Tensor, *, num_clusters: int, num_seen: int) -> Tensor:
    """(M,) the class of each row, by the one-to-one naming of clusters that gets the most labeled rows right."""
    from scipy.optimize import linear_sum_assignment  # late: slow to import

    is_labeled = labels >= 0
    counts = np.zeros((num_seen, num_clusters), dtype=np.int64)
    np.add.at(counts, (labels[is_labeled].numpy(), clusters[is_labeled].numpy()), 1)
    seen, matched = linear_sum_assignment(counts, maximize=True)
    name = np.full(num_clusters, -1)
    name[matched] = seen
    name[name < 0] = np.arange(num_seen, num_seen + (name < 0).sum())
    return torch.from_numpy(name)[clusters]


def name_soft_clusters(clusters: Tensor, p: Tensor, labels: Tensor, *, num_seen: int) -> tuple[Tensor, Tensor]:
    """The same for clusters with probabilities: classes (M,), on the CPU, and probabilities of the classes (M, K).

    Args:
        clusters: (M,) the likeliest cluster of each row.
        p: (M, K) probabilities of the clusters.
        labels: (M,) class of a labeled row, -1 elsewhere.
        num_seen: S.
    """
    K = p.shape[1]
    # One more unlabeled row for each cluster shows which class it becomes.
    clusters = torch.cat([clusters.cpu(), torch.arange(K)])
    labels = torch.cat([labels.cpu(), torch.full((K,), -1)])
    classes = name_clusters(clusters, labels, num_clusters=K, num_seen=num_seen)  # (M + K,)
    p_classes = torch.empty_like(p)
    p_classes[:, classes[-K:].to(p.device)] = p
    return classes[:-K], p_classes
