"""Clusters to classes: each seen class gets the cluster that holds most of its labeled rows.

Letters: M rows, D features, K clusters, S seen classes.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
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
    found = kmeans(z, num_clusters, generator=random_stream(torch.device("cpu"), seed))
    return name_clusters(found.assignment.cpu(), labels.cpu(), num_clusters=num_clusters, num_seen=num_seen)


def name_clusters(clusters: Tensor, labels: Tensor, *, num_clusters: int, num_seen: int) -> Tensor:
    """(M,) classes from clusters: as many labeled rows as a one-to-one naming can have get their own class."""
    known = labels >= 0
    counts = np.zeros((num_seen, num_clusters), dtype=np.int64)
    np.add.at(counts, (labels[known].numpy(), clusters[known].numpy()), 1)
    seen, matched = linear_sum_assignment(counts, maximize=True)
    name = np.full(num_clusters, -1)
    name[matched] = seen
    name[name < 0] = np.arange(num_seen, num_seen + (name < 0).sum())
    return torch.from_numpy(name)[clusters]
