"""What every way to count shares: the answer, the range of k to search, and the checks of its input.

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
Progress = Callable[[int, int], None]  # done, total

# Without max_classes, k is tried up to the larger of LARGEST and PER_SEEN times the seen classes (both ours).
LARGEST, PER_SEEN = 50, 4


@dataclass(frozen=True, repr=False)
class CountEstimate:
    """How many classes, how sure, and why."""

    num_classes: int  # seen + novel
    low: int  # the smallest number that fits about as well
    high: int  # the largest one
    curve: tuple[tuple[int, float], ...]  # (k, score), ascending k; larger is better
    why: str  # one sentence

    def __repr__(self) -> str:
        return f"<CountEstimate: {self.num_classes}, between {self.low} and {self.high}>"

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
        progress: Progress = lambda done, total: None,
    ) -> CountEstimate:
        """`x` (M, F), `labels` (M,) with -1 for unlabeled; the rest as in `estimate_classes`."""


def refuse_bad_rows(x: Tensor, labels: Tensor, num_seen: int, max_classes: int | None) -> None:
    """Refuse input that cannot be counted."""
    require(num_seen >= 0, f"num_seen = {num_seen} must not be negative. Use 0 when there are no labels.")
    require(
        max_classes is None or max_classes >= max(num_seen, 1),
        f"max_classes = {max_classes} must be at least 1 and not below num_seen = {num_seen}: seen classes count too.",
    )
    check_rows(x)
    check_labels(labels, len(x), num_seen=num_seen)


def search_range(num_rows: int, num_seen: int, max_classes: int | None) -> tuple[int, int, int]:
    """The fewest classes there can be, the most to look for, and the most that this many rows allow."""
    wanted = max_classes or max(LARGEST, PER_SEEN * num_seen)
    return max(num_seen, 1), wanted, min(wanted, num_rows // 2)  # a class has at least two rows


def nothing_to_find(num_classes: int, why: str) -> CountEstimate:
    """The answer where there is only one."""
    return CountEstimate(num_classes, num_classes, num_classes, ((num_classes, 0.0),), why)


def answer_without_choice(
    x: Tensor, labels: Tensor, num_seen: int, max_classes: int | None, name: str, *, at_least: int
) -> CountEstimate | None:
    """Refuse what cannot be counted. Returns the answer where only one is possible, else None."""
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
    """A hint for an answer that is the largest number tried, else an empty string."""
    return f" It is the most that was tried: look further with max_classes above {wanted}." if best == wanted else ""
