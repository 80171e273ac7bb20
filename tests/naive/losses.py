"""The loss formulas as slow, obvious loops."""

from __future__ import annotations

import math


def naive_info_nce(z, positives, candidates, temperature, reduction="mean"):
    """One anchor, one positive at a time."""
    losses = []
    for i in range(len(z)):
        P = [j for j in range(len(z)) if positives[i][j]]
        A = [j for j in range(len(z)) if candidates[i][j]]
        if not P:
            continue
        denominator = sum(math.exp(float(z[i] @ z[a]) / temperature) for a in A)
        losses.append(-sum(float(z[i] @ z[p]) / temperature - math.log(denominator) for p in P) / len(P))
    if reduction == "sum":
        return sum(losses)
    return sum(losses) / len(losses) if losses else 0.0


def naive_contrast(z, member, group, temperature, reduction="mean"):
    """Anchors and candidates are the members; positives share the group; nobody is compared with itself."""
    n = len(z)
    inside = [[i != j and bool(member[i]) and bool(member[j]) for j in range(n)] for i in range(n)]
    positives = [[inside[i][j] and int(group[i]) == int(group[j]) for j in range(n)] for i in range(n)]
    return naive_info_nce(z, positives, inside, temperature, reduction)


def naive_kl(logits, prior):
    """KL of the mean softmax to the prior, clamped at 1e-5."""
    num_classes = len(prior)
    mean = [0.0] * num_classes
    for row in logits:
        total = sum(math.exp(float(v)) for v in row)
        for c in range(num_classes):
            mean[c] += math.exp(float(row[c])) / total / len(logits)
    return sum(max(p, 1e-5) * (math.log(max(p, 1e-5)) - math.log(float(q))) for p, q in zip(mean, prior, strict=True))
