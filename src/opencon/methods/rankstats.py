"""RankStats: New Visual Categories with Ranking Statistics. Han et al., ICLR 2020, arXiv:2002.05714.

(The whole title begins with "Automatically Discovering and Learning".)

Letters: B images in a batch, L of them labeled (first), N = 2 * B rows (view by view), F features, S seen classes, C all
classes, M images in a set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.cluster.naming import name_soft_clusters
from opencon.config import MethodConfig
from opencon.encoders import Embedder
from opencon.errors import require
from opencon.losses.pairwise import pair_bce, same_top_k
from opencon.methods.base import (
    Assignment,
    Batch,
    Epoch,
    FeatureBank,
    Kind,
    Method,
    Schedule,
    StepOutput,
    Task,
    Variant,
)
from opencon.methods.parts import at_least_one, not_negative, ramp_up
from opencon.methods.schedule import CROP4_FLIP, HALF_CROP_FLIP, usual


@dataclass(frozen=True, kw_only=True)
class RankStatsConfig(MethodConfig):
    """Settings of RankStats."""

    name: ClassVar[str] = "rankstats"
    projects: ClassVar[bool] = False  # the heads sit on the encoder's features

    top_k: int = 5  # how many of the largest features are compared; released code
    weight_consistency: float = 50.0  # released code for CIFAR-100; 5 for CIFAR-10, 10 for ImageNet
    ramp_epochs: int = 150  # until that weight is reached; released code for CIFAR-100; 50 for the other two

    def __post_init__(self) -> None:
        at_least_one(self, "top_k")
        not_negative(self, "weight_consistency", "ramp_epochs")


class RankStats(Method[RankStatsConfig]):
    """Two unlabeled images belong together if the same features are their largest ones.

    With logits f of the labeled head (S outputs) and probabilities p of the first view and p' of the second:

        loss_ce  = - mean over labeled i of log softmax(f_i)_{y_i}
        loss_bce = - mean over pairs of unlabeled i, j of [ log(p_i . p'_j) if top_i = top_j else log(1 - p_i . p'_j) ]
        loss_mse = mean over all i and outputs of (p - p')^2, for each head

    p in loss_bce are those of the unlabeled head, top_i is the set of the `top_k` largest features of the first view. The
    loss is loss_ce + loss_bce + w(t) loss_mse, with w(t) = `weight_consistency` exp(-5 (1 - t / `ramp_epochs`)^2).

    The method was made for unlabeled images of novel classes only. Here, as in the comparisons of the OpenCon paper (there
    with a star), some are of seen classes, so the unlabeled head has C outputs, and those that the labeled images choose
    are named after them.
    """

    settings: ClassVar[type[RankStatsConfig]] = RankStatsConfig
    # The authors' code for CIFAR-10.
    special: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("cifar10", "cifar10_gcd"), ("method.weight_consistency=5.0", "method.ramp_epochs=50")
    )

    consistency: Tensor  # w(t), scalar on the device: the ramp must reach a recorded step

    def __init__(self, config: RankStatsConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        require(
            config.top_k < embedder.num_features,
            f"method.top_k = {config.top_k} must be below the encoder's {embedder.num_features} features: the same ones "
            f"would be the largest in every image.",
        )
        self.heads = self.build_heads(embedder.num_features)
        self.register_buffer("consistency", torch.tensor(0.0))

    def build_heads(self, num_features: int) -> nn.ModuleDict:
        """One for the seen classes, trained by labels, and one for everything unlabeled."""
        task = self.task
        return nn.ModuleDict(
            {"labeled": nn.Linear(num_features, task.num_seen), "unlabeled": nn.Linear(num_features, task.num_classes)}
        )

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Released code: its settings for CIFAR-100 and for ImageNet; digits and fine_grained: ours."""
        if kind == "digits":
            # Chosen by accuracy here. Five largest of 128 features coincide in less than 0.1 % of pairs, two in 0.5 %.
            method = cls.settings(top_k=2, weight_consistency=5.0, ramp_epochs=20)
            return usual(method, kind, epochs=60, batch_size=128, lr=0.4)
        if kind == "cifar":
            rate = {"lr": 0.1, "weight_decay": 1e-4, "milestones": (170,)}
            return usual(cls.settings(), kind, augment=CROP4_FLIP, batch_size=128, **rate)
        large = cls.settings(weight_consistency=10.0, ramp_epochs=50)
        if kind == "imagenet":
            return usual(large, kind, augment=HALF_CROP_FLIP, lr=0.1, epochs=90, milestones=(30, 60))
        return usual(large, kind, augment=HALF_CROP_FLIP)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F): the features as they are, because linear heads see lengths."""
        return self.embedder.features(images)

    def logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(N, F) -> of the labeled head (N, S), of the unlabeled head (N, C)."""
        return self.heads["labeled"](features), self.heads["unlabeled"](features)

    def before_epoch(self, epoch: Epoch) -> None:
        """Ramp the weight of the consistency between views."""
        self.consistency.fill_(self.config.weight_consistency * ramp_up(epoch.index, self.config.ramp_epochs))

    def step(self, batch: Batch) -> StepOutput:
        """Cross-entropy on labeled images, pairs of unlabeled ones, consistency of the views."""
        L, B = batch.num_labeled, len(batch.labels)
        features = self.embedder.features_of_views(batch.views)  # (N, F)
        seen, every = self.logits(features)
        p = every.softmax(dim=1)  # (N, C)
        loss_ce = F.cross_entropy(seen[:L], batch.labels[:L])
        same = same_top_k(features[L:B].detach(), self.config.top_k)  # (B - L, B - L)
        loss_bce = pair_bce(p[L:B], p[B + L : 2 * B], same)
        loss_mse = self.inconsistency(seen, every)
        loss = loss_ce + loss_bce + self.consistency * loss_mse
        logs = {"loss_ce": loss_ce, "loss_bce": loss_bce, "loss_mse": loss_mse, "share_same": same.float().mean()}
        return StepOutput(loss, {name: value.detach() for name, value in logs.items()})

    def inconsistency(self, seen: Tensor, every: Tensor) -> Tensor:
        """Squared difference of the probabilities of two views, of both heads."""
        return squared_difference(seen) + squared_difference(every)

    def row_logits(self, z: Tensor) -> Tensor:
        """Of the unlabeled head."""
        return self.logits(z)[1]

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The largest output of the unlabeled head, named by the labeled rows."""
        seen, every = self.logits(bank.z)
        outputs, p = every.argmax(dim=1), every.softmax(dim=1)
        classes, p = name_soft_clusters(outputs, p, bank.labels, num_seen=self.task.num_seen)
        return Assignment(classes, p=p, seen_logits=seen)


def squared_difference(logits: Tensor) -> Tensor:
    """Mean over images and outputs of (p - p')^2, p = softmax; (2 * B, K), view by view."""
    p, other = logits.softmax(dim=1).chunk(2)
    return F.mse_loss(p, other)
