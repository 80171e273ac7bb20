"""Color operations on a batch, each image with its own factors, in its own order.

Letters: B images in a batch, S side in pixels, A jitter operations that are switched on.

Images are float, (B, 3, S, S) or (B, 1, S, S), in [0, 1], and stay there. A single channel is its own gray. Functions that
mix channels take them one by one: when compiled, they read a pixel once for all three.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Channels = tuple[Tensor, ...]  # an image's one or three, (B, S, S) each

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # in the order of AugmentConfig.jitter


def choose(is_new: Tensor, new: Tensor, x: Tensor) -> Tensor:
    """`new` for the images marked in `is_new` (B,), `x` for the others; both (B, ...).

    `torch.lerp` is exact at both ends, and on a CPU several times as fast as `torch.where`.
    """
    return torch.lerp(x, new, is_new.view(-1, *[1] * (x.dim() - 1)).to(x.dtype))


def to_gray(x: Tensor) -> Tensor:
    """Luma of ITU-R 601, with the digits that torchvision uses (they add up to 0.9999): (B, 1, S, S)."""
    return x if x.shape[1] == 1 else gray_of(x.unbind(1))[:, None]


def gray_of(channels: Channels) -> Tensor:
    """The same luma from single channels: (B, S, S)."""
    if len(channels) == 1:
        return channels[0]
    red, green, blue = channels
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def blend(channels: Channels, keep: Tensor, of_mean: Tensor | None, of_gray: Tensor | None) -> Channels:
    """clamp(keep * x + of_mean * (mean gray of the image) + of_gray * gray, 0, 1), a number (B, 1, 1) for each image.

    This is brightness, contrast or saturation: a factor f keeps f of the image and takes 1 - f of black, of its mean gray,
    or of its gray version. With (1, 0, 0) an image stays as it is; None is 0 for all images.
    """
    base = torch.zeros_like(keep)
    if of_mean is not None or of_gray is not None:
        gray = gray_of(channels)
        if of_mean is not None:
            base = gray.mean(dim=(1, 2), keepdim=True) * of_mean
        if of_gray is not None:
            base = torch.addcmul(base, gray, of_gray)
    return tuple(torch.addcmul(base, x, keep).clamp_(0.0, 1.0) for x in channels)


def shift_hue(channels: Channels, shift: Tensor) -> Channels:
    """Turn the hue of each image by `shift` (B,), as a share of the full circle; value and saturation stay.

    With v = max, m = min and c = v - m over the channels r, g, b, the hue in sixths of the circle (red 0, green 2,
    blue 4) is h = 1 + (g + b - r - m) / c, negative if b > g: this holds in each of the six cases of HSV. The way back,
    with d in [0, 3] the distance on the circle from h to the channel's own hue, is

        channel = v - c * clamp(d - 1, 0, 1)

    A gray pixel has c = 0 and stays as it is, whatever its hue.
    """
    r, g, b = channels
    v = torch.maximum(torch.maximum(r, g), b)
    m = torch.minimum(torch.minimum(r, g), b)
    c = v - m
    h = torch.copysign(1.0 + (g + b - r - m) / c.clamp(min=1e-12), g - b) + 6.0 * shift[:, None, None]
    h = h - 6.0 * (h / 6.0).floor()  # in [0, 6]

    def channel(own: float) -> Tensor:
        # On the circle d = min(a, 6 - a) = 3 - |a - 3| with a = |h - own|; in place, which a CPU's cache likes.
        below = (h - own).abs_().sub_(3.0).abs_().neg_().add_(2.0).clamp_(0.0, 1.0)
        return torch.addcmul(v, c, below, value=-1.0)

    return channel(0.0), channel(2.0), channel(4.0)


def jitter(x: Tensor, operations: Sequence[int], factors: Tensor, turns: Tensor, is_on: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue; each image has its own order.

    A turn is one `blend` for all images. Hue costs several times as much, so it is computed once for all images, between
    two rounds of turns. In the first round an image takes its turns before hue, in the second those after it.

    Args:
        x: (B, channels, S, S).
        operations: the A of the four that are on, increasing. Python knows them, so that the others cost nothing.
        factors: (B, A); around 1, for hue around 0.
        turns: (B, A), a permutation in each row: when each operation is due.
        is_on: bool (B,); the other images stay as they are.
    """
    blends = [operation for operation in operations if operation != HUE]  # hue is the last one

    def blended(channels: Channels, turn: Tensor, is_now: Tensor) -> Channels:
        """The blends of some turns (T,), for the images that `is_now` (B, T) marks."""
        own_turns, own_factors = (values[:, : len(blends)].T for values in (turns, factors))  # (blends, B)
        is_due = (own_turns == turn[:, None, None]) & is_now.T[:, None]  # (T, blends, B)
        shares = torch.where(is_due, 1.0 - own_factors, 0.0)[..., None, None]  # of black or a gray
        keep, of = 1.0 - shares.sum(dim=1), dict(zip(blends, shares.unbind(1), strict=True))
        for t in range(len(turn)):
            of_mean, of_gray = (of[operation][t] if operation in of else None for operation in (CONTRAST, SATURATION))
            channels = blend(channels, keep[t], of_mean, of_gray)
        return channels

    turn, hue_turn, is_on = torch.arange(len(operations), device=x.device), turns[:, -1:], is_on[:, None]
    channels = x.unbind(1)
    if HUE not in operations:
        return torch.stack(blended(channels, turn, is_on), dim=1)
    channels = blended(channels, turn[:-1], is_on & (hue_turn > turn[:-1]))
    turned = shift_hue(channels, factors[:, -1])
    channels = tuple(choose(is_on, new, old) for new, old in zip(turned, channels, strict=True))
    return torch.stack(blended(channels, turn[1:], is_on & (hue_turn < turn[1:])), dim=1)
