"""Load images from arrays or from the files of a listing.

Whatever the source, the result is an `ImageSet`: every image as uint8 in one tensor on the CPU or, where files would take
too much memory, a `StreamedImages` instead. An image that cannot be read is set aside and named; it is an error only where
a class is left without images.

Letters: M images, H height, W width.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from opencon.data.decoders import PIECE, DecodeIn, Slot
from opencon.data.listings import HEIC_SUFFIXES, OTHER_SUFFIXES, Listing, printable
from opencon.data.pixel_budget import BUDGET
from opencon.data.streaming import Images, StreamedImages
from opencon.errors import DataError
from opencon.registry import did_you_mean

# Twice Pillow's own warning level, which is where Pillow refuses too. Fixed here, so that the same images are read
# whatever the program around us has set in Pillow. A 108 megapixel phone photo still passes.
MAX_PIXELS = 178_956_970

MOST_NAMES = 20  # classes named in a message, ours
DECODE_THREADS = 8  # ours: Pillow releases the lock while decoding; more threads only cost memory


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with their true classes. The classes are for splitting and scoring only, never for a training step."""

    images: Images  # (M, channels, H, W) uint8, on the CPU
    classes: Tensor  # (M,) int64; -1 where nobody knows
    class_names: tuple[str, ...]
    files: tuple[str, ...] = ()  # where the images came from, if from files
    problems: tuple[str, ...] = ()  # files set aside, with the reason
    given: Tensor | None = None  # (M,) bool: which carry a label, where the files say so; None: the split draws them

    def __post_init__(self) -> None:
        images, classes = self.images, self.classes
        if images.dtype != torch.uint8 or len(images.shape) != 4 or 0 in images.shape:
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
        if low < (0 if self.given is None else -1) or high >= len(self.class_names):
            raise DataError(
                f"classes lie between {low} and {high}; with {len(self.class_names)} class names they must lie "
                f"between 0 and {len(self.class_names) - 1}."
            )
        if len(set(self.class_names)) != len(self.class_names):
            twice = next(name for name, count in Counter(self.class_names).items() if count > 1)
            raise DataError(f"the class name {twice!r} is given twice. Class names must differ.")
        if self.files and len(self.files) != len(images):
            raise DataError(f"there are {len(images)} images but {len(self.files)} file names.")
        if self.given is not None and bool((self.given & (classes < 0)).any()):
            raise DataError("an image that carries a label has no class. Give its class, or no label.")

    def __len__(self) -> int:
        return len(self.images)

    def seen_first(self, names: Sequence[str]) -> ImageSet:
        """The same images with these classes first; where the files give labels, only those of these classes count."""
        unknown = next((name for name in names if name not in self.class_names), None)
        if unknown is not None:
            hint = did_you_mean(unknown, self.class_names)
            some = ", ".join(self.class_names[:MOST_NAMES]) + (", ..." if len(self.class_names) > MOST_NAMES else "")
            raise DataError(f"split.seen_classes: there is no class {unknown!r}.{hint} There are: {some}.")
        order = (*names, *(name for name in self.class_names if name not in set(names)))
        place = {name: c for c, name in enumerate(order)}
        number = torch.tensor([place[name] for name in self.class_names] + [-1])  # the last one stands for -1
        classes = number[self.classes]
        given = None if self.given is None else self.given & (classes < len(names))
        return replace(self, classes=classes, class_names=order, given=given)


# --- arrays -----------------------------------------------------------------------------------------------------------


