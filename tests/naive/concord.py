"""Concord's targets and losses from their definitions, in Python loops."""

from __future__ import annotations

import math

from tests.naive.simgcd import naive_softmax
from tests.naive.uno import naive_sinkhorn


def naive_targets(cosines, queue, labels, labeled_ratio, num_seen, epsilon, rounds):
    """Targets of the B rows of one view, labels -1 where unlabeled: a label as it is, the others share batch and queue."""
    C = len(cosines[0])
    free = [i for i, label in enumerate(labels) if label < 0]
    weight = [1 - labeled_ratio if c < num_seen else 1.0 for c in range(C)]
    shares = [w / sum(weight) for w in weight]
    soft = naive_sinkhorn([cosines[i] for i in free] + list(queue), shares, epsilon, rounds)
    if rounds == 0:  # without balance
        soft = [naive_softmax(cosines[i], epsilon) for i in free]
    out = [[float(c == label) for c in range(C)] for label in labels]
    for place, i in enumerate(free):
        out[i] = soft[place]
    return out


def naive_losses(cosines, targets, labels, temperature, weight_crops):
    """Cosines of V views and targets of two: L_swapped, L_crops, L_labels."""

    def mean_cross(target, view, *, labeled):
        terms = []
        for i, label in enumerate(labels):
            if (label >= 0) == labeled:
                p = naive_softmax(cosines[view][i], temperature)
                terms.append(-sum(q * math.log(own) for q, own in zip(target[i], p, strict=True)))
        return sum(terms) / len(terms)

    def over_views(*, labeled):
        full = (mean_cross(targets[1], 0, labeled=labeled) + mean_cross(targets[0], 1, labeled=labeled)) / 2
        middle = [[(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(*targets, strict=True)]
        further = [mean_cross(middle, view, labeled=labeled) for view in range(2, len(cosines))]
        return full, sum(further) / len(further) if further else 0.0

    (swapped, crops), (full, further) = over_views(labeled=False), over_views(labeled=True)
    return swapped, crops, full + weight_crops * further
