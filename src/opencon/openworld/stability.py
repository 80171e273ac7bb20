"""How much of each class comes back when half of the rows are grouped again.

Letters: M rows, F features, D embedding size, C classes and groups, S seen classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.cluster.numbering import by_size
from opencon.openworld.mixture import fit_gaussians
from opencon.openworld.model import OpenWorldModel, in_parts
from opencon.runtime import generator

MOST = 2000  # rows looked at, ours: so that it takes about a second
STARTS, ROUNDS = 4, 5  # of k-means and of the mixture; ours, fewer than a fit's, because only the rough shape counts
HALVES = 4  # halves that are grouped
PURPOSE = 4  # of the random stream


@torch.no_grad()
def stability(model: OpenWorldModel, x: Tensor, classes: Tensor, labels: Tensor, seed: int = 0) -> Tensor:
    """(C,) share of the rows of each class that groups of the other half of the rows put together again; NaN: no row.

    Each half of the rows is grouped by itself, into as many groups. The rows of the other half go to the nearest of these,
    and the groups are matched with the classes. By chance, a class is cut or joined with another in one half and not in the
    other; where the rows themselves show it, it comes back.

    Args:
        model: the fit.
        x: (M, F) its rows.
        classes: (M,) what it said of them.
        labels: (M,) the class of a labeled row, else -1.
        seed: same seed, same answer.
    """
    from scipy.optimize import linear_sum_assignment  # late: slow to import

    every = -(-len(x) // MOST)
    x, classes, labels = (t[::every] for t in (x.to("cpu", torch.float32), classes, labels))
    z, num, seen = in_parts(model.encoder.rotated, x), model.num_classes, model.num_seen
    back, total = torch.zeros(num), torch.zeros(num)
    stream = generator(torch.device("cpu"), seed, PURPOSE)
    for _ in range(HALVES // 2):
        order = torch.randperm(len(z), generator=stream)
        for half, other in ((order[: len(z) // 2], order[len(z) // 2 :]), (order[len(z) // 2 :], order[: len(z) // 2])):
            if len(half) < max(num, 2):
                continue
            own = torch.where(labels[half] >= 0, labels[half], -1)
            present = torch.bincount(own[own >= 0], minlength=1).nonzero()[
                :, 0
            ]  # the other half may have all of a class
            number = torch.full((seen + 1,), -1)
            number[present] = torch.arange(len(present))
            own = number[own]
            groups = kmeans(
                z[half],
                num,
                labels=own if len(present) else None,
                num_seen=len(present),
                num_starts=STARTS,
                generator=stream,
            ).assignment
            start = by_size(groups, len(present))
            whitening, found = fit_gaussians(z[half], start, own, num_seen=len(present), rounds=ROUNDS)
            flat = F.normalize(whitening(z), dim=1)
            mean = torch.zeros(num, z.shape[1]).index_add_(0, found, flat[half])
            said = (flat[other] @ F.normalize(mean, dim=1).T).argmax(dim=1)
            both = torch.zeros(num, num).index_put_((said, classes[other]), torch.ones(len(other)), accumulate=True)
            pairs = linear_sum_assignment(-both.numpy())
            kept = torch.zeros(num, num)
            kept[pairs] = both[pairs]
            back += kept.sum(dim=0)
            total += torch.bincount(classes[other], minlength=num)
    return back / total
