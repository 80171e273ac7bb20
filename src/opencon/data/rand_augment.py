"""RandAugment: a few operations in a row, each drawn from fourteen, of one strength. Cubuk et al. 2019, arXiv:1909.13719.

Letters: B images in a batch, S side in pixels, N operations in a row.

Images are float, (B, 3, S, S) or (B, 1, S, S), in [0, 1], and stay there. Each image has its own operations. The five that
move pixels are one change, the three that blend with gray another, and so on: an image for which none of them is due passes
through unchanged. So every image can go through every change, with fixed shapes, as a recorded step needs it; or each goes
through its own alone, in groups, which gives the same pixels. Strengths are those of torchvision's RandAugment, at M of 30;
pixels are resampled bilinearly here, black outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.data.color import blend, choose

(
    IDENTITY,
    SHEAR_X,
    SHEAR_Y,
    TRANSLATE_X,
    TRANSLATE_Y,
    ROTATE,
    BRIGHTNESS,
    COLOR,
    CONTRAST,
    SHARPNESS,
    POSTERIZE,
    SOLARIZE,
    AUTO_CONTRAST,
    EQUALIZE,
) = range(14)
NUM_OPERATIONS = 14
LEVELS = 256  # of gray
# At full strength, torchvision's: a shear of 0.3, a shift of 150 of 331 pixels, a turn of 30 degrees, factors of 1 +- 0.9,
# 4 bits fewer.
SHEAR, TRANSLATE, TURN, FACTOR, BITS = 0.3, 150 / 331, math.radians(30.0), 0.9, 4
MOST = 30.0  # M at full strength


def rand_augment(x: Tensor, operations: Tensor, signs: Tensor, magnitude: float, *, in_groups: bool = False) -> Tensor:
    """Every image through its N operations.

    Args:
        x: (B, channels, S, S) in [0, 1].
        operations: (B, N), 0 to 13.
        signs: (B, N), 1 or -1: the direction of a move, or whether a factor is above or below 1.
        magnitude: M, of at most 30.
        in_groups: images go through what is due for them alone. The host looks at the numbers, and shapes depend on them:
            much less work, for a CPU.
    """
    strength = magnitude / MOST
    if in_groups:
        x = x.clone()
    for operation, sign in zip(operations.unbind(1), signs.unbind(1), strict=True):
        for kinds, change in CHANGES.items():
            if not in_groups:
                x = change(x, operation, sign, strength)
                continue
            rows = ((operation >= kinds[0]) & (operation <= kinds[-1])).nonzero()[:, 0]
            if len(rows):
                x.index_copy_(0, rows, change(x[rows], operation[rows], sign[rows], strength))
    return x


def _due(operation: Tensor, kind: int, value: Tensor | float, rest: float) -> Tensor:
    """(B, 1, 1): `value` for the images whose operation is of this kind."""
    return torch.where(operation == kind, value, rest)[:, None, None]


def _moved(x: Tensor, operation: Tensor, sign: Tensor, strength: float) -> Tensor:
    is_moved = (operation >= SHEAR_X) & (operation <= ROTATE)
    return choose(is_moved, move(x, operation, sign * strength), x)


def _blended(x: Tensor, operation: Tensor, sign: Tensor, strength: float) -> Tensor:
    less = -sign * FACTOR * strength  # 1 minus the factor
    of_black, of_gray, of_mean = (_due(operation, kind, less, 0.0) for kind in (BRIGHTNESS, COLOR, CONTRAST))
    keep = 1.0 - of_mean - of_gray - of_black
    return torch.stack(blend(x.unbind(1), keep, of_mean, of_gray), dim=1)


def _sharpened(x: Tensor, operation: Tensor, sign: Tensor, strength: float) -> Tensor:
    return sharpen(x, _due(operation, SHARPNESS, -sign * FACTOR * strength, 0.0)[:, None])


def _solarized(x: Tensor, operation: Tensor, sign: Tensor, strength: float) -> Tensor:
    above = _due(operation, SOLARIZE, 1.0 - strength, 2.0)[:, None]
    return torch.where(x >= above, 1.0 - x, x)


def _posterized(x: Tensor, operation: Tensor, sign: Tensor, strength: float) -> Tensor:
    level = (x * (LEVELS - 1)).round()
    step = 2.0 ** round(BITS * strength)
    return choose(operation == POSTERIZE, (level / step).floor() * step / (LEVELS - 1), x)


def _stretched(x: Tensor, operation: Tensor, sign: Tensor, strength: float) -> Tensor:
    return choose(operation == AUTO_CONTRAST, auto_contrast(x), x)


def _equalized(x: Tensor, operation: Tensor, sign: Tensor, strength: float) -> Tensor:
    return choose(operation == EQUALIZE, equalize(x), x)


# The operations of each change, from the first to the last; it leaves the other images as they are.
CHANGES: dict[range, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    range(SHEAR_X, ROTATE + 1): _moved,
    range(BRIGHTNESS, CONTRAST + 1): _blended,
    range(SHARPNESS, SHARPNESS + 1): _sharpened,
    range(SOLARIZE, SOLARIZE + 1): _solarized,
    range(POSTERIZE, POSTERIZE + 1): _posterized,
    range(AUTO_CONTRAST, AUTO_CONTRAST + 1): _stretched,
    range(EQUALIZE, EQUALIZE + 1): _equalized,
}


def move(x: Tensor, operation: Tensor, amount: Tensor) -> Tensor:
    """Shear, shift or turn about the center by `amount` (B,) of the most there is; bilinear, black outside.

    A pixel at offset (u, v) from the center, right and down, shows the image at (u + a v, v) for a shear in x, (u - t, v)
    for a shift, and for a turn by w, counter-clockwise, at (u cos w - v sin w, u sin w + v cos w).
    """
    size = x.shape[-1]
    # grid_sample counts in half sides: pixel i of S has its center at (2 i + 1) / S - 1.
    offset = (2.0 * torch.arange(size, device=x.device) + 1.0) / size - 1.0
    u, v = offset[None, None, :], offset[None, :, None]

    def of(kind: int, most: float) -> Tensor:
        return torch.where(operation == kind, most * amount, 0.0)[:, None, None]

    turn = of(ROTATE, TURN)
    cos, sin = turn.cos(), turn.sin()
    right = cos * u + (of(SHEAR_X, SHEAR) - sin) * v - of(TRANSLATE_X, 2.0 * TRANSLATE)
    down = (of(SHEAR_Y, SHEAR) + sin) * u + cos * v - of(TRANSLATE_Y, 2.0 * TRANSLATE)
    grid = torch.stack((right, down), dim=-1)  # (B, S, S, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0.0, 1.0)


def sharpen(x: Tensor, of_smooth: Tensor) -> Tensor:
    """(1 - s) x + s smooth, s (B, 1, 1, 1); smooth is a mean of 3 x 3 whose middle counts 5 of 13, but for the edges."""
    num_images, channels, size = x.shape[:3]
    weights = torch.full((1, 1, 3, 3), 1.0 / 13.0, device=x.device, dtype=x.dtype)
    flat = x.reshape(num_images * channels, 1, size, size)
    inner = flat[:, :, 1:-1, 1:-1]
    # 3 x 3 alike, and four more of the middle: no number has to be written into a tensor
    change = F.pad(F.conv2d(flat, weights) + inner * (4.0 / 13.0) - inner, (1, 1, 1, 1))
    return (x + of_smooth * change.view_as(x)).clamp(0.0, 1.0)


def auto_contrast(x: Tensor) -> Tensor:
    """Each channel stretched to [0, 1]; one of a single value stays as it is."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    wide = high > low
    stretched = (x - low) / torch.where(wide, high - low, 1.0)
    return torch.where(wide, stretched, x).clamp(0.0, 1.0)


def equalize(x: Tensor) -> Tensor:
    """Each channel in 256 levels, spread so that all levels are about as frequent, as Pillow does it.

    With h the histogram and s = (pixels - h of the highest level) // 255, level i becomes (s // 2 + sum of h below i) // s,
    at most 255; if s is 0, the channel stays as it is.
    """
    flat = x.flatten(2)  # (B, channels, S * S)
    level = (flat * (LEVELS - 1)).round().long()  # whole numbers from here on: nothing is rounded
    counts = torch.zeros(*flat.shape[:2], LEVELS, device=x.device, dtype=torch.long)
    counts = counts.scatter_add(2, level, torch.ones_like(level))
    highest = counts.gather(2, level.amax(dim=2, keepdim=True))  # (B, channels, 1)
    step = (flat.shape[2] - highest) // (LEVELS - 1)
    below = counts.cumsum(dim=2) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=LEVELS - 1)
    spread = table.gather(2, level).to(x.dtype) / (LEVELS - 1)
    return torch.where(step > 0, spread, flat).view_as(x)
