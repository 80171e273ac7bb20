"""Where images come from: arrays, a folder with one sub-folder per class, or a list file.

Whatever the source, the result is an `ImageSet`: every image as uint8 in one tensor on the CPU. An image that cannot be
read is set aside and named; it is fatal only where a class is left without images.

Letters: M images, H height, W width.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from opencon.data.listings import Listing, list_folder, list_from_file, printable
from opencon.errors import DataError

# Twice Pillow's own warning level, which is where Pillow refuses too. Fixed here, so that the same images are read
# whatever the program around us has set in Pillow. A 108 megapixel phone photo still passes.
MAX_PIXELS = 178_956_970

DECODE_THREADS = 8  # ours: Pillow releases the lock while decoding; more threads only cost memory


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with their true classes. The classes are for splitting and scoring only, never for a training step."""

    images: Tensor  # (M, channels, H, W) uint8, on the CPU
    classes: Tensor  # (M,) int64
    class_names: tuple[str, ...]
    files: tuple[str, ...] = ()  # where the images came from, if from files
    problems: tuple[str, ...] = ()  # files set aside, with the reason

    def __post_init__(self) -> None:
        images, classes = self.images, self.classes
        if images.dtype != torch.uint8 or images.ndim != 4 or images.numel() == 0:
            raise DataError(
                f"images are {_described(images)}; expected uint8 of shape (M, channels, H, W) with at least one image."
            )
        if images.shape[1] not in (1, 3):
            raise DataError(f"images have {images.shape[1]} channels; expected 1 (gray) or 3 (RGB).")
        if classes.dtype != torch.int64 or classes.ndim != 1:
            raise DataError(f"classes are {_described(classes)}; expected int64 of shape (M,).")
        if len(classes) != len(images):
            raise DataError(f"there are {len(images)} images but {len(classes)} classes. Give one class per image.")
        low, high = int(classes.min()), int(classes.max())
        if low < 0 or high >= len(self.class_names):
            raise DataError(
                f"classes lie between {low} and {high}; with {len(self.class_names)} class names they must lie "
                f"between 0 and {len(self.class_names) - 1}."
            )
        if len(set(self.class_names)) != len(self.class_names):
            twice = next(name for name, count in Counter(self.class_names).items() if count > 1)
            raise DataError(f"the class name {twice!r} is given twice. Class names must differ.")
        if self.files and len(self.files) != len(images):
            raise DataError(f"there are {len(images)} images but {len(self.files)} file names.")

    def __len__(self) -> int:
        return len(self.images)


# --- arrays -----------------------------------------------------------------------------------------------------------


def from_arrays(images: Any, classes: Any, class_names: Sequence[str] | None = None) -> ImageSet:
    """Images from NumPy arrays or tensors.

    Args:
        images: (M, H, W), (M, H, W, channels) or (M, channels, H, W); uint8, or floating point in [0, 1].
        classes: (M,) whole numbers from 0.
        class_names: one per class; the numbers themselves if not given.
    """
    pixels, labels = _channels_first(_tensor(images, "images")), _tensor(classes, "classes")
    if pixels.is_floating_point():
        if not bool(pixels.isfinite().all()):
            bad = int((~pixels.isfinite()).flatten(1).any(dim=1).sum())
            raise DataError(f"{bad} of {len(pixels)} images hold NaN or infinite pixels. Remove or repair them.")
        if pixels.numel() and not 0 <= float(pixels.min()) <= float(pixels.max()) <= 1:
            raise DataError(
                f"floating point images must lie in [0, 1] but reach from {float(pixels.min()):g} to "
                f"{float(pixels.max()):g}. Divide by their largest possible value, or give uint8."
            )
        pixels = (pixels.float() * 255).round().to(torch.uint8)
    elif pixels.dtype != torch.uint8:
        raise DataError(f"images are {_described(pixels)}; give uint8, or floating point in [0, 1].")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise DataError(f"classes are {_described(labels)}; give whole numbers from 0.")
    labels = labels.long()
    if class_names is None:
        class_names = [str(c) for c in range(int(labels.max()) + 1)] if labels.numel() else []
    return ImageSet(pixels, labels, tuple(class_names))


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as err:
        raise DataError(f"{what} cannot be read as an array of numbers ({err}).") from err


