"""Images of the right shape that show nothing: the speed of a training step does not depend on what they show."""

from __future__ import annotations

from dataclasses import replace

import torch

from opencon.data.benchmarks import DATASETS, Dataset
from opencon.data.sources import ImageSet


def made_up(name: str, *, num_images: int | None = None, num_classes: int | None = None) -> Dataset:
    """Random pixels in place of a data set, with as many images and classes unless told otherwise."""
    info = DATASETS[name].info
    info = replace(info, num_train=num_images or info.num_train, num_classes=num_classes or info.num_classes)
    shape = (info.num_train, info.channels, info.image_size, info.image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(info.num_train) % info.num_classes
    return Dataset(info, ImageSet(pixels, classes, tuple(map(str, range(info.num_classes)))), None)
