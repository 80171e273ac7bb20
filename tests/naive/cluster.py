"""Clustering, one row and one center at a time."""

import itertools


def naive_nearest(row, centers):
    """The nearest center; the first of equals."""
    return min(range(len(centers)), key=lambda k: (float(((row - centers[k]) ** 2).sum()), k))


def naive_lloyd(x, centers, *, iterations, labels):
    """Centers and assignment after so many rounds of assign-then-average; None when a cluster loses all its rows."""
    x, centers = x.double().numpy(), centers.double().numpy()
    assignment = []
    for _ in range(iterations):
        assignment = [
            label if label >= 0 else naive_nearest(row, centers) for row, label in zip(x, labels, strict=True)
        ]
        for k in range(len(centers)):
            members = [row for row, cluster in zip(x, assignment, strict=True) if cluster == k]
            if not members:
                return None
            centers[k] = sum(members) / len(members)
    return centers, assignment


def naive_inertia(x, centers, assignment):
    return sum(float(((row - centers[k]) ** 2).sum()) for row, k in zip(x.double().numpy(), assignment, strict=True))


def naive_best_naming(clusters, labels, num_clusters, num_seen):
    """The most labeled rows that any one-to-one naming of clusters by seen classes gets right."""
    return max(
        sum(label >= 0 and clusters_of[label] == cluster for cluster, label in zip(clusters, labels, strict=True))
        for clusters_of in itertools.permutations(range(num_clusters), num_seen)
    )
