"""Which training images keep their label.

The rule of the released label lists: walk through the training images in file order; for every image of a seen class,
and for no other, draw one uniform number; below `labeled_ratio` the image keeps its label. The draws depend on the seed
and on which images are of a seen class, never on which novel class an image belongs to.

Letters: M training images, n_l labeled, n_u unlabeled, S seen classes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opencon.config import SplitConfig
from opencon.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Split:
    """Which training images are labeled. Together, `labeled` and `unlabeled` are all of them."""

    num_seen: int
    num_classes: int  # to look for: seen and novel
    labeled_ratio: float
    seed: int
    labeled: Tensor  # (n_l,) indices, increasing
    unlabeled: Tensor  # (n_u,) indices, increasing

    @property
    def num_images(self) -> int:
        """M, labeled and unlabeled together."""
        return len(self.labeled) + len(self.unlabeled)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that defines this split."""
        return _fingerprint(self._facts())

    def visible_labels(self, classes: Tensor) -> Tensor:
        """What a learner may see: (M,) the class of a labeled image, -1 elsewhere."""
        todo = "Use the data that the split was made for, or make a new split."
        if len(classes) != self.num_images:
            raise DataError(
                f"the split is for {self.num_images} training images, but the data has {len(classes)}. {todo}"
            )
        kept = classes[self.labeled]  # (n_l,)
        if bool(((kept < 0) | (kept >= self.num_seen)).any()):
            raise DataError(f"the split labels images of classes other than the {self.num_seen} seen ones. {todo}")
        labels = torch.full_like(classes, -1)
        labels[self.labeled] = kept
        return labels

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a fingerprint that `from_json` checks."""
        return {**self._facts(), "fingerprint": self.fingerprint}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Split:
        """The split that `to_json` wrote; anything else is refused."""
        facts = {key: value for key, value in data.items() if key != "fingerprint"}
        if data.get("fingerprint") != _fingerprint(facts):
            raise DataError(
                "the saved split does not match its fingerprint: it was changed or damaged after it was written. Put "
                "the original back, or start a new run."
            )
        try:
            is_labeled = torch.zeros(facts.pop("num_images"), dtype=torch.bool)
            is_labeled[torch.tensor(facts.pop("labeled"), dtype=torch.int64)] = True
            return cls(**facts, labeled=_where(is_labeled), unlabeled=_where(~is_labeled))
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as err:
            raise DataError(f"this is not a saved split ({type(err).__name__}: {err}). Start a new run.") from err

    def _facts(self) -> dict[str, Any]:
        return {
            "num_seen": self.num_seen,
            "num_classes": self.num_classes,
            "labeled_ratio": self.labeled_ratio,
            "seed": self.seed,
            "num_images": self.num_images,
            "labeled": self.labeled.tolist(),
        }


def make_split(classes: Tensor, config: SplitConfig, *, num_data_classes: int) -> Split:
    """Draw the labeled images.

    Args:
        classes: (M,) the true class of every training image, in file order.
        config: how many classes are seen, and how likely their images are labeled.
        num_data_classes: classes in the data; the number to look for, unless the config gives another.
    """
    _check_config(config, num_data_classes)
    is_seen = classes < config.num_seen  # (M,)
    is_labeled = torch.zeros_like(is_seen)
    # One call for n numbers is the same stream as n calls for one.
    draws = np.random.RandomState(config.seed).random_sample(int(is_seen.sum()))
    is_labeled[is_seen] = torch.from_numpy(draws < config.labeled_ratio)

    counts = torch.bincount(classes[is_labeled], minlength=config.num_seen)  # (S,)
    for c in range(config.num_seen):
        if counts[c] == 0:
            raise DataError(
                f"seen class {c} has {int((classes == c).sum())} training images and none of them is labeled at "
                f"split.labeled_ratio = {config.labeled_ratio}. Raise labeled_ratio, or give the class more images."
            )
    if bool(is_labeled.all()):
        raise DataError(
            f"all {len(classes)} training images are labeled at split.labeled_ratio = {config.labeled_ratio} and "
            f"split.num_seen = {config.num_seen}: nothing is left to discover. Raise the number of images, or lower "
            f"labeled_ratio or num_seen."
        )
    return Split(
        num_seen=config.num_seen,
        num_classes=config.num_classes if config.num_classes is not None else num_data_classes,
        labeled_ratio=config.labeled_ratio,
        seed=config.seed,
        labeled=_where(is_labeled),
        unlabeled=_where(~is_labeled),
    )


def check_split(
    config: SplitConfig, info_num_classes: int, num_train: int, batch_size: int, labeled_share: float | None = None
) -> None:
    """Refuse a split that cannot work, from counts alone, before anything is loaded.

    The share of labeled images in a batch is estimated as if all classes were equally large; `batch_shares` checks
    again with the exact numbers.
    """
    _check_config(config, info_num_classes)
    num_labeled = num_train * config.num_seen / info_num_classes * config.labeled_ratio
    _labeled_share(batch_size, num_labeled, num_train, labeled_share, expected=True)


def batch_shares(split: Split, batch_size: int, labeled_share: float | None = None) -> tuple[int, int]:
    """Labeled and unlabeled images in a batch.

    The released rule: int(batch_size * n_l / (n_l + n_u)) are labeled, the rest unlabeled. `labeled_share` replaces it.
    """
    share = _labeled_share(batch_size, len(split.labeled), split.num_images, labeled_share, expected=False)
    return share, batch_size - share


def labeled_in_batch(batch_size: int, num_labeled: float, num_images: int, *, least: int = 0) -> int:
    """Labeled images in a batch: in proportion, as in the released code, but at least `least`, if there are that many."""
    return max(int(batch_size * num_labeled / num_images), int(min(num_labeled, least)))


def _labeled_share(
    batch_size: int, num_labeled: float, num_images: int, labeled_share: float | None, *, expected: bool
) -> int:
    if labeled_share is not None:
        share = round(batch_size * labeled_share)
        if not (1 <= share <= num_labeled and 1 <= batch_size - share <= num_images - num_labeled):
            raise ConfigError(
                f"train.labeled_share = {labeled_share} of train.batch_size = {batch_size} asks for {share} labeled and "
                f"{batch_size - share} unlabeled images in a batch; there are {'about ' if expected else ''}"
                f"{num_labeled:.0f} and {num_images - num_labeled:.0f}. Both must be at least 1 and at most that many."
            )
        return share
    share = labeled_in_batch(batch_size, num_labeled, num_images)
    if num_labeled < 1:
        raise ConfigError(
            f"{'about ' if expected else ''}{num_labeled:.2g} of {num_images} training images are labeled, which is none. "
            f"Raise split.labeled_ratio."
        )
    if share < 1:
        smallest = math.ceil(num_images / num_labeled)
        while labeled_in_batch(smallest, num_labeled, num_images) < 1:  # rounding can leave the quotient just below 1
            smallest += 1
        raise ConfigError(
            f"train.batch_size = {batch_size} leaves no labeled image in a batch: {'about ' if expected else ''}"
            f"{num_labeled:.0f} of {num_images} training images are labeled, {num_labeled / num_images:.2%}. The "
            f"smallest batch size that would do is {smallest}; or raise split.labeled_ratio."
        )
    if batch_size > num_images:
        raise ConfigError(
            f"train.batch_size = {batch_size} is more than the {num_images} training images: no batch can be filled. "
            f"Lower it to at most {num_images}."
        )
    return share


def _check_config(config: SplitConfig, num_data_classes: int) -> None:
    if config.num_seen >= num_data_classes:
        raise ConfigError(
            f"split.num_seen = {config.num_seen} leaves no novel class: the data has {num_data_classes} classes. Lower "
            f"num_seen to at most {num_data_classes - 1}."
        )
    if config.seed >= 2**32:
        raise ConfigError(f"split.seed = {config.seed} must be below 2**32: NumPy's RandomState takes no larger one.")


def _where(mask: Tensor) -> Tensor:
    return torch.nonzero(mask).flatten()


def _fingerprint(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
