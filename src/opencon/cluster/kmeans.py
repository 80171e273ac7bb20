"""k-means and semi-supervised k-means, for methods that learn features but no classes.

Letters: M rows, D features, K clusters, S seen classes, R starts, L candidates per k-means++ draw, B rows of a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from opencon.errors import DataError, require
from opencon.rows import check_labels, check_rows, check_shape

# Numbers in a block: 8 MB on a CPU (measured: 2 to 8 MB are alike, smaller blocks pay for their calls), 1 GB on a GPU.
CPU_BLOCK, GPU_BLOCK = 1 << 21, 1 << 28
# Rows x features x clusters up to which dense products beat bounds on a CPU (measured).
FEW = 1 << 25
# Each iteration may cost a bound about 1e-7 of its size by rounding; rows closer to a change than this are looked at.
BOUND_SLACK = 1e-5
# Squared distances below this share of the longest row's square are rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class KMeansResult:
    """The best of several starts."""

    centers: Tensor  # (K, D) float32
    assignment: Tensor  # (M,) cluster of each row: the nearest center, or the class of a labeled row
    inertia: float  # sum of squared distances of the rows to their centers
    iterations: int  # of the start that was best


@dataclass(frozen=True)
class Rows:
    """The rows that may choose their cluster, and what the labeled rows add to each mean."""

    x: Tensor  # (M, D) float32
    square: Tensor  # (M,) squared length of each row
    fixed_sums: Tensor  # (K, D) float64
    fixed_counts: Tensor  # (K,) float64

    @classmethod
    def of(cls, x: Tensor, num_clusters: int, labels: Tensor | None = None) -> Rows:
        """Unlabeled rows (all without `labels`) are free to choose; labeled ones are summed by class."""
        if labels is None:
            zeros = x.new_zeros(num_clusters, x.shape[1], dtype=torch.float64)
            return cls(x, torch.linalg.vector_norm(x, dim=1).square_(), zeros, zeros[:, 0])
        labeled, free = x[labels >= 0], x[labels < 0]
        sums, counts = _sums(labeled, labels[labels >= 0][:, None], num_clusters)
        return cls(free, torch.linalg.vector_norm(free, dim=1).square_(), sums[0], counts[0])


@dataclass(frozen=True)
class Ends:
    """Where the starts ended."""

    centers: Tensor  # (R, K, D)
    explained: Tensor  # (R,) float64, sum_k n_k |c_k|^2: the inertia is sum_i |x_i|^2 minus this
    iterations: list[int]  # R


@torch.no_grad()
def kmeans(
    x: Tensor,
    num_clusters: int,
    *,
    num_starts: int = 10,
    max_iterations: int = 200,
    tolerance: float = 1e-4,
    generator: torch.Generator,
    labels: Tensor | None = None,
    num_seen: int = 0,
) -> KMeansResult:
    """Lloyd's k-means from greedy k-means++ starts; with `labels`, the semi-supervised k-means of GCD.

    Semi-supervised (Vaze et al. 2022, arXiv:2201.02609): the first S centers start at the means of the labeled rows, the
    others by k-means++ over the unlabeled rows, where the seen centers count as chosen. A labeled row belongs to its class
    in every iteration and counts in its mean.

    An empty cluster moves to the row farthest from its center: K clusters were asked for, and this never raises the
    inertia. It stays where it is when every row lies on its center (fewer distinct rows than clusters).

    Args:
        x: (M, D), on any device; the work is done in float32.
        num_clusters: K, the seen classes included.
        num_starts: how many; the one with the least inertia is returned.
        max_iterations: 200, as in GCD.
        tolerance: a start ends when sum_k |shift of center k|^2 is at most this times the mean variance of a feature
            (scikit-learn's rule and number).
        generator: gives the same result from the same state.
        labels: (M,) class in [0, S) of a labeled row, -1 elsewhere.
        num_seen: S; cluster k < S is class k.
    """
    at_least_one = {"num_clusters": num_clusters, "num_starts": num_starts, "max_iterations": max_iterations}
    for name, value in at_least_one.items():
        require(value >= 1, f"{name} = {value} must be at least 1.")
    _check(x, num_clusters, labels, num_seen)
    x = x.detach()
    labels = None if labels is None else labels.to(x.device, torch.long)
    # |x|^2 - 2 x.c + |c|^2 loses digits far from the origin, hence the offset; the scale makes the tolerance a plain number.
    scaled = x.float()
    offset = scaled.mean(dim=0)
    scaled = scaled - offset
    variance = float(torch.linalg.vector_norm(scaled, dtype=torch.float64).square() / scaled.numel())  # host sync
    if not math.isfinite(variance):
        check_rows(x)
        raise DataError(f"x reaches {float(x.abs().max()):.1e}, more than squares in float32 can hold. Scale it down.")
    scale = math.sqrt(variance) or 1.0
    rows = Rows.of(scaled.div_(scale), num_clusters, labels)
    chosen = (rows.fixed_sums[:num_seen] / rows.fixed_counts[:num_seen, None]).float()  # (S, D)
    if num_seen == num_clusters:
        num_starts = 1  # nothing to draw: all starts are the same
    starts = plus_plus(rows, num_clusters - num_seen, chosen=chosen, num_starts=num_starts, generator=generator)
    ends = lloyd(rows, starts, max_iterations=max_iterations, tolerance=tolerance)
    best = int(ends.explained.argmax())
    assignment = nearest(scaled, ends.centers[best])
    if labels is not None:
        assignment = torch.where(labels >= 0, labels, assignment)
    centers = (ends.centers[best].double() * scale + offset).float()
    return KMeansResult(centers, assignment, inertia(x, centers, assignment), ends.iterations[best])


def plus_plus(rows: Rows, num_new: int, *, chosen: Tensor, num_starts: int, generator: torch.Generator) -> Tensor:
    """Greedy k-means++ for all starts at once: (R, S + num_new, D), of which the first S are `chosen`.

    Each new center is the best of L = 2 + floor(ln K) rows drawn with chance proportional to the squared distance to the
    nearest center so far: the one that leaves the least sum of such distances (k-means++ is Arthur and Vassilvitskii 2007;
    the candidates and L are scikit-learn's). One candidate costs half as much, and on well separated clusters ends more
    than 10 % higher (measured, best of 10). One product (R * L, D) x (D, M) per center; the host waits for nothing.
    """
    x, square, num_rows = rows.x, rows.square, len(rows.x)
    trials = 2 + int(math.log(num_new + len(chosen)))
    uniform = torch.rand(num_new, num_starts, trials, dtype=torch.float64, generator=generator, device=generator.device)
    uniform = uniform.to(x.device)
    centers = [chosen.expand(num_starts, *chosen.shape)]
    if len(chosen):
        distance = torch.cat([_scores(x[part], chosen).amin(dim=1) for part in _slices(x, len(chosen))]) + square
        weight = closest = distance.clamp_(min=0).expand(num_starts, num_rows)  # (R, M) squared, to the nearest center
    else:
        closest = x.new_full((num_starts, num_rows), math.inf)
        weight = torch.ones_like(closest)
    each = torch.arange(num_starts, device=x.device)
    for u in uniform:
        # The tiny addition keeps the draw possible when every row coincides with a center.
        cumulated = (weight + 1e-30).cumsum(dim=1, dtype=torch.float64)  # (R, M)
        drawn = torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True).clamp_(max=num_rows - 1)  # (R, L)
        distance = torch.addmm(square, x[drawn.view(-1)], x.T, alpha=-2)  # (R * L, M)
        distance = distance.add_(square[drawn].view(-1, 1)).clamp_(min=0).view(num_starts, trials, num_rows)
        distance = torch.minimum(distance, closest[:, None], out=distance)
        best = distance.sum(dim=2).argmin(dim=1)  # (R,)
        weight = closest = distance[each, best]
        centers.append(x[drawn[each, best]][:, None])
    return torch.cat(centers, dim=1)


def lloyd(rows: Rows, starts: Tensor, *, max_iterations: int, tolerance: float, bounded: bool | None = None) -> Ends:
    """Lloyd's iterations from each of R starts (R, K, D), until the centers move by `tolerance` (summed squares) or less.

    Two ways to the same end, up to rounding. `bounded`: each start for itself, skipping rows that cannot change. Otherwise
    all starts share dense products. None takes the faster one: bounded on a CPU, unless the data are few.
    """
    if bounded is None:
        bounded = rows.x.device.type == "cpu" and rows.x.numel() * starts.shape[1] > FEW
    if not bounded:
        return _together(rows, starts, max_iterations, tolerance)
    # One start per thread: threads inside an operation would wait for each other thousands of times.
    threads = torch.get_num_threads()
    workers = min(threads, len(starts))
    run = functools.partial(_bounded, rows, max_iterations=max_iterations, tolerance=tolerance)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            centers, explained, iterations = zip(*pool.map(run, starts), strict=True)
    finally:
        torch.set_num_threads(threads)  # the setting is per thread, but new threads begin with the last one made
    return Ends(torch.stack(centers), torch.stack(explained), list(iterations))


def _together(rows: Rows, starts: Tensor, max_iterations: int, tolerance: float) -> Ends:
    """All starts at once: every distance, every time. A start that has converged drops out."""
    ends, explained = torch.empty_like(starts), starts.new_zeros(len(starts), dtype=torch.float64)
    iterations = [0] * len(starts)
    running, centers = list(range(len(starts))), starts
    for iteration in range(1, max_iterations + 1):
        num_running, num_clusters, _ = centers.shape
        flat = centers.flatten(0, 1)
        parts = [
            _scores(rows.x[part], flat).view(-1, num_running, num_clusters).argmin(dim=2)
            for part in _slices(rows.x, len(flat))
        ]
        assignment = torch.cat(parts)  # (M, R)
        sums, counts = _sums(rows.x, assignment, num_clusters)
        sums, counts = sums + rows.fixed_sums, counts + rows.fixed_counts
        means = torch.where(counts[..., None] > 0, sums / counts.clamp(min=1)[..., None], centers).float()
        shift = (means - centers).square().sum(dim=(1, 2))
        report = torch.stack([shift, (counts == 0).sum(dim=1).float()]).tolist()  # host sync: one per iteration
        for place, (start, moved, num_empty) in enumerate(zip(running, *report, strict=True)):
            if num_empty:
                _refill(rows, means[place], assignment[:, place], counts[place] == 0)
                report[0][place] = moved = float((means[place] - centers[place]).square().sum())
            if moved <= tolerance or iteration == max_iterations:
                ends[start], iterations[start] = means[place], iteration
                explained[start] = (sums[place].square().sum(dim=1) / counts[place].clamp(min=1)).sum()
        going = [place for place, moved in enumerate(report[0]) if moved > tolerance]
        if not going:
            break
        running = [running[place] for place in going]
        centers = means if len(going) == len(means) else means[going]
    return Ends(ends, explained, iterations)


@torch.no_grad()  # once more: it runs in a thread of its own
def _bounded(rows: Rows, centers: Tensor, max_iterations: int, tolerance: float) -> tuple[Tensor, Tensor, int]:
    """One start, looking only at rows that could change their cluster (Elkan, ICML 2003, row by row).

    When center k moves by s_k, no distance to it changes by more than s_k. So each row keeps an upper bound on the distance
    to its own center and a lower bound for every other one; while the least lower bound is above the upper one, its cluster
    stays. All rows that fail get their distances, and exact bounds, from one product. Rows that do change move from one
    sum to another.
    """
    x, square, num_rows, num_clusters = rows.x, rows.square, len(rows.x), len(centers)
    sums, counts = rows.fixed_sums.clone(), rows.fixed_counts.clone()
    assignment = torch.zeros(num_rows, dtype=torch.long, device=x.device)
    lower = x.new_empty(num_clusters, num_rows)  # for each center; infinity at a row's own
    least, upper = x.new_full((num_rows,), -1.0), x.new_zeros(num_rows)  # the least of `lower`; for the own center
    for iteration in range(1, max_iterations + 1):
        todo = (least <= upper * (1 + BOUND_SLACK)).nonzero()[:, 0]
        parts: Iterable[slice | Tensor] = torch.split(todo, _block(x, num_clusters))
        if len(todo) > 0.75 * num_rows:  # picking rows costs a copy, not worth it for nearly all of them
            parts = _slices(x, num_clusters)
        for part in parts:
            picked = x[part] if isinstance(part, slice) else x.index_select(0, part)  # (B, D)
            own = assignment[part].clone()  # (B,)
            distance = _scores(picked, centers, transposed=True).add_(square[part]).clamp_(min=0).sqrt_()  # (K, B)
            # Finding where a minimum is costs ten times as much as finding the minimum: only for rows that change.
            could = (distance.amin(dim=0) < distance.gather(0, own[None])[0]) | (iteration == 1)
            change = could.nonzero()[:, 0]
            new, old, moving = distance[:, change].min(dim=0).indices, own[change], picked[change]
            own[change] = new
            upper[part] = distance.gather(0, own[None])[0]
            distance.scatter_(0, own[None], math.inf)
            least[part] = distance.amin(dim=0)
            assignment[part] = own
            if isinstance(part, slice):
                lower[:, part] = distance
            else:
                lower.index_copy_(1, part, distance)
            gained = torch.zeros_like(centers).index_add_(0, new, moving)
            counts += torch.bincount(new, minlength=num_clusters)
            if iteration > 1:  # before, they were nowhere
                gained.index_add_(0, old, moving, alpha=-1)
                counts -= torch.bincount(old, minlength=num_clusters)
            sums += gained
        means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centers).float()
        if (counts == 0).any():
            _refill(rows, means, assignment, counts == 0)
        shift = (means - centers).norm(dim=1)  # (K,)
        centers = means
        shifts = shift.tolist()
        if sum(s * s for s in shifts) <= tolerance:
            break
        for bound, s in zip(lower, shifts, strict=True):
            if s > 0:
                torch.minimum(least, bound.sub_(s), out=least)
        upper += shift[assignment]
    return centers, (sums.square().sum(dim=1) / counts.clamp(min=1)).sum(), iteration


def _refill(rows: Rows, centers: Tensor, assignment: Tensor, empty: Tensor) -> None:
    """Put the empty centers, in place, on the rows farthest from theirs; rare, so it may cost a pass and a copy."""
    away = (rows.x - centers[assignment]).square().sum(dim=1)  # (M,)
    far = away.topk(int(empty.sum()))
    worth = (far.values > ROUNDING * rows.square.max())[:, None]
    centers[empty] = torch.where(worth, rows.x[far.indices], centers[empty])


@torch.no_grad()
def nearest(x: Tensor, centers: Tensor) -> Tensor:
    """(M,) index of the nearest center of each row; the first one of equals."""
    return torch.cat([_scores(x[part], centers).argmin(dim=1) for part in _slices(x, len(centers))])


@torch.no_grad()
def inertia(x: Tensor, centers: Tensor, assignment: Tensor) -> float:
    """Sum of squared distances of the rows to their centers, by differences, in float64."""
    total = x.new_zeros((), dtype=torch.float64)
    for part in _slices(x, 1):
        total += (x[part].double() - centers[assignment[part]]).square().sum()
    return float(total)


def _scores(x: Tensor, centers: Tensor, *, transposed: bool = False) -> Tensor:
    """(B, K), or (K, B): |c_k|^2 - 2 x_i . c_k, the squared distance but for |x_i|^2, which no argmin needs."""
    square = centers.square().sum(dim=1)
    if transposed:
        return torch.addmm(square[:, None], centers, x.T, alpha=-2)
    return torch.addmm(square, x, centers.T, alpha=-2)


def _sums(x: Tensor, assignment: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sum (R, K, D) and number (R, K) of the rows of each cluster, float64, for R assignments (M, R).

    A product with one-hot rows: unlike atomic additions on a GPU, it gives the same bits every time. (Products follow
    `torch.get_float32_matmul_precision()`, here and above.)
    """
    num_starts = assignment.shape[1]
    column = assignment + torch.arange(num_starts, device=x.device) * num_clusters
    sums = x.new_zeros(num_starts * num_clusters, x.shape[1], dtype=torch.float64)
    counts = x.new_zeros(len(sums), dtype=torch.float64)
    for part in _slices(x, len(sums)):
        one_hot = x.new_zeros(len(x[part]), len(sums)).scatter_(1, column[part], 1.0)  # (B, R * K)
        sums += one_hot.T @ x[part]
        counts += one_hot.sum(dim=0)
    return sums.view(num_starts, num_clusters, -1), counts.view(num_starts, num_clusters)


def _block(x: Tensor, width: int) -> int:
    """How many rows to take at a time, when each makes `width` numbers."""
    return max(1, (CPU_BLOCK if x.device.type == "cpu" else GPU_BLOCK) // max(width, x.shape[1], 1))


def _slices(x: Tensor, width: int) -> list[slice]:
    """Blocks of rows; one empty block when there are none."""
    step = _block(x, width)
    return [slice(first, first + step) for first in range(0, max(len(x), 1), step)]


def _check(x: Tensor, num_clusters: int, labels: Tensor | None, num_seen: int) -> None:
    require(
        0 <= num_seen <= num_clusters,
        f"num_seen = {num_seen} must lie in [0, {num_clusters}]: the clusters include the seen classes. Raise num_clusters.",
    )
    require(num_seen == 0 or labels is not None, f"num_seen = {num_seen} needs the labels of the seen classes.")
    check_shape(x)
    num_free = len(x)
    if labels is not None:
        check_labels(labels, len(x), num_seen=num_seen)
        num_free -= int((labels >= 0).sum())
    if num_clusters - num_seen > num_free:
        raise DataError(
            f"{num_clusters - num_seen} clusters need as many unlabeled rows, and there are {num_free}. "
            f"Lower num_clusters = {num_clusters}, or give more rows."
        )
