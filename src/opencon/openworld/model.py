"""Rows of features to classes and groups: what a fit leaves behind.

Letters: M rows, F features, D embedding size, S seen classes, C classes and groups together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.openworld.row_encoder import ResidualHead, RowEncoder
from opencon.rows import check_rows
from opencon.runtime import seeded

CHUNK = 8192  # rows embedded at a time
HIDDEN = 256  # ours: width of the head


@dataclass(frozen=True)
class Prediction:
    """What the model says of M rows."""

    classes: Tensor  # (M,) in [0, C); S and above are new groups, the largest among the training rows first
    p: Tensor  # (M, C) rows sum to one
    confidence: Tensor  # (M,) in [0, 1]: p of the class chosen
    novelty: Tensor  # (M,) larger is newer; above 0 a row is more likely new than seen
    unlike_everything: Tensor  # (M,) bool: unlike every class and group


class OpenWorldModel(nn.Module):
    """Rows to classes and groups. Everything it knows is in parameters and buffers."""

    prototypes: Tensor  # (C, D) unit rows
    log_share: Tensor  # (C,) logarithm of each class's share among the rows, softened like the cosines
    sharpness: Tensor  # scalar: logits are this times the cosine
    outlier_threshold: Tensor  # scalar: the least cosine to the nearest prototype that still belongs

    def __init__(self, *, num_features: int, dim: int, num_seen: int, num_classes: int) -> None:
        super().__init__()
        self.num_features, self.dim, self.num_seen, self.num_classes = num_features, dim, num_seen, num_classes
        with seeded(0):  # the numbers drawn here are replaced
            self.encoder = RowEncoder(num_features, dim)
            self.head = ResidualHead(dim, HIDDEN)
            self.whiten = nn.Linear(dim, dim).requires_grad_(False)
        self.register_buffer("prototypes", torch.zeros(num_classes, dim))
        self.register_buffer("log_share", torch.zeros(num_classes))
        self.register_buffer("sharpness", torch.tensor(10.0))
        self.register_buffer("outlier_threshold", torch.tensor(-1.0))

    def settings(self) -> dict[str, Any]:
        """Plain data from which `from_settings` builds the same model, before its tensors are loaded."""
        names = ("num_features", "dim", "num_seen", "num_classes")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> OpenWorldModel:
        """An empty model of these sizes; `load_state_dict` fills it."""
        return cls(**settings)

    def embed(self, x: Tensor) -> Tensor:
        """(M, F) -> (M, D) unit rows."""
        return F.normalize(self.whiten(self.learned(x)), dim=1)

    def learned(self, x: Tensor) -> Tensor:
        """(M, F) -> (M, D) unit rows as the method has left them, before classes become balls."""
        return F.normalize(self.head(self.encoder(x)), dim=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(M, F) -> p (M, C), novelty (M,), cosine to the nearest prototype (M,): plain tensors, for export."""
        return self.judge(self.embed(x))

    def judge(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for rows that are embedded already.

            novelty = max( log [ weight of the new groups / weight of the seen classes ],
                           sharpness * (outlier_threshold - cosine to the nearest seen class) )

        where class c weighs share_c exp(sharpness * cosine_c). It is above 0 where a new group is likelier, and where a row
        lies beyond the edge of every seen class.
        """
        cosine = z @ self.prototypes.T  # (M, C)
        logits = self.sharpness * cosine + self.log_share
        seen = self.num_seen
        if seen == 0:  # all is new
            return logits.softmax(dim=1), torch.ones_like(cosine[:, 0]), cosine.amax(dim=1)
        novelty = self.sharpness * (self.outlier_threshold - cosine[:, :seen].amax(dim=1))
        if self.num_classes > seen:
            odds = logits[:, seen:].logsumexp(dim=1) - logits[:, :seen].logsumexp(dim=1)
            novelty = torch.maximum(novelty, odds)
        return logits.softmax(dim=1), novelty, cosine.amax(dim=1)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        """A class or group for every row (M, F)."""
        check_rows(x, num_features=self.num_features)
        return self.predict_embedded(in_parts(self.embed, x))

    @torch.no_grad()
    def predict_embedded(self, z: Tensor) -> Prediction:
        """The same for unit rows (M, D) from `embed`."""
        p, novelty, nearest = self.judge(z)
        confidence, classes = p.max(dim=1)
        return Prediction(classes, p, confidence, novelty, nearest < self.outlier_threshold)


@torch.no_grad()
def in_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to float32 rows, some thousand at a time."""
    return torch.cat([function(part.float()) for part in torch.split(x, CHUNK)])
