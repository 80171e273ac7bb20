"""DTC: Learning to Discover Novel Visual Categories via Deep Transfer Clustering. Han et al., ICCV 2019, arXiv:1908.09884.

Letters: B images in a batch, L of them labeled (first), U = B - L, V views, N = V * B rows (view by view), F features,
S seen classes, K = C all classes, one cluster for each, E bottleneck size, M images in the training set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.cluster.kmeans import kmeans
from opencon.cluster.naming import name_soft_clusters
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
from opencon.methods.parts import at_least_one, not_negative, positive, ramp_up
from opencon.methods.schedule import CROP4_FLIP, HALF_CROP_FLIP, usual
from opencon.runtime import generator


@dataclass(frozen=True, kw_only=True)
class DTCConfig(MethodConfig):
    """Settings of DTC, its Pi form. "Released" is the authors' code, CIFAR-10 unless said otherwise."""

    name: ClassVar[str] = "dtc"
    projects: ClassVar[bool] = False  # clusters the encoder's features

    # Cross-entropy alone, before the clusters are made. Released: a training of its own, to its end. Ours, not tuned: short,
    # because the encoder is pre-trained already.
    labeled_epochs: int = 10
    warmup_epochs: int = 10  # on the first targets, which stay fixed; released (CIFAR-100: 30)
    update_every: int = 5  # epochs between two updates of the targets; released (CIFAR-100: 10)
    weight_consistency: float = 10.0  # between views, once warm-up is over; released (ImageNet: 100); 0: no Pi form
    ramp_epochs: int = 5  # over which it grows; released
    weight_labeled: float = 1.0  # of the cross-entropy, once clusters are made; released: 0, see docs/methods.md
    num_starts: int = 20  # of k-means; released

    def __post_init__(self) -> None:
        not_negative(self, "labeled_epochs", "warmup_epochs", "weight_consistency", "ramp_epochs", "weight_labeled")
        positive(self, "num_starts")
        at_least_one(self, "update_every")


