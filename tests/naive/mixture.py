"""The two mixtures of opencon.openworld.mixture, one row and one class at a time."""

import math

import numpy as np


def expected(logits):
    top = max(logits)
    weights = [math.exp(v - top) for v in logits]
    return [w / sum(weights) for w in weights]


def shares(q, extra):
    sizes = [sum(row[c] for row in q) + extra for c in range(len(q[0]))]
    return [s / sum(sizes) for s in sizes]


def gaussian_round(z, q, shrinkage, extra):
    """One round of `fit_gaussians` for unlabeled rows: new q (M, C), from the formula in its docstring."""
    num_rows, dim, num_classes = len(z), len(z[0]), len(q[0])
    share = shares(q, extra)
    means = []
    for c in range(num_classes):
        weight = sum(q[i][c] for i in range(num_rows))
        means.append(sum(q[i][c] * z[i] for i in range(num_rows)) / weight)
    cov = np.zeros((dim, dim))
    for i in range(num_rows):
        for c in range(num_classes):
            cov += q[i][c] * np.outer(z[i] - means[c], z[i] - means[c]) / num_rows
    cov = (1 - shrinkage) * cov + shrinkage * np.trace(cov) / dim * np.eye(dim)
    inverse = np.linalg.inv(cov)
    return [
        expected([math.log(share[c]) - (row - means[c]) @ inverse @ (row - means[c]) / 2 for c in range(num_classes)])
        for row in z
    ]


def directional(z, q, extra):
    """Prototypes, sharpness and shares of `fit_mixture` for given q."""
    num_rows, dim = len(z), len(z[0])
    totals = [sum(q[i][c] * z[i] for i in range(num_rows)) for c in range(len(q[0]))]
    r = sum(math.sqrt(t @ t) for t in totals) / num_rows
    return [t / math.sqrt(t @ t) for t in totals], r * (dim - r * r) / (1 - r * r), shares(q, extra)
