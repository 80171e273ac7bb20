"""The generalized contrastive loss: InfoNCE over a masked similarity matrix.

Letters: N rows (every view of every image), D embedding size; z_i unit rows; P(i) positives and A(i) candidates of anchor i.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from opencon.losses.blocked import info_nce_within

# Rows from which the blocked form is taken. CPU: where it is clearly the faster one (benchmarks/loss_memory.py). GPU: ours,
# where the plain form begins to hold 0.35 GB for each term.
BLOCKED_FROM = {"cpu": 512, "cuda": 4096}


class ContrastMasks(NamedTuple):
    """Who is compared with whom; bool (N, N) each."""

    positives: Tensor  # row i marks P(i), never i itself
    candidates: Tensor  # row i marks A(i), a superset of P(i)


class ContrastTerms(NamedTuple):
    """The two halves of the loss, per anchor (paper, section 4.2)."""

    alignment: Tensor  # (N,) L_a: minus the mean similarity to the positives
    uniformity: Tensor  # (N,) L_b: log-sum-exp over the candidates
    is_anchor: Tensor  # (N,) bool: has at least one positive; both terms are 0 elsewhere


def masks_within(member: Tensor, group: Tensor) -> ContrastMasks:
    """Contrast inside one subset of the rows: `member` (N,) bool says who is in, `group` (N,) who belongs together."""
    inside = member[:, None] & member[None, :]
    inside = inside & ~torch.eye(len(member), dtype=torch.bool, device=member.device)
    return ContrastMasks(inside & (group[:, None] == group[None, :]), inside)


def contrast_terms(z: Tensor, masks: ContrastMasks, *, temperature: float) -> ContrastTerms:
    """Per-anchor alignment and uniformity; their sum is the generalized contrastive loss of the paper (Eq. 1).

    With s_ij = z_i . z_j / temperature:

        L_a(i) = - mean_{p in P(i)} s_ip          L_b(i) = log sum_{a in A(i)} exp(s_ia)
    """
    positives, candidates = masks
    is_anchor = positives.any(dim=1)  # (N,)
    # An anchor without positives contributes nothing, but an empty denominator would put NaN into the backward pass:
    # give it a full row here and drop it below.
    candidates = candidates | ~is_anchor[:, None]
    logits = z @ z.T / temperature  # (N, N)
    uniformity = logits.masked_fill(~candidates, float("-inf")).logsumexp(dim=1)
    alignment = -(logits * positives).sum(dim=1) / positives.sum(dim=1).clamp(min=1)
    return ContrastTerms(alignment * is_anchor, uniformity * is_anchor, is_anchor)


def info_nce(
    z: Tensor, masks: ContrastMasks, *, temperature: float, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """The generalized contrastive loss over the anchors that have a positive.

        loss_i = - mean_{p in P(i)} [ s_ip - log sum_{a in A(i)} exp(s_ia) ]

    The mean over P(i) stands outside the log (the "out" form of Khosla et al. 2020, arXiv:2004.11362). SimCLR, SupCon
    and the three OpenCon terms are this one function; they differ in the masks.

    Args:
        z: unit-length embeddings, (N, D), float32 or float64. Call this outside autocast.
        masks: who is compared with whom, see `masks_within`.
        temperature: above zero; smaller is sharper.
        reduction: mean over the anchors (released code), or sum (the paper's L_n).

    Returns:
        Scalar; exactly 0 with zero gradient if no anchor has a positive.
    """
    terms = contrast_terms(z, masks, temperature=temperature)
    total = (terms.alignment + terms.uniformity).sum()
    return total if reduction == "sum" else total / terms.is_anchor.sum().clamp(min=1)


def contrast_within(
    z: Tensor,
    member: Tensor,
    group: Tensor,
    *,
    temperature: float,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """`info_nce(z, masks_within(member, group), ...)`, in blocks where N is large: same value and gradient."""
    if len(z) >= BLOCKED_FROM[z.device.type]:
        return info_nce_within(z, member, group, temperature=temperature, reduction=reduction)
    return info_nce(z, masks_within(member, group), temperature=temperature, reduction=reduction)
