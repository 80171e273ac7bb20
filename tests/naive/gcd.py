"""GCD's two losses, one row at a time."""

from __future__ import annotations

import math


def naive_all(z, num_images, temperature):
    """InfoNCE: each row against every other one, its positive is the other view of its image."""
    losses = []
    for i in range(len(z)):
        partner = (i + num_images) % (2 * num_images)
        total = sum(math.exp(float(z[i] @ z[j]) / temperature) for j in range(len(z)) if j != i)
        losses.append(-math.log(math.exp(float(z[i] @ z[partner]) / temperature) / total))
    return sum(losses) / len(losses)


def naive_labeled(z, labels, temperature):
    """SupCon: labeled rows of both views against each other, positives have the same label."""
    num_images = len(labels)
    labeled = [i for i in range(len(z)) if labels[i % num_images] >= 0]
    losses = []
    for i in labeled:
        others = [j for j in labeled if j != i]
        total = sum(math.exp(float(z[i] @ z[j]) / temperature) for j in others)
        same = [j for j in others if labels[j % num_images] == labels[i % num_images]]
        losses.append(sum(-math.log(math.exp(float(z[i] @ z[j]) / temperature) / total) for j in same) / len(same))
    return sum(losses) / len(losses)
