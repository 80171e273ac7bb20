"""Keep the predictions from collapsing onto a few classes.

Letters: B images, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Released code: the mean probability is clamped here before the logarithm.
SMALLEST_PROBABILITY = 1e-5


def kl_to_prior(logits: Tensor, prior: Tensor) -> Tensor:
    """KL(p || q) of the mean prediction p to a class prior q.

        p_c = max(mean_i softmax(logits_i)_c, 1e-5)      KL = sum_c p_c (log p_c - log q_c)

    Args:
        logits: (B, C).
        prior: (C,) positive, sums to one.
    """
    p = logits.softmax(dim=1).mean(dim=0).clamp(min=SMALLEST_PROBABILITY)  # (C,)
    return (p * (p.log() - prior.log())).sum()


@torch.no_grad()
def sinkhorn(logits: Tensor, shares: Tensor, *, epsilon: float, rounds: int) -> Tensor:
    """Soft labels that use each class by its share: Sinkhorn-Knopp on exp(logits / epsilon) (Cuturi, arXiv:1306.0895).

    Each round sets the totals of the classes to their shares r, then those of the images to 1 / B:

        Q_ic <- r_c Q_ic / sum_j Q_jc        Q_ic <- Q_ic / (B sum_k Q_ik)

    The result is B Q: its rows sum to one, and its columns to B r_c, the more closely the more rounds. Constant factors
    cancel in the next division, so in logarithms a round is a softmax over the images and one over the classes. Nothing
    overflows, however small epsilon is, and no sum that has become zero is divided by.

    Args:
        logits: (..., B, C); every leading index is a problem of its own.
        shares: (C,) positive, sums to one.
        epsilon: above zero; smaller is sharper.
        rounds: at least one.
    """
    log_q, log_shares = logits / epsilon, shares.log()
    for _ in range(rounds):
        log_q = (log_q.log_softmax(dim=-2) + log_shares).log_softmax(dim=-1)
    return log_q.exp()
