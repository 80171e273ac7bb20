"""Positions of the photos on the map of a report.

Letters: n photos, D embedding size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from opencon.report.figures import Points, project

MAPPED = 1500  # photos that t-SNE positions, ours: it takes minutes for many; the others go beside the nearest of these
NEAREST = 3  # sampled photos whose mean position another photo takes; ours


def map_positions(z: NDArray[Any], *, seed: int) -> tuple[str, Points]:
    """(n, D) -> the name of the projection and (n, 2). Beyond `MAPPED` rows, only a sample is projected.

    Every other row goes to the mean position of its nearest sampled rows, so the cost grows with n, not with its square.
    """
    every = -(-len(z) // MAPPED)
    sample = z[::every]
    name, projected = project(sample, seed=seed)
    if every == 1:
        return name, projected
    nearest = np.concatenate([np.argpartition(-(part @ sample.T), NEAREST, axis=1)[:, :NEAREST] for part in _parts(z)])
    xy = projected[nearest].mean(axis=1)
    xy[::every] = projected
    return f"{name} of {len(sample):,} photos, the others beside their nearest", xy


def _parts(z: NDArray[Any], rows: int = 4096) -> list[NDArray[Any]]:
    return [z[at : at + rows] for at in range(0, len(z), rows)]
