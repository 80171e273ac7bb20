"""Views of images: random crop, flip, warp, color, blur and RandAugment of a whole batch on its device.

Letters: B images in a batch, H and W their height and width, S side of a view, A jitter operations that are on.

`Augment.draw` asks a generator for every random number; `Augment.apply` is a pure function of them. Each image has its
own parameters, yet all shapes are fixed and nothing waits for the device. On a GPU one kernel (`view_kernel`) makes the
views of small images. Kernel and plain form follow torchvision's RandomResizedCrop, ColorJitter, RandomGrayscale and
GaussianBlur on float images, which take one image at a time.

Crop, resize and blur are linear and separable, so each is two (batched) matrix products, rows @ image @ columns^T.
Float32 products are good to about 1e-6; where a caller allows TF32, pixels move by up to about 1e-3, a quarter of a
gray level. Call outside autocast, which would make them bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.config import AugmentConfig, RunConfig
from opencon.data.color import CONTRAST, HUE, choose, jitter, to_gray
from opencon.data.loader import Augmentation
from opencon.data.mixing import Mixer
from opencon.data.rand_augment import NUM_OPERATIONS, rand_augment
from opencon.registry import Registry
from opencon.runtime import has_triton

CROP_TRIES = 10  # torchvision's RandomResizedCrop; then the largest centered crop of an allowed ratio

# Sides of images that the kernel reads: Triton counts in powers of two, and multiplies matrices from 16 on; more than 64
# fill a program. A view may have any side between, since the kernel pads it to the next power of two.
KERNEL_SIDES = (16, 32, 64)


class ViewParams(NamedTuple):
    """The parameters of one view of each of B images; None where the settings switch an operation off."""

    box: Tensor | None = None  # (B, 4) whole pixels: top, left, height, width
    is_flipped: Tensor | None = None  # (B,) bool
    angle: Tensor | None = None  # (B,) radians, counter-clockwise
    shift: Tensor | None = None  # (B, 2) right and down, as a share of the side
    zoom: Tensor | None = None  # (B,) above 1 enlarges
    is_jittered: Tensor | None = None  # (B,) bool
    factors: Tensor | None = None  # (B, A) strength of each jitter operation
    turns: Tensor | None = None  # (B, A) when each is due: a permutation in each row
    is_gray: Tensor | None = None  # (B,) bool
    is_blurred: Tensor | None = None  # (B,) bool
    sigma: Tensor | None = None  # (B,) pixels
    rand_operations: Tensor | None = None  # (B, N) of RandAugment
    rand_signs: Tensor | None = None  # (B, N) 1 or -1


class Augment:
    """Makes views as an `AugmentConfig` describes them: crop and flip, warp, jitter, gray, blur, RandAugment, in order."""

    def __init__(self, config: AugmentConfig, *, image_size: int, channels: int) -> None:
        assert channels in (1, 3), f"images have 1 or 3 channels, not {channels}"
        self.config = config
        self.image_size = image_size
        self.channels = channels
        last = HUE if channels == 3 else CONTRAST  # one channel has neither saturation nor hue
        self.operations = tuple(k for k in range(last + 1) if config.jitter[k] > 0 and config.jitter_p > 0)
        self.kernels = True  # on a GPU: whether a Triton kernel may make the views

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of each image: uint8 (B, channels, H, W) -> float32 (B, channels, S, S) in [0, 1]."""
        height, width = images.shape[-2:]
        return self.apply(images, self.draw(len(images), (height, width), generator))

    def draw(self, num_images: int, source_size: tuple[int, int], generator: torch.Generator) -> ViewParams:
        """Parameters for `num_images` images of `source_size` (H, W), on the generator's device."""
        c = self.config
        params: dict[str, Tensor] = {}

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            u = torch.rand(num_images, *shape, generator=generator, device=generator.device)
            return low + (high - low) * u

        def chance(p: float) -> Tensor:
            return uniform(0.0, 1.0) < p

        if c.crop_scale is not None:
            log_ratio = uniform(math.log(c.crop_ratio[0]), math.log(c.crop_ratio[1]), CROP_TRIES)
            share = uniform(*c.crop_scale, CROP_TRIES)
            params["box"] = crop_box(share, log_ratio.exp(), uniform(0.0, 1.0, 2), source_size, c.crop_ratio)
        if c.flip_p > 0:
            params["is_flipped"] = chance(c.flip_p)
        if c.rotate > 0 or c.shift > 0 or c.zoom != (1.0, 1.0):
            params["angle"] = uniform(-math.radians(c.rotate), math.radians(c.rotate))
            params["shift"] = uniform(-c.shift, c.shift, 2)
            if c.whole_pixels:  # each of 2 n + 1 shifts alike
                n = round(c.shift * self.image_size)
                share = params["shift"] / (2 * c.shift) + 0.5 if c.shift else params["shift"]
                params["shift"] = ((share * (2 * n + 1)).floor().clamp(max=2 * n) - n) / self.image_size
            params["zoom"] = uniform(*c.zoom)
        if self.operations:
            strengths = [c.jitter[k] for k in self.operations]
            params["is_jittered"] = chance(c.jitter_p)
            params["factors"] = torch.stack(
                [
                    uniform(-s, s) if k == HUE else uniform(max(0.0, 1.0 - s), 1.0 + s)
                    for k, s in zip(self.operations, strengths, strict=True)
                ],
                dim=1,
            )
            params["turns"] = uniform(0.0, 1.0, len(self.operations)).argsort(dim=1)
        if c.gray_p > 0 and self.channels == 3:
            params["is_gray"] = chance(c.gray_p)
        if c.blur_p > 0:
            params["is_blurred"] = chance(c.blur_p)
            params["sigma"] = uniform(*c.blur_sigma)
        if c.rand_ops > 0:
            params["rand_operations"] = uniform(0.0, NUM_OPERATIONS, c.rand_ops).long()
            params["rand_signs"] = torch.where(uniform(0.0, 1.0, c.rand_ops) < 0.5, -1.0, 1.0)
        return ViewParams(**params)

    def has_kernel(self, images: Tensor, params: ViewParams) -> bool:
        """Whether the kernel makes these views: small color images, cropped, neither warped nor blurred."""
        fits_in = KERNEL_SIDES[0] <= self.image_size <= KERNEL_SIDES[-1]
        is_small = fits_in and {*images.shape[-2:]}.issubset(KERNEL_SIDES)
        is_simple = params.box is not None and params.angle is None and params.is_blurred is None
        fits = self.channels == 3 and is_small and is_simple
        return fits and self.kernels and images.is_cuda and has_triton()

    def apply(self, images: Tensor, params: ViewParams) -> Tensor:
        """The views that `params` describe: uint8 (B, channels, H, W) -> float32 (B, channels, S, S) in [0, 1]."""
        assert images.dtype == torch.uint8, f"images are uint8, not {images.dtype}"
        assert images.shape[1] == self.channels, f"images have {images.shape[1]} channels, not {self.channels}"
        x = (self.by_kernel if self.has_kernel(images, params) else self.plain)(images, params)
        if params.rand_operations is None or params.rand_signs is None:
            return x
        magnitude, in_groups = self.config.rand_magnitude, not x.is_cuda
        return rand_augment(x, params.rand_operations, params.rand_signs, magnitude, in_groups=in_groups)

    def by_kernel(self, images: Tensor, params: ViewParams) -> Tensor:
        """`apply` but for RandAugment in one Triton kernel, where `has_kernel` says so."""
        from opencon.data.view_kernel import views_kernel  # needs Triton

        p = params
        assert p.box is not None, "the kernel cuts out a box"
        is_on = {"is_flipped": p.is_flipped, "is_jittered": p.is_jittered, "is_gray": p.is_gray}
        return views_kernel(images, p.box, self.image_size, self.operations, p.factors, p.turns, **is_on)

    def plain(self, images: Tensor, params: ViewParams) -> Tensor:
        """The same on any device, for any settings: every image gets every operation, and keeps those that are due."""
        p, size = params, self.image_size
        if p.box is not None:
            x = resized_crop(images, p.box, size, p.is_flipped)
        else:
            x = plain_view(images, size)
            if p.is_flipped is not None:
                x = choose(p.is_flipped, x.flip(-1), x)
        if p.angle is not None and p.shift is not None and p.zoom is not None:
            x = warp(x, p.angle, p.shift, p.zoom)
        if p.factors is not None and p.turns is not None and p.is_jittered is not None:
            x = jitter(x, self.operations, p.factors, p.turns, p.is_jittered)
        if p.is_gray is not None:
            x = choose(p.is_gray, to_gray(x), x)
        if p.is_blurred is not None and p.sigma is not None:
            x = choose(p.is_blurred, blur(x, p.sigma), x)
        return x


