"""FixMatch's loss, image by image."""

from __future__ import annotations

import math


def softmax(logits):
    top = max(logits)
    exps = [math.exp(v - top) for v in logits]
    return [e / sum(exps) for e in exps]


def naive_losses(weak, strong, labels, threshold):
    """Rows of logits of both views and labels (-1: unlabeled) -> loss_l, loss_u, share of sure ones."""
    labeled, unlabeled, num_sure = [], [], 0
    for w, s, label in zip(weak, strong, labels, strict=True):
        p = softmax(w)
        if label >= 0:
            labeled.append(-math.log(p[label]))
            continue
        sure = max(p) >= threshold
        num_sure += sure
        unlabeled.append(-math.log(softmax(s)[p.index(max(p))]) if sure else 0.0)
    return sum(labeled) / len(labeled), sum(unlabeled) / len(unlabeled), num_sure / len(unlabeled)