def from_arrays(images: Any, classes: Any, class_names: Sequence[str] | None = None) -> ImageSet:
    """Images from NumPy arrays or tensors.

    Args:
        images: (M, H, W), (M, H, W, channels) or (M, channels, H, W); uint8, or floating point in [0, 1].
        classes: (M,) whole numbers from 0.
        class_names: one per class; None: the numbers themselves.
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


def _described(values: Images) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"


# --- files ------------------------------------------------------------------------------------------------------------


def load_listing(
    listing: Listing, image_size: int, memory_gb: float | None = math.inf, decode_in: DecodeIn = "auto"
) -> ImageSet:
    """The images of a listing; files that cannot be read end in `problems`.

    They are decoded now or, if they would take more than `memory_gb` (None: `spare_memory_gb`), when they are needed. Then
    only their headers are read here, and a file with later damage fails during training (see `StreamedImages`).
    """
    paths = listing.paths
    images: Images
    if len(paths) * 3 * image_size**2 / 1e9 <= (spare_memory_gb() if memory_gb is None else memory_gb):
        images, kept, problems = read_images(paths, image_size)
    else:
        kept, problems = _sift(paths)
        images = StreamedImages([paths[i] for i in kept], image_size, _decode, decode_in=decode_in)
    if not kept:
        raise DataError(f"none of the {len(paths)} images can be read. The first: {problems[0]}")
    classes = torch.tensor([listing.classes[i] for i in kept])
    given = None if listing.given is None else torch.tensor([listing.given[i] for i in kept])
    needed = listing.given or [True] * len(paths)  # a class that only serves to measure may be lost
    have = {listing.classes[i] for i in kept if needed[i]}
    for problem, i in zip(problems, _others(kept, paths), strict=True):
        if needed[i] and listing.classes[i] not in have:
            name = listing.class_names[listing.classes[i]]
            raise DataError(f"class {name!r} has no readable image. One of its files: {problem}")
    files = tuple(str(listing.paths[i]) for i in kept)
    return ImageSet(images, classes, listing.class_names, files, listing.problems + problems, given)


def spare_memory_gb() -> float:
    """Half of the memory of this machine, or of its GPU if that is smaller: the images live in both.

    Ours: the other half is for the network, its activations and other programs.
    """
    sizes = [8e9]  # if the system does not tell
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if torch.cuda.is_available():
        sizes.append(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return min(sizes) / 2 / 1e9 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks on one machine share its memory


def read_images(
    paths: Sequence[Path], image_size: int, workers: Executor | None = None
) -> tuple[Tensor, list[int], tuple[str, ...]]:
    """Decode image files. Returns the images in order, the indices of their paths, and a line for each that failed.

    Each is turned upright, made RGB, scaled so that its short side is `image_size`, and cropped to the central square.

    Args:
        paths: the files.
        image_size: in pixels.
        workers: who decodes; None: threads of their own.
    """
    with contextlib.ExitStack() as stack:
        if workers is None:
            workers = stack.enter_context(ThreadPoolExecutor(DECODE_THREADS))
        slot = Slot.new((len(paths), 3, image_size, image_size), workers)
        with _quiet():
            reasons = [why for piece in slot.fill(workers, decode_or_why, paths) for why in piece.result()]
    kept, problems = _sifted(paths, reasons)
    images = slot.pixels
    return images if len(kept) == len(paths) else images[kept], kept, problems


def decode_or_why(path: Path, image_size: int) -> npt.NDArray[np.uint8] | str:
    """One image (3, image_size, image_size), or why it cannot be read, in words that follow its name."""
    try:
        return _decode(path, image_size)
    except Exception as err:  # a damaged file can raise nearly anything inside Pillow's decoders
        return _why_not(err, path)


def _sift(paths: Sequence[Path]) -> tuple[list[int], tuple[str, ...]]:
    """Open the paths in threads. Returns the indices of those that are images, and a line for each that is not."""

    def reason(path: Path) -> str | None:
        try:
            _open(path).close()
        except Exception as err:  # as in `decode_or_why`
            return _why_not(err, path)
        return None

    def reasons_of_piece(first: int) -> list[str | None]:
        return [reason(path) for path in paths[first : first + PIECE]]

    with _quiet(), ThreadPoolExecutor(DECODE_THREADS) as pool:
        reasons = [why for piece in pool.map(reasons_of_piece, range(0, len(paths), PIECE)) for why in piece]
    return _sifted(paths, reasons)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS decides
        yield


def _sifted(paths: Sequence[Path], reasons: list[str | None]) -> tuple[list[int], tuple[str, ...]]:
    kept = [i for i, why in enumerate(reasons) if why is None]
    return kept, tuple(f"{printable(path)} {why}" for path, why in zip(paths, reasons, strict=True) if why)


def _why_not(err: Exception, path: Path) -> str:
    return _why(err, path.suffix, os.path.exists(path) and os.path.getsize(path) == 0)


def _why(err: Exception, suffix: str, is_empty: bool) -> str:
    """Why an image cannot be read, in words that follow its name."""
    suffix = suffix.lower()
    if isinstance(err, Image.DecompressionBombError):
        return f"has too many pixels to decode (the limit is {MAX_PIXELS:,}). Shrink it."
    if isinstance(err, UnidentifiedImageError):
        if suffix in OTHER_SUFFIXES:
            return f"is in a format that cannot be read ({suffix}). Convert it to JPEG."
        if suffix in HEIC_SUFFIXES and not can_read_heic():
            return "is HEIC, which needs a package that is missing. Run: pip install 'opencon[heic]'"
        return "is empty" if is_empty else "is not an image, whatever its name says"
    return f"cannot be decoded ({type(err).__name__}: {err})"


@functools.cache
def can_read_heic() -> bool:
    """Whether Pillow reads HEIC from now on, which takes the extra `heic`."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


