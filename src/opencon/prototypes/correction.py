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
               index over rows that either takes for novel), at two epochs; of numbers that are worse than the best by no
               more than the standard error of the difference, the smallest
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
LOOKS, APART = 2, 2  # ours: with features of one epoch alone, one number in five was; two epochs lie between the two
CLEAR = 0.8  # Tibshirani and Walther 2005, "Cluster validation by prediction strength": 0.8 to 0.9
NOT_TRIED = -2.0  # below any adjusted Rand index
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
def look(prototypes: Tensor, live: Tensor, z: Tensor, labels: Tensor, *, num_seen: int) -> Tensor:
    """(HALVINGS, C + 1) how well groups come back, for each number of them; NOT_TRIED for the others.

    Args:
        prototypes: (C, D) unit rows.
        live: (C,) which of them count; seen ones always do.
        z: (M, D) unit rows.
        labels: (M,) class of a labeled row, -1 elsewhere.
        num_seen: S.
    """
    z, labels = _some(z, labels)
    in_use = _in_use(prototypes, live, z, labels, num_seen)
    most = min(round(MOST * in_use), len(prototypes), num_seen + int((labels < 0).sum()) // LEAST_IN_GROUP)
    found = z.new_full((HALVINGS, len(prototypes) + 1), NOT_TRIED)
    for number in _numbers(num_seen + 1, most):
        found[:, number] = _come_back(z, labels, number, num_seen).to(found)
    return found


@torch.no_grad()
def correct(
    prototypes: Tensor, live: Tensor, z: Tensor, labels: Tensor, *, num_seen: int, evidence: Tensor
) -> Correction:
    """Decide how many prototypes count, and put the novel ones where groups of rows are; arguments as those of `look`.

    Args:
        evidence: (n, C + 1) what `look` has found, of one or more epochs.
    """
    z, labels = _some(z, labels)
    in_use = _in_use(prototypes, live, z, labels, num_seen)
    number = _number(evidence, in_use)
    stream = generator(z.device, number)
    groups = kmeans(z, number, labels=labels, num_seen=num_seen, num_starts=STARTS, generator=stream).assignment
    total = torch.zeros_like(z[:1]).repeat(len(prototypes), 1).index_add_(0, groups, z)
    place = torch.arange(len(prototypes), device=z.device)[:, None]
    novel = (place >= num_seen) & (place < number)
    new = torch.where(novel, F.normalize(total, dim=1), prototypes.to(z)).to(prototypes)
    merged, split = max(in_use - number, 0), max(number - in_use, 0)
    return Correction(new, place[:, 0] < number, int(live.sum()) - in_use, merged, split)


def _some(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    step = max(1, len(z) // MOST_ROWS)
    return z[::step].float(), labels[::step]


def _in_use(prototypes: Tensor, live: Tensor, z: Tensor, labels: Tensor, num_seen: int) -> int:
    """Prototypes that rows choose, seen ones included, but for those that next to nothing chooses."""
    chosen = torch.where(live, z[labels < 0] @ prototypes.T.to(z), -2.0).argmax(dim=1)
    sizes = torch.bincount(chosen, minlength=len(prototypes))[num_seen:]
    used = sizes[sizes > 0].float()
    enough = sizes > (LEAST_ROWS * used.median() if len(used) else 0.0)
    return num_seen + max(int(enough.sum()), 1)


def _number(evidence: Tensor, in_use: int) -> int:
    """K: the number at which groups come back; that in use where they do at none. See the top."""
    tried: dict[int, Tensor] = {k: evidence[:, k] for k in (evidence > NOT_TRIED).all(dim=0).nonzero()[:, 0].tolist()}
    best = max(tried.values(), key=lambda found: float(found.mean()))
    if float(best.mean()) < CLEAR:
        return in_use
    worse = {k: best - found for k, found in tried.items()}  # over the same halves
    return min(k for k, by in worse.items() if float(by.mean()) <= float(by.std()) / len(by) ** 0.5)


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
