"""Embed a set of images once, in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Large enough to keep a GPU busy, small enough for a laptop.
BATCH = 1024


@torch.no_grad()
def embed_images(
    method: nn.Module, embed: Callable[[Tensor], Tensor], images: Tensor, view: Callable[[Tensor], Tensor]
) -> Tensor:
    """(M, channels, H, W) uint8 -> (M, D), without augmentation, in evaluation mode; the mode is put back afterwards.

    Args:
        method: the module whose mode is switched while embedding.
        embed: images in [0, 1] to rows.
        images: on the device of the method.
        view: uint8 images to images in [0, 1] at the size the network takes.
    """
    was_training = method.training
    method.eval()
    try:
        return torch.cat([embed(view(chunk)) for chunk in torch.split(images, BATCH)])
    finally:
        method.train(was_training)
