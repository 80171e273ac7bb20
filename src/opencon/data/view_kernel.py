"""Views of small images in one Triton kernel; its plain form is `Augment.plain`. Imported only on a machine with a GPU.

One program makes one view, and keeps its pixels in registers from crop to gray. It computes only the operations that its
image gets; the plain form computes all of them for all images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from opencon.data.color import BRIGHTNESS, CONTRAST, HUE, SATURATION

# Triton compiles the signatures too, so that arguments cannot carry type hints. What it must know when it compiles is in
# capitals; a condition on such a name needs an `if` of its own.


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _shares(  # type: ignore[no-untyped-def]
    start, length, is_flipped, SIZE: tl.constexpr, PADDED: tl.constexpr, SOURCE: tl.constexpr
):
    """(PADDED, SOURCE): `augment._resize_weights` of one image; rows from SIZE on mean nothing."""
    step = length / SIZE
    along = step * (tl.arange(0, PADDED) + 0.5)
    center = start + tl.where(is_flipped, length - along, along)
    pixel = tl.arange(0, SOURCE) + 0.5
    depth = tl.minimum(pixel - start, start + length - pixel)
    shares = 1.0 - tl.abs(pixel[None, :] - center[:, None]) / tl.maximum(step, 1.0)
    shares = tl.maximum(tl.minimum(shares, 2.0 * depth[None, :]), 0.0)
    return shares / tl.maximum(tl.sum(shares, axis=1), 1e-30)[:, None]  # rows that mean nothing may see no pixel


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cut(image_ptr, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(PADDED, PADDED): one channel of `augment.resized_crop`. Sides are far too small for TF32 to pay."""
    offsets = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    pixels = tl.load(image_ptr + offsets).to(tl.float32) / 255.0
    across = tl.dot(pixels, tl.trans(columns), input_precision="ieee")
    return _unit(tl.dot(rows, across, input_precision="ieee"))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _unit(x):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _luma(r, g, b):  # type: ignore[no-untyped-def]
    return 0.2989 * r + 0.587 * g + 0.114 * b


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _lacks(h, own):  # type: ignore[no-untyped-def]
    """How much of the chroma a channel lacks at hue h: see `color.shift_hue`."""
    return _unit(2.0 - tl.abs(tl.abs(h - own) - 3.0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _due(factors_ptr, turns_ptr, turn, rest, COLUMN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of a jitter operation if this is its turn, else `rest`. Column -1 is an operation that is off."""
    if COLUMN < 0:
        return rest
    return tl.where(tl.load(turns_ptr + COLUMN) == turn, tl.load(factors_ptr + COLUMN), rest)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _views(  # type: ignore[no-untyped-def]
    images_ptr, box_ptr, is_flipped_ptr, is_jittered_ptr, factors_ptr, turns_ptr, is_gray_ptr, out_ptr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, FLIPS: tl.constexpr,
    GRAYS: tl.constexpr, TURNS: tl.constexpr, BRIGHTNESS_COLUMN: tl.constexpr, CONTRAST_COLUMN: tl.constexpr,
    SATURATION_COLUMN: tl.constexpr, HUE_COLUMN: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    box_ptr += 4 * own
    top, left = tl.load(box_ptr).to(tl.float32), tl.load(box_ptr + 1).to(tl.float32)
    height, width = tl.load(box_ptr + 2).to(tl.float32), tl.load(box_ptr + 3).to(tl.float32)
    is_flipped = tl.load(is_flipped_ptr + own) != 0 if FLIPS else False
    rows = _shares(top, height, False, SIZE, PADDED, HEIGHT)
    columns = _shares(left, width, is_flipped, SIZE, PADDED, WIDTH)
    images_ptr += own * 3 * HEIGHT * WIDTH
    # Triton counts in powers of two: of PADDED x PADDED pixels, SIZE x SIZE are the view.
    row, column = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
    exists = (row < SIZE) & (column < SIZE)
    r = _cut(images_ptr, rows, columns, HEIGHT, WIDTH)
    g = _cut(images_ptr + HEIGHT * WIDTH, rows, columns, HEIGHT, WIDTH)
    b = _cut(images_ptr + 2 * HEIGHT * WIDTH, rows, columns, HEIGHT, WIDTH)

    if TURNS > 0:  # noqa: SIM102
        if tl.load(is_jittered_ptr + own) != 0:
            factors_ptr += own * TURNS
            turns_ptr += own * TURNS
            for turn in tl.static_range(TURNS):
                contrast = _due(factors_ptr, turns_ptr, turn, 1.0, CONTRAST_COLUMN)
                saturation = _due(factors_ptr, turns_ptr, turn, 1.0, SATURATION_COLUMN)
                brightness = _due(factors_ptr, turns_ptr, turn, 1.0, BRIGHTNESS_COLUMN)
                keep = brightness * contrast * saturation  # all but one are 1
                gray = _luma(r, g, b)
                mean = tl.sum(tl.where(exists, gray, 0.0)) / (SIZE * SIZE)
                base = (1.0 - contrast) * mean + (1.0 - saturation) * gray
                r, g, b = _unit(keep * r + base), _unit(keep * g + base), _unit(keep * b + base)
                shift = _due(factors_ptr, turns_ptr, turn, 0.0, HUE_COLUMN)
                if shift != 0.0:
                    most, least = tl.maximum(tl.maximum(r, g), b), tl.minimum(tl.minimum(r, g), b)
                    c = most - least
                    h = tl.abs(1.0 + (g + b - r - least) / tl.maximum(c, 1e-12))
                    h = tl.where(g < b, -h, h) + 6.0 * shift
                    h = h - 6.0 * tl.floor(h / 6.0)
                    r, g, b = most - c * _lacks(h, 0.0), most - c * _lacks(h, 2.0), most - c * _lacks(h, 4.0)
    if GRAYS:  # noqa: SIM102
        if tl.load(is_gray_ptr + own) != 0:
            r = _luma(r, g, b)
            g, b = r, r

    offsets = row * SIZE + column
    out_ptr += own * 3 * SIZE * SIZE
    tl.store(out_ptr + offsets, r, mask=exists)
    tl.store(out_ptr + SIZE * SIZE + offsets, g, mask=exists)
    tl.store(out_ptr + 2 * SIZE * SIZE + offsets, b, mask=exists)


def views_kernel(
    images: Tensor,
    box: Tensor,
    size: int,
    operations: Sequence[int],
    factors: Tensor | None,
    turns: Tensor | None,
    *,
    is_flipped: Tensor | None,
    is_jittered: Tensor | None,
    is_gray: Tensor | None,
) -> Tensor:
    """Crop, flip, jitter and gray of color images that `Augment.has_kernel` allows.

    `augment.ViewParams` describes the tensors; None switches an operation off. `operations` are those of the columns of
    `factors` and `turns`.
    """
    num_images, _, height, width = images.shape
    inputs = [images, box, is_flipped, is_jittered, factors, turns, is_gray]
    num_turns = 0 if turns is None else len(operations)
    columns = [operations.index(k) if k in operations else -1 for k in (BRIGHTNESS, CONTRAST, SATURATION, HUE)]
    out = images.new_empty((num_images, 3, size, size), dtype=torch.float32)
    _views[(num_images,)](
        *(None if tensor is None else tensor.contiguous() for tensor in inputs), out,
        height, width, size, triton.next_power_of_2(size), is_flipped is not None, is_gray is not None, num_turns,
        *columns,
        num_warps=4 if size <= 32 else 8,
    )  # fmt: skip
    return out
