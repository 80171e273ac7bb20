"""DS3L: Safe Deep Semi-Supervised Learning for Unseen-Class Unlabeled Data. Guo et al., ICML 2020, PMLR 119:3897-3906.

It knows the seen classes only. The images that it rejects are clustered, as the OpenCon paper extends it.

Letters: B images in a batch, L of them labeled (first), U = B - L unlabeled, S seen classes, F features, H hidden units,
P = H S + 2 H + 1 numbers of the weight net.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from opencon.methods.extend import check_rejection, reject_and_cluster
from opencon.methods.parts import Swapped, not_negative, positive, ramp_up
from opencon.methods.schedule import CROP4_FLIP, HALF_CROP_FLIP, usual

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's own (Kingma and Ba, arXiv:1412.6980); the released code keeps them


@dataclass(frozen=True, kw_only=True)
class DS3LConfig(MethodConfig):
    """Settings of DS3L. Defaults are the released code's."""

    name: ClassVar[str] = "ds3l"
    projects: ClassVar[bool] = False

    weight_consistency: float = 10.0  # at the end of the ramp
    ramp_epochs: int = 0  # epochs over which it grows; 0: all of the run, as in the released code
    inner_lr: float = 0.001  # alpha, of the look-ahead step
    # Which parameters take that step: all that learn, or the last layer alone.
    inner: Literal["all", "classifier"] = "all"
    hidden: int = 100  # H
    weight_lr: float = 6e-5  # of the weight net's Adam; the released code says "to be tuned for different settings"
    reject_share: float | None = None  # of the unlabeled images; None: as many as are expected to be novel
    # Reject below this probability of the likeliest seen class, instead of a share.
    reject_threshold: float | None = None

    def __post_init__(self) -> None:
        positive(self, "inner_lr", "hidden", "weight_lr")
        not_negative(self, "weight_consistency", "ramp_epochs")
        check_rejection(self)


