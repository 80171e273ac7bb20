"""DS3L, image by image, and its two levels of gradients by differences."""

from __future__ import annotations

import math

from tests.naive.fixmatch import softmax


def affine(x, matrix, bias):
    return [sum(m * v for m, v in zip(row, x, strict=True)) + b for row, b in zip(matrix, bias, strict=True)]


class NaiveNetwork:
    """pixels -> features -> logits, from one flat list of numbers, so that each can be moved."""

    def __init__(self, num_pixels, num_features, num_seen):
        self.shapes = [(num_features, num_pixels), (num_features,), (num_seen, num_features), (num_seen,)]

    def logits(self, theta, pixels):
        w1, b1, w2, b2 = unflatten(theta, self.shapes)
        return affine(affine(pixels, w1, b1), w2, b2)


def unflatten(numbers, shapes):
    numbers, out = list(numbers), []
    for shape in shapes:
        rows = shape[0]
        width = shape[1] if len(shape) == 2 else 1
        taken, numbers = numbers[: rows * width], numbers[rows * width :]
        out.append([taken[i * width : (i + 1) * width] for i in range(rows)] if len(shape) == 2 else taken)
    assert not numbers
    return out


def naive_weight(phi, p, hidden):
    w1, b1, w2, b2 = unflatten(phi, [(hidden, len(p)), (hidden,), (1, hidden), (1,)])
    return 1 / (1 + math.exp(-affine([max(0.0, v) for v in affine(p, w1, b1)], w2, b2)[0]))


def naive_cross_entropy(network, theta, rows, labels):
    losses = [-math.log(softmax(network.logits(theta, x))[y]) for x, y in zip(rows, labels, strict=True)]
    return sum(losses) / len(losses)


def naive_consistency(network, theta, fixed, phi, pairs, hidden):
    """The weighted mean distance of two views; first view and weights by the parameters `fixed`."""
    total = weights = 0.0
    for first, second in pairs:
        p, q = softmax(network.logits(fixed, first)), softmax(network.logits(theta, second))
        w = naive_weight(phi, p, hidden)
        total += w * sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) / len(p)
        weights += w
    return total / weights


def slope(function, at, step):
    """The gradient by central differences."""
    out = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        out.append((function(up) - function(down)) / (2 * step))
    return out


def naive_look_ahead(network, theta, phi, rows, labels, pairs, *, hidden, weight, inner_lr, moves):
    """The labeled loss after one step down L; `moves` says of each number of theta whether it takes part."""

    def L(at):
        return naive_cross_entropy(network, at, rows, labels) + weight * naive_consistency(
            network, at, theta, phi, pairs, hidden
        )

    ahead = [t - inner_lr * s * m for t, s, m in zip(theta, slope(L, theta, 1e-5), moves, strict=True)]
    return naive_cross_entropy(network, ahead, rows, labels)