class DTC(Method[DTCConfig]):
    """Clusters that sharpen themselves, on features that labels have shaped (arXiv:1908.09884).

    With h = A x + b a linear bottleneck of the encoder's features x, and centers mu_k in its space:

        q_k(x) = (1 + |h - mu_k|^2)^-1 / sum_j (1 + |h - mu_j|^2)^-1       assignment, Student's t
        p_ik   = (q_ik^2 / f_k) / sum_j (q_ij^2 / f_j), f_k = sum_i q_ik   target, over all unlabeled images

        loss = CE(labeled) + mean_i [ KL(p_i || q_i) + w |q_i - q_i'|^2 ]  over the unlabeled i, q' of the other view

    Bottleneck and centers start from a PCA of the unlabeled images' features and k-means in it; all of it then learns.
    The targets are kept for every image: fixed during warm-up and the epoch after it, then refreshed every `update_every`.
    """

    settings = DTCConfig

    targets: Tensor  # (M, K) p; labeled rows are not used
    clustered: Tensor  # scalar: 1 once bottleneck and centers are made, and the weight of KL(p || q)
    labeled_weight: Tensor  # scalar
    consistency_weight: Tensor  # scalar: w

    def __init__(self, config: DTCConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        K = task.num_classes
        E = min(K, embedder.num_features)  # a PCA has no more directions
        self.classifier = nn.Linear(embedder.num_features, task.num_seen)
        self.bottleneck = nn.Linear(embedder.num_features, E)
        self.centers = nn.Parameter(torch.randn(K, E))
        self.register_buffer("targets", torch.full((task.num_images, K), 1.0 / K))
        self.register_buffer("clustered", torch.tensor(0.0))
        self.register_buffer("labeled_weight", torch.tensor(1.0))
        self.register_buffer("consistency_weight", torch.tensor(0.0))

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Released code: warm-up at 0.1, then 100 epochs (ImageNet: 60) from 0.05, halved every 20.

        A cosine from 0.05 to 0.003 (a sixteenth, as four halvings give) stands for both. digits: ours.
        """
        if kind == "digits":
            # Two labeled epochs: the best of 0, 1, 2, 5 and 10 on the images that are evaluated (docs/methods.md).
            return usual(DTCConfig(labeled_epochs=2), kind, epochs=40, lr=0.05)
        how = {"batch_size": 128, "lr": 0.05, "lr_end": 0.003, "schedule": "cosine", "milestones": ()}
        if kind == "cifar":
            return usual(DTCConfig(), kind, augment=CROP4_FLIP, epochs=120, weight_decay=1e-4, **how)
        method = DTCConfig(weight_consistency=100.0)
        return usual(method, kind, augment=HALF_CROP_FLIP, epochs=80, weight_decay=1e-5, **how)

    def embed(self, images: Tensor) -> Tensor:
        """The encoder's features (B, F), of any length: the bottleneck is cheap and follows in `assign`."""
        return self.embedder.features(images)

    def before_epoch(self, epoch: Epoch) -> None:
        """Set the weights of the losses; make the clusters, or refresh the targets, when it is time."""
        c = self.config
        since = epoch.index - c.labeled_epochs  # epochs since the clusters were made
        self.labeled_weight.fill_(1.0 if since < 0 else c.weight_labeled)
        if since < 0:
            return
        after = since - c.warmup_epochs
        self.consistency_weight.fill_(c.weight_consistency * ramp_up(after, c.ramp_epochs) if after >= 0 else 0.0)
        if not self.clustered:
            bank = epoch.features()
            self._make_clusters(bank)
            self._refresh_targets(bank)
        elif (
            after > 0 and (after - 1) % c.update_every == 0
        ):  # released: at the end of epochs 0, 5, 10, ... after warm-up
            self._refresh_targets(epoch.features())

    @torch.no_grad()
    def _make_clusters(self, bank: FeatureBank) -> None:
        """PCA of the unlabeled rows into the bottleneck, k-means of its outputs into the centers."""
        x = bank.z[bank.labels < 0].double()
        mean = x.mean(dim=0)
        x = x - mean
        axes = torch.linalg.eigh(x.T @ x).eigenvectors.flip(1)  # (F, F), largest first
        axes = axes[:, : len(self.bottleneck.weight)]  # (F, E)
        self.bottleneck.weight.copy_(axes.T)
        self.bottleneck.bias.copy_(-mean @ axes)
        clusters = kmeans(
            x @ axes,
            self.task.num_classes,
            num_starts=self.config.num_starts,
            generator=generator(torch.device("cpu"), 0),
        )
        self.centers.copy_(clusters.centers)
        self.clustered.fill_(1.0)

    @torch.no_grad()
    def _refresh_targets(self, bank: FeatureBank) -> None:
        free = bank.labels < 0
        self.targets[free] = sharpened(soft_assignment(self.bottleneck(bank.z[free]), self.centers))

    def step(self, batch: Batch) -> StepOutput:
        """KL to the targets and consistency on the unlabeled images, cross-entropy on the labeled ones."""
        B, L = len(batch.labels), batch.num_labeled
        x = self.embedder.features_of_views(batch.views)  # (N, F)
        q = soft_assignment(self.bottleneck(x), self.centers).view(-1, B, len(self.centers))[:, L:]  # (V, U, K)
        p = self.targets[batch.rows[L:]]  # (U, K)
        loss_kl = (torch.xlogy(p, p) - p * q[0].log()).sum(dim=1).mean()
        loss_consistency = (q[0] - q[1]).square().sum(dim=1).mean()
        loss_l = F.cross_entropy(self.classifier(x[:L]), batch.labels[:L])
        loss = self.clustered * loss_kl + self.consistency_weight * loss_consistency + self.labeled_weight * loss_l
        logs = {"loss_kl": loss_kl, "loss_consistency": loss_consistency, "loss_l": loss_l}
        logs = {name: value.detach() for name, value in logs.items()}
        return StepOutput(loss, logs | {"confidence": q[0].detach().amax(dim=1).mean()})

    def row_logits(self, z: Tensor) -> Tensor:
        """log q of each cluster."""
        return soft_assignment(self.bottleneck(z), self.centers).log()

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The most probable cluster, named by the labeled rows; novelty: the best novel minus the best seen one."""
        S = self.task.num_seen
        q = soft_assignment(self.bottleneck(bank.z), self.centers)  # (M, K)
        classes, p = name_soft_clusters(q.argmax(dim=1), q, bank.labels, num_seen=S)
        return Assignment(
            classes=classes.to(q.device),
            p=p,
            seen_logits=self.classifier(bank.z),
            novelty=p[:, S:].amax(dim=1) - p[:, :S].amax(dim=1),
            novelty_threshold=torch.tensor(0.0),
        )


def soft_assignment(h: Tensor, centers: Tensor) -> Tensor:
    """(N, E), (K, E) -> (N, K): q_k proportional to 1 / (1 + |h - mu_k|^2), rows sum to one."""
    distance = (h.square().sum(dim=1, keepdim=True) - 2.0 * h @ centers.T + centers.square().sum(dim=1)).clamp(min=0)
    near = 1.0 / (1.0 + distance)
    return near / near.sum(dim=1, keepdim=True)


def sharpened(q: Tensor) -> Tensor:
    """(N, K) -> (N, K): p proportional to q^2 / f with f the sum of each column, rows sum to one.

    Squares make each row surer; the division keeps large clusters from growing by their size alone.
    """
    p = q.square() / q.sum(dim=0)
    return p / p.sum(dim=1, keepdim=True)
