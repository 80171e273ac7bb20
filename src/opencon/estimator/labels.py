"""y as people have it, and labels for new groups.

Letters: M rows, S seen classes.
"""

from __future__ import annotations

import itertools
import math
import numbers
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from opencon.estimator.samples import DiscoveryWarning, InputError
from opencon.photos.listing import new_names

Array = npt.NDArray[Any]
EXACT = 2**53  # above it float64 leaves whole numbers out


def encode_labels(y: Any) -> tuple[Array, npt.NDArray[np.int64]]:
    """The classes (S,), sorted, and the number of the class of each row (M,), -1 where it has none."""
    if y is None:
        raise InputError(
            "OpenWorldClassifier requires y to be passed, but the target y is None. Give the class of each labeled row "
            "and -1 (None among strings) for the others; where there are no labels at all, -1 for every row."
        )
    if isinstance(y, (list, tuple)) and any(isinstance(value, str) for value in y):
        y = np.asarray(y, dtype=object)  # next to strings, numpy would turn everything else into text
    y = column_or_1d(y, warn=True)
    if y.dtype == object:
        has_label = np.array([not _is_missing(value) for value in y], dtype=bool)
        labels = _of_one_type(y[has_label])
    else:
        has_label = ~np.isnan(y) if y.dtype.kind == "f" else np.ones(len(y), dtype=bool)
        if len(y) and not has_label.any():
            raise InputError("y holds nothing but NaN. Where there are no labels, give -1 for every row.")
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
        warnings.warn(
            'y has a class named "-1". Among strings, None marks the unlabeled rows.', DiscoveryWarning, stacklevel=3
        )
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
        try:
            return values.astype(np.int64)
        except OverflowError as err:
            raise InputError("y holds whole numbers beyond 64 bits. Give smaller ones, or strings.") from err
    kinds = sorted({type(value).__name__ for value in values})
    raise InputError(
        f"y holds {', '.join(kinds)}. Give labels that are all strings, with None for unlabeled, or all whole numbers, "
        f"with -1 or None."
    )


def with_new(classes: Array, num_new: int, *, taken: Any = None) -> Array:
    """The classes, then labels for new groups that differ from all of them, from -1 (unlabeled) and from `taken`."""
    if not num_new:
        return classes
    if classes.dtype.kind == "U":
        free: Iterator[Any] = new_names([*classes.tolist(), str(taken)])
        return np.concatenate([classes, list(itertools.islice(free, num_new))])
    is_float = classes.dtype.kind == "f"
    is_huge = classes.dtype == np.uint64
    kind: type[np.number[Any]] = np.float64 if is_float else np.uint64 if is_huge else np.int64
    limit = EXACT if is_float else 2**64 - 1 if is_huge else 2**63 - 1
    used = {int(c) for c in classes}
    numbers_left = itertools.chain(range(max(used | {-1}) + 1, limit + 1), itertools.count())
    free = (number for number in numbers_left if number not in used and number != taken)
    return np.concatenate([classes.astype(kind), np.array(list(itertools.islice(free, num_new)), dtype=kind)])


def check_outlier_label(label: Any, classes: Array) -> None:
    """Refuse a label for strangers that a class has, or that an array of such classes cannot hold."""
    is_text = classes.dtype.kind == "U"
    if not (isinstance(label, str) if is_text else _is_whole(label)):
        kind = "a string" if is_text else "a whole number"
        raise InputError(f"outlier_label = {label!r} must be {kind}, as the labels in y are, or None.")
    if label in classes.tolist():
        raise InputError(f"outlier_label = {label!r} is a class in y. Give a label that no class has.")
