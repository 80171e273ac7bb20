"""FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence. Sohn et al., 2020, arXiv:2001.07685.

NeurIPS. It knows the seen classes only. The images that it rejects are clustered, as the OpenCon paper extends it.

Letters: B images in a batch, L of them labeled (first), F features, S seen classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.config import AugmentConfig, MethodConfig
from opencon.encoders import Embedder
from opencon.errors import require
from opencon.methods.base import Assignment, Batch, FeatureBank, Kind, Method, Schedule, StepOutput, Task, Variant
from opencon.methods.extend import check_rejection, reject_and_cluster
from opencon.methods.parts import WeightAverage, not_negative
from opencon.methods.schedule import CROP4_FLIP, DIGITS_VIEW, HALF_CROP_FLIP, usual


@dataclass(frozen=True, kw_only=True)
class FixMatchConfig(MethodConfig):
    """Settings of FixMatch. Defaults are the paper's for CIFAR (section 4.1 and appendix B)."""

    name: ClassVar[str] = "fixmatch"
    projects: ClassVar[bool] = False

    threshold: float = 0.95  # tau: a pseudo-label counts from this probability on; 0.7 on ImageNet
    weight_unlabeled: float = 1.0  # lambda_u; 10 on ImageNet
    momentum: float = 0.999  # of the weight average that is evaluated
    reject_share: float | None = None  # of the unlabeled images; None: as many as are expected to be novel
    # Reject below this probability of the likeliest seen class, instead of a share.
    reject_threshold: float | None = None

    def __post_init__(self) -> None:
        require(0 <= self.threshold <= 1, f"method.threshold = {self.threshold} must lie between 0 and 1.")
        require(0 <= self.momentum < 1, f"method.momentum = {self.momentum} must lie in [0, 1).")
        not_negative(self, "weight_unlabeled")
        check_rejection(self)


class FixMatch(Method[FixMatchConfig]):
    """Where the classifier is sure of the weak view of an unlabeled image, the strong view should get the same class.

    With p(x) the softmax over the S seen classes, `weak` and `strong` views, and CE the cross entropy:

        loss_l = mean over labeled i of CE(p(weak_i), label_i)
        loss_u = mean over unlabeled i of [max p(weak_i) >= threshold] CE(p(strong_i), argmax p(weak_i))
        loss   = loss_l + weight_unlabeled loss_u

    No gradient passes through the weak view of an unlabeled image. Evaluation uses the weights averaged over the steps.
    """

    settings = FixMatchConfig
    # The paper's weight decay for CIFAR-10.
    special: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("cifar10", "cifar10_gcd"), ("train.weight_decay=0.0005",)
    )

    def __init__(self, config: FixMatchConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        self.classifier = nn.Linear(embedder.num_features, task.num_seen)
        self.average = WeightAverage(embedder, config.momentum, warms_up=True)
        self.average_classifier = WeightAverage(self.classifier, config.momentum, warms_up=True)

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Paper, appendix B, and released code: SGD 0.03 with Nesterov's momentum, 64 labeled of 512 images in a batch."""
        method = FixMatchConfig()
        rate: dict[str, Any] = {"lr": 0.03, "nesterov": True, "schedule": "cosine", "milestones": ()}
        if kind == "digits":
            # Ours: a strong view that leaves a digit readable, and 140 steps in all. Thirty epochs were worse than ten:
            # the share of sure images rose from 49 % to 82 %, where a third are of seen classes.
            schedule = usual(replace(method, momentum=0.99), kind, epochs=10, labeled_share=1 / 8, **rate)
            return replace(schedule, strong=replace(DIGITS_VIEW, rotate=15, shift=0.15, zoom=(0.8, 1.2)))
        if kind == "cifar":
            # The paper's rate falls to cos(7 pi / 16) = 0.2 of its start. Its weight decay is 5e-4 on CIFAR-10.
            rate |= {"lr_end": 0.006, "weight_decay": 1e-3, "labeled_share": 1 / 8}
            return replace(usual(method, kind, augment=CROP4_FLIP, **rate), strong=AugmentConfig())
        # Released code for ImageNet: 5 unlabeled images for each labeled one, and a rate of 0.1 for 256 labeled ones. Of our
        # 512 images 85 are labeled (0.03), of the 128 of fine_grained 21 (0.008).
        method = replace(method, threshold=0.7, weight_unlabeled=10.0)
        rate |= {"weight_decay": 3e-4, "labeled_share": 1 / 6, "lr": 0.03 if kind == "imagenet" else 0.008}
        return replace(usual(method, kind, augment=HALF_CROP_FLIP, **rate), strong=AugmentConfig(size=224))

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F), float32: features by the averaged weights, of any length."""
        features: Tensor = self.average(images, call="features")
        return features

    def step(self, batch: Batch) -> StepOutput:
        """Cross entropy of the labeled images, and of the strong views whose weak view is sure."""
        L, U = batch.num_labeled, len(batch.labels) - batch.num_labeled
        weak, strong = batch.views[0], batch.views[1][L:]  # strong views of labeled images are not used
        logits = self.classifier(self.embedder.features_of_views((weak, strong)))  # (B + U, S)
        labeled, teacher, student = logits.split([L, U, U])
        with torch.no_grad():
            confidence, pseudo = teacher.softmax(dim=1).max(dim=1)  # (U,)
            is_sure = (confidence >= self.config.threshold).to(logits.dtype)
        loss_l = F.cross_entropy(labeled, batch.labels[:L])
        loss_u = (F.cross_entropy(student, pseudo, reduction="none") * is_sure).mean()
        logs = {"loss_l": loss_l.detach(), "loss_u": loss_u.detach(), "share_sure": is_sure.mean()}
        return StepOutput(loss_l + self.config.weight_unlabeled * loss_u, logs)

    def after_step(self, *carry: Tensor) -> None:
        """Move the averages."""
        self.average.update()
        self.average_classifier.update()

    def row_logits(self, z: Tensor) -> Tensor:
        """Of the seen classes, with averaged weights."""
        logits: Tensor = self.average_classifier(z)
        return logits

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The choice of the classifier with averaged weights; the images it is least sure of are clustered."""
        c = self.config
        logits = self.row_logits(bank.z)
        return reject_and_cluster(bank, logits, self.task, share=c.reject_share, threshold=c.reject_threshold)
