"""What every way to count has in common: the answer, the range that is searched, and what is refused.

Letters: M rows, F features, S seen classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from opencon.errors import DataError, require
from opencon.metrics import open_world_accuracy
from opencon.rows import check_labels, check_rows

Ints = NDArray[np.int64]
Told = Callable[[int, int], None]  # done, of how many

LARGEST = 50  # groups to try when nothing is said (ours), or
PER_SEEN = 4  # so many times the seen classes (ours)


@dataclass(frozen=True)
class CountEstimate:
    """How many classes, how sure, and why."""

    num_classes: int  # seen + novel
    low: int  # the smallest and
    high: int  # the largest number that fits about as well
    curve: tuple[tuple[int, float], ...]  # (k, score), ascending k; larger is better
    why: str  # one sentence

    def left(self, num_classes: int) -> CountEstimate:
        """The estimate where some groups have lost all their rows to others."""
        why = f"{self.why} Some groups lost their rows to others: {num_classes} are left."
        return replace(self, num_classes=num_classes, low=min(self.low, num_classes), why=why)


class Counter(Protocol):
    """A way to count: seen and novel classes together, at least `num_seen`."""

    def __call__(
        self,
        x: Tensor,
        labels: Tensor,
        *,
        num_seen: int,
        seed: int = 0,
        max_classes: int | None = None,
        progress: Told = lambda done, total: None,
    ) -> CountEstimate:
        """`x` (M, F), `labels` (M,) with -1 for unlabeled; the rest as in `estimate_classes`."""


def refuse_bad_rows(x: Tensor, labels: Tensor, num_seen: int, max_classes: int | None) -> None:
    """Refuse what no way of counting can work on."""
    require(num_seen >= 0, f"num_seen = {num_seen} must not be negative. Use 0 when there are no labels.")
    require(
        max_classes is None or max_classes >= max(num_seen, 1),
        f"max_classes = {max_classes} must be at least 1 and not below num_seen = {num_seen}: seen classes count too.",
    )
    check_rows(x)
    check_labels(labels, len(x), num_seen=num_seen)


def search_range(num_rows: int, num_seen: int, max_classes: int | None) -> tuple[int, int, int]:
    """The fewest classes there can be, the most that are wanted, and the most of those that so many rows allow."""
    wanted = max_classes or max(LARGEST, PER_SEEN * num_seen)
    return max(num_seen, 1), wanted, min(wanted, num_rows // 2)  # a class has two rows at least


def nothing_to_find(num_classes: int, why: str) -> CountEstimate:
    """An answer that left no choice."""
    return CountEstimate(num_classes, num_classes, num_classes, ((num_classes, 0.0),), why)


def answer_without_choice(
    x: Tensor, labels: Tensor, num_seen: int, max_classes: int | None, name: str, *, at_least: int
) -> CountEstimate | None:
    """Refuse what cannot be counted; the answer where there is no choice, else None."""
    refuse_bad_rows(x, labels, num_seen, max_classes)
    if num_seen < at_least:
        raise DataError(
            f"{name} counts by labeled rows of at least {at_least} seen classes, and there are {num_seen}. "
            f"Label more, or count by 'tree'."
        )
    if bool((labels >= 0).all()):
        return nothing_to_find(num_seen, f"All {len(labels)} rows are labeled, so the {num_seen} seen classes are all.")
    low, wanted, high = search_range(len(x), num_seen, max_classes)
    if high <= low:
        return nothing_to_find(low, f"{len(x)} rows and at most {wanted} classes leave no choice above {low}.")
    return None


def accuracy(group: Ints, truth: Ints) -> float:
    """Share of the rows that the best one-to-one naming of groups by classes gets right."""
    return open_world_accuracy(group, truth, num_seen=0, protocol="gcd").all


def hint_of_a_limit(best: int, wanted: int) -> str:
    """What to say where the answer is the largest number that was tried."""
    return f" It is the most that was tried: look further with max_classes above {wanted}." if best == wanted else ""
