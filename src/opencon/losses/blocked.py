"""`info_nce` inside one subset of the rows, without an N x N matrix: for batches whose matrix would not fit.

The two halves of the loss (see `contrastive.contrast_terms`) ask for different things. With s_ij = z_i . z_j / t,
members M, and n_i members in the group of i, whose sum is G_i:

    alignment    mean_{p in P(i)} s_ip = z_i . (G_i - z_i) / ((n_i - 1) t)         no pairs at all: N x D numbers
    uniformity   l_i = log sum_{a in M, a != i} exp(s_ia)                           pairs, a block of rows at a time

Only l is kept for the backward pass, which makes the blocks of s again. The gradient of sum_i l_i, over the anchors, is

    dz_j = (1 / t) sum_i Q_ij z_i,     Q_ij = exp(s_ij - l_i) + exp(s_ij - l_j)

A term is left out where its own l is not that of an anchor. Q is symmetric, so a block of its rows is one of its columns.

Where several ranks compute the same loss, each takes the blocks of its own piece of the rows, and l and the gradient are
added up (`shared_by`). The pairs are what grows with the square of N.

Letters: N rows, D embedding size, R rows of a block; z_i rows, t temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

# Rows of a block on a CPU: ours, fastest or near it from N = 1024 to 16,384. Fewer starve the matrix product, more leave
# the cache.
CPU_ROWS = 128
# Numbers in a block on a GPU, 32 MiB in float32: ours. Two such blocks are alive at once; kernels of this size take longer
# than their launch.
GPU_NUMBERS = 2**23
_ranks = (0, 1)  # the number of this rank, and how many share the pairs


@contextmanager
def shared_by(rank: int, num_ranks: int) -> Iterator[None]:
    """Inside, ranks share the pairs of every loss here. All of them must compute the same losses, in the same order."""
    global _ranks
    before, _ranks = _ranks, (rank, num_ranks)
    try:
        yield
    finally:
        _ranks = before


def info_nce_within(
    z: Tensor,
    member: Tensor,
    group: Tensor,
    *,
    temperature: float,
    reduction: Literal["mean", "sum"] = "mean",
    block: int | None = None,
) -> Tensor:
    """`info_nce(z, masks_within(member, group), ...)`: the same value and gradient in O(N D + R N) memory.

    Nothing is read by the host, shapes depend on N alone, and torch.compile sees two operators of known shape. It can be
    differentiated once. Matrix products follow `torch.get_float32_matmul_precision()`, as in the plain form: full float32
    unless someone allowed TF32. On a GPU the sum of a group of three or more rows is taken in no fixed order, so the last
    bits may differ from run to run.

    Args:
        z: unit-length embeddings, (N, D), float32 or float64. Call this outside autocast.
        member: (N,) bool, who is compared.
        group: (N,) numbers of any range; members with the same one are positives of each other.
        temperature: above zero; smaller is sharper.
        reduction: mean over the anchors, the members that have a positive, or their sum.
        block: rows of a block, R; None takes what suits the device.

    Returns:
        Scalar; exactly 0 with zero gradient if no anchor has a positive.
    """
    # The number of a group is the position of its first row in sorted order: below N, and unlike torch.unique no host sync.
    group = torch.searchsorted(group.sort().values, group)  # (N,)
    inside = member.to(z.dtype)  # (N,)
    size = torch.zeros_like(inside).index_add(0, group, inside).index_select(0, group)  # (N,) n_i
    is_anchor = member & (size > 1)
    total = torch.zeros_like(z).index_add(0, group, z * inside[:, None]).index_select(0, group)  # (N, D) G_i
    weight = is_anchor / (size - 1).clamp(min=1)
    alignment = -(((total - z) * z).sum(dim=1) * weight).sum() / temperature
    uniformity, _ = _uniformity(z, member, is_anchor, temperature, block or rows_of_a_block(z), *_ranks)
    loss: Tensor = alignment + uniformity
    return loss if reduction == "sum" else loss / is_anchor.sum().clamp(min=1)


def rows_of_a_block(z: Tensor) -> int:
    """How many rows of a block suit the device of z."""
    return max(CPU_ROWS, GPU_NUMBERS // max(len(z), 1)) if z.is_cuda else CPU_ROWS


def _logits(z: Tensor, outside: Tensor, start: int, temperature: float, out: Tensor) -> Tensor:
    """Rows of s from `start` on, as many as `out` (R, N) has; -inf where i = j or one of the two is no member."""
    stop = start + len(out)
    torch.add(outside[start:stop, None], outside, out=out)
    out.addmm_(z[start:stop], z.T, alpha=1.0 / temperature)
    out.diagonal(start).fill_(float("-inf"))
    return out


def _outside(z: Tensor, member: Tensor) -> Tensor:
    """(N,) 0 for a member, -inf for the others."""
    return z.new_zeros(len(z)).masked_fill_(~member, float("-inf"))


def _blocks(num_rows: int, block: int, rank: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the blocks of a rank's piece of the rows."""
    first, last = rank * num_rows // num_ranks, (rank + 1) * num_rows // num_ranks
    return ((start, min(start + block, last)) for start in range(first, last, block))


