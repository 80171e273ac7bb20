"""A small convolutional network for small images.

Ours, because scikit-learn's 8x8 digits on a CPU need a network that trains in seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn

from opencon.encoders.base import Encoder
from opencon.errors import require

MIN_SIZE, MAX_SIZE = 8, 64  # pixels
WIDTHS = (16, 64, 128)  # of the first stages (the first one sees every pixel); later ones stay at the last width


class ConvNet(Encoder):
    """3x3 convolution, batch norm, ReLU, several times; every stage but the first halves the image.

    There is one stage per doubling of the side (three at 8 pixels, five at 32), so that a feature before the average
    over the image has seen all of it.
    """

    def __init__(self, in_channels: int, image_size: int) -> None:
        super().__init__()
        require(in_channels >= 1, f"encoder 'convnet' needs at least one channel, got {in_channels}.")
        require(
            MIN_SIZE <= image_size <= MAX_SIZE,
            f"encoder 'convnet' takes images of {MIN_SIZE} to {MAX_SIZE} pixels, but these have {image_size}. "
            f"Resize the images (data.image_size=32 for your own), or use encoder 'resnet18' for large ones.",
        )
        self.in_channels = in_channels
        num_stages = math.ceil(math.log2(image_size))
        self.stages = tuple(f"conv{i + 1}" for i in range(num_stages))
        before = in_channels
        for i, name in enumerate(self.stages):
            width = WIDTHS[min(i, len(WIDTHS) - 1)]
            conv = nn.Conv2d(before, width, 3, stride=1 if i == 0 else 2, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            parts = OrderedDict(conv=conv, bn=nn.BatchNorm2d(width), relu=nn.ReLU(inplace=True))
            self.add_module(name, nn.Sequential(parts))
            before = width
        self.num_features = before

    def pool(self, x: Tensor) -> Tensor:
        """Average over the image."""
        return x.mean(dim=(2, 3))  # (B, F)
