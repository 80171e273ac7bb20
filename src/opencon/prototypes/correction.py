"""Prototypes that are too many go, and one that stands for two classes becomes two.

Letters: M rows, D embedding size, C prototypes, of which the first S belong to seen classes. `live` (C,) says which count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.merging import merge_alike, split_apart

LEAST_ROWS = 0.1  # ours: a novel prototype that fewer rows choose than a tenth of the median of its like goes
MOST_ROWS = 20000  # ours: of more rows so many are looked at; groups of a hundred classes have 200 rows then


@dataclass(frozen=True)
class Correction:
    """What became of the prototypes."""

    prototypes: Tensor  # (C, D) unit rows
    live: Tensor  # (C,)
    sizes: Tensor  # (C,) rows that chose each before, among those looked at
    gone: int  # that nothing, or too little, chose
    merged: int
    split: int


@torch.no_grad()
def correct(prototypes: Tensor, live: Tensor, z: Tensor, labels: Tensor, *, num_seen: int) -> Correction:
    """Drop novel prototypes that next to nothing chooses, merge twins, split what is two classes.

    What one class looks like is read off the seen classes (`merge_alike`, `split_apart`), from unlabeled rows alone: the
    labeled rows of a class have been pulled together by their label, and would make every other class look like two.

    Args:
        prototypes: (C, D) unit rows.
        live: (C,) which of them count; seen ones always do.
        z: (M, D) unit rows.
        labels: (M,) class of a labeled row, -1 elsewhere.
        num_seen: S.
    """
    device, C = prototypes.device, len(prototypes)
    rows = (labels < 0).nonzero()[:, 0]
    rows = rows[:: max(1, len(rows) // MOST_ROWS)]
    z = z[rows]
    choice = torch.where(live, z @ prototypes.T, -2.0).argmax(dim=1)
    sizes = torch.bincount(choice, minlength=C)
    novel = live.clone()
    novel[:num_seen] = False
    usual = sizes[novel & (sizes > 0)].float().median() if bool((novel & (sizes > 0)).any()) else torch.tensor(0.0)
    kept = live & (~novel | (sizes > LEAST_ROWS * usual.to(device)))
    gone = int(live.sum() - kept.sum())
    choice = torch.where(kept, z @ prototypes.T, -2.0).argmax(dim=1)

    z_cpu, slots = z.cpu().float(), kept.nonzero()[:, 0].cpu()  # groups are numbered without gaps below
    number = torch.full((C,), -1).scatter(0, slots, torch.arange(len(slots)))
    groups = number[choice.cpu()]
    merged = merge_alike(z_cpu, groups, num_seen=num_seen)
    after = _count(merged, num_seen)
    num_merged = _count(groups, num_seen) - after
    divided = split_apart(z_cpu, merged, num_seen=num_seen, most=C - after)
    num_split = _count(divided, num_seen) - after

    # Each group takes the slot of the prototype that most of its rows chose; a new one takes a free slot.
    new, alive = prototypes.clone(), torch.zeros_like(live)
    alive[:num_seen] = True
    taken = torch.zeros(C, dtype=torch.bool)
    taken[:num_seen] = True
    for group in torch.unique(divided[divided >= num_seen]).tolist():
        member = divided == group
        wanted = torch.bincount(choice.cpu()[member], minlength=C).masked_fill(taken, -1)
        slot = int(wanted.argmax())
        taken[slot] = True
        alive[slot] = True
        new[slot] = F.normalize(z[member.to(device)].mean(dim=0), dim=0)
    return Correction(new, alive, sizes, gone, num_merged, num_split)


def _count(groups: Tensor, num_seen: int) -> int:
    """Seen classes, and novel groups that have rows."""
    return num_seen + len(torch.unique(groups[groups >= num_seen]))
