"""Rows of features to classes and groups: what a fit leaves behind.

Letters: M rows, F features, D embedding size, S seen classes, C classes and groups together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.openworld.row_encoder import ResidualHead, RowEncoder, unit
from opencon.openworld.strangers import FALSE_ALARMS, Strangers, check_false_alarms
from opencon.rows import check_rows
from opencon.runtime import seeded

CHUNK = 8192  # rows embedded at a time
HIDDEN = 256  # ours: width of the head


# What a choice is worth: numbers of a logistic regression on the rows of the development worlds (benchmarks/strangers.py
# --learn prints them), of which 0.9 means nine in ten. Stability over resamples and the accuracy on held-out labels were
# tried as well; neither made it better.
TRUST = {"always": -1.35, "margin": 0.23, "neighbors": 2.73, "oddness": -2.15, "seen": -0.94}
MOST_MARGIN = 50.0  # ours: beyond, one class is as good as alone
SOFTER = 0.2  # ours: the power of the mixture's odds that counts where they are shown; as they are, they are too sharp
STEEP = 10.0  # ours: novelty of a row that is e times as odd as the threshold, about what a sure new group has
FAR = 0.005  # ours: share of known rows whose distance alone makes them new; at 5 % it would be many of the seen ones


@dataclass(frozen=True)
class Prediction:
    """What the model says of M rows."""

    classes: Tensor  # (M,) in [0, C); S and above are new groups, the largest among the training rows first
    p: Tensor  # (M, C) rows sum to one
    confidence: Tensor  # (M,) in [0, 1]: how often such a choice is right; p of the class chosen, where there are two
    novelty: Tensor  # (M,) larger is newer; above 0 a row is more likely new than seen
    oddness: Tensor  # (M,) distance to the nearest rows of the fit, beside what is usual there
    unlike_everything: Tensor  # (M,) bool: odder than all but a stated share of the fit's own rows


class OpenWorldModel(nn.Module):
    """Rows to classes and groups. Everything it knows is in parameters and buffers."""

    prototypes: Tensor  # (C, D) unit rows
    log_share: Tensor  # (C,) logarithm of each class's share among the rows
    sharpness: Tensor  # scalar: logits are this times the cosine
    trust: Tensor  # (5,) see `TRUST`

    def __init__(
        self, *, num_features: int, dim: int, num_seen: int, num_classes: int, num_references: int = 1
    ) -> None:
        super().__init__()
        self.num_features, self.dim, self.num_seen, self.num_classes = num_features, dim, num_seen, num_classes
        with seeded(0):  # the numbers drawn here are replaced
            self.encoder = RowEncoder(num_features, dim)
            self.head = ResidualHead(dim, HIDDEN)
            self.whiten = nn.Linear(dim, dim).requires_grad_(False)
        self.strangers = Strangers(num_features, num_references)
        self.register_buffer("prototypes", torch.zeros(num_classes, dim))
        self.register_buffer("log_share", torch.zeros(num_classes))
        self.register_buffer("sharpness", torch.tensor(10.0))
        self.register_buffer("trust", torch.tensor(list(TRUST.values())))

    def settings(self) -> dict[str, Any]:
        """Plain data from which `from_settings` builds the same model, before its tensors are loaded."""
        names = ("num_features", "dim", "num_seen", "num_classes")
        return {name: getattr(self, name) for name in names} | {"num_references": len(self.strangers.rows)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> OpenWorldModel:
        """An empty model of these sizes; `load_state_dict` fills it."""
        return cls(**settings)

    def embed(self, x: Tensor) -> Tensor:
        """(M, F) -> (M, D) unit rows."""
        return unit(self.whiten(self.learned(x)))

    def learned(self, x: Tensor) -> Tensor:
        """(M, F) -> (M, D) unit rows as the method has left them, before classes become balls."""
        return F.normalize(self.head(self.encoder(x)), dim=1)

    def logits(self, z: Tensor) -> Tensor:
        """(M, D) unit rows -> (M, C): sharpness * cosine + log share."""
        return self.sharpness * (z @ self.prototypes.T) + self.log_share

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(M, F) -> p (M, C), confidence, novelty, oddness, all (M,): plain tensors, for export."""
        oddness, near = self.strangers(x)
        p, confidence, novelty = self.judge(self.embed(x), oddness, near)
        return p, confidence, novelty, oddness

    def judge(self, z: Tensor, oddness: Tensor, near: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p (M, C), confidence (M,) and novelty (M,) of embedded rows (M, D), from what `strangers` says of them.

            novelty    = max( 0.2 log [ weight of new groups / weight of seen ones ], 10 log(oddness / threshold at 0.5 %) )
            confidence = sigmoid( trust . facts )

        where class c weighs share_c exp(sharpness * cosine_c).
        """
        logits, seen = self.logits(z), self.num_seen
        novelty = STEEP * self._beyond(oddness, FAR)
        if seen == 0:
            novelty = torch.ones_like(novelty)  # all is new
        elif seen < self.num_classes:
            odds = logits[:, seen:].logsumexp(dim=1) - logits[:, :seen].logsumexp(dim=1)
            novelty = torch.maximum(SOFTER * odds, novelty)
        confidence = torch.sigmoid(self.facts(logits, oddness, near) @ self.trust)
        if self.num_classes == 1:
            return torch.ones_like(logits), confidence, novelty
        return *shared_out(logits, confidence), novelty

    def facts(self, logits: Tensor, oddness: Tensor, near: Tensor) -> Tensor:
        """(M, 5) what the confidence is made of: 1; log(1 + margin); neighbors; log(oddness / threshold); seen.

        The margin is the log odds of the class chosen against the second best. Neighbors is the share of the nearest rows of
        the fit that are of this class. Seen is 1 for a seen class and 0 for a new group.
        """
        best, chosen = logits.max(dim=1)
        second = logits.topk(2, dim=1).values[:, 1] if self.num_classes > 1 else best - MOST_MARGIN
        margin = (best - second).clamp(max=MOST_MARGIN).log1p()
        alike = (near == chosen[:, None]).to(logits.dtype).mean(dim=1)
        is_seen = (chosen < self.num_seen).to(logits.dtype)
        return torch.stack([torch.ones_like(best), margin, alike, self._beyond(oddness), is_seen], dim=1)

    def _beyond(self, oddness: Tensor, false_alarms: float = FALSE_ALARMS) -> Tensor:
        """Logarithm of the oddness by its threshold."""
        return (oddness / self.strangers.threshold(false_alarms).clamp(min=1e-6)).clamp(min=1e-6).log()

    @torch.no_grad()
    def predict(self, x: Tensor, *, false_alarms: float = FALSE_ALARMS) -> Prediction:
        """A class or group for every row (M, F).

        Args:
            x: the rows.
            false_alarms: the share of rows of known classes and groups that may be called unlike everything.
        """
        check_rows(x, num_features=self.num_features)
        check_false_alarms(false_alarms)
        parts = [self.said(*self.forward(part.float()), false_alarms) for part in torch.split(x, CHUNK)]
        return Prediction(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Prediction)))

    def said(
        self, p: Tensor, confidence: Tensor, novelty: Tensor, oddness: Tensor, false_alarms: float = FALSE_ALARMS
    ) -> Prediction:
        """What `forward` computed, with the class chosen and who is unlike everything."""
        unlike = oddness > self.strangers.threshold(false_alarms)
        return Prediction(p.argmax(dim=1), p, confidence, novelty, oddness, unlike)


def shared_out(logits: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (M, C) in which the best class has the confidence (M,), and that confidence: 1 / C at least.

    The others share the rest by their logits, softened; none of them gets more than the best.
    """
    num = logits.shape[1]
    confidence = confidence.clamp(min=1.001 / num)[:, None]
    best = F.one_hot(logits.argmax(dim=1), num).to(logits.dtype)
    others = (SOFTER * logits).masked_fill(best.bool(), -torch.inf).softmax(dim=1)  # (M, C), 0 for the best
    even = (1 - best) / (num - 1)
    room = (
        confidence / (1 - confidence).clamp(min=1e-6) / 1.001
    )  # the largest share of the rest that leaves the best ahead
    largest = others.amax(dim=1, keepdim=True)
    mixed = ((largest - room) / (largest - 1 / (num - 1)).clamp(min=1e-6)).clamp(0, 1)
    rest = (1 - mixed) * others + mixed * even
    return confidence * best + (1 - confidence) * rest, confidence[:, 0]


@torch.no_grad()
def in_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to float32 rows, some thousand at a time."""
    return torch.cat([function(part.float()) for part in torch.split(x, CHUNK)])
