"""Classes and groups as a mixture: a prototype and a share for each, one shape for all.

Letters: M rows, D embedding size, C classes and groups, of which the first S are seen classes.

A class is rarely a ball: some directions vary within every class and tell nothing, others differ between classes only.
So there are two steps, each by expectation maximization in which a labeled row keeps its class:

    settle       Gaussians with one covariance for all classes (linear discriminant analysis with hidden labels)
    fit_mixture  on the sphere, after that covariance has been made a ball: directions with one sharpness for all
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHRINKAGE = 0.1  # ours: share of the covariance that is a ball, so that few rows in many dimensions do no harm
EXTRA = 1.0  # ours: rows added to each class's share (Laplace), so that no class is impossible
FARTHEST_HALVES = 0.9  # ours: with 1, one loose class among fifty lets a fifth of the true classes merge (measured)
LEAST_BRIDGE = 0.3  # ours: 0.2 to 0.3 are alike; 0 merges small classes, 0.6 leaves halves apart (measured)
SMALLEST_CUT = 8  # ours: rows of a class below which its halves say nothing
SHARPEST = 1e4  # ours: where all rows of a class coincide, the sharpness would be infinite
ROUNDING = 3e-5  # ours: float32 moves an edge by 1e-6 (128 dimensions) to 4e-6 (2048) of its factors (measured)
BLOCK = 1 << 18  # ours: numbers in a block of rows; 2^16 to 2^18 are alike, 2^21 takes a quarter longer (measured)


@dataclass(frozen=True)
class Mixture:
    """p(class c | z) is proportional to share_c exp(sharpness * mu_c . z), for unit rows z."""

    prototypes: Tensor  # (C, D) unit rows
    share: Tensor  # (C,) sums to one
    sharpness: Tensor  # scalar
    assignment: Tensor  # (M,) of the rows it was fitted to

    def logits(self, z: Tensor) -> Tensor:
        """(M, D) -> (M, C)."""
        return self.sharpness * (z @ self.prototypes.T) + self.share.log()


@dataclass(frozen=True)
class Whitening:
    """z -> (z - center) matrix: classes become balls of radius about sqrt(D)."""

    center: Tensor  # (D,)
    matrix: Tensor  # (D, D)

    def __call__(self, z: Tensor) -> Tensor:
        """(M, D) -> (M, D), not of unit length."""
        return (z - self.center) @ self.matrix


@torch.no_grad()
def settle(z: Tensor, start: Tensor, labels: Tensor, *, num_seen: int, rounds: int) -> tuple[Whitening, Tensor]:
    """Gaussians with one covariance: the whitening it asks for, and the class of each row (M,).

        mean_c = sum_i q_ic z_i / n_c         cov = (1 - a) sum_ic q_ic (z_i - mean_c)(z_i - mean_c)^T / M + a ball
        q_ic  ~ share_c exp(-|W (z_i - mean_c)|^2 / 2)   with W^T W = cov^-1

    Args:
        z: (M, D).
        start: (M,) class of each row to begin with.
        labels: (M,) class of a labeled row, which it keeps, else -1.
        num_seen: S.
        rounds: of expectation maximization. Few: many classes with few rows each drift (measured).
    """
    num_rows, dim = z.shape
    center = z.mean(dim=0)
    z = z - center
    q = fixed = _one_hot(start, labels, num_seen)
    second = z.T @ z  # (D, D)
    ball = torch.eye(dim, dtype=z.dtype, device=z.device)
    for _ in range(rounds):
        size = q.sum(dim=0)  # (C,)
        mean = (q.T @ z) / size.clamp(min=1e-6)[:, None]  # (C, D)
        within = (second - (mean * size[:, None]).T @ mean) / num_rows
        spread = (within.trace() / dim).clamp(min=1e-8)
        values, axes = torch.linalg.eigh((((1 - SHRINKAGE) * within + SHRINKAGE * spread * ball) / spread).double())
        root = (axes * values.clamp(min=SHRINKAGE / 2).rsqrt()) @ axes.T  # symmetric: the axes stay where they are
        matrix = (root / spread.double().sqrt()).to(z.dtype)
        flat, flat_mean = z @ matrix, mean @ matrix
        q = (flat @ flat_mean.T - flat_mean.square().sum(dim=1) / 2 + _share(q).log()).softmax(dim=1)
        q = torch.where(labels[:, None] >= 0, fixed, q)
    return Whitening(center, matrix), q.argmax(dim=1)


@torch.no_grad()
def fit_mixture(z: Tensor, start: Tensor, labels: Tensor, *, num_seen: int, rounds: int) -> Mixture:
    """Directions with one sharpness: von Mises-Fisher distributions, unit rows.

        mu_c = normalize(sum_i q_ic z_i)      r = sum_c |sum_i q_ic z_i| / M      sharpness = r (D - r^2) / (1 - r^2)

    (Banerjee et al., JMLR 2005, for the sharpness.) The arguments are those of `settle`.
    """
    q = fixed = _one_hot(start, labels, num_seen)
    for _ in range(rounds):
        total = q.T @ z  # (C, D)
        prototypes = F.normalize(total, dim=1)
        r = (total.norm(dim=1).sum() / len(z)).clamp(max=1 - 1e-6)
        sharpness = (r * (z.shape[1] - r.square()) / (1 - r.square())).clamp(1.0, SHARPEST)
        mixture = Mixture(prototypes, _share(q), sharpness, start)
        q = torch.where(labels[:, None] >= 0, fixed, mixture.logits(z).softmax(dim=1))
    return Mixture(prototypes, mixture.share, sharpness, q.argmax(dim=1))


def _one_hot(start: Tensor, labels: Tensor, num_seen: int) -> Tensor:
    """(M, C): the start, with the labels put in."""
    num_classes = max(int(start.max()) + 1, num_seen)
    return F.one_hot(torch.where(labels >= 0, labels, start), num_classes).float()


def _share(q: Tensor) -> Tensor:
    size = q.sum(dim=0) + EXTRA
    return size / size.sum()


def by_size(assignment: Tensor, num_seen: int) -> Tensor:
    """The same with new groups numbered by size, largest first; empty ones are gone, seen classes keep their number."""
    size = torch.bincount(assignment, minlength=num_seen)
    order = torch.argsort(size[num_seen:], descending=True, stable=True) + num_seen
    number = torch.arange(len(size))
    number[order] = torch.arange(num_seen, len(size))
    return number[assignment]


@torch.no_grad()
def held_out_accuracy(z: Tensor, assignment: Tensor, labels: Tensor) -> float | None:
    """Share of labeled rows whose nearest prototype is right, each second row of a class judged without its own help.

    None where no class has two labeled rows. One right and one wrong row are added (Laplace), for few say little.
    """
    labeled = (labels >= 0).nonzero()[:, 0]
    labeled = labeled[torch.argsort(labels[labeled], stable=True)]  # class by class
    counts = torch.bincount(labels[labeled])
    turn = torch.arange(len(labeled)) - (counts.cumsum(0) - counts)[labels[labeled]]  # number of the row in its class
    held = labeled[turn % 2 == 1]
    if len(held) == 0:
        return None
    rest = torch.ones(len(z), dtype=torch.bool)
    rest[held] = False
    total = z.new_zeros(int(assignment.max()) + 1, z.shape[1]).index_add_(0, assignment[rest], z[rest])
    right = (z[held] @ F.normalize(total, dim=1).T).argmax(dim=1) == labels[held]
    return float((right.sum() + 1) / (len(held) + 2))


@torch.no_grad()
def softness(logits: Tensor, confidence: float) -> float:
    """The factor in (0, 1] that brings the mean probability of the likeliest class down to `confidence`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        too_sure = float((middle * logits).softmax(dim=1).amax(dim=1).mean()) > confidence
        low, high = (low, middle) if too_sure else (middle, high)
    return high


