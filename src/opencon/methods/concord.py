"""Concord: ours, 2026. Views of an image agree on its class, and every class has its share of the images.

Whose ideas it joins: swapped prediction, balanced targets, a queue and small crops are SwAV's (Caron et al.,
arXiv:2006.09882); one classifier for seen and novel classes is UNO's (arXiv:2108.08536); contrast of projections beside a
classifier of features is SimGCD's (arXiv:2211.11727); evaluation with averaged weights is Mean Teacher's
(arXiv:1703.01780). Ours: the starts at semi-supervised k-means, a number of classes that is counted anew in features that
have learned, targets balanced to the shares that classes have among the *unlabeled* images, labels in every view and crop,
and how all this is put together.

Letters: B images in a batch, L of them labeled (first), U the others, V views of which two are full, N = V * B rows (view by
view), F features, S seen classes, C all classes, Q rows of the queue, M images in the set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.config import AugmentConfig, MethodConfig, ViewConfig, Views
from opencon.encoders import Embedder
from opencon.errors import require
from opencon.losses.balance import sinkhorn
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
from opencon.methods.correction import APART, LOOKS, NOT_TRIED, Looked, decide, signs_of
from opencon.methods.gcd import contrast
from opencon.methods.parts import CosineClassifier, not_negative, positive
from opencon.methods.schedule import DIGITS_VIEW, usual
from opencon.runtime import generator

# Ours: a crop holds a fifth to three fifths of the image, at about 0.6 of its side, so that four cost as much as two views.
SMALL = ViewConfig(size=20, crop_scale=(0.2, 0.6), count=4)
# Ours, for the two full views: between SimCLR's and a plain crop, so that targets come from most of the image.
MILD = AugmentConfig(crop_scale=(0.4, 1.0), jitter=(0.3, 0.3, 0.3, 0.05), gray_p=0.1)
# Ours, for the digits: with views that move less, a way of writing a digit becomes a group of its own.
WIDE = replace(DIGITS_VIEW, rotate=15, shift=0.12, zoom=(0.8, 1.2))
# Of a class that is not looked for: a cosine below all others, and a share that is nothing but has a logarithm.
BELOW_ALL, NOTHING = -2.0, 1e-12


@dataclass(frozen=True, kw_only=True)
class ConcordConfig(MethodConfig):
    """Settings of Concord. Numbers without another source are ours."""

    name: ClassVar[str] = "concord"
    views: ClassVar[Views] = Views(most=None, sizes=True)

    temperature: float = 0.1  # of predictions, SwAV
    epsilon: float = 0.05  # of targets, SwAV: smaller is surer
    rounds: int = 3  # of Sinkhorn-Knopp, SwAV; 0: targets are not balanced
    queue: int = 4096  # Q: rows of earlier steps that are balanced together with a batch's; at most half of the set
    weight_labels: float = 0.5  # of the cross-entropy on labels
    weight_crops: float = 1.0  # of views after the first two
    temperature_contrast: float = 0.4  # InfoNCE; as OpenCon's for unlabeled images
    weight_contrast: float = 1.0
    temperature_labeled: float = 0.1  # SupCon
    weight_labeled: float = 0.3
    # Of contrast alone, before the classifier starts: for an encoder without weights. Half of the epochs at most.
    contrast_epochs: int = 0
    shares: Literal["equal", "start"] = "equal"  # of the classes among all images: alike, or as they are at the start
    # Of the k-means where the classifier starts; ours: with 10, runs differ by their luck. 0: it starts once, at random.
    num_starts: int = 50
    # Epochs before which it starts anew: features that have learned make better clusters.
    restarts: tuple[int, ...] = ()
    # Whether the number of classes is counted anew at the last start. None: where the number is an estimate.
    counts: bool | None = None

    def __post_init__(self) -> None:
        positive(self, "temperature", "epsilon", "temperature_contrast", "temperature_labeled")
        not_negative(self, "rounds", "queue", "num_starts", "contrast_epochs")
        not_negative(self, "weight_labels", "weight_crops", "weight_contrast", "weight_labeled")
        require(
            all(epoch > self.contrast_epochs for epoch in self.restarts),
            f"method.restarts = {self.restarts} must all be above method.contrast_epochs = {self.contrast_epochs}.",
        )
        require(
            self.num_starts > 0 or not self.counts,
            "method.num_starts = 0 leaves out k-means, and method.counts = true counts for it. Change one of them.",
        )

    def corrects(self, is_counted: bool) -> bool:
        """By `counts`; without a word, where the number is an estimate and there is a k-means to count at."""
        return is_counted and self.num_starts > 0 if self.counts is None else self.counts


class Concord(Method[ConcordConfig]):
    """A cosine classifier over all classes that learns balanced targets across views.

        loss = L_swapped + w_crops L_crops + w_labels L_labels + w_contrast L_contrast + w_labeled L_labeled

    With p_v = softmax(cosines of view v / temperature), an image's target q_v comes from view v, without gradient: its
    label where it has one; else what Sinkhorn-Knopp makes of the cosines of the unlabeled rows of batch and queue, so that
    each class has the share that is expected among unlabeled images (`losses.balance.sinkhorn`). Without balance
    (`rounds=0`) it is softmax(cosines / epsilon).

        cross(q, p) = - sum_c q_c log p_c
        L_swapped   = mean over unlabeled images of [ cross(q_2, p_1) + cross(q_1, p_2) ] / 2
        L_crops     = mean over unlabeled images and further views v of cross((q_1 + q_2) / 2, p_v)
        L_labels    = the same means over labeled images, that of further views times w_crops

    L_contrast is InfoNCE over the projections of both full views, L_labeled SupCon over those of labeled images. The
    classifier starts at the class means of semi-supervised k-means, unless `start_from` gives others, and once more before
    the epochs `restarts`; with `num_starts=0` it starts at random. Until its start the last two losses are alone. An
    image's class is that of its greatest cosine.

    Where the number of classes is an estimate, the method is given more of them than it seems to need. The features learn
    with all of them until the last start. There the classes are counted anew, from looks at the features of three epochs
    (`methods.correction`); k-means makes that many, and the others are no longer looked for.
    """

    settings = ConcordConfig

    queue: Tensor  # (Q, C) cosines of unlabeled rows, the newest first
    shares: Tensor  # (C,) expected among unlabeled images
    is_started: Tensor  # scalar bool: the classifier has left its random start, and learns
    is_used: Tensor  # (C,) bool: classes that are looked for; all of them unless they are counted anew
    signs: Tensor  # (LOOKS, 2, C + 1) what speaks for each number of classes, where they are counted

    def __init__(self, config: ConcordConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        self.classifier = CosineClassifier(embedder.num_features, task.num_classes)
        self.register_buffer("shares", torch.empty(task.num_classes))
        self.register_buffer("queue", torch.zeros(min(config.queue, task.num_images // 2), task.num_classes))
        self.register_buffer("is_started", torch.tensor(False))
        self.register_buffer("is_used", torch.ones(task.num_classes, dtype=torch.bool))
        self.register_buffer("signs", torch.full((LOOKS, 2, task.num_classes + 1), NOT_TRIED))
        self.counts = config.corrects(task.is_counted)
        self._look_for(task.num_classes)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints from before it could count, or looked more than once.
        state.setdefault(f"{prefix}is_used", torch.ones_like(self.is_used))
        state.setdefault(f"{prefix}signs", self.signs.clone())
        super()._load_from_state_dict(state, prefix, *args)

    @torch.no_grad()
    def _look_for(self, number: int) -> None:
        """The first so many classes, each with an equal share of all images; a seen one has lost its labeled images."""
        self.is_used.copy_(torch.arange(len(self.is_used)) < number)
        self.shares.copy_(self.is_used)
        self.shares[: self.task.num_seen] *= 1.0 - self.task.labeled_ratio
        self.shares.div_(self.shares.sum()).clamp_(min=NOTHING)

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Ours: Nesterov's momentum, a cosine, mild views and four small crops. On CIFAR all layers learn."""
        judged: dict[str, Any] = {"average": 0.999, "fresh_norms": True}
        if kind == "digits":
            # A digit's mirror image is no digit. Crops and views of 16 pixels did worse on other splits of the digits.
            own = usual(ConcordConfig(contrast_epochs=125), kind, augment=WIDE, epochs=250, nesterov=True)
            return replace(own, eval=judged, eval_every=25)
        judged["mirror"] = True
        if kind == "fine_grained":
            own = usual(ConcordConfig(), kind, nesterov=True)
            return replace(own, views=(replace(SMALL, size=96),), eval=judged)  # SwAV's size
        train: dict[str, Any] = {"epochs": 110, "lr": 0.1, "nesterov": True, "schedule": "cosine", "milestones": ()}
        if kind == "imagenet":
            return replace(usual(ConcordConfig(), kind, **train), views=(replace(SMALL, size=96),), eval=judged)
        # Views and passes of this size have kernels of their own.
        own = usual(ConcordConfig(restarts=(10, 20)), kind, augment=MILD, compile=False, **train)
        return replace(own, views=(SMALL,), encoder={"train_from": "all", "frozen_norm": "batch"}, eval=judged)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F), unit length: features in front of the head."""
        return F.normalize(self.embedder.features(images), dim=1)

    @torch.no_grad()
    def start_from(self, bank: FeatureBank, classes: Tensor) -> None:
        """The classifier at the mean of each class; a class without rows stays as it is."""
        weight = self.classifier.weight
        means = F.normalize(torch.zeros_like(weight).index_add_(0, classes, bank.z.to(weight.dtype)), dim=1)
        weight.copy_(torch.where(means.any(dim=1, keepdim=True), means, weight))
        if self.config.shares == "start":
            # One row more for each, so that no class is ruled out.
            counts = 1 + torch.bincount(classes[bank.labels < 0], minlength=len(weight)).to(self.shares.dtype)
            counts = counts * self.is_used
            self.shares.copy_((counts / counts.sum()).clamp(min=NOTHING))
        self._begin(bank)

    @torch.no_grad()
    def _begin(self, bank: FeatureBank) -> None:
        """From here on the classifier learns, beside a queue of unlabeled rows and averages that begin anew."""
        unlabeled = torch.nonzero(bank.labels < 0).flatten()
        order = torch.randperm(len(unlabeled), generator=generator(torch.device("cpu"), 0)).to(unlabeled.device)
        turn = torch.arange(len(self.queue), device=unlabeled.device) % len(unlabeled)
        self.queue.copy_(self._cosines(bank.z[unlabeled[order[turn]]].to(self.classifier.weight.dtype)))
        if self.twin is not None:
            self.twin.restart()
        self.is_started.fill_(True)

    def before_epoch(self, epoch: Epoch) -> None:
        """Once contrast has had its epochs: start from semi-supervised k-means, where nobody has given another start.

        Start anew where the settings say so. At the last start, count the classes where that is wanted.
        """
        c, S = self.config, self.task.num_seen
        first = min(c.contrast_epochs, epoch.num_epochs // 2)  # a short run leaves half of its epochs to the classifier
        last = max((start for start in c.restarts if start < epoch.num_epochs), default=first)
        if self.counts:
            self._look(epoch, last - epoch.index)
        is_first = epoch.index >= first and not bool(self.is_started)  # host sync: once an epoch
        if not is_first and (c.num_starts == 0 or epoch.index not in c.restarts):
            return
        bank = epoch.features()
        if c.num_starts == 0:
            self._begin(bank)
            return
        if self.counts and epoch.index == last:
            self._look_for(max(decide(self.signs.cpu(), otherwise=None), S + 1))
        number, stream = int(self.is_used.sum()), generator(torch.device("cpu"), 0)
        found = kmeans(bank.z, number, num_starts=c.num_starts, generator=stream, labels=bank.labels, num_seen=S)
        self.start_from(bank, found.assignment)

    def _look(self, epoch: Epoch, left: int) -> None:
        """At some epochs before the last start, what speaks for each number of classes."""
        if left in range(0, LOOKS * APART, APART):
            bank, C = epoch.features(), self.task.num_classes
            rows = Looked.at(bank.z, bank.z, bank.labels, self.task.num_seen)
            # Once groups have come back all numbers are tried: else one that does not, by a hair, would decide alone.
            was_clear = bool(((self.signs > NOT_TRIED).all(dim=1).sum(dim=1) > 1).any())  # host sync
            self.signs[left // APART] = signs_of(rows, C, C, where_clear=not was_clear).to(self.signs)

    def _cosines(self, rows: Tensor) -> Tensor:
        """(N, F) -> (N, C); that of a class which is not looked for is below all others."""
        cosines: Tensor = self.classifier(rows)
        return torch.where(self.is_used, cosines, BELOW_ALL) if self.counts else cosines

    def step(self, batch: Batch) -> StepOutput:
        """The weighted sum of five losses."""
        c, V, B, L = self.config, len(batch.views), len(batch.labels), batch.num_labeled
        assert V >= 2, "swapped prediction needs a second view"
        features = self.embedder.features_of_views(batch.views)  # (N, F)
        cosines = self._cosines(features).view(V, B, -1)  # (V, B, C)
        targets = self.targets(cosines[:2], batch.labels[:L])  # (2, B, C)
        log_p = (cosines / c.temperature).log_softmax(dim=2)
        full = -(targets.flip(0) * log_p[:2]).sum(dim=2)  # (2, B)
        # A pile without labels has nothing to average here.
        logs = {"loss_swapped": full[:, L:].mean(), "loss_labels": full[:, :L].sum() / max(2 * L, 1)}
        if V > 2:
            further = -(targets.mean(dim=0) * log_p[2:]).sum(dim=2)  # (V - 2, B)
            logs["loss_crops"] = further[:, L:].mean()
            of_labeled = further[:, :L].sum() / max((V - 2) * L, 1)
            logs["loss_labels"] = logs["loss_labels"] + c.weight_crops * of_labeled

        z = self.embedder.project(features[: 2 * B])  # (2 B, D)
        logs["loss_contrast"], logs["loss_labeled"] = contrast(
            z,
            replace(batch, views=batch.views[:2]),
            temperature=c.temperature_contrast,
            temperature_labeled=c.temperature_labeled,
        )
        loss = logs["loss_swapped"] + c.weight_labels * logs["loss_labels"]
        if V > 2:
            loss = loss + c.weight_crops * logs["loss_crops"]
        loss = loss * self.is_started + c.weight_contrast * logs["loss_contrast"]
        loss = loss + c.weight_labeled * logs["loss_labeled"]
        if self.counts:
            logs["prototypes"] = self.is_used.sum()
        fresh = cosines[:2, L:].detach().flatten(0, 1)  # (2 U, C)
        return StepOutput(loss, {name: value.detach() for name, value in logs.items()}, carry=(fresh,))

    @torch.no_grad()
    def targets(self, cosines: Tensor, labels: Tensor) -> Tensor:
        """(2, B, C) from cosines (2, B, C) and the labels (L,) of the first rows: one-hot, then balanced ones."""
        c, L, C = self.config, len(labels), cosines.shape[2]
        free = cosines[:, L:]  # (2, U, C)
        if c.rounds:
            rows = torch.cat([free, self.queue.expand(2, -1, -1)], dim=1)  # (2, U + Q, C)
            soft = sinkhorn(rows, self.shares, epsilon=c.epsilon, rounds=c.rounds)[:, : free.shape[1]]
        else:
            soft = (free / c.epsilon).softmax(dim=2)
        one_hot = labels[:, None] == torch.arange(C, device=labels.device)  # (L, C)
        return torch.cat([one_hot.to(soft.dtype).expand(2, L, C), soft], dim=1)

    @torch.no_grad()
    def after_step(self, *carry: Tensor) -> None:
        """The queue takes in the new rows."""
        self.queue.copy_(torch.cat([carry[0], self.queue])[: len(self.queue)])

    def row_logits(self, z: Tensor) -> Tensor:
        """Cosines over the temperature."""
        return self._cosines(z) / self.config.temperature

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The class of the greatest cosine."""
        return Assignment.from_logits(self.row_logits(bank.z), self.task.num_seen)
