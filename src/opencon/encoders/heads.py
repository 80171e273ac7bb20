"""Projection heads: features to the space in which the losses compare."""

from __future__ import annotations

from torch import nn


def projection_head(num_features: int, dim: int, hidden: int | None = None) -> nn.Sequential:
    """Linear(F, hidden), ReLU, Linear(hidden, D); `hidden` defaults to F (SimCLR; OpenCon's D is 128)."""
    hidden = num_features if hidden is None else hidden
    return nn.Sequential(nn.Linear(num_features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim))