@dataclass(frozen=True)
class AugmentationEntry:
    """Who makes views, by name."""

    build: Callable[
        ..., Augmentation
    ]  # (config, image_size=..., channels=...): the section, side and channels of a view
    what: str


AUGMENTATIONS: Registry[AugmentationEntry] = Registry("augmentation")
AUGMENTATIONS.add("standard", AugmentationEntry(Augment, "crop, flip, warp, jitter, gray, blur, RandAugment"))


def build_views(config: RunConfig, *, image_size: int, channels: int) -> tuple[list[Augmentation], list[Mixer | None]]:
    """What makes each view of an image, and what mixes each: the two full views, then those of `config.views`."""
    full = config.augment.size or image_size

    def made(kind: AugmentConfig) -> Augmentation:
        augment = AUGMENTATIONS[kind.name].build(kind, image_size=kind.size or full, channels=channels)
        if isinstance(augment, Augment):
            augment.kernels = config.train.kernels
            # RandAugment stays as it is: compiled for a CPU, by torch 2.13, it took the sign of another operation.
            if config.train.compile:
                augment.plain = torch.compile(augment.plain)  # type: ignore[method-assign]
        return augment

    first = made(config.augment)
    kinds, augments = [config.augment, config.strong or config.augment], [first]
    augments.append(made(config.strong) if config.strong is not None else first)
    for view in config.views:
        kinds += [view] * view.count
        augments += [made(view)] * view.count
    return augments, [Mixer(kind, size=kind.size or full) if kind.mixes else None for kind in kinds]


