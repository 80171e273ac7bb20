"""k-means: k-means++, The Advantages of Careful Seeding. Arthur and Vassilvitskii, SODA 2007, doi:10.5555/1283383.1283494.

Letters: M images, F features, K clusters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opencon.cluster.naming import cluster_and_name
from opencon.config import MethodConfig
from opencon.encoders import Embedder
from opencon.methods.base import Assignment, Batch, FeatureBank, Kind, Method, Schedule, StepOutput, Task, Variant
from opencon.methods.schedule import usual


@dataclass(frozen=True, kw_only=True)
class KMeansConfig(MethodConfig):
    """Settings of k-means; labels name the seen classes and do nothing else."""

    name: ClassVar[str] = "kmeans"
    projects: ClassVar[bool] = False
    trains: ClassVar[bool] = False


class KMeans(Method[KMeansConfig]):
    """k-means on the unit features z of a frozen encoder; the row "SimCLR*" of OpenCon's tables, given SimCLR's weights.

        min over mu_1 ... mu_K of  sum_i min_k |z_i - mu_k|^2          K = all classes, z_i = f_i / |f_i|

    Then every seen class is matched with one cluster, so that as many labeled images as possible are in their own.
    """

    settings = KMeansConfig

    seed: Tensor  # scalar, of the starts: drawn with the run's own seed, so that runs with others differ

    def __init__(self, config: KMeansConfig, task: Task, embedder: Embedder) -> None:
        super().__init__(config, task, embedder)
        self.register_buffer("seed", torch.randint(2**31, ()))

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """No epoch: the encoder stays as its weights are, in float32, since there is no time to save."""
        return usual(KMeansConfig(), kind, epochs=0, milestones=(), precision="fp32", compile=False)

    def step(self, batch: Batch) -> StepOutput:
        """There is none: a run of a method that does not train has no epoch."""
        raise AssertionError("k-means has no step")

    def assign(self, bank: FeatureBank) -> Assignment:
        """k-means, then seen classes named by their labeled images."""
        num_clusters, num_seen = self.task.num_classes, self.task.num_seen
        return Assignment(
            cluster_and_name(bank.z, bank.labels, num_clusters=num_clusters, num_seen=num_seen, seed=int(self.seed))
        )
