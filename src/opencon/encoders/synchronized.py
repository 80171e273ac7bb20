"""Batch norm over the rows of all ranks, on any device: with it, ranks compute what one process with the whole batch would.

Letters: N rows of this rank, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Sum(torch.autograd.Function):
    """The sum over ranks. A gradient of it reaches every rank's part, from every rank: backward sums, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override, unused-ignore]
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of every rank's tensor, with gradient."""
    total: Tensor = _Sum.apply(value)  # type: ignore[no-untyped-call]
    return total


class SynchronizedNorm(nn.BatchNorm2d):
    """A batch norm whose statistics in training are those of all ranks' rows; a rank may have none."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> the same, normalized. First the mean, then the variance around it: exact where both are small."""
        if not self.training:
            return super().forward(input)
        x = input.float()
        count = sum_over_ranks(x.new_tensor([x.numel() / max(x.shape[1], 1)])).detach()
        mean = sum_over_ranks(x.sum(dim=(0, 2, 3))) / count  # (C,)
        centered = x - mean[:, None, None]
        variance = sum_over_ranks(centered.square().sum(dim=(0, 2, 3))) / count
        with torch.no_grad():
            self._follow(mean, variance * count / (count - 1).clamp(min=1))
        y = centered * (variance + self.eps).rsqrt()[:, None, None]
        if self.affine:
            y = y * self.weight[:, None, None] + self.bias[:, None, None]
        return y.to(input.dtype)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics, as torch does: by `momentum`, or as a mean of all batches where it is None."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


def synchronize_norms(module: nn.Module) -> None:
    """Make every batch norm in a module a synchronized one, in place: names, weights and statistics stay."""
    for part in module.modules():
        if type(part) is nn.BatchNorm2d:
            part.__class__ = SynchronizedNorm


def has_synchronized(module: nn.Module) -> bool:
    """Whether a module has synchronized batch norms."""
    return any(isinstance(part, SynchronizedNorm) for part in module.modules())
