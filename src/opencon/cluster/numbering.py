"""New groups are numbered by size, largest first.

Letters: M rows, C classes and groups, of which the first S are seen classes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def order_by_size(classes: Tensor, num_seen: int, num_classes: int) -> Tensor:
    """(C,) the seen classes as they are, then the new groups, the one with the most rows first.

    Args:
        classes: (M,) in [0, C).
        num_seen: S.
        num_classes: C; a group without a row comes last.
    """
    size = torch.bincount(classes, minlength=num_classes)
    return torch.cat([torch.arange(num_seen), num_seen + size[num_seen:].argsort(descending=True, stable=True)])


def by_size(classes: Tensor, num_seen: int) -> Tensor:
    """The same (M,) with new groups numbered by size; empty ones are gone, seen classes keep their number."""
    order = order_by_size(classes, num_seen, max(int(classes.max()) + 1, num_seen))
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order))
    return number[classes]