class WeightNet(nn.Module):
    """The weight of an unlabeled image, from its softmax vector: S -> H, ReLU, H -> 1, sigmoid.

    The network does not learn by the trainer's optimizer but by an Adam of its own. So one buffer holds all P numbers, and
    others hold Adam's two running means and its count.
    """

    numbers: Tensor  # (P,) weight and bias of the first layer, weight and bias of the second
    mean: Tensor  # (P,) running mean of the gradient
    square: Tensor  # (P,) running mean of its square
    count: Tensor  # scalar: updates so far

    def __init__(self, num_seen: int, hidden: int) -> None:
        super().__init__()
        first, second = nn.Linear(num_seen, hidden), nn.Linear(hidden, 1)
        parts = [p.detach() for layer in (first, second) for p in (layer.weight, layer.bias)]
        self.shapes = [p.shape for p in parts]
        self.register_buffer("numbers", torch.cat([p.flatten() for p in parts]))
        self.register_buffer("mean", torch.zeros_like(self.numbers))
        self.register_buffer("square", torch.zeros_like(self.numbers))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, p: Tensor, numbers: Tensor) -> Tensor:
        """(U, S) probabilities, and the P numbers of the network to use -> (U,) weights in (0, 1)."""
        parts = torch.split(numbers, [shape.numel() for shape in self.shapes])
        w1, b1, w2, b2 = (part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
        return torch.sigmoid(F.linear(F.relu(F.linear(p, w1, b1)), w2, b2)).squeeze(1)

    @torch.no_grad()
    def update(self, gradient: Tensor, lr: float) -> None:
        """One step of Adam."""
        self.count += 1
        self.mean.lerp_(gradient, 1 - BETA1)
        self.square.lerp_(gradient.square(), 1 - BETA2)
        mean, square = self.mean / (1 - BETA1**self.count), self.square / (1 - BETA2**self.count)
        self.numbers -= lr * mean / (square.sqrt() + EPSILON)


class DS3L(Method[DS3LConfig]):
    """Consistency on unlabeled images, each weighted so that a step on it would help the labeled ones.

    With theta the learning parameters, phi the weight net w, p(x; theta) the softmax over S seen classes, two views x, x'
    of unlabeled images, and w_i = w(p(x_i); phi):

        L(theta, phi) = CE(labeled; theta) + weight * sum_i w_i mean_c (p_c(x'_i; theta) - p_c(x_i))^2 / sum_i w_i

        theta moves down L, for the present phi;
        phi moves down CE(labeled; theta - inner_lr * gradient of L in theta), the loss after a look ahead.

    No gradient reaches theta through p(x_i), neither as target nor in w_i. Adam moves phi after the step.
    """

    settings = DS3LConfig
    differentiates_twice = True

    weight: Tensor  # scalar on the device: the ramp must reach a captured step

    def __init__(self, config: DS3LConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        self.classifier = nn.Linear(embedder.num_features, task.num_seen)
        self.weight_net = WeightNet(task.num_seen, config.hidden)
        self.register_buffer("weight", torch.tensor(config.weight_consistency))
        self.swapped = Swapped(self)
        keep_look_ahead_plain()

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Half of a batch is labeled, both views are weak (released code); SGD as for OpenCon (released: Adam, 3e-4)."""
        method = DS3LConfig()
        if kind == "digits":
            # Ours: at 6e-5, a few hundred steps would hardly move the weight net.
            method = replace(method, weight_lr=1e-3)
            return usual(method, kind, epochs=20, lr=0.03, batch_size=128, labeled_share=0.5)
        view = CROP4_FLIP if kind == "cifar" else HALF_CROP_FLIP
        # 128 labeled images, as many as in a batch of OpenCon's for CIFAR-100; the released code has 50.
        batch_size = 128 if kind == "fine_grained" else 256
        return usual(method, kind, augment=view, batch_size=batch_size, labeled_share=0.5)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F), float32: features, of any length."""
        return self.embedder.features(images)

    def before_epoch(self, epoch: Epoch) -> None:
        """Ramp the weight of the consistency."""
        c = self.config
        self.weight.fill_(c.weight_consistency * ramp_up(epoch.index, c.ramp_epochs or epoch.num_epochs))

    def logits(self, *views: Tensor) -> Tensor:
        """Views, each of any number of images -> logits of the seen classes for all, view by view."""
        logits: Tensor = self.classifier(self.embedder.features_of_views(views))
        return logits

    def step(self, batch: Batch) -> StepOutput:
        """L for the present weight net; the gradient that moves the weight net goes to `after_step`."""
        L = batch.num_labeled
        labels, views = batch.labels[:L], (batch.views[0], batch.views[1][L:])
        features = self.embedder.features_of_views(views)  # (L + 2 U, F)
        loss_l, distance, p = terms(self.classifier(features), labels)
        w = self.weight_net(p, self.weight_net.numbers)  # (U,)
        loss_c = weighted_mean(distance, w)
        gradient, loss_ahead = self.look_ahead(views, features.detach(), labels)
        logs = {"loss_l": loss_l, "loss_c": loss_c, "loss_ahead": loss_ahead}
        logs |= {"weight_mean": w.mean(), "weight_spread": w.std(correction=0)}
        logs = {name: value.detach() for name, value in logs.items()}
        return StepOutput(loss_l + self.weight * loss_c, logs, carry=(gradient,))

    def look_ahead(self, views: tuple[Tensor, ...], features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient in phi of the labeled loss after one step down L, (P,), and that loss; both without a graph."""
        c, L = self.config, len(labels)
        theta = {
            name: p
            for name, p in self.named_parameters()
            if p.requires_grad and (c.inner == "all" or name.startswith("classifier."))
        }
        call, inputs = ("logits", views) if c.inner == "all" else ("classifier", (features,))
        # The look-ahead passes must not count in the running statistics.
        statistics = {name: b.clone() for name, b in self.embedder.named_buffers(prefix="embedder")}
        phi = self.weight_net.numbers.detach().requires_grad_()

        loss_l, distance, p = terms(self.swapped({**theta, **statistics}, call, *inputs), labels)
        loss = loss_l + self.weight * weighted_mean(distance, self.weight_net(p, phi))
        slopes = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        ahead = {name: p - c.inner_lr * slope for (name, p), slope in zip(theta.items(), slopes, strict=True)}
        loss_ahead = F.cross_entropy(self.swapped({**ahead, **statistics}, call, inputs[0][:L]), labels)
        (gradient,) = torch.autograd.grad(loss_ahead, phi)
        return gradient, loss_ahead.detach()

    def after_step(self, *carry: Tensor) -> None:
        """Move the weight net."""
        (gradient,) = carry
        self.weight_net.update(gradient, self.config.weight_lr)

    def row_logits(self, z: Tensor) -> Tensor:
        """Of the seen classes."""
        logits: Tensor = self.classifier(z)
        return logits

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The choice of the classifier; the images it is least sure of are clustered."""
        c = self.config
        logits = self.row_logits(bank.z)
        return reject_and_cluster(bank, logits, self.task, share=c.reject_share, threshold=c.reject_threshold)


@functools.cache
def keep_look_ahead_plain() -> None:
    """Keep `look_ahead` uncompiled: it needs second derivatives. A decorator would import the compiler at once."""
    DS3L.look_ahead = torch.compiler.disable(DS3L.look_ahead)  # type: ignore[method-assign, no-untyped-call, unused-ignore]


def terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of L: the labeled loss, the distance of the two views of each unlabeled image, and its probabilities.

    Args:
        logits: (L + 2 U, S) of labeled images, first views and second views of unlabeled ones.
        labels: (L,).

    Returns:
        Scalar; (U,) mean squared difference of probabilities; (U, S) probabilities of the first view, without gradient.
    """
    L = len(labels)
    labeled, unlabeled = logits[:L], logits[L:]
    first, second = unlabeled.softmax(dim=1).chunk(2)  # (U, S)
    first = first.detach()
    return F.cross_entropy(labeled, labels), (second - first).square().mean(dim=1), first


def weighted_mean(values: Tensor, w: Tensor) -> Tensor:
    """sum_i w_i values_i / sum_i w_i; 0 if all weights have vanished."""
    return (w * values).sum() / w.sum().clamp(min=torch.finfo(w.dtype).tiny)
