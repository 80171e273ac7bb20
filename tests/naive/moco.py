"""The loss of MoCo v3 from its definition, in Python loops."""

from __future__ import annotations

import math


def naive_head(rows, layers):
    """Linear, batch norm over all rows, ReLU, Linear, unit length; `layers` are a Sequential's."""
    first, norm, _, last = layers
    hidden = [[float(row @ w) for w in first.weight] for row in rows]
    for h in range(len(hidden[0])):
        column = [row[h] for row in hidden]
        mean = sum(column) / len(column)
        variance = sum((value - mean) ** 2 for value in column) / len(column)
        for row in hidden:
            x = (row[h] - mean) / math.sqrt(variance + norm.eps)
            row[h] = max(0.0, x * float(norm.weight[h]) + float(norm.bias[h]))
    bias = [0.0] * len(last.weight) if last.bias is None else last.bias.tolist()
    return [
        [sum(a * float(b) for a, b in zip(row, w, strict=True)) + c for w, c in zip(last.weight, bias, strict=True)]
        for row in hidden
    ]


def naive_unit(rows):
    """Rows at unit length; a row of zeros stays one."""
    lengths = [math.sqrt(sum(value * value for value in row)) or 1.0 for row in rows]
    return [[value / length for value in row] for row, length in zip(rows, lengths, strict=True)]


def naive_told_apart(q, k, temperature):
    """Mean over i of minus the log of the probability that row i of q picks row i of k."""
    losses = []
    for i, x in enumerate(q):
        weights = [math.exp(sum(a * b for a, b in zip(x, y, strict=True)) / temperature) for y in k]
        losses.append(-math.log(weights[i] / sum(weights)))
    return sum(losses) / len(losses)


def naive_over_views(q, k, apart):
    """Full views against the other one, further views against both: the two terms, and the mean over all views."""
    full = [apart(q[0], k[1]), apart(q[1], k[0])]
    further = [(apart(row, k[0]) + apart(row, k[1])) / 2 for row in q[2:]]
    crops = sum(further) / len(further) if further else 0.0
    return sum(full) / 2, crops, (sum(full) + sum(further)) / len(q)