def plain_view(images: Tensor, image_size: int) -> Tensor:
    """The view for evaluation: uint8 (B, channels, H, W) -> float32 (B, channels, S, S) in [0, 1], resized if need be."""
    x = images.float() / 255.0
    if tuple(images.shape[-2:]) != (image_size, image_size):
        x = F.interpolate(x, (image_size, image_size), mode="bilinear", antialias=True, align_corners=False)
        x = x.clamp(0.0, 1.0)  # the weights add up to 1 only within rounding
    return x


def resized_crop(images: Tensor, box: Tensor, size: int, is_flipped: Tensor | None = None) -> Tensor:
    """Cut out each image's box, resize it to (size, size) and flip it where `is_flipped` says so.

    Equals `F.interpolate(crop, size, mode="bilinear", antialias=True)` of the box's pixels, in [0, 1].
    """
    height, width = images.shape[-2:]
    top, left, box_height, box_width = box.float().unbind(1)  # (B,) each
    rows = _resize_weights(top, box_height, size, height)  # (B, S, H)
    columns = _resize_weights(left, box_width, size, width, is_flipped)  # (B, S, W)
    return _separable(images.float(), rows / 255.0, columns).clamp_(0.0, 1.0)  # weights add up to 1 within rounding


def warp(x: Tensor, angle: Tensor, shift: Tensor, zoom: Tensor) -> Tensor:
    """Zoom each (S, S) image about its center, rotate it counter-clockwise, then shift it; bilinear, black outside.

    A view's pixel at offset o from the center (x right, y down) shows the image at

        (1 / zoom) * [[cos, -sin], [sin, cos]] @ (o - S * shift)
    """
    size = x.shape[-1]
    # grid_sample counts in half sides: pixel i of S has its center at (2 i + 1) / S - 1.
    offset = (2.0 * torch.arange(size, device=x.device) + 1.0) / size - 1.0
    to_right = offset[None, None, :] - 2.0 * shift[:, 0, None, None]  # (B, 1, S)
    down = offset[None, :, None] - 2.0 * shift[:, 1, None, None]  # (B, S, 1)
    cos, sin = (angle.cos() / zoom)[:, None, None], (angle.sin() / zoom)[:, None, None]
    grid = torch.stack((cos * to_right - sin * down, sin * to_right + cos * down), dim=-1)  # (B, S, S, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of (S, S) images, `sigma` (B,) in pixels, edges reflected.

    The kernel is a tenth of the side, as in SimCLR (arXiv:2002.05709, appendix A), made odd, and at least 3 wide.
    """
    size = x.shape[-1]
    radius = max(3, size // 10) // 2
    i = torch.arange(size, device=x.device)
    t = torch.arange(radius + 1, device=x.device)
    to, source, distance, last = i[:, None], i, t[:, None, None], size - 1
    # Pixel j is read at j and at its mirror images -j and 2 (S - 1) - j; a pixel on an edge has only one mirror image.
    reads = ((to - source).abs() == distance).float()  # (radius + 1, S, S): how often i reads j at this distance
    reads += (to + source == distance) & (source > 0)
    reads += (2 * last - to - source == distance) & (source < last)
    taps = torch.exp(-0.5 * (t / sigma[:, None]) ** 2)  # (B, radius + 1)
    taps = taps / (2.0 * taps.sum(dim=1, keepdim=True) - 1.0)  # the middle one is read once, the others twice
    weights = (taps @ reads.flatten(1)).view(-1, size, size)  # (B, S, S)
    return _separable(x, weights, weights).clamp_(0.0, 1.0)


def _separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows (B, S, H) @ x (B, channels, H, W) @ columns^T (B, W, S), for every channel."""
    num_images, channels, height = x.shape[:3]
    x = (x.flatten(1, 2) @ columns.mT).view(num_images, channels, height, -1)  # (B, channels, H, S)
    return rows[:, None] @ x


