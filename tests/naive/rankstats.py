"""One RankStats step from the definitions, in Python loops over float64 rows."""

from __future__ import annotations

import math

from tests.naive.pairwise import naive_pair_bce, naive_top, softmax


def naive_mse(first, second):
    """Mean over images and outputs of the squared difference."""
    squares = [(a - b) ** 2 for p, q in zip(first, second, strict=True) for a, b in zip(p, q, strict=True)]
    return sum(squares) / len(squares)


def naive_step(features, seen, every, labels, top_k, *, one_head):
    """The three terms. features (B, F) of the first view; seen and every: the heads' logits of both views, (B, K) each."""
    B = len(labels)
    labeled, unlabeled = ([i for i in range(B) if (labels[i] >= 0) == kind] for kind in (True, False))
    loss_ce = sum(-math.log(softmax(seen[0][i])[labels[i]]) for i in labeled) / len(labeled)
    tops = {i: naive_top(features[i], top_k) for i in unlabeled}
    same = [[tops[i] == tops[j] for j in unlabeled] for i in unlabeled]
    p, other = ([softmax(row) for row in view] for view in every)
    loss_bce = naive_pair_bce([p[i] for i in unlabeled], [other[j] for j in unlabeled], same)
    loss_mse = naive_mse(p, other)
    if not one_head:
        loss_mse += naive_mse(*([softmax(row) for row in view] for view in seen))
    return {"loss_ce": loss_ce, "loss_bce": loss_bce, "loss_mse": loss_mse}
