"""Photos that must not count in a fit: near-duplicates beyond the first, and pictures of nothing.

A near-duplicate (the same photo smaller, compressed again, or a copy) looks like a dense group of its own. So one of them
counts for all; the others get what it gets. Two photos are twins where their features are close, which is quick to look up,
and their perceptual hashes too, which needs their pixels.

A picture of nothing is blank (one color, all but rounding) or noise (pixels that know nothing of their neighbors). Several
of them would be a group. They are unlike everything instead.

Letters: n photos, F features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from opencon.data.pixel_budget import BUDGET
from opencon.openworld.fit import Fitted
from opencon.openworld.model import Prediction
from opencon.runtime import generator

CLOSE = 0.7  # distance of unit features below which photos may be twins, ours: one at half its size is at 0.5 to 0.66
HASH_SIDE, HASH_BITS = 8, 10  # 64 bits, of which so many may differ: the usual numbers for a difference hash
LOOKED_UP = 8  # nearest photos of each that are compared; ours
DIRECTIONS, SLACK = 128, 1.3  # random directions in which they are looked up, and by how much these may be off; ours
CHUNK = 1024  # photos compared with all at a time
# Bytes per pixel of a compressed photo, ours, wide: outside of these a picture may be blank or noise, and is looked at.
USUAL_BYTES = (0.05, 0.5)
FEW_PIXELS = 192 * 192  # ours: a picture up to here may be blank all the same, because the head of a file is most of it
FLAT = 6.0  # gray levels between the darkest and the brightest hundredth of a blank picture, ours: what JPEG adds
FREE = 0.15  # correlation of neighboring pixels below which a picture is noise; nearly all photos have 0.8 and more
LOOK = 256  # side of the central part in which noise is looked for
THREADS = 4  # ours: they mostly wait for the disk and for decoding
CPU = torch.device("cpu")


@dataclass(frozen=True)
class SetAside:
    """Which of n photos do not count in the fit."""

    twin_of: Tensor  # (n,) the photo that counts for this one, or -1
    is_nothing: Tensor  # (n,) bool: blank or noise

    @property
    def counts(self) -> Tensor:
        """(n,) bool."""
        return (self.twin_of < 0) & ~self.is_nothing


def find(x: Tensor, paths: Sequence[Path], labels: Tensor, fewest: int) -> SetAside:
    """Look for twins and pictures of nothing among n photos.

    Args:
        x: (n, F) features.
        paths: n files.
        labels: (n,) the user's class, or -1. A labeled photo is never nothing, and only a twin of one with its label.
        fewest: photos that must be left; where fewer would be, none is set aside.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        is_nothing = torch.tensor(list(pool.map(shows_nothing, paths)), dtype=torch.bool) & (labels < 0)
        twin_of = _twins(x, paths, labels, pool)
    twin_of[is_nothing] = -1
    twin_of[(twin_of >= 0) & is_nothing[twin_of.clamp(min=0)]] = -1
    found = SetAside(twin_of, is_nothing)
    if int(found.counts.sum()) < fewest or not bool((labels[found.counts] < 0).any()):
        return SetAside(torch.full_like(labels, -1), torch.zeros_like(is_nothing))
    return found


def fit_those_that_count(x: Tensor, aside: SetAside, fit: Callable[[Tensor], Fitted]) -> Fitted:
    """Fit to the photos that count (`fit` gets their indices), and say of every photo what the model makes of it."""
    rows = aside.counts.nonzero()[:, 0]
    fitted = fit(rows)
    if len(rows) == len(x):
        return fitted
    others = (~aside.counts).nonzero()[:, 0]
    model = fitted.model
    said, near = model.predict(x[others]), model.strangers(x[others].float())[1]
    said = replace(said, unlike_everything=said.unlike_everything | aside.is_nothing[others])
    order = torch.cat([rows, others]).argsort()

    def joined(own: Tensor, more: Tensor) -> Tensor:
        return torch.cat([own, more])[order]

    fields = {name: joined(value, getattr(said, name)) for name, value in vars(fitted.prediction).items()}
    z = joined(fitted.z, model.embed(x[others].float()))
    near = near[:, : fitted.near.shape[1]]  # of few rows, each that was fitted has one neighbor less than a new one
    return replace(fitted, z=z, prediction=Prediction(**fields), near=joined(fitted.near, near))


# --- twins ------------------------------------------------------------------------------------------------------------


