"""Rows of features and their labels: the one place that refuses what cannot be worked with.

Letters: M rows, F features, S seen classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opencon.errors import DataError


def check_rows(x: Tensor, *, what: str = "x", num_features: int | None = None) -> None:
    """Refuse what is not one row of finite numbers for each sample, (M, F).

    Args:
        x: the rows.
        what: what they are called in the message.
        num_features: F, where it is settled already.
    """
    check_shape(x, what=what)
    if len(x) == 0:
        raise DataError(
            f"{what} has shape {tuple(x.shape)}: there is no row in it. Give one row for each sample, (M, F)."
        )
    if num_features is not None and x.shape[1] != num_features:
        raise DataError(
            f"{what} has {x.shape[1]} features, but the model was trained with {num_features}. Use the same ones."
        )
    bad = (~torch.isfinite(x.float()).all(dim=1)).nonzero()[:, 0]
    if len(bad):
        raise DataError(
            f"{len(bad)} of {len(x)} rows of {what} hold NaN, infinity or more than float32 can, the first is row "
            f"{int(bad[0])}. Drop or repair them."
        )


def check_shape(x: Tensor, *, what: str = "x") -> None:
    """Refuse what has no rows of features. Numbers are not looked at, which would cost a pass over them."""
    if x.ndim != 2 or x.shape[1] == 0:
        raise DataError(f"{what} has shape {tuple(x.shape)}. Give one row of features for each sample, (M, F).")


def check_labels(labels: Tensor, num_rows: int, *, num_seen: int | None = None) -> int:
    """The number of seen classes, S. Refuses labels that do not fit the rows, and a seen class without a labeled row.

    Args:
        labels: (M,) class in [0, S) of a labeled row, -1 for an unlabeled one.
        num_rows: M.
        num_seen: S, where it is settled already; None: the largest label and one.
    """
    if labels.shape != (num_rows,):
        raise DataError(
            f"labels has shape {tuple(labels.shape)}, x has {num_rows} rows. Give one label per row, -1 for none."
        )
    if num_seen is None:
        num_seen = int(labels.max()) + 1
    outside = labels[(labels < -1) | (labels >= num_seen)][:1].tolist()
    if outside:
        allowed = (
            f"labels lie in [0, {num_seen}), or are -1 for unlabeled" if num_seen else "without seen classes all are -1"
        )
        raise DataError(f"label {outside[0]} is no seen class: {allowed}.")
    counts = torch.bincount(labels[labels >= 0].long(), minlength=num_seen)
    missing = (counts == 0).nonzero()[:, 0].tolist()
    if missing:
        raise DataError(
            f"seen classes {missing} of {num_seen} have no labeled row. Label one of each, and number the classes from 0 "
            f"without a gap."
        )
    return num_seen
