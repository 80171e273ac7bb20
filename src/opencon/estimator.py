"""The scikit-learn estimator: rows, images or photo files with some labels in; seen classes and new groups out.

    X --> rows --> fit_features --> classes_ = seen classes, then new groups

Letters: M samples, F features, D embedding size, S seen classes, C classes and groups together, H and W height and width.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import numbers
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from opencon.data.augment import plain_view
from opencon.data.listings import printable
from opencon.data.sources import from_arrays
from opencon.errors import DataError, require
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.openworld.model import OpenWorldModel, Prediction, in_parts
from opencon.photos.features import Extractor, FeatureSettings, photo_features, views_for
from opencon.photos.listing import new_names
from opencon.runtime import pick_device, seeded

Array = npt.NDArray[Any]

# Gray images of at most this side are taken as they are, pixel by pixel; all others go through the encoder. Ours: on
# handwritten digits of 8 x 8 pixels the encoder loses by far, on photos it wins at any size (docs/estimator.md).
SMALL_SIDE = 16


class InputError(DataError, ValueError):
    """X or y is not what the estimator takes. Also a `ValueError`, which is what scikit-learn's users catch."""


class OpenWorldClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Recognize the classes that have labels, and group what belongs to none of them.

    `y` holds the class of each labeled row. Unlabeled rows, of seen classes and of new ones, are -1 or NaN among numbers
    and None (or what pandas makes of it, NaN or NA) among strings, where "-1" is a class like any other.

    Args:
        n_novel: how many new groups to look for, or "auto" to have it estimated.
        method: name of the method whose losses the steps use.
        steps: steps of training a head on the features with the method's losses. On fixed features they gain nothing
            that can be measured (docs/how-discover-works.md), so there are none unless you ask.
        lr: learning rate at the start.
        encoder: what turns images and photos into features, see `open_encoder`; not used for 2-D `X`.
        cache: folder for the features of photo files; None: they are computed again each time.
        random_state: seed, generator, or None for another result each time.

    Attributes:
        classes_: (C,) labels of the seen classes, sorted, then those of the new groups, largest group first: max + 1,
            max + 2, ... after numbers; "new-1", "new-2", ... after strings, without those that are classes.
        n_seen_, n_novel_: S, and the number of new groups; they add up to C.
        labels_: (M,) prediction for the rows of `fit`.
        embedding_: (M, D) their unit embedding.
        count_: the `CountEstimate`; None where `n_novel` is a number.
        model_: the `OpenWorldModel`.
        n_features_in_: F.
    """

    classes_: Array
    n_seen_: int
    n_novel_: int
    labels_: Array
    embedding_: Array
    model_: OpenWorldModel
    n_features_in_: int

    def __init__(
        self,
        n_novel: int | str = "auto",
        *,
        method: str = "opencon",
        steps: int = 0,
        lr: float = OpenWorldConfig.lr,
        encoder: str | os.PathLike[str] = "efficientnet_lite0",
        cache: str | os.PathLike[str] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_novel = n_novel
        self.method = method
        self.steps = steps
        self.lr = lr
        self.encoder = encoder
        self.cache = cache
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> OpenWorldClassifier:
        """Learn from labeled and unlabeled samples together.

        Args:
            X: (M, F) embeddings; or images (M, H, W) or (M, H, W, 3), uint8 or floats in [0, 1]; or paths of photo files.
            y: (M,) class, or -1 (None among strings) for unlabeled.
        """
        classes, codes = encode_labels(y)
        samples = read_samples(X)
        check_consistent_length(samples.values, codes)
        if not len(classes):
            raise InputError(
                f"y has no labeled row (all {len(codes)} are -1 or None). Label some rows of at least one class, or use "
                f"sklearn.cluster.KMeans, which needs no labels."
            )
        config = self._config(is_all_labeled=bool((codes >= 0).all()))
        rows, views = samples.rows(self._settings(num_views=views_for(config.steps)), self.cache)
        rows = validate_data(self, rows, dtype=np.float32, ensure_min_samples=2)
        self._kind = samples.kind
        with seeded(config.seed):  # building networks draws from torch's default generator, which must stay as it was
            fitted = fit_features(_tensor(rows), torch.from_numpy(codes), config, views=views)

        self.model_ = fitted.model
        self.count_ = fitted.count
        self.n_seen_ = len(classes)
        self.n_novel_ = fitted.model.num_classes - len(classes)
        self.classes_ = with_new(classes, self.n_novel_)
        self.embedding_ = fitted.z.numpy()
        self._n_features_out = self.embedding_.shape[1]
        self.labels_ = self.classes_[fitted.prediction.classes.numpy()]
        return self

    def predict(self, X: Any) -> Array:
        """(M,) the class or new group of each sample, as in `classes_`."""
        said = self._judge(X)  # first: it says so where nothing was fitted
        return np.asarray(self.classes_[said.classes.numpy()])

    def predict_proba(self, X: Any) -> Array:
        """(M, C) probability of each of `classes_`."""
        return self._judge(X).p.numpy()

    def novelty_score(self, X: Any) -> Array:
        """(M,) larger is newer; above zero, a new group or none at all is likelier than all seen classes together."""
        return self._judge(X).novelty.numpy()

    def is_novel(self, X: Any) -> Array:
        """(M,) bool: whether `predict` gives a new group."""
        return np.asarray(self._judge(X).classes.numpy() >= self.n_seen_)

    def transform(self, X: Any) -> Array:
        """(M, D) unit embedding, in which classes and groups are compact."""
        rows = self._valid(X)
        return in_parts(self.model_.embed, rows).numpy()

    def fit_predict(self, X: Any, y: Any) -> Array:
        """Fit, and the prediction for the same samples."""
        return self.fit(X, y).labels_

    def fit_transform(self, X: Any, y: Any) -> Array:
        """Fit, and the embedding of the same samples."""
        return self.fit(X, y).embedding_

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy on the rows whose label in `y` is a seen class; all others are left out.

        It says nothing of the new groups: we made up their labels, so no `y` can contain them. Where you know the true
        classes, use `opencon.open_world_accuracy`.
        """
        predicted = self.predict(X)
        y = column_or_1d(y)
        check_consistent_length(predicted, y, sample_weight)
        seen = np.isin(y, self.classes_[: self.n_seen_])
        if not seen.any():
            raise InputError("no label in y is a seen class (see classes_[:n_seen_]): there is nothing to score.")
        weight = None if sample_weight is None else np.asarray(sample_weight)[seen]
        return float(accuracy_score(y[seen].astype(predicted.dtype), predicted[seen], sample_weight=weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True  # gray images; paths are a list, for which there is no tag
        tags.transformer_tags.preserves_dtype = ["float32"]  # for every input type
        return tags

    def _config(self, *, is_all_labeled: bool) -> OpenWorldConfig:
        """The parameters, checked."""
        n_novel = None if isinstance(self.n_novel, str) and self.n_novel == "auto" else _count("n_novel", self.n_novel)
        steps = _count("steps", self.steps)
        require(isinstance(self.lr, numbers.Real), f"lr = {self.lr!r} must be a number above zero.")
        if is_all_labeled:
            warnings.warn(
                "y has no unlabeled row (-1, or None among strings): there is nothing to discover, and no new group "
                "will be found.",
                stacklevel=3,
            )
            n_novel = 0
        seed = self.random_state
        if not isinstance(seed, numbers.Integral):
            seed = check_random_state(seed).randint(np.iinfo(np.int32).max)
        return OpenWorldConfig(num_novel=n_novel, method=self.method, seed=int(seed), steps=steps, lr=float(self.lr))

    def _settings(self, *, num_views: int) -> FeatureSettings:
        return FeatureSettings(encoder=os.fspath(self.encoder), num_views=num_views)

    def _valid(self, X: Any) -> Tensor:
        """Samples for a fitted estimator as rows (M, F)."""
        check_is_fitted(self)
        samples = read_samples(X)
        if samples.kind != self._kind:
            raise InputError(f"X holds {samples.kind}, but fit was given {self._kind}. Give the same kind.")
        rows, _ = samples.rows(self._settings(num_views=0), self.cache)
        return _tensor(validate_data(self, rows, dtype=np.float32, reset=False))

    def _judge(self, X: Any) -> Prediction:
        rows = self._valid(X)
        return self.model_.predict(rows)


def _count(name: str, value: Any) -> int:
    is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0
    or_auto = ', or "auto"' if name == "n_novel" else ""
    require(is_count, f"{name} = {value!r} must be a whole number, 0 or more{or_auto}.")
    return int(value)


# --- labels -----------------------------------------------------------------------------------------------------------


def encode_labels(y: Any) -> tuple[Array, npt.NDArray[np.int64]]:
    """The classes (S,), sorted, and the number of the class of each row (M,), -1 where it has none."""
    if y is None:
        raise InputError(
            "OpenWorldClassifier requires y to be passed, but the target y is None. Give the class of each labeled row "
            "and -1 (None among strings) for the others; for no labels at all there is sklearn.cluster.KMeans."
        )
    if isinstance(y, (list, tuple)) and any(isinstance(value, str) for value in y):
        y = np.asarray(y, dtype=object)  # next to strings, numpy would turn everything else into text
    y = column_or_1d(y, warn=True)
    if y.dtype == object:
        has_label = np.array([not _is_missing(value) for value in y], dtype=bool)
        labels = _of_one_type(y[has_label])
    else:
        has_label = ~np.isnan(y) if y.dtype.kind == "f" else np.ones(len(y), dtype=bool)
        labels = y[has_label]
        assert_all_finite(labels, input_name="y")
    if labels.dtype.kind in "iuf":
        is_class = labels != -1
        has_label[has_label], labels = is_class, labels[is_class]
    codes = np.full(len(y), -1, dtype=np.int64)
    if not len(labels):
        return labels, codes
    check_classification_targets(labels)
    classes, codes[has_label] = np.unique(labels, return_inverse=True)
    if "-1" in classes.astype(str) and classes.dtype.kind == "U":
        warnings.warn('y has a class named "-1". Among strings, None marks the unlabeled rows.', stacklevel=3)
    return classes, codes


def _is_missing(value: object) -> bool:
    """None, what pandas makes of it (NaN, NA), or the number -1."""
    if value is None or type(value).__name__ == "NAType":
        return True
    return (isinstance(value, float) and math.isnan(value)) or (_is_whole(value) and value == -1)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _of_one_type(values: Array) -> Array:
    """Objects as an array of strings or of whole numbers."""
    if all(isinstance(value, str) for value in values):
        return values.astype(str)
    if all(_is_whole(value) for value in values):
        return values.astype(np.int64)
    kinds = sorted({type(value).__name__ for value in values})
    raise InputError(
        f"y holds {', '.join(kinds)}. Give labels that are all strings, with None for unlabeled, or all whole numbers, "
        f"with -1 or None."
    )


def with_new(classes: Array, num_new: int) -> Array:
    """The classes, then labels for new groups that differ from all of them."""
    if not num_new:
        return classes
    if classes.dtype.kind == "U":
        free = new_names(classes.tolist())
        return np.concatenate([classes, list(itertools.islice(free, num_new))])
    kind = np.float64 if classes.dtype.kind == "f" else np.int64
    return np.concatenate([classes, classes.max().astype(kind) + 1 + np.arange(num_new)])


# --- samples ----------------------------------------------------------------------------------------------------------

ROWS, ENCODED = "rows of features", "images for the encoder"
Folder = str | os.PathLike[str] | None


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


def _tensor(rows: Array) -> Tensor:
    """A copy, because the caller's array may be read-only or may change."""
    return torch.tensor(rows, dtype=torch.float32)