def _twins(x: Tensor, paths: Sequence[Path], labels: Tensor, pool: ThreadPoolExecutor) -> Tensor:
    """(n,) the photo of which each is a twin, or -1. The one that counts is labeled if any is, else the first."""
    pairs = _close_pairs(F.normalize(x.float(), dim=1))
    looked_at = sorted({i for pair in pairs for i in pair})
    hashes = dict(zip(looked_at, pool.map(difference_hash, (paths[i] for i in looked_at)), strict=True))
    label = labels.tolist()
    twin_of = {i: i for i in looked_at}

    def first_of(i: int) -> int:
        while twin_of[i] != i:
            i = twin_of[i]
        return i

    for a, b in pairs:
        one, other = hashes[a], hashes[b]
        if one is None or other is None or int((one != other).sum()) > HASH_BITS:
            continue
        first, second = sorted((first_of(a), first_of(b)), key=lambda i: (label[i] < 0, i))
        if label[second] in (-1, label[first]):  # two labels that differ: both count
            twin_of[second] = first
    found = torch.full((len(paths),), -1)
    for i in looked_at:
        if first_of(i) != i:
            found[i] = first_of(i)
    return found


def _close_pairs(z: Tensor) -> list[tuple[int, int]]:
    """Pairs of unit rows that are close, among the nearest of each: looked up in a few directions, then measured in all."""
    dims = min(DIRECTIONS, z.shape[1])
    turn = torch.randn(z.shape[1], dims, generator=generator(CPU, 0)) / dims**0.5
    flat = z @ turn if z.shape[1] > dims else z
    square = flat.square().sum(dim=1)
    pairs = set()
    for start in range(0, len(z), CHUNK):
        part = slice(start, start + CHUNK)
        apart = square[part, None] + square - 2 * flat[part] @ flat.T  # (chunk, n)
        found = apart.topk(min(LOOKED_UP + 1, len(z)), dim=1, largest=False)
        rows, places = (found.values < (SLACK * CLOSE) ** 2).nonzero(as_tuple=True)
        left, right = rows + start, found.indices[rows, places]
        close = ((z[left] - z[right]).norm(dim=1) < CLOSE) & (left != right)
        pairs |= {(min(a, b), max(a, b)) for a, b in zip(left[close].tolist(), right[close].tolist(), strict=True)}
    return sorted(pairs)


def difference_hash(path: Path) -> NDArray[np.bool_] | None:
    """64 bits: whether each of 9 x 8 gray patches is brighter than the next in its line; None for an unreadable file."""
    gray = _gray(path, (HASH_SIDE + 1, HASH_SIDE))
    return None if gray is None else (gray[:, 1:] > gray[:, :-1]).ravel()


# --- pictures of nothing ----------------------------------------------------------------------------------------------


def shows_nothing(path: Path) -> bool:
    """Whether a picture is blank or noise. Most photos are passed by the size of their file alone."""
    try:
        with Image.open(path) as image:
            pixels = image.width * image.height
        size = os.path.getsize(path)
    except (OSError, ValueError, Image.DecompressionBombError):
        return False
    is_usual = USUAL_BYTES[0] <= size / max(pixels, 1) <= USUAL_BYTES[1]
    if is_usual and pixels > FEW_PIXELS:
        return False
    small = _gray(path, (64, 64))
    if small is None:
        return False
    low, high = np.quantile(small, (0.01, 0.99))
    if high - low <= FLAT:
        return True
    if is_usual:
        return False  # noise fills a file
    middle = _middle(path)
    return middle is not None and _is_noise(middle)


def _is_noise(gray: NDArray[np.float64]) -> bool:
    """Whether neighboring pixels are unrelated, both across and down."""
    away = gray - gray.mean()
    power = float((away**2).mean())
    if power == 0 or min(gray.shape) < HASH_SIDE:
        return False
    across, down = (away[:, 1:] * away[:, :-1]).mean(), (away[1:] * away[:-1]).mean()
    return max(float(across), float(down)) / power < FREE


def _gray(path: Path, size: tuple[int, int]) -> NDArray[np.float64] | None:
    """A photo in gray and small, upright."""
    try:
        with Image.open(path) as image:
            image.draft("L", (4 * size[0], 4 * size[1]))
            with BUDGET.take(image.width * image.height):
                ImageOps.exif_transpose(image, in_place=True)
                return np.asarray(image.convert("L").resize(size, Image.Resampling.BOX), dtype=np.float64)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def _middle(path: Path) -> NDArray[np.float64] | None:
    """The central part of a photo in gray, pixel by pixel."""
    try:
        with Image.open(path) as image, BUDGET.take(image.width * image.height):
            left, top = (max((side - LOOK) // 2, 0) for side in image.size)
            part = image.crop((left, top, min(left + LOOK, image.width), min(top + LOOK, image.height)))
            return np.asarray(part.convert("L"), dtype=np.float64)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
