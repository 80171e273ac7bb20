"""Views of feature rows, for the two-stream loader: another cached view of the same image, and a little noise.

Letters: B rows in a batch, V cached views, D features, R rows of noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Ours: rows of noise drawn once. Fresh noise for every row of an epoch would take more memory than the features.
NUM_NOISES = 1024


class RowViewParams(NamedTuple):
    """The parameters of one view of each of B rows."""

    which: Tensor  # (B,) the cached view to take
    noise: Tensor  # (B,) the row of noise to add


class FeatureViews:
    """A view of a row: one of its cached views, plus noise. Two views of a row differ in both."""

    def __init__(self, scale: Tensor, *, generator: torch.Generator) -> None:
        """Draw the noise.

        Args:
            scale: (D,) standard deviation of the noise in each feature.
            generator: gives the same noise from the same state.
        """
        shape = (NUM_NOISES, len(scale))
        self.noise = torch.randn(shape, generator=generator, device=generator.device) * scale  # (R, D)

    def draw(self, num_images: int, source_size: tuple[int, int], generator: torch.Generator) -> RowViewParams:
        """Parameters for `num_images` rows; `source_size` is (V, D)."""

        def below(limit: int) -> Tensor:
            return torch.randint(limit, (num_images,), generator=generator, device=generator.device)

        return RowViewParams(below(source_size[0]), below(NUM_NOISES))

    def apply(self, images: Tensor, params: RowViewParams) -> Tensor:
        """(B, V, D) -> (B, D) float32."""
        each = torch.arange(len(images), device=images.device)
        return images[each, params.which].float() + self.noise[params.noise]
