"""Embed a set of images once, in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Large enough to keep a GPU busy, small enough for a laptop.
BATCH = 1024


@torch.no_grad()
def embed_images(
    method: nn.Module,
    embed: Callable[[Tensor], Tensor],
    images: Tensor,
    view: Callable[[Tensor], Tensor],
    *,
    mirror: bool = False,
) -> Tensor:
    """(M, channels, H, W) uint8 -> (M, D), without augmentation, in evaluation mode; the mode is put back afterwards.

    Args:
        method: the module whose mode is switched while embedding.
        embed: images in [0, 1] to rows.
        images: on the device of the method.
        view: uint8 images to images in [0, 1] at the size the network takes.
        mirror: rows are those of an image and of its mirror image together, at unit length.
    """
    was_training = method.training
    method.eval()
    try:
        chunks = map(view, torch.split(images, BATCH))
        if mirror:
            return torch.cat([F.normalize(embed(chunk) + embed(chunk.flip(-1)), dim=1) for chunk in chunks])
        return torch.cat([embed(chunk) for chunk in chunks])
    finally:
        method.train(was_training)
