"""Swap: ours, 2026. A plugin: swapped prediction with four small crops, AdamW, clipping and a warm-up by step.

    opencon train swap/digits --import examples/swap.py --out runs/swap
    opencon compare runs/swap runs/digits

Letters: B images in a batch, L of them labeled (first), V views of which two are full, C all classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from opencon.config import GroupConfig, MethodConfig, ViewConfig, Views
from opencon.losses.balance import sinkhorn
from opencon.methods import LABELS, METHODS, Assignment, MethodEntry
from opencon.methods.base import Batch, FeatureBank, Kind, Method, Schedule, StepOutput, Variant
from opencon.methods.parts import CosineClassifier, positive
from opencon.methods.schedule import usual


@dataclass(frozen=True, kw_only=True)
class SwapConfig(MethodConfig):
    """Settings of Swap."""

    name: ClassVar[str] = "swap"
    projects: ClassVar[bool] = False  # the classifier sees features
    views: ClassVar[Views] = Views(most=None, sizes=True)  # any number, of any size

    temperature: float = 0.1  # of predictions, SwAV (arXiv:2006.09882)
    epsilon: float = 0.05  # of targets, SwAV

    def __post_init__(self) -> None:
        positive(self, "temperature", "epsilon")


class Swap(Method[SwapConfig]):
    """Every view predicts the class that the full views of its image have: the label, or a balanced guess."""

    settings = SwapConfig

    def __init__(self, config, task, embedder) -> None:
        super().__init__(config, task, embedder)
        self.classifier = CosineClassifier(embedder.dim, task.num_classes)
        shares = torch.ones(task.num_classes)
        shares[: task.num_seen] = 1.0 - task.labeled_ratio  # a seen class has lost its labeled images
        self.register_buffer("shares", shares / shares.sum(), persistent=False)

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Ours: AdamW, no decay on norms and biases, clipping, a warm-up of two epochs that moves with every step."""
        train = {"optimizer": "adamw", "lr": 1e-3, "schedule": "cosine", "milestones": (), "weight_decay": 0.05}
        train |= {"clip": 1.0, "per_step": True, "warmup_epochs": 2}
        own = usual(SwapConfig(), kind, groups=(GroupConfig(match=("norms", "biases"), weight_decay=0.0),), **train)
        size = {"digits": 8, "cifar": 20}.get(kind, 96)  # in pixels; digits have no more than 8
        crops = ViewConfig(size=size, crop_scale=(0.3, 0.7), flip_p=own.augment.flip_p, jitter_p=0, gray_p=0, count=4)
        return replace(own, views=(crops,), encoder={} if kind == "fine_grained" else {"train_from": "all"})

    def step(self, batch: Batch) -> StepOutput:
        """Cross-entropy of every view's prediction with the targets of the other full views."""
        c, V, L = self.config, len(batch.views), batch.num_labeled
        cosines = self.classifier(self.embedder.embed_views(batch.views)).view(V, len(batch.labels), -1)  # (V, B, C)
        with torch.no_grad():
            free = sinkhorn(cosines[:2, L:], self.shares, epsilon=c.epsilon, rounds=3)  # (2, B - L, C)
            known = F.one_hot(batch.labels[:L], free.shape[2]).to(free.dtype).expand(2, -1, -1)
            target = torch.cat([known, free], dim=1)  # (2, B, C)
        others = target.mean(dim=0).expand(V - 2, -1, -1)  # a crop follows both full views
        loss = -(torch.cat([target.flip(0), others]) * (cosines / c.temperature).log_softmax(dim=2)).sum(
            dim=2
        )  # (V, B)
        loss_l, loss_u = loss[:, :L].mean(), loss[:, L:].mean()
        return StepOutput(loss_l + loss_u, {"loss_l": loss_l.detach(), "loss_u": loss_u.detach()})

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The class of the greatest cosine."""
        return Assignment.from_logits(self.classifier(bank.z) / self.config.temperature, self.task.num_seen)


METHODS.add("swap", MethodEntry(Swap, "Swap", "ours", 2026, LABELS))
