"""One unit vector per class: scores, novelty, and the moving average on the sphere.

Letters: B samples, D embedding size, C classes, of which the first S are seen. `cosine` is (B, C), larger is nearer.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.runtime import has_triton

# Released code: similarities become logits as 10 * cosine.
LOGIT_SCALE = 10.0

SeenScore = Literal["standardized", "cosine"]


def random_prototypes(num_classes: int, dim: int) -> Tensor:
    """(C, D) random directions, the start of training (paper, section 3.2)."""
    return F.normalize(torch.randn(num_classes, dim), dim=1)


def seen_score(cosine: Tensor, *, num_seen: int, form: SeenScore, live: Tensor | None = None) -> Tensor:
    """How much each sample looks like some seen class, (B,); minus this is the novelty score.

        cosine        max_{c < S} cos_c                                       (paper)
        standardized  max_{c < S} (cos_c - mean_C cos) / std_C cos            (released code)

    The standardized form asks how far the best seen class stands out among all C. Released code scales the cosines by 10
    first, which the standardization undoes. With `live` (C,), mean and deviation are over those classes alone.
    """
    if form == "standardized" and live is not None:
        number = live.sum()
        mean = torch.where(live, cosine, 0.0).sum(dim=1, keepdim=True) / number
        square = torch.where(live, (cosine - mean).square(), 0.0).sum(dim=1, keepdim=True)
        cosine = (cosine - mean) / (square / (number - 1)).sqrt().clamp(min=1e-8)
    elif form == "standardized":
        # The clamp keeps a sample equally near to every prototype finite (ours).
        spread = cosine.std(dim=1, keepdim=True).clamp(min=1e-8)
        cosine = (cosine - cosine.mean(dim=1, keepdim=True)) / spread
    return cosine[:, :num_seen].amax(dim=1)


def novelty_threshold(labeled_scores: Tensor, *, percentile: float) -> Tensor:
    """The score below which a sample counts as novel: `percentile` percent of the labeled samples lie above it.

    percentile = 70 is the 30th percentile of the labeled scores, interpolated linearly. At 0 it is the largest labeled
    score, so that nearly everything unlabeled counts as novel (paper, Figure 3).
    """
    # torch.quantile, spelled out: its checks would make the host wait.
    ordered = labeled_scores.sort().values
    position = (1.0 - percentile / 100.0) * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)


@torch.no_grad()
def ema_update(prototypes: Tensor, z: Tensor, labels: Tensor, *, momentum: float, kernel: bool = True) -> Tensor:
    """Move each class prototype toward its samples, one sample at a time, on the sphere (paper, Eq. 6).

        mu_c <- normalize(momentum * mu_c + (1 - momentum) * z_i)   for every i with label c, in order

    The samples of one class must be applied in turn (each step renormalizes), but classes do not touch each other, so
    round k applies the k-th sample of every class at once: as many rounds as the largest class has samples instead of one
    per sample, with the same result.

    Args:
        prototypes: (C, D) unit rows; not modified.
        z: (B, D) unit rows.
        labels: (B,) class of each row; -1 moves nothing.
        momentum: share of the old prototype kept at each sample.
        kernel: on a GPU, use one Triton program per class instead of rounds (same result, no host sync).
    """
    if kernel and prototypes.is_cuda and has_triton():
        from opencon.prototypes.kernel import ema_update_kernel

        return ema_update_kernel(prototypes, z, labels, momentum)
    num_classes = len(prototypes)
    # -1 becomes a class of its own behind the others, whose row is dropped at the end.
    labels = torch.where(labels < 0, num_classes, labels)
    mu = torch.cat([prototypes, torch.zeros_like(prototypes[:1])])  # (C + 1, D)
    counts = torch.bincount(labels, minlength=num_classes + 1)  # (C + 1,)
    order = torch.argsort(labels, stable=True)  # class by class, in turn
    first = counts.cumsum(0) - counts
    rounds = int(counts[:num_classes].max()) if len(labels) else 0  # host sync: how many rounds
    for k in range(rounds):
        row = order[(first + k).clamp(max=len(labels) - 1)]  # (C + 1,) the k-th sample of each class, if it has one
        moved = F.normalize(momentum * mu + (1 - momentum) * z[row], dim=1)
        mu = torch.where((k < counts)[:, None], moved, mu)
    return mu[:num_classes]
