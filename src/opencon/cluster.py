"""Clustering, for methods that learn features but no classes.

Letters: M rows, D features, K clusters, S seen classes.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor


def cluster_and_name(z: Tensor, labels: Tensor, *, num_clusters: int, num_seen: int, seed: int) -> Tensor:
    """k-means on all rows; then each seen class is matched with the cluster that holds most of its labeled rows.

    The matching is one-to-one (Hungarian method on labeled rows, as the OpenCon paper extends methods that cannot name
    seen classes). The other clusters are numbered from S on.

    Args:
        z: (M, D).
        labels: (M,) class of a labeled row, -1 elsewhere.

    Returns:
        (M,) classes in [0, K).
    """
    clusters = KMeans(num_clusters, n_init=10, random_state=seed).fit_predict(z.cpu().numpy())
    known = labels.cpu().numpy()
    counts = np.zeros((num_seen, num_clusters), dtype=np.int64)
    np.add.at(counts, (known[known >= 0], clusters[known >= 0]), 1)
    seen, matched = linear_sum_assignment(counts, maximize=True)
    name = np.full(num_clusters, -1)
    name[matched] = seen
    name[name < 0] = np.arange(num_seen, num_seen + (name < 0).sum())
    return torch.from_numpy(name[clusters])
