"""What every encoder is: a sequence of stages, of which the first may be frozen.

Letters: B images in a batch, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from opencon.config import FrozenNorm
from opencon.errors import ConfigError, require
from opencon.registry import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self


class Encoder(nn.Module):
    """Images to penultimate features, stage by stage.

    A subclass sets `in_channels`, `num_features` and `stages` (the names of its child modules, in the order of the
    forward pass), and turns the output of the last stage into one row per image in `pool`.
    """

    channels_last: ClassVar[bool] = True  # the memory format in which convolutions are fast
    in_channels: int
    num_features: int
    stages: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self.num_frozen = 0  # how many of the first stages do not learn
        self.frozen_norm: FrozenNorm = "batch"
        self.folded: Callable[[Tensor], Tensor] | None = None  # a faster form of the frozen stages, see `fold`
        self.fused: Callable[[Tensor], Tensor] | None = None  # a faster form of all stages in training, see `fuse`
        self.register_load_state_dict_post_hook(_forget_folded)  # type: ignore[no-untyped-call]

    def pool(self, x: Tensor) -> Tensor:
        """Output of the last stage -> (B, F)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W), normalized -> (B, F)."""
        with torch.no_grad():
            x = self._frozen(x)
        if self.fused is not None and self.training and x.is_cuda:
            return self.pool(self.fused(x))
        for name in self.stages[self.num_frozen :]:
            x = getattr(self, name)(x)
        return self.pool(x)

    def _frozen(self, x: Tensor) -> Tensor:
        if self.folded is not None:
            return self.folded(x)
        for name in self.stages[: self.num_frozen]:
            x = getattr(self, name)(x)
        return x

    def fold(self, dtype: torch.dtype) -> None:
        """Prepare a faster form of the frozen stages, if this encoder has one. Call it once their weights are final."""

    def fuse(self) -> None:
        """Prepare a faster form for training every stage on a GPU, if this encoder has one."""

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor]) -> None:
        """Measure the statistics of frozen batch norms anew: their mean over these batches of normalized images.

        What comes before a frozen batch norm does not learn, so the statistics of a batch only scatter around this mean.
        """
        frozen = [getattr(self, name) for name in self.stages[: self.num_frozen]]
        norms = [m for stage in frozen for m in stage.modules() if isinstance(m, nn.BatchNorm2d)]
        if not norms:
            return
        self.folded = None
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch then takes the mean of all batches
            norm.train()
        for x in batches:
            for stage in frozen:
                x = stage(x)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        self.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.folded = None  # made of tensors that are about to move
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def named_starts(self) -> dict[str, int]:
        """Every allowed `train_from`: its name to the number of stages frozen before it."""
        starts = {name: index for index, name in enumerate(self.stages)}
        return {**starts, "all": 0, "head": len(self.stages)}

    def freeze(self, train_from: str, norm: FrozenNorm = "batch") -> None:
        """Let only `train_from` and what follows it learn.

        Args:
            train_from: a stage; "all" (everything learns); or "head" (nothing of the encoder learns).
            norm: batch norms of frozen stages either keep following the train and eval mode ("batch": batch
                statistics while training, running ones updated, as the released OpenCon does), or always use their
                running statistics: those that came with the weights ("running"), or that `measure` took ("measured").
        """
        starts = self.named_starts()
        if train_from not in starts:
            raise ConfigError(
                f"encoder.train_from = {train_from!r} is not a stage of this encoder."
                f"{did_you_mean(train_from, starts)} Allowed: {', '.join(starts)}."
            )
        self.num_frozen = starts[train_from]
        self.folded = self.fused = None
        self.frozen_norm = norm
        for index, name in enumerate(self.stages):
            getattr(self, name).requires_grad_(index >= self.num_frozen)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation; frozen batch norms keep to `frozen_norm`."""
        super().train(mode)
        if self.frozen_norm != "batch":
            for name in self.stages[: self.num_frozen]:
                getattr(self, name).eval()
        return self


def _forget_folded(encoder: Encoder, _: object) -> None:
    encoder.folded = None  # other weights have been loaded


def require_color(name: str, in_channels: int) -> None:
    """Refuse images that do not have three channels."""
    require(
        in_channels == 3,
        f"encoder {name!r} takes color images (3 channels), but these have {in_channels}. "
        f"Convert the images to RGB, or use encoder 'convnet', which takes any number of channels.",
    )
