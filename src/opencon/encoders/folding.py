"""The frozen part of a ResNet with its batch norms folded into the convolutions.

Where batch norm uses running statistics it is a fixed scale and shift per channel, so it can be multiplied into the weights
once:

    bn(conv(x)) = conv'(x),   w' = w * g,   b' = beta - mean * g,   g = gamma / sqrt(var + eps)

What is left is convolution + bias (+ shortcut) + ReLU, which cuDNN computes in one pass over memory instead of two or three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.encoders.resnet import ResNet, Unit

CHANNEL_GROUP = 8  # tensor cores read channels in eights


def padded(x: Tensor) -> Tensor:
    """The channels of images, or of the weights for them, filled up with zeros to a whole group; channels last."""
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
        conv, norm = unit
        assert norm.running_mean is not None
        assert norm.running_var is not None
        gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)  # (out channels,)
        weight = (conv.weight * gain[:, None, None, None]).detach()
        bias = (norm.bias - norm.running_mean * gain).detach()
        weight = padded(weight.to(dtype))
        assert isinstance(conv.padding, tuple)
        return cls(weight, bias.to(dtype), conv.stride, conv.padding)

    def __call__(self, x: Tensor) -> Tensor:
        """Without bias and activation."""
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


# cuDNN's fused calls are unknown to torch.compile; as an operator of our own they are a black box with a known shape.
@torch.library.custom_op(
    "opencon::conv_relu",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x, Tensor weight, Tensor bias, Tensor shortcut, int[] stride, int[] padding) -> Tensor",
)
def _conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """ReLU(conv(x) + shortcut) in one pass; an empty shortcut is none."""
    if shortcut.numel() == 0:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)
    return torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, bias, stride, padding, (1, 1), 1)


@_conv_relu.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding)


class FoldedResNet:
    """The first stages of a ResNet, in evaluation mode, for as long as their weights do not change."""

    def __init__(self, resnet: ResNet, num_stages: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stem = FoldedConv.of(Unit(resnet.stem.conv1, resnet.stem.bn1), dtype)  # type: ignore[arg-type]
        self.maxpool = getattr(resnet.stem, "maxpool", None)
        self.blocks: list[tuple[list[FoldedConv], FoldedConv | None]] = []
        for block in (block for name in resnet.stages[1:num_stages] for block in getattr(resnet, name)):
            branch, down = block.units()
            folded = [FoldedConv.of(unit, dtype) for unit in branch]
            shortcut = None if down is None else FoldedConv.of(down, dtype)
            if (
                shortcut is not None
            ):  # what both add, one can add: without a ReLU, a bias is a pass over memory of its own
                folded[-1] = replace(folded[-1], bias=folded[-1].bias + shortcut.bias)
            self.blocks.append((folded, shortcut))

    def __call__(self, x: Tensor) -> Tensor:
        """(B, 3, H, W), normalized -> the output of the last folded stage."""
        x = self.stem.relu(padded(x.to(self.dtype)))
        if self.maxpool is not None:
            x = self.maxpool(x)
        for convs, downsample in self.blocks:
            shortcut = x if downsample is None else downsample(x)
            for conv in convs[:-1]:
                x = conv.relu(x)
            x = convs[-1].relu(x, shortcut)
        return x
