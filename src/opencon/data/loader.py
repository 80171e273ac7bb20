"""Two streams, one batch: labeled images first, then unlabeled ones, augmented on the device.

The images live on the device as one uint8 tensor, or come from their files batch by batch (`streaming`). Before an epoch
all its random numbers are drawn at once (`draw`: which images, which crops, which colors); a batch is then a pure function
of them and of the step's number (`batch`), with fixed shapes, and the host waits for nothing but files. The loader knows
only `labels` about classes: the class of a labeled image, -1 for every other.

Letters: T steps of an epoch, B images in a batch, V views, M images in the set.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from opencon.data.mixing import Mix, Mixer
from opencon.data.shares import Share, Sharing
from opencon.data.streaming import Images
from opencon.runtime import generator

# Purposes of the random streams of an epoch, so that they are independent of each other.
ORDER, VIEWS, MIXES = 1, 2, 3


class Augmentation(Protocol):
    """Draw random numbers first, then apply a pure function of them; `Augment` is one."""

    def draw(self, num_images: int, source_size: tuple[int, int], generator: torch.Generator) -> Any:
        """A named tuple of tensors (num_images, ...), or None where an operation is off."""

    def apply(self, images: Tensor, params: Any) -> Tensor:
        """uint8 (B, channels, H, W) -> float (B, channels, S, S) in [0, 1]."""


class Draws(NamedTuple):
    """Everything random in an epoch."""

    rows: Tensor  # (T, B) which images, labeled first
    params: tuple[Any, ...]  # V named tuples of tensors (T, B, ...)
    mixes: tuple[Any, ...]  # V likewise, None for a view whose images are not mixed


@dataclass(frozen=True)
class Batch:
    """One step's images, labeled ones first. It does not hold the classes of unlabeled images.

    Letters: B images, V views.
    """

    # V tensors (B, channels, H, W) in [0, 1]: the same images, augmented V times; with several ranks, their `Share`s
    views: tuple[Tensor, ...]
    labels: Tensor  # (B,) class of a labeled image, -1 for an unlabeled one
    num_labeled: int  # how many rows, the first ones, are labeled: hot code can slice instead of mask
    rows: Tensor  # (B,) index of each image in the set, for methods that keep something about every image
    mixes: tuple[Mix | None, ...] = ()  # V: how each view's images are mixed with each other; () where none are


class TwoStreamLoader:
    """Batches of `num_labeled` labeled and `num_unlabeled` unlabeled images, one view by each of V augmentations.

    With several ranks, the batches are the same as with one. A rank reads and augments its own share of each (`shares`).

    One epoch is one pass over the labeled images (over the unlabeled ones if none is labeled); the other stream is cycled,
    reshuffled at every pass; incomplete batches are dropped. Everything random comes from (seed, epoch), so epoch 17 is
    the same whether or not the run was interrupted before it.
    """

    def __init__(
        self,
        images: Images,
        labels: Tensor,
        *,
        batch_shares: tuple[int, int],
        augments: tuple[Augmentation, ...],
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        mixers: tuple[Mixer | None, ...] = (),
    ) -> None:
        self.sharing = Sharing(rank, num_ranks, batch_shares[0], sum(batch_shares)) if num_ranks > 1 else None
        self.images = images  # (M, channels, H, W) uint8
        self.labels = labels  # (M,)
        self.num_labeled, self.num_unlabeled = batch_shares
        # Streamed images are copied here before each step, always to the same address, which a recorded step reads.
        num_own = self.sharing.num_own if self.sharing is not None and not any(mixers) else sum(batch_shares)
        self.buffer = torch.empty(0) if isinstance(images, Tensor) else images.buffer(num_own)
        self.augments = augments  # V
        self.mixers = mixers if any(mixers) else ()  # V, or none at all
        self.seed = seed
        self.labeled = torch.nonzero(labels >= 0).flatten()
        self.unlabeled = torch.nonzero(labels < 0).flatten()
        lead, share = (self.labeled, self.num_labeled) if self.num_labeled else (self.unlabeled, self.num_unlabeled)
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

    def draw(self, epoch: int) -> Draws:
        """Every random number of an epoch."""
        rng = generator(self.images.device, self.seed, epoch, VIEWS)
        rows = self.indices(epoch)
        height, width = self.images.shape[-2:]
        params = tuple(augment.draw(rows.numel(), (height, width), rng) for augment in self.augments)
        rng = generator(self.images.device, self.seed, epoch, MIXES)
        mixes = tuple(mixer and mixer.draw(len(rows), rows.shape[1], self.num_labeled, rng) for mixer in self.mixers)
        return Draws(rows, tree_map(lambda t: t.view(*rows.shape, *t.shape[1:]), params), mixes)

    def feed(self, draws: Draws) -> Generator[int, None, None]:
        """The steps of an epoch, one by one. Once a step is yielded, `batch` can be called for it.

        Close the generator if the epoch ends early, so that decoding stops.
        """
        if isinstance(self.images, Tensor):
            yield from range(self.num_steps)
            return
        rows = draws.rows.cpu().unbind()  # host sync, once an epoch
        if self.sharing is not None and not self.mixers:
            rows = tuple(map(self.sharing.own, rows))
        with closing(self.images.batches(rows, self.buffer)) as batches:
            for step, _ in enumerate(batches):
                yield step

    def batch(self, draws: Draws, step: Tensor) -> Batch:
        """The batch of one step; `step` is a tensor (1,), so that a captured graph can count it up."""
        now = tree_map(lambda t: t.index_select(0, step)[0], draws)
        # A partner to mix with may belong to another rank: then each rank makes all views, and takes its own rows of them.
        part = self.sharing if not self.mixers else None
        own = tree_map(part.own, now) if part is not None else now
        images = self.images[own.rows] if isinstance(self.images, Tensor) else self.buffer
        pairs = zip(self.augments, own.params, strict=True)
        views: Any = tuple(augment.apply(images, params) for augment, params in pairs)
        mixes: tuple[Mix | None, ...] = ()
        if self.mixers:
            mixed = [
                (view, None) if mixer is None else mixer.apply(view, params)
                for view, mixer, params in zip(views, self.mixers, now.mixes, strict=True)
            ]
            views, mixes = tuple(view for view, _ in mixed), tuple(mix for _, mix in mixed)
        if self.sharing is not None:
            whole = self.sharing if part is None else None
            views = tuple(Share.of(view if whole is None else whole.own(view), self.sharing) for view in views)
        return Batch(views, self.labels[now.rows], self.num_labeled, now.rows, mixes)

    def first_views(self, most_steps: int) -> Generator[Tensor, None, None]:
        """The two full views of the first steps of training, one by one; a rank gets its own rows."""
        draws = self.draw(0)
        with closing(self.feed(draws)) as feed:
            for index in islice(feed, most_steps):
                views: Any = self.batch(draws, torch.tensor([index], device=self.images.device)).views[:2]
                yield from (view.own if isinstance(view, Share) else view for view in views)


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of nested (named) tuples; None stays None."""
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None else function(tree)
    parts = [tree_map(function, part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def _shuffled_cycle(pool: Tensor, length: int, rng: torch.Generator) -> Tensor:
    """`length` entries of `pool`: one random permutation after another."""
    passes = -(-length // len(pool))
    orders = [torch.randperm(len(pool), generator=rng, device=pool.device) for _ in range(passes)]
    return pool[torch.cat(orders)[:length]]
