"""The frozen part of a ResNet with its batch norms folded into the convolutions (`Unit.folded`).

What is left is convolution + bias (+ shortcut) + ReLU. cuDNN computes it in one pass over memory instead of two or three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.encoders.units import ResidualUnits, Unit

CHANNEL_GROUP = 8  # tensor cores read channels in eights


def padded(x: Tensor) -> Tensor:
    """Images, or the weights for them, with zero channels added up to a whole group; channels last."""
    missing = -x.shape[1] % CHANNEL_GROUP
    return F.pad(x, (0, 0, 0, 0, 0, missing)).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class FoldedConv:
    """A convolution with the batch norm behind it folded in."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    @classmethod
    def of(cls, unit: Unit, dtype: torch.dtype) -> FoldedConv:
        """Fold the norm of `unit` into its convolution."""
        weight, bias = unit.folded()
        assert isinstance(unit.conv.padding, tuple)
        return cls(padded(weight.to(dtype)), bias.to(dtype), unit.conv.stride, unit.conv.padding)

    def __call__(self, x: Tensor) -> Tensor:
        """The convolution without bias and ReLU."""
        return F.conv2d(x, self.weight, None, self.stride, self.padding)

    def relu(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """ReLU of the result, after adding the shortcut if there is one."""
        if not x.is_cuda:
            y = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
            return F.relu(y if shortcut is None else y + shortcut)
        none = x.new_empty(0)
        add = none if shortcut is None else shortcut
        out: Tensor = _conv_relu(x, self.weight, self.bias, add, self.stride, self.padding)
        return out


# torch.compile does not know cuDNN's fused calls. As an operator of our own they are a black box with a known shape.
@torch.library.custom_op(
    "opencon::conv_relu",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x, Tensor weight, Tensor bias, Tensor shortcut, int[] stride, int[] padding) -> Tensor",
)
def _conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """ReLU(conv(x) + bias + shortcut) in one pass; an empty tensor stands for no shortcut."""
    if shortcut.numel() == 0:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)
    return torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, bias, stride, padding, (1, 1), 1)


@_conv_relu.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding)


class FoldedResNet:
    """The first stages of a ResNet in evaluation mode. It is valid for as long as their weights do not change."""

    def __init__(self, units: ResidualUnits, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stem = FoldedConv.of(units.stem, dtype)
        self.maxpool = units.maxpool
        self.blocks: list[tuple[list[FoldedConv], FoldedConv | None]] = []
        for block in units.blocks:
            branch = [FoldedConv.of(unit, dtype) for unit in block.branch]
            shortcut = None if block.shortcut is None else FoldedConv.of(block.shortcut, dtype)
            if shortcut is not None:
                # The branch adds both biases: without a ReLU behind it, a bias is a pass over memory of its own.
                branch[-1] = replace(branch[-1], bias=branch[-1].bias + shortcut.bias)
            self.blocks.append((branch, shortcut))

    def __call__(self, x: Tensor) -> Tensor:
        """(B, 3, H, W), normalized -> the output of the last folded stage."""
        x = self.stem.relu(padded(x.to(self.dtype)))
        if self.maxpool is not None:
            x = self.maxpool(x)
        for branch, downsample in self.blocks:
            shortcut = x if downsample is None else downsample(x)
            for conv in branch[:-1]:
                x = conv.relu(x)
            x = branch[-1].relu(x, shortcut)
        return x
