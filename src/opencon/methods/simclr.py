"""SimCLR: A Simple Framework for Contrastive Learning of Visual Representations. Chen et al., ICML 2020, arXiv:2002.05709.

Letters: B images in a batch, V views, N = V * B rows (view by view).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from opencon.cluster.naming import cluster_and_name
from opencon.config import MethodConfig, Views
from opencon.losses.contrastive import contrast_within
from opencon.methods.base import Assignment, Batch, FeatureBank, Kind, Method, Schedule, StepOutput, Variant
from opencon.methods.parts import positive
from opencon.methods.schedule import usual


@dataclass(frozen=True, kw_only=True)
class SimCLRConfig(MethodConfig):
    """Settings of SimCLR, which uses no label while training."""

    name: ClassVar[str] = "simclr"
    uses_labels: ClassVar[bool] = False
    views: ClassVar[Views] = Views(most=None, sizes=True)  # all views of an image are positives of each other

    temperature: float = 0.1  # ours for CIFAR at batch 512; the paper's best on ImageNet is 0.1 too (Table 5)

    def __post_init__(self) -> None:
        positive(self, "temperature")


class SimCLR(Method[SimCLRConfig]):
    """Pull the two views of an image together, push all other images away (arXiv:2002.05709)."""

    settings = SimCLRConfig

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Every parameter learns. cifar: SCAN's setting (arXiv:2005.12320) for small images; digits: ours."""
        if kind == "digits":
            return usual(cls.settings(temperature=0.4), kind, epochs=60)
        schedule = usual(
            cls.settings(),
            kind,
            epochs=500,
            batch_size=512,
            weight_decay=1e-4,
            schedule="cosine",
            lr=0.4,
            lr_end=0.0,
            milestones=(),
        )
        return replace(schedule, encoder={"train_from": "all"}, eval_every=50)

    def step(self, batch: Batch) -> StepOutput:
        """NT-Xent over every image of the batch."""
        z = self.embedder.embed_views(batch.views)  # (N, D)
        image = torch.arange(len(batch.labels), device=z.device).repeat(len(batch.views))  # (N,)
        everyone = torch.ones_like(image, dtype=torch.bool)
        loss = contrast_within(z, everyone, image, temperature=self.config.temperature)
        return StepOutput(loss)

    def assign(self, bank: FeatureBank) -> Assignment:
        """k-means, then seen classes named by their labeled images."""
        return Assignment(
            cluster_and_name(
                bank.z, bank.labels, num_clusters=self.task.num_classes, num_seen=self.task.num_seen, seed=0
            )
        )
