"""Residual networks (He et al. 2016, arXiv:1512.03385), with the stride on the 3x3 convolution (torchvision's "v1.5").

Names inside a stage are torchvision's (`layer1.0.conv1`, `layer2.0.downsample.0`); the stem is a stage of its own.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.encoders.base import Encoder, require_color
from opencon.encoders.folding import FoldedResNet
from opencon.encoders.units import BlockUnits, ResidualUnits, Unit
from opencon.errors import require
from opencon.runtime import has_triton

WIDTH = 64  # of the stem and the first stage; each later stage doubles it
LAYERS = ("layer1", "layer2", "layer3", "layer4")


def conv(before: int, after: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size (but for the stride), without bias since a batch norm follows."""
    return nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block: ReLU(branch(x) + shortcut(x))."""

    expansion: int  # output channels per unit of width

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * self.expansion
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(conv(before, after, 1, stride), nn.BatchNorm2d(after))

    def branch(self, x: Tensor) -> Tensor:
        """What is added to the shortcut."""
        raise NotImplementedError

    def units(self) -> BlockUnits:
        """Its convolutions, each with its batch norm."""
        numbers = [i for i in (1, 2, 3) if hasattr(self, f"conv{i}")]
        branch = [Unit(getattr(self, f"conv{i}"), getattr(self, f"bn{i}")) for i in numbers]
        shortcut = None if self.downsample is None else Unit(*self.downsample.children())  # type: ignore[arg-type]
        return BlockUnits(branch, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, width * expansion, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.branch(x) + shortcut, inplace=True)


class BasicBlock(Block):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__(before, width, stride)
        self.conv1 = conv(before, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)

    def branch(self, x: Tensor) -> Tensor:
        """Two 3x3 convolutions, each with a batch norm, a ReLU between them."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out: Tensor = self.bn2(self.conv2(x))
        return out


class Bottleneck(Block):
    """1x1 down, 3x3, 1x1 up."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__(before, width, stride)
        self.conv1 = conv(before, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)

    def branch(self, x: Tensor) -> Tensor:
        """The three convolutions, each with a batch norm, ReLUs between them."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        out: Tensor = self.bn3(self.conv3(x))
        return out


class ResNet(Encoder):
    """A stem, four stages of residual blocks (each twice as wide as the last), and the average over the image."""

    def __init__(
        self, block: type[Block], depths: tuple[int, int, int, int], *, small_images: bool, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.in_channels = 3
        self.stages = ("stem", *LAYERS)
        stem: OrderedDict[str, nn.Module] = OrderedDict()
        stem["conv1"] = conv(3, width, 3) if small_images else conv(3, width, 7, stride=2)
        stem["bn1"] = nn.BatchNorm2d(width)
        stem["relu"] = nn.ReLU(inplace=True)
        if not small_images:
            stem["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
        self.stem = nn.Sequential(stem)
        before = width
        for i, (name, depth) in enumerate(zip(LAYERS, depths, strict=True)):
            blocks = []
            for j in range(depth):
                blocks.append(block(before, width * 2**i, stride=2 if i > 0 and j == 0 else 1))
                before = width * 2**i * block.expansion
            self.add_module(name, nn.Sequential(*blocks))
        self.num_features = before
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")  # torchvision's start

    def pool(self, x: Tensor) -> Tensor:
        """Average over the image."""
        return x.mean(dim=(2, 3))  # (B, F)

    def units(self, num_stages: int) -> ResidualUnits:
        """The convolutions of the first stages, each with its batch norm."""
        stem = Unit(self.stem.conv1, self.stem.bn1)  # type: ignore[arg-type]
        blocks = [block.units() for name in self.stages[1:num_stages] for block in getattr(self, name)]
        return ResidualUnits(stem, getattr(self.stem, "maxpool", None), blocks)

    def fold(self, dtype: torch.dtype) -> None:
        """Fold frozen batch norms into their convolutions, where they use running statistics."""
        if self.frozen_norm != "batch" and self.num_frozen:
            self.folded = FoldedResNet(self.units(self.num_frozen), dtype)

    def fuse(self) -> None:
        """Compute batch norm, shortcut and ReLU in one kernel, where everything learns: in a part it gains nothing."""
        if has_triton() and not self.num_frozen:
            from opencon.encoders.fused import FusedResNet  # needs Triton

            fused = FusedResNet(self.units(len(self.stages)))
            self.fused = fused if fused.fits else None


def _require_large(name: str, image_size: int) -> None:
    # The ImageNet stem and the strides divide the side by 32.
    require(
        image_size >= 32,
        f"encoder {name!r} takes images of at least 32 pixels, but these have {image_size}. "
        f"Use 'resnet18_cifar' or 'convnet', or larger images.",
    )


def resnet18_cifar(in_channels: int, image_size: int) -> ResNet:
    """ResNet-18 for small images: a 3x3 stem without stride and no max-pool (SimCLR, arXiv:2002.05709, B.9)."""
    require_color("resnet18_cifar", in_channels)
    return ResNet(BasicBlock, (2, 2, 2, 2), small_images=True)


def resnet18(in_channels: int, image_size: int) -> ResNet:
    """ResNet-18 with the ImageNet stem."""
    require_color("resnet18", in_channels)
    _require_large("resnet18", image_size)
    return ResNet(BasicBlock, (2, 2, 2, 2), small_images=False)


def resnet50(in_channels: int, image_size: int) -> ResNet:
    """ResNet-50 with the ImageNet stem."""
    require_color("resnet50", in_channels)
    _require_large("resnet50", image_size)
    return ResNet(Bottleneck, (3, 4, 6, 3), small_images=False)
