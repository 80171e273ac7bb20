"""Images to unit rows: normalize, encode, project.

Letters: B images in a batch, V views, C channels, F features, D embedding size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.config import EncoderConfig, Precision
from opencon.data.shares import Share, gather
from opencon.encoders.base import Encoder
from opencon.encoders.synchronized import has_synchronized
from opencon.encoders.weights import LoadReport
from opencon.errors import require
from opencon.runtime import fast_dtype

AUTOCAST: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def quiet_norms(module: nn.Module) -> Iterator[None]:
    """Inside, batch norms keep their running statistics: those of small crops are not those of images."""
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


class Embedder(nn.Module):
    """An encoder and its projection head (or none), from images in [0, 1] to float32 rows of unit length.

    Reduced precision covers encoder and head only; what leaves is float32.
    """

    mean: Tensor
    std: Tensor
    load_report: LoadReport | None = None  # of the encoder's weights; None: they started at random

    def __init__(
        self, encoder: Encoder, head: nn.Module | None, config: EncoderConfig, precision: Precision = "fp32"
    ) -> None:
        super().__init__()
        # The config owns these two; a checkpoint trained elsewhere must not bring its own in silently.
        for name, values in (("mean", config.mean), ("std", config.std)):
            require(
                len(values) in (1, encoder.in_channels),
                f"encoder.{name} = {values} has {len(values)} values for images of {encoder.in_channels} channels. "
                f"Give one value for all channels, or one per channel.",
            )
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)
        self.encoder = encoder
        self.head = head if head is not None else nn.Identity()
        self.config = config
        self.precision = precision
        # A CPU without bfloat16 emulates it, which is slower than float32.
        self.reduces_on_cpu = precision != "bf16" or fast_dtype(torch.device("cpu")) == torch.bfloat16
        self.num_features = encoder.num_features  # F
        self.dim = config.head_dim if head is not None else encoder.num_features  # D
        if encoder.channels_last:
            encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, D), float32, unit length. A row of zeros stays a row of zeros."""
        return self.project(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, F), float32: the input of the head, not normalized.

        A rank encodes the rows that it has, and gets the features of all.
        """
        if isinstance(images, Share):
            return gather(self._features_of_own(images.own), (images,))
        images = self._normalized(images)
        with self._autocast(images):
            features: Tensor = self.encoder(images)
        return features.float()

    def project(self, features: Tensor) -> Tensor:
        """(B, F) -> (B, D), float32, unit length: the head, where there is one."""
        with self._autocast(features):
            z = self.head(features)
        return F.normalize(z.float(), dim=1)

    def embed_views(self, views: tuple[Tensor, ...]) -> Tensor:
        """V views (B, C, H, W) -> (V * B, D), view by view."""
        return self.project(self.features_of_views(views))

    def features_of_views(self, views: tuple[Tensor, ...]) -> Tensor:
        """V views (B, C, H, W) -> (V * B, F), view by view: the input of the head, not normalized.

        With `views_together` there is one pass, and batch norm sees all views at once; else there is one pass per view.
        Views of another size follow in passes of their own, one for each size, which leave the running statistics alone.
        """
        size = views[0].shape[-1]
        others = tuple(view for view in views if view.shape[-1] != size)
        if others:
            same = tuple(view for view in views if view.shape[-1] == size)
            of_same = iter(self.features_of_views(same).chunk(len(same)))
            with quiet_norms(self):
                of_others = iter(self.features_of_views(others).chunk(len(others)))
            return torch.cat([next(of_same if view.shape[-1] == size else of_others) for view in views])
        if isinstance(views[0], Share) and self.config.views_together:
            shares: Any = views
            return gather(self._features_of_own(torch.cat([share.own for share in shares])), shares)
        if self.config.views_together:
            return self.features(torch.cat(views))
        return torch.cat([self.features(view) for view in views])

    def _features_of_own(self, images: Tensor) -> Tensor:
        """The same for the rows of this rank. One that has none encodes an empty image, so that no other waits for it."""
        if len(images) or has_synchronized(self.encoder):  # those count rows themselves, and may get none
            return self.features(images)
        with quiet_norms(self):
            return self.features(images.new_zeros(1, *images.shape[1:]))[:0]

    def measure_frozen(self, views: Iterable[Tensor]) -> None:
        """Measure the statistics of frozen batch norms on views (B, C, H, W), if the settings ask for it."""
        if self.config.frozen_norm == "measured":
            with self._autocast(self.mean):
                self.encoder.measure(map(self._normalized, views))

    def fold_frozen(self) -> None:
        """Use the faster form of the frozen stages from now on. Their weights must not change afterwards."""
        if self.config.fold_frozen:
            self.encoder.fold(self._reduced(self.mean.device) or torch.float32)

    def _normalized(self, images: Tensor) -> Tensor:
        assert images.is_floating_point(), f"images must be float in [0, 1], got {images.dtype}"
        images = (images - self.mean) / self.std
        return images.contiguous(memory_format=torch.channels_last) if self.encoder.channels_last else images

    def _reduced(self, device: torch.device) -> torch.dtype | None:
        """The reduced precision of encoder and head on this device; None for float32."""
        return None if device.type == "cpu" and not self.reduces_on_cpu else AUTOCAST.get(self.precision)

    def _autocast(self, images: Tensor) -> torch.autocast:
        dtype = self._reduced(images.device)
        return torch.autocast(images.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
