"""SimGCD: Parametric Classification for Generalized Category Discovery. Wen et al., ICCV 2023, arXiv:2211.11727.

Letters: B images in a batch, L of them labeled (first), V = 2 views, N = V * B rows (view by view), F features, D embedding
size, S seen classes, C all classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.config import MethodConfig
from opencon.encoders import Embedder
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
from opencon.methods.gcd import CONVNET, CROP_FLIP, TRAIN, check_share, contrast
from opencon.methods.parts import CosineClassifier, not_negative, positive
from opencon.methods.schedule import usual


@dataclass(frozen=True, kw_only=True)
class SimGCDConfig(MethodConfig):
    """Settings of SimGCD."""

    name: ClassVar[str] = "simgcd"

    temperature: float = 1.0  # of the contrast of all images, released code; 0.4 in the recipes for a ResNet
    temperature_labeled: float = 0.07  # of the contrast of labeled images, released code
    weight_labeled: float = 0.35  # lambda, paper and released code
    temperature_student: float = 0.1  # of predictions, paper and released code
    temperature_teacher_start: float = 0.07  # of targets, released code
    temperature_teacher: float = 0.04
    teacher_epochs: int = 60  # from one to the other; released: 30 of its epochs, which are twice ours
    weight_entropy: float = 1.0  # epsilon, released scripts: 1, but 4 for CIFAR-100 and 2 for CUB

    def __post_init__(self) -> None:
        positive(self, "temperature", "temperature_labeled")
        positive(self, "temperature_student", "temperature_teacher_start", "temperature_teacher")
        not_negative(self, "teacher_epochs", "weight_entropy")
        check_share(self.weight_labeled)


def swapped_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """- mean over rows of sum_c q_c log p_c, where q = softmax(teacher) of the other of two views; logits (N, C)."""
    target = teacher.detach().softmax(dim=1)
    first, second = target.chunk(2)
    return F.cross_entropy(student, torch.cat([second, first]))


def missing_entropy(logits: Tensor) -> Tensor:
    """log C - H(p) of the mean prediction p = mean_i softmax(logits_i): 0 where all classes are equally likely.

    Computed in logarithms, so that a class that no image chooses has a finite gradient.
    """
    log_p = logits.log_softmax(dim=1).logsumexp(dim=0) - math.log(len(logits))  # (C,)
    return (log_p.exp() * log_p).sum() + math.log(logits.shape[1])


class SimGCD(Method[SimGCDConfig]):
    """GCD's two losses, and a cosine classifier over all classes that learns from the other view.

        loss = (1 - lambda) (L_all + L_cluster + epsilon L_entropy) + lambda (L_labeled + L_class)

    With p = softmax(cosines / 0.1) of a row and q = softmax(cosines / teacher temperature) of its image's other view,
    without gradient: L_cluster = - mean_i sum_c q_ic log p_ic over all rows; L_class = - mean log p of the label, over
    labeled rows; L_entropy = log C - H(mean_i p_i). L_all and L_labeled are GCD's, on projections; the cosines are those
    of the features in front of the projection head. An image's class is that of its greatest cosine.
    """

    settings = SimGCDConfig
    # Released scripts: entropy weight 1 but for CIFAR-100 and CUB. cifar100_gcd: as GCD, and the teacher's epochs with it.
    special: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(
            ("cifar10", "cifar10_gcd", "stanford_cars", "fgvc_aircraft", "herbarium19"), ("method.weight_entropy=1.0",)
        ),
        "cifar100_gcd": ("train.epochs=63", "method.teacher_epochs=9"),
    }

    teacher_temperature: Tensor  # scalar on the device: its schedule must reach a recorded step

    def __init__(self, config: SimGCDConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        self.classifier = CosineClassifier(embedder.num_features, task.num_classes)
        self.register_buffer("teacher_temperature", torch.tensor(config.temperature_teacher_start))

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """The released code's; views as for GCD. digits: ours."""
        if kind == "digits":
            return usual(SimGCDConfig(teacher_epochs=20), kind, batch_size=128, labeled_share=0.5, epochs=60)
        # Released scripts: 4 for CIFAR-100, 2 for CUB, 1 for the others of their kinds (`special`).
        weight = {"cifar": 4.0, "imagenet": 1.0, "fine_grained": 2.0}[kind]
        if kind == "fine_grained":
            return usual(SimGCDConfig(weight_entropy=weight), kind, augment=CROP_FLIP, **TRAIN)
        # A ResNet from SimCLR's weights: ours, as for GCD; half as many epochs, since a classifier learns along.
        method = SimGCDConfig(weight_entropy=weight, temperature=0.4, teacher_epochs=15)
        return usual(method, kind, **CONVNET | {"epochs": 100}, lr=0.1)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F): what the classifier sees, features to unit length."""
        return F.normalize(self.embedder.features(images), dim=1)

    def before_epoch(self, epoch: Epoch) -> None:
        """Sharpen the teacher: a straight line over the first epochs, whose last one has the final temperature."""
        c = self.config
        done = min(1.0, epoch.index / (c.teacher_epochs - 1)) if c.teacher_epochs > 1 else 1.0
        self.teacher_temperature.fill_(c.temperature_teacher_start * (1 - done) + c.temperature_teacher * done)

    def step(self, batch: Batch) -> StepOutput:
        """The weighted sum of five losses."""
        c, V, L = self.config, len(batch.views), batch.num_labeled
        assert V == 2, "the teacher is the other view"
        features = self.embedder.features_of_views(batch.views)  # (N, F)
        z = self.embedder.project(features)  # (N, D)
        loss_all, loss_l = contrast(z, batch, temperature=c.temperature, temperature_labeled=c.temperature_labeled)

        cosine = self.classifier(features)  # (N, C)
        logits = cosine / c.temperature_student
        labeled = logits.view(V, len(batch.labels), -1)[:, :L].flatten(0, 1)  # (V L, C)
        loss_class = F.cross_entropy(labeled, batch.labels[:L].repeat(V))
        loss_cluster = swapped_cross_entropy(logits, cosine / self.teacher_temperature)
        loss_entropy = missing_entropy(logits)

        unsupervised = loss_all + loss_cluster + c.weight_entropy * loss_entropy
        loss = (1 - c.weight_labeled) * unsupervised + c.weight_labeled * (loss_l + loss_class)
        logs = {
            "loss_all": loss_all,
            "loss_l": loss_l,
            "loss_class": loss_class,
            "loss_cluster": loss_cluster,
            "loss_entropy": loss_entropy,
        }
        return StepOutput(loss, {name: value.detach() for name, value in logs.items()})

    def row_logits(self, z: Tensor) -> Tensor:
        """The student's: cosines over its temperature."""
        logits: Tensor = self.classifier(z) / self.config.temperature_student
        return logits

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The class of the greatest cosine, and the student's probabilities."""
        return Assignment.from_logits(self.row_logits(bank.z), self.task.num_seen)
