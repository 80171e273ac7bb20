"""Novelty scores, one row, one class and one neighbor at a time; larger is more likely seen."""

import math

import numpy as np


def naive_msp(row):
    return max(math.exp(f) for f in row) / sum(math.exp(f) for f in row)


def naive_energy(row, temperature):
    return temperature * math.log(sum(math.exp(f / temperature) for f in row))


def unit(row):
    return row / math.sqrt(sum(float(v) ** 2 for v in row))


def naive_means(z, labels):
    """{class: mean of its labeled rows}."""
    return {c: sum(z[i] for i in range(len(z)) if labels[i] == c) / labels.count(c) for c in set(labels) - {-1}}


def naive_shrinkage(apart):
    """Ledoit and Wolf (2004), section 3.3: how far the sample covariance is from its mean variance, and how sure it is.

    d2 = |S - m I|^2 / p,   b2 = mean over rows of |x x' - S|^2 / (n p), at most d2;   the share is b2 / d2
    """
    n, p = len(apart), len(apart[0])
    S = sum(np.outer(x, x) for x in apart) / n
    m = np.trace(S) / p
    d2 = ((S - m * np.eye(p)) ** 2).sum() / p
    b2 = sum(((np.outer(x, x) - S) ** 2).sum() for x in apart) / n**2 / p
    return min(b2, d2) / d2


def naive_mahalanobis(query, z, labels):
    means = naive_means(z, labels)
    apart = [z[i] - means[labels[i]] for i in range(len(z)) if labels[i] >= 0]
    share, p = naive_shrinkage(apart), len(query)
    S = sum(np.outer(x, x) for x in apart) / len(apart)
    inverse = np.linalg.inv((1 - share) * S + share * np.trace(S) / p * np.eye(p))
    return -min(float((query - mu) @ inverse @ (query - mu)) for mu in means.values())


def naive_prototype(query, z, labels):
    means = naive_means([unit(row) for row in z], labels)
    return max(float(unit(query) @ unit(mu)) for mu in means.values())


def naive_knn(query, z, labels, k):
    distances = sorted(
        math.sqrt(float(((unit(query) - unit(z[i])) ** 2).sum())) for i in range(len(z)) if labels[i] >= 0
    )
    return -distances[k - 1]


def interpolated_fpr95(seen, novel):
    """Share of the novel scores above the 5th percentile of the seen scores, interpolated as numpy does."""
    threshold = float(np.percentile(seen, 5))
    return sum(s > threshold for s in novel) / len(novel)
