"""Keep the predictions from collapsing onto a few classes.

Letters: B images, C classes.
"""

from __future__ import annotations

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
