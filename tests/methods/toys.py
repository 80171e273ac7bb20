"""A network and data small enough to check by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from opencon.data.loader import Batch
from opencon.methods import Task

TASK = Task(num_seen=2, num_classes=5, labeled_ratio=0.4, num_images=40)


@dataclass(frozen=True)
class Blobs:
    """What a method must reach on the six patterns of `test_every_method`, and in how many epochs."""

    epochs: int = 10
    seen: float = 0.9
    all: float = 0.6
    nmi: float = 0.7
    neighbors: float = 0.95  # 5-NN accuracy


class ToyEmbedder(nn.Module):
    """A linear map to features and (with `num_features`) another one to the sphere, as an Embedder has them."""

    def __init__(self, dim=6, pixels=9, num_features=None, dtype=torch.float32):
        super().__init__()
        self.dim, self.num_features = dim, num_features or dim
        self.linear = nn.Linear(pixels, self.num_features, dtype=dtype)
        self.head = nn.Linear(num_features, dim, dtype=dtype) if num_features else nn.Identity()

    def features(self, images):
        return self.linear(images.flatten(1).to(self.linear.weight.dtype))

    def project(self, features):
        return F.normalize(self.head(features), dim=1)

    def forward(self, images):
        return self.project(self.features(images))

    def features_of_views(self, views):
        return self.features(torch.cat(views))

    def embed_views(self, views):
        return self.project(self.features_of_views(views))


class ExactEmbedder(ToyEmbedder):
    """The same in float64, to compare with a definition to the last digits."""

    def __init__(self, dim=6, pixels=9, num_features=None):
        super().__init__(dim, pixels, num_features, torch.float64)


def toy_batch(seed=0, num_labeled=8, num_unlabeled=16, num_seen=2, views=2):
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(num_labeled + num_unlabeled, 1, 3, 3, generator=g)
    labels = torch.cat([torch.randint(num_seen, (num_labeled,), generator=g), torch.full((num_unlabeled,), -1)])
    noisy = tuple(images + 0.2 * torch.rand(images.shape, generator=g) for _ in range(views))
    rows = torch.randperm(TASK.num_images, generator=g)[: len(labels)]
    return Batch(noisy, labels, num_labeled, rows)
