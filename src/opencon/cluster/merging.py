"""Merge groups that are halves of one class.

Letters: M rows, D embedding size, C classes and groups, of which the first S are seen classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

FARTHEST_HALVES = 0.9  # ours: with 1, one loose class among fifty lets a fifth of the true classes merge (measured)
LEAST_BRIDGE = 0.3  # ours: 0.2 to 0.3 are alike; 0 merges small classes, 0.6 leaves halves apart (measured)
SMALLEST_CUT = 8  # ours: rows of a class below which its halves say nothing
ROUNDING = 3e-5  # ours: float32 moves an edge by 1e-6 (128 dimensions) to 4e-6 (2048) of its factors (measured)
BLOCK = 1 << 18  # ours: numbers in a block of rows; 2^16 to 2^18 are alike, 2^21 takes a quarter longer (measured)


@torch.no_grad()
def merge_alike(z: Tensor, assignment: Tensor, *, num_seen: int) -> Tensor:
    """Merge groups that are no farther apart than the two halves of a seen class. Returns the new assignment, (M,).

    Seen classes show what one class looks like. Each is cut in two (2-means), and its halves a, b are measured:

        cost    n_a n_b / (n_a + n_b) |mean_a - mean_b|^2: by how much merging raises the inertia (Ward)
        bridge  rows half way between the means, as a share of the rows around the means

    Groups are merged, cheapest first, where the cost is below that of the farthest tenth of the halves, and the bridge is
    at least 0.3 times their median: a small class has a small cost with everything, but nothing on the way. Two seen
    classes are never merged; a group merged with a seen class becomes that class. Where no class has enough rows to be
    cut, nothing is merged.
    """
    members = [(assignment == c).nonzero()[:, 0] for c in range(max(int(assignment.max()) + 1, num_seen))]
    halves = [_apart(*cut) for rows in members[:num_seen] if (cut := _halves(z[rows])) is not None]
    if not halves:
        return assignment
    costs, bridges = torch.tensor(halves).T
    limit, least_bridge = float(costs.quantile(FARTHEST_HALVES)), LEAST_BRIDGE * float(bridges.median())
    while merged := _merge_once(z, members, num_seen, limit, least_bridge):
        members = merged
    renumbered = torch.empty_like(assignment)
    for c, rows in enumerate(members):
        renumbered[rows] = c
    return renumbered


def _merge_once(
    z: Tensor, members: list[Tensor], num_seen: int, limit: float, least_bridge: float
) -> list[Tensor] | None:
    """Merge pairs of groups, each group at most once; None if there is nothing to merge."""
    size = torch.tensor([len(rows) for rows in members], dtype=z.dtype)  # (C,)
    mean = torch.stack([z[rows].sum(dim=0) for rows in members]) / size.clamp(min=1)[:, None]  # (C, D)
    cost = torch.cdist(mean, mean).square() * (size[:, None] * size / (size[:, None] + size).clamp(min=1))
    possible = torch.ones_like(cost, dtype=torch.bool).triu(diagonal=1) & (cost <= limit)
    possible &= (size > 0)[:, None] & (size > 0)
    possible[:num_seen, :num_seen] = False
    if int(possible.sum()) > len(members):  # else the bound costs more than the pairs themselves (measured)
        possible &= _most_bridge(z, members, mean) >= least_bridge
    pairs = possible.nonzero()  # (pairs, 2), the smaller number first
    pairs = pairs[cost[possible].argsort(stable=True)]
    gone: dict[int, int] = {}
    taken: set[int] = set()
    for a, b in pairs.tolist():
        if taken.isdisjoint((a, b)) and _apart(z[members[a]], z[members[b]])[1] >= least_bridge:
            gone[b] = a
            taken |= {a, b}
    if not gone:
        return None
    joined = {a: torch.cat([members[a], members[b]]) for b, a in gone.items()}
    return [joined.get(c, rows) for c, rows in enumerate(members) if c not in gone]


def _most_bridge(z: Tensor, members: list[Tensor], mean: Tensor) -> Tensor:
    """(C, C): an upper bound on the bridge of every two groups, for all pairs at once.

    The position of row i of group a on the way to group b follows from its distances to the two means:

        lead_ib = |z_i - mean_b|^2 - |z_i - mean_a|^2     0 half way, u = |mean_a - mean_b|^2 at its own mean

    So it is half way where |lead| < u / 3, around its own mean where |lead - u| < u / 3. `_apart` rounds otherwise and may
    find a row on the other side of an edge, so a row on an edge counts as half way, and not as around its mean.
    """
    order, mean = torch.cat(members), mean.double()
    size = torch.tensor([len(rows) for rows in members])  # (C,)
    own = torch.arange(len(members)).repeat_interleave(size)  # (M,)
    square = mean.square().sum(dim=1)
    apart = (square[:, None] + square - 2 * mean @ mean.T).clamp(min=0)  # (C, C)
    gap, longest = apart.sqrt(), float(z.norm(dim=1).max())
    middle, around = torch.zeros_like(apart), torch.zeros_like(apart)  # how many of a's rows, on the way to b
    step = max(1, BLOCK // len(members))
    for rows, group in zip(torch.split(order, step), torch.split(own, step), strict=True):
        row, u = z[rows].double(), apart[group]  # (B, D), (B, C)
        lead = torch.addmm(square, row, mean.T, alpha=-2)
        lead -= lead.gather(1, group[:, None])
        edge = ROUNDING * longest * ((row - mean[group]).norm(dim=1, keepdim=True) + gap[group])
        middle.index_add_(0, group, (lead.abs() < u / 3 + edge).double())
        around.index_add_(0, group, ((lead - u).abs() < u / 3 - edge).double())
    middle, around = (count / size.clamp(min=1)[:, None] for count in (middle, around))
    return (1 + ROUNDING) * (middle + middle.T) / (around + around.T).clamp(min=1e-6)


def _halves(z: Tensor) -> tuple[Tensor, Tensor] | None:
    """2-means of one class's rows (n, D), from a cut across its longest axis; None if the class is too small."""
    if len(z) < SMALLEST_CUT:
        return None
    centered = z - z.mean(dim=0)
    axis = torch.linalg.eigh((centered.T @ centered).double()).eigenvectors[:, -1].to(z.dtype)
    right = centered @ axis > 0  # (n,)
    for _ in range(10):
        if bool(right.all()) or not bool(right.any()):
            return None  # all rows coincide
        a, b = z[right].mean(dim=0), z[~right].mean(dim=0)
        moved = (z - (a + b) / 2) @ (a - b) > 0
        if bool((moved == right).all()):
            break
        right = moved
    return (z[right], z[~right]) if bool(right.any()) and not bool(right.all()) else None


def _apart(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Cost and bridge of two sets of rows (see `merge_alike`)."""
    mean_a, mean_b = a.mean(dim=0), b.mean(dim=0)
    gap = mean_a - mean_b
    half = gap.norm() / 2
    direction = gap / gap.norm().clamp(min=1e-12)
    middle = (mean_a + mean_b) / 2
    along_a, along_b = (a - middle) @ direction, (b - middle) @ direction  # the means lie at +half and -half

    def around(center: Tensor | float, along: Tensor) -> Tensor:
        inside: Tensor = (along - center).abs() < half / 3
        return inside.float().mean()

    bridge = around(0.0, along_a) + around(0.0, along_b)
    usual = around(half, along_a) + around(-half, along_b)
    cost = gap.square().sum() * len(a) * len(b) / (len(a) + len(b))
    return float(cost), float(bridge / usual.clamp(min=1e-6))
