"""Losses over pairs of images: do these two belong together?

Letters: N rows, F features, K classes; p and q rows of probabilities, one for each of two views.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Released code of RankStats: added before the logarithm, so that it stays finite and a pair that is all wrong still learns.
SMALLEST_CHANCE = 1e-7


def pair_bce(p: Tensor, q: Tensor, same: Tensor) -> Tensor:
    """Binary cross-entropy over all pairs (i, j), an image with itself included, of the chance to share a class.

        s_ij = p_i . q_j      loss = - mean_ij [ log(s_ij + 1e-7) if same_ij else log(1 - s_ij + 1e-7) ]

    Args:
        p: (N, K) probabilities of the first view.
        q: (N, K) of the second view.
        same: (N, N) bool, which pairs belong together.
    """
    chance = (p @ q.T).clamp(max=1.0)  # rounding may put it above one, and 1 - chance below zero
    return -(torch.where(same, chance, 1.0 - chance) + SMALLEST_CHANCE).log().mean()


def pair_agreement(log_p: Tensor, log_q: Tensor) -> Tensor:
    """- mean_i log(p_i . q_i): row i of one and row i of the other belong together. From log-probabilities (N, K)."""
    return -(log_p + log_q).logsumexp(dim=1).mean()


def same_top_k(features: Tensor, k: int) -> Tensor:
    """(N, N) bool: whether the k largest features of two rows are the same ones, in whatever order. Features are (N, F)."""
    top = features.topk(k, dim=1).indices.sort(dim=1).values  # (N, k)
    return (top[:, None] == top[None, :]).all(dim=2)


def nearest_other(z: Tensor) -> Tensor:
    """(N,) for each unit row the index of the nearest other row."""
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    return (z @ z.T).masked_fill(itself, -torch.inf).argmax(dim=1)


def next_of_class(labels: Tensor) -> Tensor:
    """(N,) for each row the index of the next one with its label, around the end; its own if there is no other.

    In a shuffled batch that is a random partner of the same class, without another draw.
    """
    index = torch.arange(len(labels), device=labels.device)
    steps = (index[None, :] - index[:, None] - 1) % len(labels)  # 0 to the row after it, N - 1 to itself
    return steps.masked_fill(labels[:, None] != labels[None, :], len(labels)).argmin(dim=1)
