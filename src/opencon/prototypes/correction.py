"""How many prototypes there should be, and where: decided once, on features that no prior has shaped.

Letters: M rows, D embedding size, C prototypes, of which the first S belong to seen classes, K classes. `live` (C,) says
which prototypes count.

Why a prototype too many does harm: the prior term of the loss wants every prototype to have its share of the images. So it
pulls each of them into use, cuts classes into pieces, and the features follow. After that no look at the features can tell
a piece from a class: they lie as far apart as classes do (measured). So the prior waits until the number is decided. Without
it, prototypes compete, and about as many are chosen as there are classes, however many they are at the start.

    in use     novel prototypes that rows choose, but for those that next to nothing chooses; the seen ones always count
    K          at most in use * MOST; the number at which groups come back best: two halves of the rows are grouped for
               themselves (semi-supervised k-means), each half then groups all rows, and the two are compared (adjusted Rand
               index over rows that either takes for novel); of numbers that are worse than the best by no more than the
               standard error of the difference, the smallest
    overlap    where groups come back at no number (below CLEAR), such as those of photos of a hundred kinds, fewer groups
               always come back better: there K is the number in use
    places     the directions of the K groups of all rows
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.runtime import generator

# Measured on digits with other seen classes than those reported (5 to 9, even, odd), and on 4, 6 and 8 of the digits.
LEAST_ROWS = 0.1  # ours: a novel prototype that fewer rows choose than a tenth of the median of its like is not in use
MOST = 1.2  # ours: of ten classes, nine to twelve are in use when the number is decided
STEP = 1.05  # ours: from one number to try to the next: each one up to 20
HALVINGS = 10  # ours: with five, one number in four was off by one or more
CLEAR = 0.8  # Tibshirani and Walther 2005, "Cluster validation by prediction strength": 0.8 to 0.9
STARTS = 10  # ours, of k-means: with two, halves differ because one of them was grouped badly
LEAST_IN_GROUP = 8  # ours: unlabeled rows for each novel group, on average: halves of few rows say nothing
MOST_ROWS = 20000  # ours: of more rows so many are looked at; groups of a hundred classes have 200 rows then


@dataclass(frozen=True)
class Correction:
    """What became of the prototypes."""

    prototypes: Tensor  # (C, D) unit rows
    live: Tensor  # (C,)
    gone: int  # that nothing, or too little, chose
    merged: int  # of those in use, how many there are fewer
    split: int  # or how many there are more


@torch.no_grad()
def correct(prototypes: Tensor, live: Tensor, z: Tensor, labels: Tensor, *, num_seen: int) -> Correction:
    """Decide how many prototypes count, and put the novel ones where groups of rows are.

    Args:
        prototypes: (C, D) unit rows.
        live: (C,) which of them count; seen ones always do.
        z: (M, D) unit rows.
        labels: (M,) class of a labeled row, -1 elsewhere.
        num_seen: S.
    """
    step = max(1, len(z) // MOST_ROWS)
    z, labels = z[::step].float(), labels[::step]
    chosen = torch.where(live, z[labels < 0] @ prototypes.T.float(), -2.0).argmax(dim=1)
    sizes = torch.bincount(chosen, minlength=len(prototypes))[num_seen:]
    used = sizes[sizes > 0].float()
    enough = sizes > (LEAST_ROWS * used.median() if len(used) else 0.0)
    in_use = num_seen + max(int(enough.sum()), 1)
    most = min(round(MOST * in_use), len(prototypes), num_seen + len(chosen) // LEAST_IN_GROUP)
    number = _number(z, labels, num_seen, in_use, most)

    stream = generator(z.device, number)
    groups = kmeans(z, number, labels=labels, num_seen=num_seen, num_starts=STARTS, generator=stream).assignment
    total = torch.zeros_like(z[:1]).repeat(len(prototypes), 1).index_add_(0, groups, z)
    place = torch.arange(len(prototypes), device=z.device)[:, None]
    novel = (place >= num_seen) & (place < number)
    new = torch.where(novel, F.normalize(total, dim=1), prototypes.to(z))
    gone = int(live.sum()) - in_use
    return Correction(new.to(prototypes), place[:, 0] < number, gone, max(in_use - number, 0), max(number - in_use, 0))


def _number(z: Tensor, labels: Tensor, num_seen: int, in_use: int, most: int) -> int:
    """K: the number at which groups come back; that in use where they do at none. See the top."""
    again = {k: _come_back(z, labels, k, num_seen) for k in _numbers(num_seen + 1, most)}
    best = max(again.values(), key=lambda found: float(found.mean()))
    if float(best.mean()) < CLEAR:
        return in_use
    worse = {k: best - found for k, found in again.items()}  # (HALVINGS,) each: over the same halves
    return min(k for k, by in worse.items() if float(by.mean()) <= float(by.std()) / HALVINGS**0.5)


def _numbers(low: int, high: int) -> list[int]:
    """Numbers to try, ascending."""
    numbers = [low]
    while numbers[-1] < high:
        numbers.append(min(max(numbers[-1] + 1, round(numbers[-1] * STEP)), high))
    return numbers


def _come_back(z: Tensor, labels: Tensor, number: int, num_seen: int) -> Tensor:
    """(HALVINGS,) how alike two halves of the rows group all unlabeled rows that either takes for novel."""
    from sklearn.metrics import adjusted_rand_score  # late: slow to import

    free, found = z[labels < 0], []
    for halving in range(HALVINGS):
        stream = generator(z.device, halving)
        group = partial(kmeans, num_clusters=number, num_seen=num_seen, num_starts=STARTS, generator=stream)
        first, second = (
            torch.cdist(free, group(z[half], labels=labels[half]).centers).argmin(dim=1)
            for half in _halves(labels, stream)
        )
        novel = (first >= num_seen) | (second >= num_seen)
        found.append(adjusted_rand_score(first[novel].cpu().numpy(), second[novel].cpu().numpy()))
    return torch.tensor(found)


def _halves(labels: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two random halves of the rows, as many of each label in both; the only row of a label is in both."""
    order = torch.randperm(len(labels), generator=stream, device=labels.device)
    order = order[labels[order].argsort(stable=True)]
    sizes = torch.bincount(labels + 1)
    lone = order[(sizes[labels[order] + 1] == 1) & (labels[order] >= 0)]
    first, second = (torch.unique(torch.cat([order[start::2], lone])) for start in (0, 1))
    return first, second