def decode_bytes(content: bytes, name: str, size: int) -> npt.NDArray[np.uint8] | str:
    """One image (3, size, size) from the bytes of its file, as `read_images` decodes it; or why it cannot be read."""
    if Path(name).suffix.lower() in HEIC_SUFFIXES:
        can_read_heic()
    try:
        with _checked(Image.open(io.BytesIO(content))) as file:
            return _square(file, size)
    except Exception as err:  # as in `decode_or_why`
        return _why(err, Path(name).suffix, not content)


def _open(path: Path) -> Image.Image:
    """Open a file whose header says that it is an image of an acceptable size."""
    if not path.is_file():  # a pipe would block forever, and a dangling link deserves a plain message
        raise FileNotFoundError("not a file")
    if path.suffix.lower() in HEIC_SUFFIXES:
        can_read_heic()
    return _checked(Image.open(path))


def _checked(file: Image.Image) -> Image.Image:
    if file.width * file.height > MAX_PIXELS:
        file.close()
        raise Image.DecompressionBombError
    return file


def _decode(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """One image as (3, size, size)."""
    with _open(path) as file:
        return _square(file, size)


def _square(file: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """Upright, RGB, the central square, (3, size, size)."""
    # A JPEG decodes at 1/2, 1/4 or 1/8, as long as a quarter more is left than we need. Ours: half as much again costs half
    # as much time again. In two photos, pixels are off by 0.4 and 0.9 gray levels in the mean instead of 0.2 and 0.3.
    file.draft(None, (size * 5 // 4, size * 5 // 4))
    with BUDGET.take(file.width * file.height):
        ImageOps.exif_transpose(file, in_place=True)
        image = _to_rgb(file)
        # Scaling only the central square equals scaling everything and then cropping, but a panorama does not grow first.
        short = min(image.size)
        left, top = (image.width - short) / 2, (image.height - short) / 2
        # Bicubic, as in the evaluation transforms of DINO and EfficientNet; Pillow widens the filter when shrinking.
        square = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + short, top + short))
        del image
    return np.moveaxis(np.array(square, dtype=np.uint8), 2, 0)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image  # converting would copy it
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion would clip at 255
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating point pixels have no fixed white; save it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        # The color under transparent pixels is arbitrary, and people see such images on a light page.
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _others(kept: list[int], paths: Sequence[Path]) -> list[int]:
    taken = set(kept)
    return [i for i in range(len(paths)) if i not in taken]