# An operator of our own is a black box to torch.compile, which would otherwise unroll the loop over the blocks.
@torch.library.custom_op(
    "opencon::uniformity",
    mutates_args=(),
    schema="(Tensor z, Tensor member, Tensor is_anchor, float temperature, int block, int rank, int num_ranks)"
    " -> (Tensor, Tensor)",
)
def _uniformity(
    z: Tensor, member: Tensor, is_anchor: Tensor, temperature: float, block: int, rank: int, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """The sum of l_i over the anchors, and l (N,), +inf where i is no anchor."""
    outside = _outside(z, member)
    lse = torch.zeros_like(outside)
    buffer = z.new_empty(min(block, len(z)), len(z))
    for start, stop in _blocks(len(z), block, rank, num_ranks):
        s = _logits(z, outside, start, temperature, buffer[: stop - start])  # (R, N)
        largest = s.amax(dim=1)  # -inf in a row without candidates: it becomes NaN, but such a row is no anchor
        lse[start:stop] = s.sub_(largest[:, None]).exp_().sum(dim=1).log_().add_(largest)
    if num_ranks > 1:
        dist.all_reduce(lse)
    return lse.masked_fill(~is_anchor, 0.0).sum(), lse.masked_fill_(~is_anchor, float("inf"))


@_uniformity.register_fake
def _(
    z: Tensor, member: Tensor, is_anchor: Tensor, temperature: float, block: int, rank: int, num_ranks: int
) -> tuple[Tensor, Tensor]:
    return z.new_empty(()), z.new_empty(len(z))


@torch.library.custom_op(
    "opencon::uniformity_gradient",
    mutates_args=(),
    schema="(Tensor z, Tensor member, Tensor lse, float temperature, int block, int rank, int num_ranks) -> Tensor",
)
def _uniformity_gradient(
    z: Tensor, member: Tensor, lse: Tensor, temperature: float, block: int, rank: int, num_ranks: int
) -> Tensor:
    """(N, D): the derivative of the sum of l_i over the anchors."""
    outside = _outside(z, member)
    gradient = torch.zeros_like(z)
    buffers = z.new_empty(2, min(block, len(z)), len(z))
    for start, stop in _blocks(len(z), block, rank, num_ranks):
        s, q = buffers[:, : stop - start]  # (R, N)
        _logits(z, outside, start, temperature, s)
        torch.sub(s, lse[start:stop, None], out=q).exp_()  # +inf, no anchor, makes it 0
        q.add_(s.sub_(lse).exp_())
        # q.T @ (R, D), added to all rows, instead of q @ (N, D), set in R rows: a small result of long sums leaves most
        # of a GPU idle.
        gradient.addmm_(q.T, z[start:stop])
    if num_ranks > 1:
        dist.all_reduce(gradient)
    return gradient.div_(temperature)


@_uniformity_gradient.register_fake
def _(z: Tensor, member: Tensor, lse: Tensor, temperature: float, block: int, rank: int, num_ranks: int) -> Tensor:
    return torch.empty_like(z)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, member, _, ctx.temperature, *ctx.blocks = inputs
    ctx.save_for_backward(z, member, output[1])


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradient = _uniformity_gradient(*ctx.saved_tensors, ctx.temperature, *ctx.blocks)
    return upstream * gradient, None, None, None, None, None, None


_uniformity.register_autograd(_backward, setup_context=_keep)
