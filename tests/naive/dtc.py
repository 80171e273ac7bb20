"""DTC from its definitions, one image and one cluster at a time."""

from __future__ import annotations

import math


def naive_soft_assignment(h, centers):
    """Student's t with one degree of freedom, rows normalized."""
    rows = []
    for x in h:
        near = [1.0 / (1.0 + sum((float(a) - float(b)) ** 2 for a, b in zip(x, mu, strict=True))) for mu in centers]
        rows.append([n / sum(near) for n in near])
    return rows


def naive_targets(q):
    """Squares over the size of each cluster, rows normalized."""
    K = len(q[0])
    size = [sum(row[k] for row in q) for k in range(K)]
    raw = [[row[k] ** 2 / size[k] for k in range(K)] for row in q]
    return [[value / sum(row) for value in row] for row in raw]


def naive_kl(p, q):
    """Mean over the rows of KL(p || q)."""
    terms = [sum(a * math.log(a / b) for a, b in zip(x, y, strict=True) if a > 0) for x, y in zip(p, q, strict=True)]
    return sum(terms) / len(terms)


def naive_squared_distance(q, other):
    """Mean over the rows."""
    terms = [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for x, y in zip(q, other, strict=True)]
    return sum(terms) / len(terms)


def naive_cross_entropy(logits, labels):
    """Mean over the rows."""
    terms = [
        math.log(sum(math.exp(float(v)) for v in row)) - float(row[int(y)])
        for row, y in zip(logits, labels, strict=True)
    ]
    return sum(terms) / len(terms)