def can_merge(assignment: Tensor, num_seen: int) -> bool:
    """Whether `merge_alike` has a class to go by."""
    return bool((torch.bincount(assignment, minlength=num_seen)[:num_seen] >= SMALLEST_CUT).any())


@torch.no_grad()
def merge_alike(z: Tensor, assignment: Tensor, *, num_seen: int) -> Tensor:
    """Make one of two groups that are no more apart than the two halves of a seen class: the new assignment (M,).

    Seen classes say what one class looks like. Each is cut in two (2-means), and the halves a, b are measured:

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
    found = torch.empty_like(assignment)
    for c, rows in enumerate(members):
        found[rows] = c
    return found


def _merge_once(
    z: Tensor, members: list[Tensor], num_seen: int, limit: float, least_bridge: float
) -> list[Tensor] | None:
    """Merge pairs of groups, each group once at most; None if there is nothing to merge."""
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
    """(C, C): what the bridge of each two groups is at most, all pairs at once.

    The place of row i of group a on the way to group b follows from its distances to the two means:

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
    """2-means of one class's rows (n, D), from a cut across its longest axis; None if it is too small to say."""
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
    along = gap / gap.norm().clamp(min=1e-12)
    place_a, place_b = (a - (mean_a + mean_b) / 2) @ along, (b - (mean_a + mean_b) / 2) @ along  # means at +-half

    def around(center: Tensor | float, place: Tensor) -> Tensor:
        inside: Tensor = (place - center).abs() < half / 3
        return inside.float().mean()

    bridge = around(0.0, place_a) + around(0.0, place_b)
    usual = around(half, place_a) + around(-half, place_b)
    cost = gap.square().sum() * len(a) * len(b) / (len(a) + len(b))
    return float(cost), float(bridge / usual.clamp(min=1e-6))