def _resize_weights(start: Tensor, length: Tensor, size: int, source: int, is_flipped: Tensor | None = None) -> Tensor:
    """Share of each of `source` pixels in each of `size` pixels that cover [start, start + length): (B, S, source).

    The shares are a triangle around the new pixel's center. Its half width is one new pixel, or one old pixel if that is
    larger.
    """
    start, length = start[:, None], length[:, None]  # (B, 1)
    step = length / size  # old pixels to a new one
    along = step * (torch.arange(size, device=start.device) + 0.5)  # (B, S)
    if is_flipped is not None:
        along = torch.where(is_flipped[:, None], length - along, along)
    pixel = torch.arange(source, device=start.device) + 0.5  # (source,)
    # At least 1/2 inside the box and at most -1/2 outside it, so that twice this cuts off what lies outside.
    depth = torch.minimum(pixel - start, start + length - pixel)  # (B, source)
    distance = (pixel - (start + along)[:, :, None]).abs_()  # (B, S, source)
    weights = 1.0 - distance / step.clamp(min=1.0)[:, :, None]
    weights = torch.minimum(weights, 2.0 * depth[:, None, :]).clamp_(min=0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


def crop_box(
    share: Tensor, ratio: Tensor, corner: Tensor, source_size: tuple[int, int], allowed: tuple[float, float]
) -> Tensor:
    """The first try (B, tries) that fits, or a centered crop if none does: (B, 4) as in `ViewParams.box`.

    Args:
        share: (B, tries) of the image's area.
        ratio: (B, tries) width to height.
        corner: (B, 2) in [0, 1): top and left, as a share of the room that the box leaves.
        source_size: height and width of the images.
        allowed: least and largest ratio of the centered crop.
    """
    height, width = source_size
    area = share * (height * width)
    tried = torch.stack(((area / ratio).sqrt().round(), (area * ratio).sqrt().round()), dim=-1)  # (B, tries, 2)
    h, w = tried.unbind(-1)
    fits = (h >= 1) & (h <= height) & (w >= 1) & (w <= width)  # (B, tries)
    first = fits.int().argmax(dim=1)  # argmax takes the first of equals
    h, w = tried[torch.arange(len(first), device=first.device), first].unbind(-1)  # (B,)
    top = (corner[:, 0] * (height - h + 1)).floor()  # u < 1 makes u * n < n in floating point, too
    left = (corner[:, 1] * (width - w + 1)).floor()
    box = torch.stack((top, left, h, w), dim=1)

    low, high = allowed
    center_h = min(height, max(1, round(width / low)))
    center_w = min(width, max(1, round(height * high)))
    center = ((height - center_h) // 2, (width - center_w) // 2, center_h, center_w)
    fallback = torch.stack([torch.full_like(h, value) for value in center], dim=1)
    return torch.where(fits.any(dim=1, keepdim=True), box, fallback).long()
