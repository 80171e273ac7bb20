"""Shares of a batch: each of several processes (ranks) reads and encodes its own rows; then all ranks have all features.

    whole batch    l0 l1 l2 l3 | u0 u1 u2 u3 u4 u5        labeled rows, then unlabeled ones
    rank 0         l0 l1       | u0 u1 u2                 a piece of both
    rank 1               l2 l3 |          u3 u4 u5

Every rank computes the loss of the whole batch from the gathered features, so methods know nothing of ranks. All ranks
then have the same loss and the same gradient of it in the features. `gather` hands each rank the part of this gradient that
belongs to its own rows: summed over ranks, the gradients of the encoder are those of one process with the whole batch.

Letters: R ranks, B rows of a batch, b own rows, F features.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Sharing:
    """Which rows of a batch belong to which rank: of the labeled and of the unlabeled rows a piece each."""

    rank: int
    num_ranks: int  # R
    num_labeled: int
    num_rows: int  # B

    def pieces(self, rank: int) -> tuple[range, range]:
        """The rows of a rank: a range of labeled and one of unlabeled rows."""
        R, L, U = self.num_ranks, self.num_labeled, self.num_rows - self.num_labeled
        return (
            range(rank * L // R, (rank + 1) * L // R),
            range(L + rank * U // R, L + (rank + 1) * U // R),
        )

    def own(self, rows: Tensor) -> Tensor:
        """(B, ...) -> (b, ...): the rows of this rank."""
        first, second = self.pieces(self.rank)
        return torch.cat([rows[first.start : first.stop], rows[second.start : second.stop]])

    @property
    def num_own(self) -> int:
        """b, of this rank."""
        return sum(map(len, self.pieces(self.rank)))


@dataclass(frozen=True, eq=False)
class Share:
    """The part of a view that this rank has, in place of the whole view (B, channels, H, W).

    It can be sliced like the view. `own` holds those of the rows `start` to `stop` that belong to this rank.
    """

    own: Tensor  # (b, channels, H, W)
    sharing: Sharing
    start: int
    stop: int

    @classmethod
    def of(cls, own: Tensor, sharing: Sharing) -> Share:
        """All rows of a batch, of which this rank has its own."""
        return cls(own, sharing, 0, sharing.num_rows)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole view."""
        return len(self), *self.own.shape[1:]

    def __getitem__(self, rows: slice) -> Share:
        start, stop, step = rows.indices(len(self))
        assert step == 1, "a share is sliced in one piece"
        start, stop = self.start + start, self.start + stop
        before, inside = (sum(i < edge for i in self.own_rows()) for edge in (start, stop))
        return Share(self.own[before:inside], self.sharing, start, stop)

    def own_rows(self, rank: int | None = None) -> list[int]:
        """The numbers of the rows in here that a rank has (None: this one), in the order of `own`."""
        pieces = self.sharing.pieces(self.sharing.rank if rank is None else rank)
        return [i for piece in pieces for i in piece if self.start <= i < self.stop]


@functools.lru_cache(maxsize=64)
def _layout(sharing: Sharing, parts: tuple[tuple[int, int], ...], device: torch.device) -> tuple[int, Tensor]:
    """How many rows every rank sends (the most that any has), and where each row of the result is among those received."""
    shares = [Share(torch.empty(0), sharing, start, stop) for start, stop in parts]
    of_rank = [[share.own_rows(rank) for share in shares] for rank in range(sharing.num_ranks)]
    most = max(sum(map(len, rows)) for rows in of_rank)
    offsets = [sum(len(share) for share in shares[:k]) - share.start for k, share in enumerate(shares)]
    where = [0] * sum(map(len, shares))
    for rank, lists in enumerate(of_rank):
        at = rank * most
        for offset, rows in zip(offsets, lists, strict=True):
            for i in rows:
                where[offset + i] = at
                at += 1
    return most, torch.tensor(where, device=device)


def gather(own: Tensor, shares: tuple[Share, ...]) -> Tensor:
    """Own rows (b, ...) of some shares, one after the other -> the whole rows (B, ...) of these, with gradient."""
    parts = tuple((share.start, share.stop) for share in shares)
    most, where = _layout(shares[0].sharing, parts, own.device)
    padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])]) if len(own) < most else own
    everyone: Tensor = _Gather.apply(padded, shares[0].sharing)  # type: ignore[no-untyped-call]
    return everyone[where]


class _Gather(torch.autograd.Function):
    """(b, ...) of each rank -> (R b, ...). All ranks have the same loss: a rank's own part of its gradient is all of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sharing: Sharing) -> Tensor:
        ctx.rows = slice(sharing.rank * len(own), (sharing.rank + 1) * len(own))
        everyone = [torch.empty_like(own) for _ in range(sharing.num_ranks)]
        dist.all_gather(everyone, own.contiguous())
        everyone[sharing.rank] = own
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override, unused-ignore]
        return gradient[ctx.rows], None
