"""A network and data small enough to check by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from opencon.data.loader import Batch
from opencon.methods import Task

TASK = Task(num_seen=2, num_classes=5, labeled_ratio=0.4)


class ToyEmbedder(nn.Module):
    """A linear map to the sphere, in float64, with the interface of an Embedder."""

    def __init__(self, dim=6, pixels=9):
        super().__init__()
        self.linear = nn.Linear(pixels, dim, dtype=torch.float64)
        self.dim = dim

    def forward(self, images):
        return F.normalize(self.linear(images.flatten(1).double()), dim=1)

    def embed_views(self, views):
        return self(torch.cat(views))


def toy_batch(seed=0, num_labeled=8, num_unlabeled=16, num_seen=2, views=2):
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(num_labeled + num_unlabeled, 1, 3, 3, generator=g)
    labels = torch.cat([torch.randint(num_seen, (num_labeled,), generator=g), torch.full((num_unlabeled,), -1)])
    noisy = tuple(images + 0.2 * torch.rand(images.shape, generator=g) for _ in range(views))
    return Batch(noisy, labels, num_labeled)
