"""One ORCA step from the definitions, in Python loops over float64 rows."""

from __future__ import annotations

import math

from tests.naive.pairwise import dot, naive_agreement, naive_nearest, naive_next, softmax


def naive_logits(features, weight, scale):
    """scale * cosine of every row with every class."""
    logits = []
    for z in features:
        logits.append([scale * dot(z, w) / math.sqrt(dot(z, z) * dot(w, w)) for w in weight])
    return logits


def naive_uncertainty(features, weight, labels, scale):
    """Mean of 1 - the largest probability, over the unlabeled images."""
    rows = naive_logits(features, weight, scale)
    doubts = [1 - max(softmax(row)) for row, label in zip(rows, labels, strict=True) if label < 0]
    return sum(doubts) / len(doubts)


def naive_step(views, labels, weight, config, uncertainty):
    """Returns the total loss and its terms. views: two arrays (B, D) of features; labels: (B,), -1 for unlabeled."""
    B = len(labels)
    logits = [naive_logits(view, weight, config.scale) for view in views]
    labeled = [i for i in range(B) if labels[i] >= 0]

    losses = []
    for i in labeled:
        row = list(logits[0][i])
        row[labels[i]] += config.scale * min(uncertainty, config.max_margin)
        losses.append(-math.log(softmax(row)[labels[i]]))
    loss_s = sum(losses) / len(losses)

    p, other = ([softmax(row) for row in rows] for rows in logits)
    partners = [
        labeled[naive_next([labels[j] for j in labeled], labeled.index(i))]
        if i in labeled
        else naive_nearest(views[0], i)
        for i in range(B)
    ]
    loss_p = naive_agreement(p, [other[j] for j in partners])

    mean = [sum(row[c] for row in p) / B for c in range(len(weight))]
    loss_h = sum(m * math.log(m) for m in mean)
    total = loss_s + config.weight_pairwise * loss_p + config.weight_entropy * loss_h
    return total, {"loss_s": loss_s, "loss_p": loss_p, "loss_h": loss_h}
