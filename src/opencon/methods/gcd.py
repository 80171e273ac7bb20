"""GCD: Generalized Category Discovery. Vaze et al., CVPR 2022, arXiv:2201.02609.

Letters: B images in a batch, L of them labeled (first), V views, N = V * B rows (view by view), F features, D embedding
size, S seen classes, C all classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.config import AugmentConfig, MethodConfig
from opencon.errors import require
from opencon.losses.contrastive import contrast_within
from opencon.methods.base import Assignment, Batch, FeatureBank, Kind, Method, Schedule, StepOutput, Variant
from opencon.methods.parts import positive
from opencon.methods.schedule import usual
from opencon.runtime import generator

# Released code, which SimGCD's follows. Its 200 epochs are passes over all images, at equal shares of labeled and unlabeled
# ones; ours are passes over the labeled quarter, which fill half of every batch, so that 400 are as many steps.
TRAIN: dict[str, Any] = {
    "epochs": 400,
    "batch_size": 128,
    "labeled_share": 0.5,
    "lr": 0.1,
    "lr_end": 1e-4,
    "weight_decay": 5e-5,
    "schedule": "cosine",
    "milestones": (),
}
# A ResNet that starts from SimCLR's weights, as in OpenCon's tables: ours, because the released rate (0.1 at batches of 128,
# for the last block of a vision transformer) is twenty times OpenCon's for each image, and trains the features worse than
# they start. Batches and views are OpenCon's.
CONVNET: dict[str, Any] = {"epochs": 200, "batch_size": 512, "lr_end": 1e-4, "weight_decay": 5e-5}
CONVNET |= {"schedule": "cosine", "milestones": ()}
# Released code: 224 of 256 pixels each way, and flip (its color jitter has no strength).
CROP_FLIP = AugmentConfig(
    size=224, crop_scale=((224 / 256) ** 2, (224 / 256) ** 2), crop_ratio=(1.0, 1.0), jitter_p=0, gray_p=0
)


@dataclass(frozen=True, kw_only=True)
class GCDConfig(MethodConfig):
    """Settings of GCD."""

    name: ClassVar[str] = "gcd"

    temperature: float = 1.0  # of the loss over all images, released code; 0.4 in the recipes for a ResNet
    temperature_labeled: float = 0.07  # released code, as in SupCon
    weight_labeled: float = 0.35  # lambda, paper section 4.1
    num_starts: int = 10  # of the k-means in the end; released script: 100, which the recipes for GPUs take

    def __post_init__(self) -> None:
        positive(self, "temperature", "temperature_labeled", "num_starts")
        check_share(self.weight_labeled)


def check_share(weight_labeled: float) -> None:
    """Refuse a weight outside [0, 1]."""
    require(0 <= weight_labeled <= 1, f"method.weight_labeled = {weight_labeled} must lie between 0 and 1.")


def contrast(z: Tensor, batch: Batch, *, temperature: float, temperature_labeled: float) -> tuple[Tensor, Tensor]:
    """GCD's two losses: InfoNCE over every row and SupCon over the labeled rows of all views.

    Args:
        z: (N, D) unit rows, view by view.
        batch: the images of these rows.
        temperature: of InfoNCE.
        temperature_labeled: of SupCon.
    """
    V, B, L = len(batch.views), len(batch.labels), batch.num_labeled
    image = torch.arange(B, device=z.device).repeat(V)  # (N,)
    everyone = torch.ones_like(image, dtype=torch.bool)
    loss_all = contrast_within(z, everyone, image, temperature=temperature)
    z_labeled = z.view(V, B, -1)[:, :L].flatten(0, 1)  # (V L, D)
    label = batch.labels[:L].repeat(V)
    return loss_all, contrast_within(z_labeled, everyone[: V * L], label, temperature=temperature_labeled)


class GCD(Method[GCDConfig]):
    """Contrast every image with all others and labeled ones by class; then semi-supervised k-means on features.

        loss = (1 - lambda) L_all + lambda L_labeled

    Both are means over anchors i of  - mean_{p in P(i)} log [ exp(s_ip) / sum_{a in A(i)} exp(s_ia) ]  with s the cosine
    of projections over a temperature, never i itself among P(i) and A(i). L_all: A all rows of the batch, P the other
    view. L_labeled: A the labeled rows of both views, P those of the same class. The projection head is for the losses
    only: images are assigned by the unit features z in front of it, with seen centers that start at the labeled means and
    labeled images that stay in their class.
    """

    settings = GCDConfig
    # 80 of 100 classes are seen, so a pass over the labeled images has more steps: 125 are as many.
    special: ClassVar[Mapping[str, tuple[str, ...]]] = {"cifar100_gcd": ("train.epochs=125",)}

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """The released code's, with its views where the images are large and few. digits: ours."""
        if kind == "digits":
            return usual(GCDConfig(), kind, batch_size=128, labeled_share=0.5, epochs=60)
        if kind == "fine_grained":
            return usual(GCDConfig(num_starts=100), kind, augment=CROP_FLIP, **TRAIN)
        # The temperature is OpenCon's for the same loss over all images, and so is the rate.
        return usual(GCDConfig(num_starts=100, temperature=0.4), kind, **CONVNET, lr=0.02)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F): features in front of the projection head, to unit length."""
        return F.normalize(self.embedder.features(images), dim=1)

    def step(self, batch: Batch) -> StepOutput:
        """The weighted sum of both losses."""
        c = self.config
        z = self.embedder.embed_views(batch.views)  # (N, D)
        loss_all, loss_l = contrast(z, batch, temperature=c.temperature, temperature_labeled=c.temperature_labeled)
        loss = (1 - c.weight_labeled) * loss_all + c.weight_labeled * loss_l
        return StepOutput(loss, {"loss_all": loss_all.detach(), "loss_l": loss_l.detach()})

    def assign(self, bank: FeatureBank) -> Assignment:
        """Semi-supervised k-means; plain where nothing is labeled."""
        starts, stream = self.config.num_starts, generator(torch.device("cpu"), 0)
        labels, num_seen = (bank.labels, self.task.num_seen) if bool((bank.labels >= 0).any()) else (None, 0)
        clusters = kmeans(
            bank.z, self.task.num_classes, num_starts=starts, generator=stream, labels=labels, num_seen=num_seen
        )
        return Assignment(clusters.assignment)
