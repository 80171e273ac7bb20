"""How a method is trained on one kind of images: what a recipe needs besides a data set and an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from opencon.config import AugmentConfig, MethodConfig, TrainConfig, ViewConfig

Kind = Literal["digits", "cifar", "imagenet", "fine_grained"]  # of images
Variant = Literal["released", "paper"]  # as the published code does it, or as the text says where they differ


@dataclass(frozen=True)
class Schedule:
    """A method's settings, its training, its views, and settings of the encoder."""

    method: MethodConfig
    train: TrainConfig
    augment: AugmentConfig
    strong: AugmentConfig | None = None  # of the second view; None: as the first
    views: tuple[ViewConfig, ...] = ()  # further ones
    encoder: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from the recipe's own
    eval: Mapping[str, Any] = field(default_factory=dict)  # how it is judged, where that differs
    eval_every: int = 20  # epochs


# Ours: 8 pixels leave little to turn and shift.
DIGITS_VIEW = AugmentConfig(crop_scale=None, flip_p=0, jitter_p=0, gray_p=0, rotate=5, shift=0.08, zoom=(0.92, 1.08))
# "Random crop with 4 pixels of padding, and flip", the weak view of many papers for images of 32 pixels.
CROP4_FLIP = AugmentConfig(crop_scale=None, flip_p=0.5, jitter_p=0, gray_p=0, shift=4 / 32, whole_pixels=True)
# The weak view for larger images: a random crop of at least half the area, as in ORCA's code.
HALF_CROP_FLIP = AugmentConfig(size=224, crop_scale=(0.5, 1.0), jitter_p=0, gray_p=0)


def usual(method: MethodConfig, kind: Kind, *, augment: AugmentConfig | None = None, **train: Any) -> Schedule:
    """OpenCon's schedule, released code; keyword arguments change the training, `augment` both views.

    digits: ours. cifar, imagenet: OpenCon, appendix I. fine_grained: GCD (arXiv:2201.02609), section 4.1.
    """
    if kind == "digits":
        base = TrainConfig(epochs=100, batch_size=256, lr=0.1, schedule="cosine", log_every=1000)
        return Schedule(method, replace(base, **train), augment or DIGITS_VIEW, eval_every=10)
    fast = TrainConfig(epochs=200, milestones=(100, 150), precision="bf16", compile=True)
    if kind == "cifar":
        return Schedule(method, replace(fast, **train), augment or AugmentConfig(), eval_every=50)
    large = augment or AugmentConfig(size=224)
    if kind == "imagenet":
        fast = replace(fast, epochs=120, milestones=(60, 90), lr=0.01, weight_decay=1e-4)
        return Schedule(method, replace(fast, **train), large)
    fast = replace(fast, batch_size=128, lr=0.1, lr_end=1e-4, weight_decay=5e-5, schedule="cosine", milestones=())
    return Schedule(method, replace(fast, **train), large)
