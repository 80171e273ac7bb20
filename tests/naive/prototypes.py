"""Prototype arithmetic, one sample at a time."""

from __future__ import annotations

import numpy as np


def naive_ema(prototypes, z, labels, momentum):
    mu = np.asarray(prototypes, dtype=np.float64).copy()
    for row, label in zip(np.asarray(z, dtype=np.float64), labels, strict=True):
        if label < 0:
            continue
        moved = momentum * mu[label] + (1 - momentum) * row
        mu[label] = moved / np.linalg.norm(moved)
    return mu


def naive_seen_score(cosine, num_seen, form):
    scores = []
    for row in np.asarray(cosine, dtype=np.float64):
        if form == "standardized":
            row = 10 * row  # as the released code does first
            row = (row - row.mean()) / row.std(ddof=1)
        scores.append(row[:num_seen].max())
    return np.array(scores)
