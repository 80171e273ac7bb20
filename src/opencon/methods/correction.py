"""How many prototypes there should be, and where: decided once, on features that no prototype has shaped.

Letters: M rows, D embedding size, F features in front of the projection head, C prototypes, of which the first S belong to
seen classes, K classes. `live` (C,) says which prototypes count.

Why a prototype too many does harm: the prior term of the loss wants every prototype to have its share of the images. So it
pulls each of them into use, cuts classes into pieces, and the features follow. After that no look at the features can tell
a piece from a class: they lie as far apart as classes do (measured). The novel loss does the same, more slowly: it holds
together what chose the same prototype. So both wait until the number is decided. Until then the features learn from labels
and from views of one image, and the prototypes only follow.

The number is looked for in front of the projection head. The loss spreads the head's outputs over the whole sphere, and soon
every class lies there in pieces (measured).

    in use     novel prototypes that rows choose, but for those that next to nothing chooses; the seen ones always count
    K          at most in use * MOST; the number with the largest sum of two signs, the mean of three epochs:
               come back    two halves of the rows are grouped for themselves (semi-supervised k-means), each half then
                            groups all rows, and the two are compared: adjusted Rand index over rows that either takes for
                            novel
               apart        the score of the tree of `counting.tree`: labeled rows that are right, and twice the silhouette
    overlap    where the groups of this number do not come back (below CLEAR), such as those of photos of a hundred kinds,
               fewer groups always come back better: there K is the number in use
    places     the directions of the K groups of all rows
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.counting.tree import estimate_classes
from opencon.runtime import generator

# Chosen on digits with other seen classes than those reported: eight choices of three, five or seven of them.
LEAST_ROWS = 0.1  # ours: a novel prototype that fewer rows choose than a tenth of the median of its like is not in use
MOST = 1.2  # ours: of ten classes, nine to fourteen are in use when the number is decided
STEP = 1.05  # ours: from one number to try to the next: each one up to 20
HALVINGS = 10  # ours
LOOKS, APART = 3, 5  # ours: three looks, five epochs apart
CLEAR = 0.8  # Tibshirani and Walther 2005, "Cluster validation by prediction strength": 0.8 to 0.9
NOT_TRIED = -2.0  # below either sign
STARTS = 10  # ours, of k-means: with two, halves differ because one of them was grouped badly
LEAST_IN_GROUP = 8  # ours: unlabeled rows for each novel group, on average: halves of few rows say nothing
MOST_ROWS = 20000  # ours: of more rows so many are looked at; groups of a hundred classes have 200 rows then


@dataclass(frozen=True)
class Looked:
    """What is known of the rows."""

    z: Tensor  # (M, D) unit rows, as the prototypes see them
    features: Tensor  # (M, F) unit rows, in front of the projection head
    labels: Tensor  # (M,) class of a labeled row, -1 elsewhere
    num_seen: int

    @classmethod
    def at(cls, z: Tensor, features: Tensor, labels: Tensor, num_seen: int) -> Looked:
        """Not more rows than are looked at, but for a row of each label."""
        chosen = torch.zeros_like(labels, dtype=torch.bool)
        chosen[:: -(-len(z) // MOST_ROWS)] = True
        by_label = labels.argsort(stable=True)
        chosen[by_label[labels[by_label].diff(prepend=labels.new_full((1,), -2)) > 0]] = True  # one of each label
        return cls(z[chosen].float(), F.normalize(features[chosen].float(), dim=1), labels[chosen], num_seen)


@dataclass(frozen=True)
class Correction:
    """What became of the prototypes."""

    prototypes: Tensor  # (C, D) unit rows
    live: Tensor  # (C,)
    gone: int  # that nothing, or too little, chose
    merged: int  # of those in use, how many there are fewer
    split: int  # or how many there are more


@torch.no_grad()
def look(prototypes: Tensor, live: Tensor, rows: Looked) -> Tensor:
    """(2, C + 1) the two signs for each number of groups; NOT_TRIED for the others.

    Args:
        prototypes: (C, D) unit rows.
        live: (C,) which of them count; seen ones always do.
        rows: what is looked at.
    """
    return signs_of(rows, min(round(MOST * _in_use(prototypes, live, rows)), len(prototypes)), len(prototypes))


@torch.no_grad()
def signs_of(rows: Looked, most: int, num_classes: int, *, where_clear: bool = False) -> Tensor:
    """(2, C + 1) the two signs for each number of groups up to `most`; NOT_TRIED for the others.

    With `where_clear` the number whose groups stand apart most is tried first. Where these do not come back, no other is
    tried: with a hundred classes and more, that would take longer than the training.
    """
    S, num_free = rows.num_seen, int((rows.labels < 0).sum())
    most = max(min(most, S + num_free // LEAST_IN_GROUP), S + 1)
    tree = dict(estimate_classes(rows.features, rows.labels, num_seen=S, max_classes=most).curve)
    numbers = _numbers(S + 1, most)
    if where_clear:
        first = max(range(S + 1, most + 1), key=lambda number: tree.get(number, 0.0))
        numbers = [first] if _come_back(rows, first) < CLEAR else sorted({*numbers, first})
    found = torch.full((2, num_classes + 1), NOT_TRIED)
    for number in numbers:
        found[:, number] = torch.tensor([_come_back(rows, number), tree.get(number, 0.0)])
    return found


@torch.no_grad()
def correct(prototypes: Tensor, live: Tensor, rows: Looked, *, signs: Tensor) -> Correction:
    """Decide how many prototypes count, and put the novel ones where groups of rows are; arguments as those of `look`.

    Args:
        signs: (n, 2, C + 1) what `look` has found, at one or more epochs.
    """
    z, S, in_use = rows.z, rows.num_seen, _in_use(prototypes, live, rows)
    number = decide(signs, otherwise=in_use)
    group = partial(kmeans, num_starts=STARTS, generator=generator(z.device, number))
    groups = group(rows.features, number, labels=rows.labels, num_seen=S).assignment
    total = torch.zeros_like(z[:1]).repeat(len(prototypes), 1).index_add_(0, groups, z)
    place = torch.arange(len(prototypes), device=z.device)[:, None]
    novel = (place >= S) & (place < number)
    new = torch.where(novel, F.normalize(total, dim=1), prototypes.to(z)).to(prototypes)
    merged, split = max(in_use - number, 0), max(number - in_use, 0)
    return Correction(new, place[:, 0] < number, int(live.sum()) - in_use, merged, split)


def _in_use(prototypes: Tensor, live: Tensor, rows: Looked) -> int:
    """Prototypes that rows choose, seen ones included, but for those that next to nothing chooses."""
    chosen = torch.where(live, rows.z[rows.labels < 0] @ prototypes.T.to(rows.z), -2.0).argmax(dim=1)
    sizes = torch.bincount(chosen, minlength=len(prototypes))[rows.num_seen :]
    used = sizes[sizes > 0].float()
    enough = sizes > (LEAST_ROWS * used.median() if len(used) else 0.0)
    return rows.num_seen + max(int(enough.sum()), 1)


def decide(signs: Tensor, *, otherwise: int | None) -> int:
    """K: the number with the largest sum of signs (n, 2, C + 1), the last look first.

    Where the groups of this number do not come back it is `otherwise`; None: that whose groups stood apart most in the
    last look.
    """
    tried = (signs > NOT_TRIED).all(dim=1).sum(dim=1)  # (n,)
    # A short run looks once. A look that has tried one number says nothing of others.
    signs = signs[tried > int(bool((tried > 1).any()))]
    is_tried = (signs > NOT_TRIED).all(dim=1).all(dim=0)  # (C + 1,)
    come_back, apart = signs.mean(dim=0)
    best = int(torch.where(is_tried, come_back + apart, -torch.inf).argmax())  # the smallest of equals
    if bool(is_tried.any()) and float(come_back[best]) >= CLEAR:
        return best
    return int(signs[0, 1].argmax()) if otherwise is None else otherwise


def _numbers(low: int, high: int) -> list[int]:
    """Numbers to try, ascending."""
    numbers = [low]
    while numbers[-1] < high:
        numbers.append(min(max(numbers[-1] + 1, round(numbers[-1] * STEP)), high))
    return numbers


def _come_back(rows: Looked, number: int) -> float:
    """How alike two halves of the rows group all unlabeled rows that either takes for novel."""
    from sklearn.metrics import adjusted_rand_score  # late: slow to import

    x, labels, S = rows.features, rows.labels, rows.num_seen
    free, found = x[labels < 0], []
    for halving in range(HALVINGS):
        stream = generator(x.device, halving)
        group = partial(kmeans, num_clusters=number, num_seen=S, num_starts=STARTS, generator=stream)
        first, second = (
            torch.cdist(free, group(x[half], labels=labels[half]).centers).argmin(dim=1)
            for half in _halves(labels, stream)
        )
        novel = (first >= S) | (second >= S)
        found.append(float(adjusted_rand_score(first[novel].cpu().numpy(), second[novel].cpu().numpy())))
    return sum(found) / HALVINGS


def _halves(labels: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two random halves of the rows, as many of each label in both; the only row of a label is in both."""
    order = torch.randperm(len(labels), generator=stream, device=labels.device)
    order = order[labels[order].argsort(stable=True)]
    sizes = torch.bincount(labels + 1)
    lone = order[(sizes[labels[order] + 1] == 1) & (labels[order] >= 0)]
    first, second = (torch.unique(torch.cat([order[start::2], lone])) for start in (0, 1))
    return first, second
