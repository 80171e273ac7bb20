"""Two streams, one batch: labeled images first, then unlabeled ones, augmented on the device.

The images live on the device as one uint8 tensor; an epoch is a stream of index draws, gathers and augmentations that the
host never waits for. What the loader knows of classes is `labels`: the class of a labeled image, -1 for every other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from opencon.runtime import generator

Augmentation = Callable[[Tensor, torch.Generator], Tensor]

# Purposes of the random streams of an epoch, so that they are independent of each other.
ORDER, VIEWS = 1, 2


@dataclass(frozen=True)
class Batch:
    """One step's images, labeled ones first. There is no place in it for the labels of unlabeled images.

    Letters: B images, V views.
    """

    views: tuple[Tensor, ...]  # V tensors (B, channels, H, W) in [0, 1]: the same images, augmented V times
    labels: Tensor  # (B,) class of a labeled image, -1 for an unlabeled one
    num_labeled: int  # the first so many rows are labeled, so that hot code can slice instead of mask


class TwoStreamLoader:
    """Batches of `num_labeled` labeled and `num_unlabeled` unlabeled images, V views each.

    One epoch is one pass over the labeled images (over the unlabeled ones if none is labeled); the other stream is cycled,
    reshuffled at every pass; incomplete batches are dropped. Everything random comes from (seed, epoch), so epoch 17 is
    the same whether or not the run was interrupted before it.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_shares: tuple[int, int],
        views: tuple[Augmentation, ...],
        seed: int,
    ) -> None:
        self.images = images  # (M, channels, H, W) uint8
        self.labels = labels  # (M,)
        self.num_labeled, self.num_unlabeled = batch_shares
        self.views = views
        self.seed = seed
        self.labeled = torch.nonzero(labels >= 0).flatten()
        self.unlabeled = torch.nonzero(labels < 0).flatten()
        lead, share = (
            (self.labeled, self.num_labeled) if self.num_labeled else (self.unlabeled, self.num_unlabeled)
        )
        self.num_steps = len(lead) // share

    def __len__(self) -> int:
        return self.num_steps

    def indices(self, epoch: int) -> Tensor:
        """(steps, B) image indices of an epoch, labeled first in each row."""
        rng = generator(self.images.device, self.seed, epoch, ORDER)
        parts = [
            _shuffled_cycle(pool, self.num_steps * share, rng).view(self.num_steps, share)
            for pool, share in ((self.labeled, self.num_labeled), (self.unlabeled, self.num_unlabeled))
            if share
        ]
        return torch.cat(parts, dim=1)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch."""
        rng = generator(self.images.device, self.seed, epoch, VIEWS)
        for rows in self.indices(epoch):
            images = self.images[rows]
            yield Batch(tuple(view(images, rng) for view in self.views), self.labels[rows], self.num_labeled)


def _shuffled_cycle(pool: Tensor, length: int, rng: torch.Generator) -> Tensor:
    """`length` entries of `pool`: one random permutation after another."""
    passes = -(-length // len(pool))
    orders = [torch.randperm(len(pool), generator=rng, device=pool.device) for _ in range(passes)]
    return pool[torch.cat(orders)[:length]]
