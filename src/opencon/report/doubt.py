"""Where a result is shaky, one sentence says so first, and names what would help.

The numbers are ours: rules of thumb that keep still for groups that stand apart, come back, and have labels enough. Piles
where the groups are wrong and yet stable are not noticed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opencon.report.table import PhotoTable, number_of

if TYPE_CHECKING:
    from opencon.counting.base import CountEstimate

FEW_PHOTOS = 5  # for each class and group, below which groups may be chance
FEW_LABELS, MORE_LABELS = 3, 5  # labels of a class below which it may be mistaken for another; and how many to ask for
STABLE, VERY_STABLE = 0.8, 0.9  # share of the photos that come back to their group when half of them are grouped again
WIDE = 1.0  # width of the interval by the number itself
UNSURE = 0.75  # mean confidence
LOOSE = 0.7  # of a single group: one that should be looked at
DOUBTFUL = 0.2  # share of the labels that the model does not see


def doubt_of(table: PhotoTable, count: CountEstimate | None, stable: Mapping[str, float]) -> str:
    """A sentence that says why the result is shaky and what would help; empty where nothing speaks against it.

    Args:
        table: a row for each photo.
        count: the estimate of the number of classes; None: the user gave it.
        stable: for each class and group, the share of its photos that come back when half of them are grouped again.
    """
    rows = table.unlabeled
    if not rows:
        return ""
    labels = Counter(row.given for row in table.readable if row.given is not None)
    groups = [group for group in table.groups if group.size or group.kind == "seen"]
    known = {name: share for name, share in stable.items() if not math.isnan(share)}
    sizes = {group.name: group.size for group in groups}
    weight = sum(sizes.get(name, 0) for name in known)
    mean = sum(share * sizes.get(name, 0) for name, share in known.items()) / weight if weight else 1.0
    wrong = [row for row in table.readable if row.given is not None and row.closest != row.given]
    sure = sum(row.confidence or 0.0 for row in rows) / len(rows)

    reasons = []
    if len(rows) < FEW_PHOTOS * len(groups):
        reasons.append(f"there are only {number_of(len(rows), 'photo')} for {number_of(len(groups), 'group')}")
    if mean < STABLE:
        reasons.append(f"{_in_ten(1 - mean)} in ten photos change their group when half of them are grouped again")
    if count is not None and count.high - count.low >= WIDE * count.num_classes and mean < VERY_STABLE:
        reasons.append(f"{count.low} to {count.high} classes fit nearly as well as {count.num_classes}")
    few = sorted((labels[name], name) for name in labels if labels[name] < FEW_LABELS)
    if few:
        reasons.append(f"{few[0][1]} has {'a single label' if few[0][0] == 1 else f'only {few[0][0]} labels'}")
    if len(wrong) >= FEW_LABELS and len(wrong) >= DOUBTFUL * sum(labels.values()):
        reasons.append(f"{len(wrong)} of your {sum(labels.values())} labels look like something else")
    if sure < UNSURE and not reasons:
        reasons.append(f"about {_in_ten(1 - sure)} in ten photos are in the wrong place")
    if not reasons:
        return ""
    return f"Take this with care: {_list(reasons[:2])}. {_help(table, labels, known, sizes, bool(wrong))}."


def _help(
    table: PhotoTable, labels: Counter[str], stable: Mapping[str, float], sizes: Mapping[str, int], wrong: bool
) -> str:
    """What would help, most helpful first."""
    seen = list(dict.fromkeys(table.class_names[: table.num_seen]))
    ways = []
    if seen:
        weakest = min(seen, key=lambda name: (labels[name] >= MORE_LABELS, stable.get(name, 1.0), labels[name]))
        ways.append(f"{'five more labels' if labels[weakest] else 'labels'} of {weakest}")
    else:
        ways.append("a few photos of each kind that you can name")
    loose = [name for name in sizes if name not in seen and sizes[name] > 2 and stable.get(name, 1.0) < LOOSE]
    if loose:
        ways.append(f"a look at {min(loose, key=stable.__getitem__)}")
    elif wrong and seen:
        ways.append("a look at the doubtful labels")
    else:
        ways.append("more photos")
    return f"It would help to have {_list(ways)}"


def _list(words: list[str]) -> str:
    return " and ".join(words)


def _in_ten(share: float) -> int:
    return min(max(round(10 * share), 1), 9)
