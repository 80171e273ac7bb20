"""MoCo v3: An Empirical Study of Training Self-Supervised Vision Transformers. Chen et al., ICCV 2021, arXiv:2104.02057.

Further views, small crops for example, join as SwAV's do (Caron et al., arXiv:2006.09882): they predict, and are no targets.

Letters: B images in a batch, V views of which two are full, N = V * B rows (view by view), F features, H hidden, D embedding
size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.cluster.naming import cluster_and_name
from opencon.config import GroupConfig, MethodConfig, Views
from opencon.encoders import Embedder
from opencon.errors import require
from opencon.methods.base import (
    Assignment,
    Batch,
    FeatureBank,
    Kind,
    Method,
    Schedule,
    StepOutput,
    Task,
    Variant,
)
from opencon.methods.concord import SMALL
from opencon.methods.parts import WeightAverage, at_least_one, positive
from opencon.methods.schedule import usual

SMALL_PHOTO = 96  # pixels, SwAV's


@dataclass(frozen=True, kw_only=True)
class MoCoConfig(MethodConfig):
    """Settings of MoCo v3, which uses no label while training."""

    name: ClassVar[str] = "moco"
    uses_labels: ClassVar[bool] = False
    projects: ClassVar[bool] = False  # its heads have batch norms, and are its own
    views: ClassVar[Views] = Views(most=None, sizes=True)

    temperature: float = 0.2  # paper, for ViT
    momentum: float = 0.99  # of the teacher; in the paper it goes from here to 1
    hidden: int = 1024  # H, ours: the paper has 4096 on ImageNet
    dim: int = 256  # D, paper

    def __post_init__(self) -> None:
        positive(self, "temperature")
        require(0 <= self.momentum < 1, f"method.momentum = {self.momentum} must lie in [0, 1).")
        at_least_one(self, "hidden", "dim")


class MoCo(Method[MoCoConfig]):
    """Every view predicts what a slower copy of the network, the teacher, says of the other full views of its image.

    With f_v the features of view v and primes for the teacher, which no gradient reaches:

        q_v = unit(predictor(projector(f_v)))           k_t = unit(projector'(f'_t)),  t = 1, 2
        apart(q, k) = - mean over images i of log [ exp(q_i . k_i / tau) / sum_j exp(q_i . k_j / tau) ]

        L_full  = [ apart(q_1, k_2) + apart(q_2, k_1) ] / 2
        L_crops = mean over further views v of [ apart(q_v, k_1) + apart(q_v, k_2) ] / 2
        loss    = [ 2 L_full + (V - 2) L_crops ] / V,  every view alike

    The teacher follows as an average of the weights. Images are judged by their features, as the next run gets them.
    """

    settings = MoCoConfig

    def __init__(self, config: MoCoConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        # The last layer has no bias: the norm of the predictor would take it away again.
        self.projector = two_layers(embedder.num_features, config.hidden, config.dim, bias=False)
        self.predictor = two_layers(config.dim, config.hidden, config.dim)
        self.teacher = WeightAverage(embedder, config.momentum)
        self.teacher_projector = WeightAverage(self.projector, config.momentum)

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Every parameter learns. Ours: SGD instead of LARS, half of SimCLR's rate on CIFAR, four small crops."""
        if kind == "digits":
            # An epoch has seven steps here; at 0.99 the teacher would hardly leave its start.
            return usual(cls.settings(momentum=0.9, hidden=256, dim=128), kind, epochs=60)
        train: dict[str, Any] = {"epochs": 200, "lr": 0.2, "weight_decay": 5e-4, "lr_end": 0.0, "schedule": "cosine"}
        train |= {"batch_size": 512, "milestones": (), "nesterov": True, "compile": False, "warmup_epochs": 2}
        # Usual for these heads: no decay on norms and biases.
        no_decay = GroupConfig(match=("norms", "biases"), weight_decay=0.0)
        own = usual(cls.settings(), kind, groups=(no_decay,), **train)
        crops = SMALL if kind == "cifar" else replace(SMALL, size=SMALL_PHOTO)
        return replace(own, views=(crops,), encoder={"train_from": "all", "frozen_norm": "batch"}, eval_every=50)

    def step(self, batch: Batch) -> StepOutput:
        """The mean of what each view is apart from its targets."""
        V, B = len(batch.views), len(batch.labels)
        assert V >= 2, "a view predicts another one"
        features = self.embedder.features_of_views(batch.views)  # (N, F)
        q = F.normalize(self.predictor(self.projector(features)), dim=1).view(V, B, -1)
        with torch.no_grad():
            taught = self.teacher(batch.views[:2], call="features_of_views")  # (2 B, F)
            k = F.normalize(self.teacher_projector(taught), dim=1).view(2, B, -1)
        apart = self.apart(q, k)  # (V, 2)
        full, crops = (apart[0, 1] + apart[1, 0]) / 2, apart[2:].mean(dim=1)  # (), (V - 2,)
        logs = {"loss_full": full.detach()}
        if V > 2:
            logs["loss_crops"] = crops.detach().mean()
        return StepOutput((2 * full + crops.sum()) / V, logs)

    def apart(self, q: Tensor, k: Tensor) -> Tensor:
        """(V, 2): InfoNCE of predictions (V, B, D) of each view among targets (2, B, D), as a mean over the images."""
        logits = torch.einsum("vid,tjd->vtij", q, k) / self.config.temperature
        return (logits.logsumexp(dim=3) - logits.diagonal(dim1=2, dim2=3)).mean(dim=2)

    @torch.no_grad()
    def after_step(self, *carry: Tensor) -> None:
        """The teacher follows."""
        self.teacher.update()
        self.teacher_projector.update()

    def assign(self, bank: FeatureBank) -> Assignment:
        """k-means, then seen classes named by their labeled images."""
        task = self.task
        return Assignment(
            cluster_and_name(bank.z, bank.labels, num_clusters=task.num_classes, num_seen=task.num_seen, seed=0)
        )


def two_layers(num_inputs: int, hidden: int, num_outputs: int, *, bias: bool = True) -> nn.Sequential:
    """Linear, batch norm, ReLU, Linear: the paper's predictor, and a projector of one layer less (ours)."""
    first = nn.Linear(num_inputs, hidden, bias=False)  # the norm has a bias
    last = nn.Linear(hidden, num_outputs, bias=bias)
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), last)
