"""A convolution and the batch norm behind it: the pieces from which a network gets its faster forms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Unit(NamedTuple):
    """A convolution and the batch norm behind it."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the one convolution that computes both, where the norm uses its running statistics.

        A norm is then a fixed scale and shift of each channel:

            bn(conv(x)) = conv'(x),   w' = w * g,   b' = beta - mean * g,   g = gamma / sqrt(var + eps)
        """
        conv, norm = self
        assert norm.running_mean is not None
        assert norm.running_var is not None
        gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)  # (out channels,)
        weight = conv.weight * gain[:, None, None, None]
        bias = norm.bias - norm.running_mean * gain
        return weight.detach(), bias.detach()


class BlockUnits(NamedTuple):
    """A residual block: ReLU(branch(x) + shortcut(x))."""

    branch: list[Unit]  # with a ReLU between two of them
    shortcut: Unit | None  # None: x itself


class ResidualUnits(NamedTuple):
    """The first stages of a residual network: stem, ReLU, max-pool if there is one, then the blocks."""

    stem: Unit
    maxpool: nn.Module | None
    blocks: list[BlockUnits]
