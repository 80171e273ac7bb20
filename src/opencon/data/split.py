"""Which training images keep their label.

The rule of the released label lists: walk through the training images in file order; for every image of a seen class,
and for no other, draw one uniform number; below `labeled_ratio` the image keeps its label. The draws depend on the seed
and on which images are of a seen class, never on which novel class an image belongs to. GCD's rule (`exact`) draws the same
share of all these images at once.

Where the files themselves say which images are labeled, nothing is drawn but the few labels that are kept back, to measure
with (`held_out`).

Letters: M training images, n_l labeled, n_u unlabeled, S seen classes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opencon.config import SplitConfig
from opencon.errors import ConfigError, DataError, require

LEAST_RATIO = 0.01  # of the guessed share of labeled images, and of its complement, ours: no class is impossible


@dataclass(frozen=True, eq=False)
class Split:
    """Which training images are labeled. Together, `labeled` and `unlabeled` are all of them."""

    num_seen: int
    num_classes: int  # to look for: seen and novel
    labeled_ratio: float  # of the images of seen classes; a guess where the files give the labels
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


def make_split(
    classes: Tensor,
    config: SplitConfig,
    *,
    num_data_classes: int,
    given: Tensor | None = None,
    num_classes: int | None = None,
) -> Split:
    """Draw the labeled images.

    Args:
        classes: (M,) the true class of every training image, in file order; with `given`, -1 where nobody knows.
        config: how many classes are seen, and how likely their images are labeled.
        num_data_classes: classes in the data; the number to look for, unless the config gives another.
        given: (M,) bool: which images carry a label, where the files say so.
        num_classes: to look for, where the config does not say it.
    """
    if given is not None:
        return _given_split(classes, given, config, num_classes)
    num_seen = _check_config(config, num_data_classes)
    is_seen = classes < num_seen  # (M,)
    is_labeled = torch.zeros_like(is_seen)
    is_labeled[is_seen] = torch.from_numpy(_drawn(config, int(is_seen.sum())))

    counts = torch.bincount(classes[is_labeled], minlength=num_seen)  # (S,)
    for c in range(num_seen):
        if counts[c] == 0:
            raise DataError(
                f"seen class {c} has {int((classes == c).sum())} training images and none of them is labeled at "
                f"split.labeled_ratio = {config.labeled_ratio}. Raise labeled_ratio, or give the class more images."
            )
    if bool(is_labeled.all()):
        raise DataError(
            f"all {len(classes)} training images are labeled at split.labeled_ratio = {config.labeled_ratio} and "
            f"split.num_seen = {num_seen}: nothing is left to discover. Raise the number of images, or lower "
            f"labeled_ratio or num_seen."
        )
    return Split(
        num_seen=num_seen,
        num_classes=config.known_classes or num_classes or num_data_classes,
        labeled_ratio=config.labeled_ratio,
        seed=config.seed,
        labeled=_where(is_labeled),
        unlabeled=_where(~is_labeled),
    )


def _drawn(config: SplitConfig, number: int) -> NDArray[np.bool_]:
    """Which of so many images of seen classes keep their label, by `config.rule`."""
    random = np.random.RandomState(config.seed)
    if config.rule == "coin":  # one call for n numbers is the same stream as n calls for one
        coins: NDArray[np.bool_] = random.random_sample(number) < config.labeled_ratio
        return coins
    kept = np.zeros(number, dtype=bool)
    kept[random.choice(number, int(config.labeled_ratio * number), replace=False)] = True
    return kept


def _given_split(classes: Tensor, given: Tensor, config: SplitConfig, num_classes: int | None) -> Split:
    """The labels that the files give, but for those kept back. A class keeps at least one."""
    num_seen = int(classes[given].max()) + 1 if bool(given.any()) else 0
    counts = torch.bincount(classes[given], minlength=num_seen).tolist()
    without = next((c for c, count in enumerate(counts) if not count), None)
    if without is not None:
        raise DataError(f"class {without} is to be seen, but no image carries its label. Label some of its images.")
    total = config.known_classes or num_classes
    assert total is not None, "somebody must have said, or estimated, how many classes there are"
    is_labeled, draws = given.clone(), np.random.RandomState(config.seed)
    for c, count in enumerate(counts):
        rows = _where(given & (classes == c))
        is_labeled[rows[draws.permutation(count)[: min(round(config.held_out * count), count - 1)]]] = False
    # As if all classes were equally large, so S of C classes had their share of the images; ours.
    expected = len(classes) * num_seen / max(total, 1)
    ratio = int(is_labeled.sum()) / max(expected, 1.0)
    return Split(
        num_seen=num_seen,
        num_classes=total,
        labeled_ratio=min(max(ratio, LEAST_RATIO), 1 - LEAST_RATIO),
        seed=config.seed,
        labeled=_where(is_labeled),
        unlabeled=_where(~is_labeled),
    )


def names_from_file(config: SplitConfig) -> SplitConfig:
    """The same settings; where `seen_classes` is the name of a text file, the names in it, one a line."""
    if len(config.seen_classes) != 1 or Path(config.seen_classes[0]).suffix != ".txt":
        return config
    path = Path(config.seen_classes[0]).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"split.seen_classes: {path} cannot be read ({err}). Give a text file, a name a line."
        ) from err
    names = tuple(line for line in lines if line and not line.startswith("#"))
    require(bool(names), f"split.seen_classes: {path} names no class. Write one name a line.")
    return replace(config, seen_classes=names)


def validation_split(config: SplitConfig) -> SplitConfig:
    """The split within the labeled images: the first half of their classes is seen, by the same rule, half of it labeled."""
    num_seen = config.num_seen or 0
    if num_seen < 2:
        raise ConfigError(
            f"split.validation needs two seen classes at least, to take one for novel; there are {num_seen}."
        )
    return SplitConfig(
        num_seen=num_seen // 2, seed=config.seed, rule=config.rule
    )  # half of them labeled, as in the paper


def check_split(
    config: SplitConfig, info_num_classes: int, num_train: int, batch_size: int, labeled_share: float | None = None
) -> None:
    """Refuse a split that cannot work, from counts alone, before anything is loaded.

    The share of labeled images in a batch is estimated as if all classes were equally large; `batch_shares` checks
    again with the exact numbers.
    """
    num_seen = _check_config(config, info_num_classes)
    num_labeled = num_train * num_seen / info_num_classes * config.labeled_ratio
    _labeled_share(batch_size, num_labeled, num_train, labeled_share, expected=True)


def check_given(
    config: SplitConfig,
    num_seen: int,
    num_labeled: int,
    num_train: int,
    batch_size: int,
    labeled_share: float | None = None,
) -> None:
    """The same where the files give the labels."""
    if num_seen == 0:
        raise DataError(
            "no image carries a label, so there is nothing to tell seen from new. Give some (--labeled, or a class in the "
            "list), or learn without labels: opencon pretrain."
        )
    if num_labeled == num_train:
        raise DataError(f"all {num_train} training images are labeled: nothing is left to discover.")
    if config.num_seen is not None and not config.seen_classes and config.num_seen != num_seen:
        raise ConfigError(
            f"split.num_seen = {config.num_seen}, but the files give labels of {num_seen} classes. Write "
            f"split.num_seen=none: the labels say which classes are seen; or name some of them, split.seen_classes=A,B."
        )
    if config.known_classes is not None and config.known_classes <= num_seen:
        raise ConfigError(
            f"split.num_classes = {config.num_classes} leaves no novel class: {num_seen} are labeled. Raise it."
        )
    if config.seed >= 2**32:
        raise ConfigError(f"split.seed = {config.seed} must be below 2**32: NumPy's RandomState takes no larger one.")
    _labeled_share(batch_size, num_labeled * (1 - config.held_out), num_train, labeled_share, expected=True)


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
                f"{num_labeled:.0f} and {num_images - num_labeled:.0f}. Both must be at least 1 and at most that many. "
                f"Lower train.batch_size, or write train.labeled_share=none: in proportion."
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


def _check_config(config: SplitConfig, num_data_classes: int) -> int:
    """The number of seen classes, after a check."""
    if config.num_seen is None:
        raise ConfigError(
            "split.num_seen is missing: say how many classes are seen, or name them (split.seen_classes=A,B). Only where "
            "some images carry no label do the files say it."
        )
    if config.num_seen >= num_data_classes:
        raise ConfigError(
            f"split.num_seen = {config.num_seen} leaves no novel class: the data has {num_data_classes} classes. Lower "
            f"num_seen to at most {num_data_classes - 1}."
        )
    if config.seed >= 2**32:
        raise ConfigError(f"split.seed = {config.seed} must be below 2**32: NumPy's RandomState takes no larger one.")
    return config.num_seen


def _where(mask: Tensor) -> Tensor:
    return torch.nonzero(mask).flatten()


def _fingerprint(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
