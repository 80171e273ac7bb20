"""The weights that are judged: averaged ones, whose batch norms have seen plain images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opencon.methods.base import Method


@contextmanager
def judged_weights(method: Method[Any], plain: Iterable[Tensor] | None = None) -> Iterator[None]:
    """Within the block, `method` has its averaged weights, if it keeps some; afterwards, the learning ones again.

    Args:
        method: on its device, in any mode.
        plain: training images in [0, 1], as evaluation sees them, to measure batch norms on; None: averaged statistics.
    """
    if method.twin is None:
        yield
        return
    method.twin.exchange()
    try:
        if plain is not None:
            measure_norms(method, plain)
        yield
    finally:
        method.twin.exchange()


@torch.no_grad()
def measure_norms(method: Method[Any], plain: Iterable[Tensor]) -> None:
    """Give every batch norm that learns the mean statistics of these images, all batches alike; frozen ones stay."""
    was_training = method.training
    method.train()
    norms = [m for m in method.embedder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    before = [norm.momentum for norm in norms]
    try:
        for count, images in enumerate(plain, start=1):
            for norm in norms:
                norm.momentum = 1 / count  # a mean over all batches; the first forgets what was
            method.embed(images)
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
        method.train(was_training)
