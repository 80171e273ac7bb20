"""MoCo v3: An Empirical Study of Training Self-Supervised Vision Transformers. Chen et al., ICCV 2021, arXiv:2104.02057.

Letters: B images in a batch, V views of which two are full, D embedding size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opencon.methods.byol import BYOL, BYOLConfig
from opencon.methods.parts import positive


@dataclass(frozen=True, kw_only=True)
class MoCoConfig(BYOLConfig):
    """Settings of MoCo v3, which uses no label while training."""

    name: ClassVar[str] = "moco"

    temperature: float = 0.2  # paper, section 4.1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "temperature")


class MoCo(BYOL[MoCoConfig]):
    """BYOL's networks and views, but a view is told its own image from the others of the batch.

    apart(q, k)_i = - log [ exp(q_i . k_i / tau) / sum_j exp(q_i . k_j / tau) ],   mean over the images i
    """

    settings = MoCoConfig

    def apart(self, q: Tensor, k: Tensor) -> Tensor:
        """(V, 2): InfoNCE of predictions (V, B, D) of each view among targets (2, B, D), as a mean over the images."""
        logits = torch.einsum("vid,tjd->vtij", q, k) / self.config.temperature
        return (logits.logsumexp(dim=3) - logits.diagonal(dim1=2, dim2=3)).mean(dim=2)
