"""PCL: Prototypical Contrastive Learning of Unsupervised Representations. Li et al., ICLR 2021, arXiv:2005.04966.

Letters: B images in a batch, F features, D embedding size, Q rows of the queue, J levels of clustering, K prototypes of a
level, P of all levels together, M images in the training set, C all classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.cluster.naming import cluster_and_name
from opencon.config import AugmentConfig, MethodConfig
from opencon.encoders import Embedder
from opencon.errors import require
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
from opencon.methods.parts import WeightAverage, at_least_one, not_negative, positive
from opencon.methods.schedule import usual
from opencon.runtime import generator


@dataclass(frozen=True, kw_only=True)
class PCLConfig(MethodConfig):
    """Settings of PCL; defaults are those of the authors' code, unless a comment says otherwise.

    The loss uses no label. `uses_labels` stays True, so that batches, split and evaluation are those of the other methods:
    labels name the clusters in the end.
    """

    name: ClassVar[str] = "pcl"

    temperature: float = 0.2  # of InfoNCE, and the mean one of the prototypes
    momentum: float = 0.999  # of the second encoder
    queue_size: int = 16384  # Q; at most half the images are used, see `PCL`
    # Clusters at each level. None: C, 2 C, 4 C; the authors double twice, too, but from 25 for each class (25,000 on
    # ImageNet). Ours start at one, because classes are the goal in the end.
    num_prototypes: tuple[int, ...] | None = None
    warmup_epochs: int = 20  # with InfoNCE alone
    smoothing: float = 10.0  # alpha, so that a small cluster is not taken for a dense one
    kmeans_starts: int = 5
    kmeans_iterations: int = 20

    def __post_init__(self) -> None:
        positive(self, "temperature")
        not_negative(self, "warmup_epochs", "smoothing")
        at_least_one(self, "queue_size", "kmeans_starts", "kmeans_iterations")
        require(0 <= self.momentum < 1, f"method.momentum = {self.momentum} must lie in [0, 1).")
        levels = self.num_prototypes
        require(
            levels is None or (len(levels) > 0 and min(levels) >= 2),
            f"method.num_prototypes = {levels} must be numbers of clusters, each at least 2, or none: 1, 2 and 4 for each "
            f"class.",
        )


class PCL(Method[PCLConfig]):
    """Contrast with other images, and with cluster centers at several levels.

    z is the first view of an image, k the second one as a slower copy of the encoder sees it, n the queue of the last Q such
    rows, mu the cluster centers of that copy's view of all images, c(i) the cluster of image i:

        InfoNCE  = - mean_i log [ exp(z_i . k_i / tau) / (exp(z_i . k_i / tau) + sum_n exp(z_i . n / tau)) ]
        ProtoNCE = - mean_i log [ exp(z_i . mu_c(i) / phi_c(i)) / sum_c exp(z_i . mu_c / phi_c) ],  mean over the levels

        loss = InfoNCE + ProtoNCE (from epoch `warmup_epochs` on)

    phi_c is the concentration of a cluster (`concentration`), which replaces the temperature.

    The queue is at most half as long as the training set: a longer one would often hold an image's own last row, and
    push the image away from it.
    """

    settings = PCLConfig

    queue: Tensor  # (Q, D) unit rows
    pointer: Tensor  # where the next row goes
    prototypes: Tensor  # (P, D) unit rows, level by level
    phi: Tensor  # (P,)
    members: Tensor  # (J, M) cluster of each image at each level
    prototype_weight: Tensor  # scalar on the device: 0 while warming up, then 1

    def __init__(self, config: PCLConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        self.average = WeightAverage(embedder, config.momentum)
        self.levels = levels(config.num_prototypes, task)  # J numbers K
        length = max(1, min(config.queue_size, task.num_images // 2))
        # Random rows to begin with, as in the authors' code; soon they are all replaced.
        self.register_buffer("queue", F.normalize(torch.randn(length, embedder.dim), dim=1))
        self.register_buffer("pointer", torch.tensor(0))
        self.register_buffer("prototypes", torch.zeros(sum(self.levels), embedder.dim))
        self.register_buffer("phi", torch.full((sum(self.levels),), config.temperature))
        self.register_buffer("members", torch.zeros(len(self.levels), task.num_images, dtype=torch.long))
        self.register_buffer("prototype_weight", torch.tensor(0.0))
        self._by_average = False  # whether `embed` uses the slower copy

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """The authors' code (its second version: MLP head, cosine) on ImageNet, for all large images. digits: ours."""
        if kind == "digits":
            # An epoch has seven steps here; at 0.999 the slower copy would hardly leave its start.
            return usual(PCLConfig(momentum=0.99, warmup_epochs=10), kind, epochs=50)
        train = {"epochs": 200, "batch_size": 256, "lr": 0.03, "weight_decay": 1e-4, "schedule": "cosine"}
        view = AugmentConfig() if kind == "cifar" else AugmentConfig(size=224, blur_p=0.5)
        return usual(PCLConfig(), kind, augment=view, lr_end=0.0, milestones=(), **train)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F), features of unit length; projections (B, D) while prototypes are made.

        Prototypes live among projections, as the losses do. Classes are groups of features: the projection head is new
        where the encoder is pre-trained, and knows less of them.
        """
        if self._by_average:
            z: Tensor = self.average(images)
            return z
        return F.normalize(self.embedder.features(images), dim=1)

    def before_epoch(self, epoch: Epoch) -> None:
        """Once warm, cluster the embeddings of the slower copy, at every level."""
        warm = epoch.index >= self.config.warmup_epochs
        self.prototype_weight.fill_(float(warm))
        if not warm:
            return
        self._by_average = True
        try:
            z = epoch.features().z
        finally:
            self._by_average = False
        c, first = self.config, 0
        for level, K in enumerate(self.levels):
            clusters = kmeans(
                z,
                K,
                num_starts=c.kmeans_starts,
                max_iterations=c.kmeans_iterations,
                generator=generator(torch.device("cpu"), epoch.index, level),
            )
            distance = (z - clusters.centers[clusters.assignment]).norm(dim=1)
            phi = concentration(distance, clusters.assignment, K, smoothing=c.smoothing, temperature=c.temperature)
            self.prototypes[first : first + K] = F.normalize(clusters.centers, dim=1)
            self.phi[first : first + K] = phi.to(self.phi)
            self.members[level] = clusters.assignment
            first += K

    def step(self, batch: Batch) -> StepOutput:
        """InfoNCE, and ProtoNCE once warm."""
        tau = self.config.temperature
        z = self.embedder(batch.views[0])  # (B, D)
        with torch.no_grad():
            k = self.average(batch.views[1])  # (B, D)
        logits = torch.cat([(z * k).sum(dim=1, keepdim=True), z @ self.queue.T], dim=1) / tau  # (B, 1 + Q)
        loss_instance = (logits.logsumexp(dim=1) - logits[:, 0]).mean()

        logits = z @ self.prototypes.T / self.phi  # (B, P)
        each = [
            F.cross_entropy(part, members[batch.rows])
            for part, members in zip(torch.split(logits, self.levels, dim=1), self.members, strict=True)
        ]
        loss_prototype = torch.stack(each).mean()
        loss = loss_instance + self.prototype_weight * loss_prototype
        # Logged with its weight: without it, it would show a number before there are prototypes.
        logs = {"loss_instance": loss_instance, "loss_prototype": self.prototype_weight * loss_prototype}
        return StepOutput(loss, {name: value.detach() for name, value in logs.items()}, carry=(k,))

    @torch.no_grad()
    def after_step(self, *carry: Tensor) -> None:
        """The slower copy follows; the newest rows replace the oldest ones of the queue."""
        self.average.update()
        rows = carry[0][-len(self.queue) :]
        positions = (self.pointer + torch.arange(len(rows), device=rows.device)) % len(self.queue)
        self.queue[positions] = rows.to(self.queue.dtype)
        self.pointer.copy_((self.pointer + len(rows)) % len(self.queue))

    def assign(self, bank: FeatureBank) -> Assignment:
        """k-means of the features, then seen classes named by their labeled images."""
        return Assignment(
            cluster_and_name(
                bank.z, bank.labels, num_clusters=self.task.num_classes, num_seen=self.task.num_seen, seed=0
            )
        )


def levels(num_prototypes: tuple[int, ...] | None, task: Task) -> list[int]:
    """How many clusters at each level; by default 1, 2 and 4 for each class, as far as there are two images for each."""
    if num_prototypes is None:
        most = max(task.num_classes, task.num_images // 2)
        return [min(n * task.num_classes, most) for n in (1, 2, 4)]
    require(
        max(num_prototypes) <= task.num_images,
        f"method.num_prototypes = {num_prototypes} asks for more clusters than the {task.num_images} training images. "
        f"Lower it, or use none: 1, 2 and 4 for each class.",
    )
    return list(num_prototypes)


@torch.no_grad()
def concentration(
    distance: Tensor, assignment: Tensor, num_clusters: int, *, smoothing: float, temperature: float
) -> Tensor:
    """(K,) phi of each cluster: small where many images lie close to the center.

        phi_c = sum of the distances / (n log(n + smoothing)),   n images in cluster c

    A cluster of one image or none, about which distances say nothing, gets the largest phi of the others. Then all are
    clipped to their 10th to 90th percentile, and scaled so that their mean is the temperature. On the CPU in float64: sums
    there have one order, so that a run can be repeated.

    Args:
        distance: (M,) of each image to its center.
        assignment: (M,) its cluster.
    """
    assignment = assignment.cpu()
    n = torch.bincount(assignment, minlength=num_clusters).double()
    total = torch.bincount(assignment, weights=distance.cpu().double(), minlength=num_clusters)
    phi = total / (n * (n + smoothing).log()).clamp(min=1e-12)
    several = n > 1
    largest = phi[several].max() if bool(several.any()) else phi.new_tensor(1.0)
    phi = torch.where(several, phi, largest)
    phi = phi.clamp(*phi.quantile(torch.tensor([0.1, 0.9], dtype=phi.dtype)).tolist())
    phi = phi.clamp(min=1e-12)  # where every image lies on its center, all are alike
    return temperature * phi / phi.mean()
