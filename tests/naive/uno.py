"""Sinkhorn-Knopp and one UNO+ step from the definitions, in Python loops."""

from __future__ import annotations

import math

import torch


def naive_sinkhorn(logits, shares, epsilon, rounds):
    """(B, C) as lists: the classes get their shares, then the images get 1 / B each, in turns; times B in the end."""
    B, C = len(logits), len(logits[0])
    q = [[math.exp(float(logits[i][c]) / epsilon) for c in range(C)] for i in range(B)]
    for _ in range(rounds):
        column = [sum(q[i][c] for i in range(B)) for c in range(C)]
        q = [[q[i][c] / column[c] * float(shares[c]) for c in range(C)] for i in range(B)]
        row = [sum(q[i]) for i in range(B)]
        q = [[q[i][c] / row[i] / B for c in range(C)] for i in range(B)]
    return [[B * value for value in row] for row in q]


def cosine(a, b):
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(x) ** 2 for x in a)) / math.sqrt(sum(float(y) ** 2 for y in b))


@torch.no_grad()
def naive_head(heads, h, rows):
    """Cosines of head h, row by row: Linear, batch norm with the statistics of these rows, ReLU, Linear, prototypes."""
    E = heads.weight.shape[1]
    units = range(h * E, (h + 1) * E)
    before = [[float(heads.hidden.weight[e] @ row + heads.hidden.bias[e]) for e in units] for row in rows]
    hidden = []
    for k, e in enumerate(units):
        column = [row[k] for row in before]
        mean = sum(column) / len(column)
        var = sum((value - mean) ** 2 for value in column) / len(column)
        gain, shift = float(heads.norm.weight[e]), float(heads.norm.bias[e])
        hidden.append([max(0.0, gain * (v - mean) / math.sqrt(var + heads.norm.eps) + shift) for v in column])
    out = []
    for i in range(len(rows)):
        z = [
            sum(hidden[k][i] * float(heads.weight[h, k, d]) for k in range(E)) + float(heads.bias[h, 0, d])
            for d in range(heads.weight.shape[2])
        ]
        out.append([cosine(z, prototype) for prototype in heads.prototypes[h]])
    return out


@torch.no_grad()
def naive_head_losses(heads, seen, rows, labels, shares, config):
    """The loss of each head; rows: V lists of B unit features, labels: -1 for unlabeled."""
    V, B = len(rows), len(labels)
    losses = []
    for h in range(config.num_heads):
        novel = naive_head(heads, h, [row for view in rows for row in view])
        logits = [
            [[cosine(rows[v][i], s) for s in seen] + novel[v * B + i] for i in range(B)] for v in range(V)
        ]  # V x B x (S + K)
        targets = []
        for v in range(V):
            free = [i for i in range(B) if labels[i] < 0]
            soft = naive_sinkhorn([logits[v][i] for i in free], shares, config.epsilon, config.rounds)
            target = [[float(c == labels[i]) for c in range(len(shares))] for i in range(B)]
            for place, i in enumerate(free):
                target[i] = soft[place]
            targets.append(target)
        total, pairs = 0.0, 0
        for v in range(V):
            for w in range(V):
                if v == w:
                    continue
                pairs += 1
                for i in range(B):
                    scaled = [value / config.temperature for value in logits[w][i]]
                    log_sum = math.log(sum(math.exp(value) for value in scaled))
                    total -= sum(t * (s - log_sum) for t, s in zip(targets[v][i], scaled, strict=True)) / B
        losses.append(total / pairs)
    return losses
