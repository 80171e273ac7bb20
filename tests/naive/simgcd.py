"""What SimGCD adds to GCD, one row at a time."""

from __future__ import annotations

import math


def naive_softmax(cosine, temperature):
    """Probabilities of one row."""
    weights = [math.exp(float(v) / temperature) for v in cosine]
    return [w / sum(weights) for w in weights]


def naive_cosines(features, directions):
    """Cosine of each row with each direction."""
    return [[float(f @ w) / math.sqrt(float(f @ f)) / math.sqrt(float(w @ w)) for w in directions] for f in features]


def naive_cluster(cosines, num_images, student, teacher):
    """Cross-entropy of each view's prediction to the sharper one of the other view; mean over views and images."""
    terms = []
    for target, predicted in ((0, 1), (1, 0)):
        for i in range(num_images):
            q = naive_softmax(cosines[target * num_images + i], teacher)
            p = naive_softmax(cosines[predicted * num_images + i], student)
            terms.append(-sum(a * math.log(b) for a, b in zip(q, p, strict=True)))
    return sum(terms) / len(terms)


def naive_class(cosines, labels, student):
    """Cross-entropy of labeled rows of both views."""
    terms = [
        -math.log(naive_softmax(row, student)[labels[i % len(labels)]])
        for i, row in enumerate(cosines)
        if labels[i % len(labels)] >= 0
    ]
    return sum(terms) / len(terms)


def naive_missing_entropy(cosines, student):
    """log C minus the entropy of the mean prediction."""
    rows = [naive_softmax(row, student) for row in cosines]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return math.log(len(mean)) + sum(p * math.log(p) for p in mean)
