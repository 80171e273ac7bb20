"""X as people have it: rows of features, sparse rows, images or photo files.

Letters: M samples, F features, V views, H and W height and width.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from torch import Tensor

from opencon.data.augment import plain_view
from opencon.data.listings import printable
from opencon.data.sources import from_arrays
from opencon.errors import ConfigError, DataError
from opencon.photos.features import Extractor, FeatureSettings, photo_features
from opencon.runtime import pick_device

Array = npt.NDArray[Any]
Folder = str | os.PathLike[str] | None
ROWS, ENCODED = "rows of features", "images for the encoder"

# Gray images of at most this side are taken as they are, pixel by pixel; all others go through the encoder. Ours: on
# handwritten digits of 8 x 8 pixels the encoder loses by far, on photos it wins at any size (docs/estimator.md).
SMALL_SIDE = 16
MOST_DENSE = 2**28  # numbers of a sparse matrix that is made dense: 1 GiB in float32 (ours, because it fits everywhere)


class InputError(DataError, ValueError):
    """X or y is not what the estimator takes. Also a `ValueError`, which is what scikit-learn's users catch."""


class ParameterError(ConfigError, ValueError):
    """A parameter of the estimator is not what it takes. Also a `ValueError`."""


class DiscoveryWarning(UserWarning):
    """The result is likely not what was meant: a group was lost, a limit reached, units differ wildly."""


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """Errors of parameters and input as scikit-learn's users expect them."""
    try:
        yield
    except ValueError:
        raise
    except DataError as err:
        raise InputError(str(err)) from err
    except ConfigError as err:
        raise ParameterError(str(err)) from err


class Samples(NamedTuple):
    """The content of X, and how it becomes rows."""

    values: Any  # one entry per sample
    kind: str  # in words; a fitted estimator takes only what it was fitted with
    # Called with the settings and the cache; (M, F) features, and (M, V, F) of views where there are some.
    rows: Callable[[FeatureSettings, Folder], tuple[Any, Tensor | None]]


def read_samples(X: Any) -> Samples:
    """Tell embeddings, images and photo files apart, without looking at pixels yet."""
    if isinstance(X, (str, os.PathLike)):
        raise InputError(f"X is a single path, {os.fspath(X)!r}. Give a list with the path of each photo.")
    if issparse(X):
        return Samples(X, ROWS, lambda settings, cache: (X, None))
    array = X if hasattr(X, "ndim") else np.asarray(X)
    if array.ndim == 1 and len(array) and isinstance(next(iter(array)), (str, os.PathLike)):
        paths = [Path(path) for path in array]
        return Samples(paths, ENCODED, functools.partial(encode_photos, paths))
    if array.ndim < 3:
        return Samples(X, ROWS, lambda settings, cache: (X, None))
    if len(array) == 0:
        raise InputError(f"X has shape {tuple(array.shape)}: there is no image in it.")
    images = from_arrays(array, np.zeros(len(array), dtype=np.int64)).images
    assert isinstance(images, Tensor)  # only files are streamed
    channels, height, width = images.shape[1:]
    if channels == 3 or max(height, width) > SMALL_SIDE:
        return Samples(images, ENCODED, lambda settings, cache: encode_images(images, settings))
    kind = f"gray images of {height} x {width} pixels"
    return Samples(images, kind, lambda settings, cache: (images.flatten(1).numpy() / np.float32(255), None))


def dense(rows: Any) -> Array:
    """Rows as an array; sparse ones are filled in, unless that would take too much memory."""
    if not issparse(rows):
        return np.asarray(rows)
    num_rows, num_features = rows.shape
    if num_rows * num_features > MOST_DENSE:
        raise InputError(
            f"X is sparse, and {num_rows:,} x {num_features:,} numbers are too many to fill in. Reduce the features first, "
            f"with sklearn.decomposition.TruncatedSVD(100) say, in a pipeline."
        )
    return np.asarray(rows.toarray())


def encode_images(images: Tensor, settings: FeatureSettings) -> tuple[Array, Tensor | None]:
    """(M, channels, H, W) uint8 -> (M, F) features of the central square of each, (M, V, F) of random views of it."""
    extractor = Extractor.open(settings, pick_device())
    height, width = images.shape[2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    plain, views = [], []
    for part in torch.split(images[..., top : top + side, left : left + side], extractor.photos_at_once):
        x = plain_view(part.expand(-1, 3, -1, -1), extractor.encoder.image_size)
        keys = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in part]
        for row, others in extractor((x * 255).round().to(torch.uint8), keys):
            plain.append(row)
            views.append(others)
    return torch.stack(plain).numpy(), torch.stack(views) if settings.num_views else None


def encode_photos(paths: Sequence[Path], settings: FeatureSettings, cache: Folder) -> tuple[Array, Tensor | None]:
    """Photo files -> (M, F) features, (M, V, F) of random views."""
    extractor = Extractor.open(settings, pick_device())
    features = photo_features(paths, extractor, cache=None if cache is None else Path(cache))
    if features.problems:
        first, why = next(iter(features.problems.items()))
        raise InputError(
            f"{len(features.problems)} of {len(paths)} photos cannot be read. The first is {printable(paths[first])}: it "
            f"{why}. Drop such paths, and their entries in y."
        )
    return features.plain.numpy(), features.views if settings.num_views else None