def _channels_first(pixels: Tensor) -> Tensor:
    if pixels.ndim == 3:
        return pixels[:, None].contiguous()
    first, last = (pixels.ndim == 4 and pixels.shape[axis] in (1, 3) for axis in (1, 3))
    if first and last:
        raise DataError(
            f"images of shape {tuple(pixels.shape)} could have their channels first or last. Give (M, H, W), or images "
            f"whose height and width are neither 1 nor 3."
        )
    if not first and not last:
        raise DataError(
            f"images have shape {tuple(pixels.shape)}; expected (M, H, W), (M, H, W, channels) or (M, channels, H, W) "
            f"with 1 or 3 channels."
        )
    return (pixels if first else pixels.permute(0, 3, 1, 2)).contiguous()


def _described(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"


# --- files ------------------------------------------------------------------------------------------------------------


def from_folder(root: str | Path, image_size: int) -> ImageSet:
    """Images from a folder with one sub-folder per class; the classes are the sub-folders in sorted order."""
    return load_listing(list_folder(root), image_size)


def from_list(list_file: str | Path, image_size: int, root: str | Path | None = None) -> ImageSet:
    """Images named in a text or CSV file together with their classes; see `list_from_file` for its form."""
    return load_listing(list_from_file(list_file, root), image_size)


def load_listing(listing: Listing, image_size: int) -> ImageSet:
    """Decode the files of a listing; those that cannot be read end in `problems`."""
    images, kept, problems = read_images(listing.paths, image_size)
    if not kept:
        raise DataError(f"none of the {len(listing.paths)} images can be read. The first: {problems[0]}")
    classes = torch.tensor([listing.classes[i] for i in kept])
    counts = torch.bincount(classes, minlength=len(listing.class_names))  # (C,)
    for c, name in enumerate(listing.class_names):
        if counts[c] == 0:
            lost = next(
                p for p, i in zip(problems, _others(kept, listing.paths), strict=True) if listing.classes[i] == c
            )
            raise DataError(f"class {name!r} has no readable image. One of its files: {lost}")
    files = tuple(str(listing.paths[i]) for i in kept)
    return ImageSet(images, classes, listing.class_names, files, listing.problems + problems)


def read_images(paths: Sequence[Path], image_size: int) -> tuple[Tensor, list[int], tuple[str, ...]]:
    """Decode image files: the images in order, which of the paths they are, and a line for each that failed.

    Each is turned upright, made RGB, scaled so that its short side is `image_size`, and cropped to the central square.
    """
    images = torch.empty(len(paths), 3, image_size, image_size, dtype=torch.uint8)

    def fill(i: int) -> str | None:
        try:
            images[i] = torch.from_numpy(_decode(paths[i], image_size))
        except Image.DecompressionBombError:
            return f"has too many pixels to decode (the limit is {MAX_PIXELS:,}). Shrink it."
        except UnidentifiedImageError:
            return "is empty" if os.path.getsize(paths[i]) == 0 else "is not an image, whatever its name says"
        except Exception as err:  # a damaged file can raise nearly anything inside Pillow's decoders
            return f"cannot be decoded ({type(err).__name__}: {err})"
        return None

    with warnings.catch_warnings(), ThreadPoolExecutor(DECODE_THREADS) as pool:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS decides
        reasons = list(pool.map(fill, range(len(paths))))
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    problems = tuple(f"{printable(path)} {reason}" for path, reason in zip(paths, reasons, strict=True) if reason)
    return images if len(kept) == len(paths) else images[kept], kept, problems


def _decode(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """One image as (3, size, size)."""
    if not path.is_file():  # a pipe would block for ever, a dangling link is worth a plain word
        raise FileNotFoundError("not a file")
    with Image.open(path) as file:
        if file.width * file.height > MAX_PIXELS:
            raise Image.DecompressionBombError
        file.draft(None, (2 * size, 2 * size))  # a JPEG decodes at 1/2, 1/4 or 1/8, still twice the size we need
        image = _to_rgb(ImageOps.exif_transpose(file))
    # Scaling only the central square is scaling everything, then cropping; but a panorama does not grow on the way.
    short = min(image.size)
    left, top = (image.width - short) / 2, (image.height - short) / 2
    # Bicubic, as in the evaluation transforms of DINO and EfficientNet; Pillow widens the filter when shrinking.
    square = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + short, top + short))
    return np.moveaxis(np.array(square, dtype=np.uint8), 2, 0)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion would clip at 255
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating point pixels have no fixed white; save it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        # What lies under transparent pixels is arbitrary, and people see such images on a light page.
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _others(kept: list[int], paths: Sequence[Path]) -> list[int]:
    taken = set(kept)
    return [i for i in range(len(paths)) if i not in taken]
