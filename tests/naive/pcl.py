"""PCL's two losses and the concentration of clusters, in Python loops."""

from __future__ import annotations

import math

import numpy as np


def dot(a, b):
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def naive_instance_loss(z, keys, queue, temperature):
    """Each row against its own key and everything in the queue."""
    total = 0.0
    for i in range(len(z)):
        own = math.exp(dot(z[i], keys[i]) / temperature)
        others = sum(math.exp(dot(z[i], row) / temperature) for row in queue)
        total -= math.log(own / (own + others))
    return total / len(z)


def naive_prototype_loss(z, rows, levels):
    """levels: (prototypes, phi, cluster of each image of the set), one after another."""
    per_level = []
    for prototypes, phi, members in levels:
        total = 0.0
        for i, row in enumerate(rows):
            weights = [math.exp(dot(z[i], mu) / float(p)) for mu, p in zip(prototypes, phi, strict=True)]
            total -= math.log(weights[int(members[row])] / sum(weights))
        per_level.append(total / len(rows))
    return sum(per_level) / len(per_level)


def naive_concentration(z, centers, assignment, smoothing, temperature):
    """phi of each cluster: mean distance over log(n + smoothing), then the three repairs of the authors' code."""
    phi = {}
    for c in range(len(centers)):
        own = [i for i in range(len(z)) if int(assignment[i]) == c]
        if len(own) > 1:
            distance = [
                math.sqrt(sum((float(x) - float(y)) ** 2 for x, y in zip(z[i], centers[c], strict=True))) for i in own
            ]
            phi[c] = sum(distance) / (len(own) * math.log(len(own) + smoothing))
    largest = max(phi.values())
    every = [phi.get(c, largest) for c in range(len(centers))]
    low, high = np.percentile(every, 10), np.percentile(every, 90)
    every = [min(max(value, low), high) for value in every]
    mean = sum(every) / len(every)
    return [temperature * value / mean for value in every]


def naive_queue(queue, pushes):
    """Row after row into a ring; returns it and where the next row goes."""
    queue, place = [row.tolist() for row in queue], 0
    for rows in pushes:
        for row in rows:
            queue[place] = row.tolist()
            place = (place + 1) % len(queue)
    return queue, place
