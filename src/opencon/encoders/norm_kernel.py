"""Batch norm with shortcut and ReLU as Triton kernels, for `fused`. Imported only on a machine with a GPU.

All tensors are rows of channels: (B, C, H, W) in channels-last order is (M, C) in memory, M = B * H * W. Each kernel passes
over memory once. Kernels that sum go from the end to the start, kernels that write from the start to the end: what the
one before touched last is still cached.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

WIDE = 64  # channels of a tile: a whole cache line of bfloat16, and the fewest a ResNet has
TALL = 32  # rows of a tile
# Ours, the fastest of a dozen settings on an H200. A program that goes over many tiles loads the next ones ahead. Two
# programs for each multiprocessor are then as fast as more of them, and leave fewer sums to gather.
AHEAD = 5
SUMMING = 264

# Triton compiles the signatures too, so that arguments cannot carry type hints. What it must know when it compiles is in
# capitals; a condition on such a name needs an `if` of its own.


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile(first, rows, C: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of the rows from `first` on, in this program's channels, and which of the rows exist."""
    i, j = tl.arange(0, TALL)[:, None], tl.arange(0, WIDE)[None, :]
    start = tl.cast(first, tl.int64) * C + tl.program_id(1) * WIDE
    return start + i * C + j, (first + i >= 0) & (first + i < rows)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _channels(ptr, C: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two rows (2, C), such as mean and reciprocal deviation, of this program's channels."""
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    return tl.load(ptr + channel), tl.load(ptr + C + channel)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _affine(stats_ptr, gain_ptr, bias_ptr, C: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean and reciprocal deviation of this program's channels; and the norm as x * scale + shift."""
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    mean, rstd = _channels(stats_ptr, C, WIDE)
    scale = tl.load(gain_ptr + channel) * rstd
    return mean, rstd, scale, tl.load(bias_ptr + channel) - mean * scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gathered(  # type: ignore[no-untyped-def]
    first, second, parts_ptr, tickets_ptr, C: tl.constexpr, WIDE: tl.constexpr
):
    """Two sums (channels,) over all programs, for the program that ends last. It adds in order, so that sums repeat."""
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    own, parts = parts_ptr + tl.program_id(0) * 2 * C + channel, tl.num_programs(0)
    tl.store(own, first)
    tl.store(own + C, second)
    tl.debug_barrier()  # all threads have written before one of them draws a ticket
    is_last = tl.atomic_add(tickets_ptr + tl.program_id(1), 1, sem="acq_rel") == parts - 1
    if is_last:
        tl.store(tickets_ptr + tl.program_id(1), 0)
        first, second = tl.zeros_like(first), tl.zeros_like(second)
        for start in range(0, parts, 128):
            part = (start + tl.arange(0, 128))[:, None]
            offsets = parts_ptr + part * 2 * C + channel[None, :]
            first += tl.sum(tl.load(offsets, mask=part < parts, other=0.0), 0)
            second += tl.sum(tl.load(offsets + C, mask=part < parts, other=0.0), 0)
    return is_last, first, second


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _statistics(  # type: ignore[no-untyped-def]
    x_ptr, stats_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, parts_ptr, tickets_ptr, rows, eps, momentum,
    C: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    before = tl.load(running_mean_ptr + channel)
    center = tl.where(tl.abs(before) < 1e30, before, 0.0)  # sums around it keep their digits where the mean is large
    total = tl.zeros((TALL, WIDE), tl.float32)
    squares = tl.zeros((TALL, WIDE), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, TALL), tl.num_programs(0), num_stages=AHEAD):
        offsets, exists = _tile(rows - (tile + 1) * TALL, rows, C, WIDE, TALL)
        x = tl.load(x_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        x = tl.where(exists, x - center[None, :], 0.0)
        total += x
        squares += x * x
    is_last, first, second = _gathered(tl.sum(total, 0), tl.sum(squares, 0), parts_ptr, tickets_ptr, C, WIDE)
    if is_last:
        shift = first / rows
        mean, var = center + shift, second / rows - shift * shift
        var = tl.where(var < 0, 0.0, var)
        tl.store(stats_ptr + channel, mean)
        tl.store(stats_ptr + C + channel, 1.0 / tl.sqrt(var + eps))
        tl.store(running_mean_ptr + channel, before + momentum * (mean - before))
        before = tl.load(running_var_ptr + channel)
        tl.store(running_var_ptr + channel, before + momentum * (var * (rows / (rows - 1.0)) - before))
        if tl.program_id(1) == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _normalize(  # type: ignore[no-untyped-def]
    x_ptr, shortcut_ptr, y_ptr, stats_ptr, gain_ptr, bias_ptr, rows,
    C: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    _, _, scale, shift = _affine(stats_ptr, gain_ptr, bias_ptr, C, WIDE)
    offsets, exists = _tile(tl.program_id(0) * TALL, rows, C, WIDE, TALL)
    y = tl.load(x_ptr + offsets, mask=exists).to(tl.float32) * scale[None, :] + shift[None, :]
    if ADDS:
        y += tl.load(shortcut_ptr + offsets, mask=exists).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # unlike a maximum, it keeps NaN
    tl.store(y_ptr + offsets, y, mask=exists)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gradient_sums(  # type: ignore[no-untyped-def]
    g_ptr, more_ptr, x_ptr, y_ptr, kept_ptr, stats_ptr, gain_ptr, bias_ptr, grads_ptr, parts_ptr, tickets_ptr, rows,
    C: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, AHEAD: tl.constexpr,
    MORE: tl.constexpr, KEEPS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    mean, rstd, scale, shift = _affine(stats_ptr, gain_ptr, bias_ptr, C, WIDE)
    total = tl.zeros((TALL, WIDE), tl.float32)
    along = tl.zeros((TALL, WIDE), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, TALL), tl.num_programs(0), num_stages=AHEAD):
        offsets, exists = _tile(rows - (tile + 1) * TALL, rows, C, WIDE, TALL)
        g = tl.load(g_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        if MORE:
            g += tl.load(more_ptr + offsets, mask=exists, other=0.0).to(tl.float32)
        if KEEPS:
            g = tl.where(tl.load(y_ptr + offsets, mask=exists, other=0.0) > 0, g, 0.0)
            tl.store(kept_ptr + offsets, g, mask=exists)
        elif RELU:
            g = tl.where(x * scale[None, :] + shift[None, :] > 0, g, 0.0)
        total += g
        along += g * (x - mean[None, :])
    is_last, first, second = _gathered(tl.sum(total, 0), tl.sum(along, 0), parts_ptr, tickets_ptr, C, WIDE)
    if is_last:
        channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        tl.store(grads_ptr + channel, second * rstd)
        tl.store(grads_ptr + C + channel, first)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gradient(  # type: ignore[no-untyped-def]
    g_ptr, x_ptr, out_ptr, stats_ptr, gain_ptr, bias_ptr, grads_ptr, rows,
    C: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    mean, rstd, scale, shift = _affine(stats_ptr, gain_ptr, bias_ptr, C, WIDE)
    gain_grad, bias_grad = _channels(grads_ptr, C, WIDE)
    offsets, exists = _tile(tl.program_id(0) * TALL, rows, C, WIDE, TALL)
    g = tl.load(g_ptr + offsets, mask=exists).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=exists).to(tl.float32)
    if RELU:
        g = tl.where(x * scale[None, :] + shift[None, :] > 0, g, 0.0)
    slope = gain_grad * rstd / rows
    out = scale[None, :] * (g - (bias_grad / rows)[None, :] - (x - mean[None, :]) * slope[None, :])
    tl.store(out_ptr + offsets, out, mask=exists)


@functools.cache
def _tickets(device: torch.device, tiles: int, stream: int) -> Tensor:
    """Zeros, which every use leaves as zeros. Each stream has its own: kernels on two streams could run at once."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def _ahead(x: Tensor) -> int:
    """How many tiles to load ahead, such that they also fit into the shared memory of smaller GPUs."""
    return AHEAD if x.element_size() == 2 else 3


def _sizes(x: Tensor) -> tuple[int, int]:
    """Rows and channels of (B, C, H, W), which must lie in memory as rows of channels."""
    assert x.is_contiguous(memory_format=torch.channels_last)
    return x.numel() // x.shape[1], x.shape[1]


def _summing(x: Tensor) -> tuple[tuple[int, int], Tensor, Tensor]:
    """The programs that sum over x; and where they leave their parts and draw their tickets."""
    rows, channels = _sizes(x)
    tiles = channels // WIDE
    programs = min(max(1, SUMMING // tiles), triton.cdiv(rows, TALL))
    parts = torch.empty(programs, 2, channels, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    return (programs, tiles), parts, _tickets(x.device, tiles, stream)


def statistics(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """(2, C): mean and reciprocal deviation of each channel. It also updates the norm's running statistics."""
    rows, channels = _sizes(x)
    assert rows > 1, "one row has no variance"
    grid, parts, tickets = _summing(x)
    stats = torch.empty(2, channels, device=x.device)
    _statistics[grid](
        x, stats, norm.running_mean, norm.running_var, norm.num_batches_tracked, parts, tickets,
        rows, norm.eps, norm.momentum, channels, WIDE, TALL, _ahead(x),
    )  # fmt: skip
    return stats


def normalize(x: Tensor, stats: Tensor, gain: Tensor, bias: Tensor, shortcut: Tensor | None, *, relu: bool) -> Tensor:
    """Batch norm, plus a shortcut if there is one, and ReLU if wanted."""
    rows, channels = _sizes(x)
    assert shortcut is None or _sizes(shortcut) == (rows, channels)
    y = torch.empty_like(x)
    _normalize[(triton.cdiv(rows, TALL), channels // WIDE)](
        x, x if shortcut is None else shortcut, y, stats, gain, bias, rows,
        channels, WIDE, TALL, shortcut is not None, relu,
    )  # fmt: skip
    return y


def gradient_sums(
    grads: list[Tensor], x: Tensor, y: Tensor, stats: Tensor, gain: Tensor, bias: Tensor, *, relu: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """(2, C): the gradients of gain and bias; and the gradient that goes on.

    Args:
        grads: one gradient of y, or with `keep` two, which are added.
        keep: return the gradient that passes the ReLU (y > 0); else it is returned as it came, and `gradient` has to apply
            the ReLU.
    """
    rows, channels = _sizes(x)
    assert keep or len(grads) == 1
    assert all(_sizes(t) == (rows, channels) for t in (y, *grads))
    grid, parts, tickets = _summing(x)
    of_parameters = torch.empty(2, channels, device=x.device)
    kept = torch.empty_like(x) if keep else grads[0]
    _gradient_sums[grid](
        grads[0], grads[-1], x, y, kept, stats, gain, bias, of_parameters, parts, tickets, rows,
        channels, WIDE, TALL, _ahead(x), len(grads) == 2, keep, relu,
    )  # fmt: skip
    return of_parameters, kept


def gradient(
    g: Tensor, x: Tensor, stats: Tensor, gain: Tensor, bias: Tensor, of_parameters: Tensor, *, relu: bool
) -> Tensor:
    """The gradient of x from that of the norm's output, or with `relu` from that of the ReLU's output."""
    rows, channels = _sizes(x)
    out = torch.empty_like(x)
    _gradient[(triton.cdiv(rows, TALL), channels // WIDE)](
        g, x, out, stats, gain, bias, of_parameters, rows, channels, WIDE, TALL, relu
    )
    return out
