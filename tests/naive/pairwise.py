"""Losses over pairs, one pair at a time."""

from __future__ import annotations

import math


def softmax(row):
    exps = [math.exp(float(v)) for v in row]
    return [e / sum(exps) for e in exps]


def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def naive_pair_bce(p, q, same):
    losses = []
    for i in range(len(p)):
        for j in range(len(q)):
            chance = dot(p[i], q[j])
            losses.append(-math.log((chance if same[i][j] else 1 - chance) + 1e-7))
    return sum(losses) / len(losses)


def naive_agreement(p, q):
    return sum(-math.log(dot(a, b)) for a, b in zip(p, q, strict=True)) / len(p)


def naive_top(row, k):
    """The set of the places of the k largest."""
    return set(sorted(range(len(row)), key=lambda f: -float(row[f]))[:k])


def naive_nearest(z, i):
    """The other row with the largest cosine."""
    others = [j for j in range(len(z)) if j != i]
    return max(others, key=lambda j: dot(z[i], z[j]) / math.sqrt(dot(z[i], z[i]) * dot(z[j], z[j])))


def naive_next(labels, i):
    """Walk on, around the end, until the label comes back."""
    j = (i + 1) % len(labels)
    while labels[j] != labels[i]:
        j = (j + 1) % len(labels)
    return j
