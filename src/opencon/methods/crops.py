"""Crops: ours, 2026. SimCLR's contrast (Chen et al., arXiv:2002.05709) over many small views, judged at full size.

A view of 20 pixels takes 0.4 of the time of one of 32. So five small views of an image cost as much as two full ones, and
have ten pairs to learn from instead of one. Several crops are SwAV's idea (Caron et al., arXiv:2006.09882), where they join
two full views. An encoder that averages over the image can be judged at another size than it was trained at, once its batch
norms have been measured there (Touvron et al., arXiv:1906.06423).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from opencon.config import AugmentConfig, ViewConfig
from opencon.methods.base import Kind, Schedule, Variant
from opencon.methods.schedule import DIGITS_VIEW
from opencon.methods.simclr import SimCLR, SimCLRConfig

SMALL, FULL = 20, 32  # pixels on CIFAR, ours
SMALL_PHOTO = ViewConfig(size=96, crop_scale=(0.05, 0.14), count=4)  # SwAV's for images of 224 pixels


@dataclass(frozen=True, kw_only=True)
class CropsConfig(SimCLRConfig):
    """Settings of Crops, which uses no label while training."""

    name: ClassVar[str] = "crops"


class Crops(SimCLR):
    """SimCLR's loss and head; all views of an image are positives of each other, all rows of other images negatives."""

    settings = CropsConfig

    @classmethod
    def schedule(cls, kind: Kind, variant: Variant = "released") -> Schedule:
        """Every parameter learns. Ours: SimCLR's rates; five small views on CIFAR, four views of digits."""
        own = super().schedule(kind, variant)
        if kind == "digits":  # 8 pixels cannot be fewer
            more = ViewConfig(**asdict(DIGITS_VIEW), count=2)
            return replace(own, train=replace(own.train, epochs=40), views=(more,))
        train = replace(own.train, compile=False)  # views and passes of this size have kernels of their own
        if kind != "cifar":
            return replace(own, train=train, views=(SMALL_PHOTO,))
        judged: dict[str, Any] = {"size": FULL, "average": 0.999, "fresh_norms": True}
        views = (ViewConfig(size=SMALL, count=3),)
        return replace(own, train=train, augment=AugmentConfig(size=SMALL), views=views, eval=judged)
