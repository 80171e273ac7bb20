"""Prototypes that are too many go, and one that stands for two classes becomes two.

Letters: M rows, D embedding size, C prototypes, of which the first S belong to seen classes, G groups of rows. `live` (C,)
says which prototypes count.

Why a prototype too many does harm: the prior term of the loss wants every prototype to have its share of the images. So it
pulls each of them into use, and classes are cut into pieces. Here the prior is spread over live prototypes alone.

What one class looks like is read off the seen classes. By their cosines, two groups of rows are one class or two:

    apart    mean cosine of the directions of two seen classes
    nearest  the largest of them
    within   median cosine of the directions of the two halves (2-means) of a seen class

    merge    two groups whose directions have a cosine above    nearest + MERGE (within - nearest)
    split    a group whose two halves have a cosine below       apart + SPLIT (within - apart)

Unlabeled rows alone are looked at: labels have pulled the labeled rows of a class together. They do so for the unlabeled
rows of seen classes, too, if less; that is why halves of a class need not be nearly as close as `within` to be one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 0.1  # ours: a novel prototype that fewer rows choose than a tenth of the median of its like goes
# Ours: on digits in training, halves of a class lie at 0.15 to 0.45 of the way, two classes below 0.1 (measured).
MERGE, SPLIT = 0.2, 0.1
SMALLEST_CUT = 8  # ours: rows of a group below which its halves say nothing
MOST_ROWS = 20000  # ours: of more rows so many are looked at; groups of a hundred classes have 200 rows then


@dataclass(frozen=True)
class Correction:
    """What became of the prototypes."""

    prototypes: Tensor  # (C, D) unit rows
    live: Tensor  # (C,)
    gone: int  # that nothing, or too little, chose
    merged: int
    split: int


@torch.no_grad()
def correct(prototypes: Tensor, live: Tensor, z: Tensor, labels: Tensor, *, num_seen: int) -> Correction:
    """Drop novel prototypes that next to nothing chooses, merge twins, split what is two classes.

    Args:
        prototypes: (C, D) unit rows.
        live: (C,) which of them count; seen ones always do.
        z: (M, D) unit rows.
        labels: (M,) class of a labeled row, -1 elsewhere.
        num_seen: S.
    """
    device = prototypes.device
    rows = (labels < 0).nonzero()[:, 0]
    z = z[rows[:: max(1, len(rows) // MOST_ROWS)]].cpu().float()
    new, alive = prototypes.cpu().float().clone(), live.cpu().clone()

    sizes = torch.bincount(_nearest(z, new, alive), minlength=len(new))
    novel = alive & (torch.arange(len(new)) >= num_seen)
    used = sizes[novel & (sizes > 0)]
    too_few = novel & (sizes <= LEAST_ROWS * (used.float().median() if len(used) else 0.0))
    alive &= ~too_few

    choice = _nearest(z, new, alive)
    apart, limit = _limits(z, choice, num_seen)
    merged = _merge(z, choice, new, alive, num_seen, limit)
    split = _split(z, _nearest(z, new, alive), new, alive, num_seen, apart)
    return Correction(new.to(prototypes), alive.to(device), int(too_few.sum()), merged, split)


def _nearest(z: Tensor, prototypes: Tensor, live: Tensor) -> Tensor:
    """(M,) the live prototype that each row chooses."""
    return torch.where(live, z @ prototypes.T, -2.0).argmax(dim=1)


def _limits(z: Tensor, choice: Tensor, num_seen: int) -> tuple[float, float]:
    """The cosine below which two halves are two classes, and that above which two groups are one; see the top."""
    groups = [rows for c in range(num_seen) if len(rows := z[choice == c])]
    halves = [_cosine(rows[side], rows[~side]) for rows in groups if (side := _halves(rows)) is not None]
    if len(groups) < 2 or not halves:
        return -2.0, 2.0  # one seen class, or tiny ones, show nothing: all stays as it is
    directions = F.normalize(torch.stack([rows.sum(dim=0) for rows in groups]), dim=1)
    cosine = directions @ directions.T
    pairs = cosine[torch.ones_like(cosine, dtype=torch.bool).triu(diagonal=1)]
    nearest, within = float(pairs.max()), float(torch.tensor(halves).median())
    apart = float(pairs.mean())
    return apart + SPLIT * max(0.0, within - apart), nearest + MERGE * max(0.0, within - nearest)


def _merge(z: Tensor, choice: Tensor, new: Tensor, alive: Tensor, num_seen: int, limit: float) -> int:
    """Merge pairs of groups, the most alike first, in place; a seen class takes in a novel group. Returns how many."""
    total = torch.zeros_like(new).index_add_(0, choice, z)
    merged = 0
    while True:
        direction = F.normalize(total, dim=1)
        cosine = torch.where(torch.ones(len(new), len(new)).triu(diagonal=1) > 0, direction @ direction.T, -3.0)
        cosine[~alive] = cosine[:, ~alive] = -3.0
        cosine[:num_seen, :num_seen] = -3.0
        best = int(cosine.argmax())
        a, b = best // len(new), best % len(new)  # a < b: a seen class stays
        if float(cosine[a, b]) <= limit:
            return merged
        total[a] += total[b]
        total[b] = 0.0
        alive[b] = False
        if a >= num_seen:
            new[a] = F.normalize(total[a], dim=0)
        merged += 1


def _split(z: Tensor, choice: Tensor, new: Tensor, alive: Tensor, num_seen: int, apart: float) -> int:
    """Split groups whose halves are as far apart as seen classes are, into free places, in place. Returns how many."""
    free = [c for c in range(num_seen, len(new)) if not alive[c]]
    split = 0
    for c in [c for c in range(num_seen, len(new)) if alive[c]]:
        rows = z[choice == c]
        side = _halves(rows)
        if side is None or split == len(free) or _cosine(rows[side], rows[~side]) >= apart:
            continue
        place = free[split]
        new[c], new[place] = (F.normalize(half.sum(dim=0), dim=0) for half in (rows[side], rows[~side]))
        alive[place] = True
        split += 1
    return split


def _cosine(a: Tensor, b: Tensor) -> float:
    """Of the directions of two groups of rows."""
    return float(F.cosine_similarity(a.sum(dim=0), b.sum(dim=0), dim=0))


def _halves(rows: Tensor) -> Tensor | None:
    """(n,) bool: 2-means of the rows of a group, from a cut across its longest axis; None if the group is too small."""
    if len(rows) < SMALLEST_CUT:
        return None
    centered = rows - rows.mean(dim=0)
    axis = torch.linalg.eigh((centered.T @ centered).double()).eigenvectors[:, -1].to(rows.dtype)
    side = centered @ axis > 0  # (n,)
    for _ in range(10):
        if bool(side.all()) or not bool(side.any()):
            return None  # all rows coincide
        a, b = rows[side].mean(dim=0), rows[~side].mean(dim=0)
        moved = (rows - (a + b) / 2) @ (a - b) > 0
        if bool((moved == side).all()):
            break
        side = moved
    return side if bool(side.any()) and not bool(side.all()) else None
