"""Images of a batch mixed in pairs: mixup (Zhang et al., arXiv:1710.09412) and CutMix (Yun et al., arXiv:1905.04899).

Letters: T steps of an epoch, B images in a batch, L of them labeled (first), S side of a view.

Each image has a partner and a share of its own. A labeled image is mixed with a labeled one, and an unlabeled image with an
unlabeled one, so that what is known about the two can be mixed too. Random numbers first, then a pure function of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opencon.config import AugmentConfig
from opencon.data.color import choose


class Mix(NamedTuple):
    """What a view shows: `share` of the image itself, and the rest of its partner in the batch."""

    partner: Tensor  # (B,) place in the batch
    share: Tensor  # (B,) in [0, 1]

    def of(self, values: Tensor) -> Tensor:
        """share * values + (1 - share) * values of the partner, for targets (B, ...), say."""
        share = self.share.view(-1, *[1] * (values.dim() - 1)).to(values.dtype)
        return torch.lerp(values[self.partner], values, share)


class MixParams(NamedTuple):
    """The parameters of a mix of B images; None where one of the two ways is off."""

    partner: Tensor  # (B,)
    share: Tensor  # (B,)
    is_cut: Tensor | None = None  # (B,) bool: a box is replaced, instead of a mean of both
    box: Tensor | None = None  # (B, 4) whole pixels: top, left, bottom, right


class Mixer:
    """Mixes views of one size as an `AugmentConfig` describes it."""

    def __init__(self, config: AugmentConfig, *, size: int) -> None:
        assert config.mixes, "there is nothing to mix"
        self.config = config
        self.size = size

    def draw(self, num_steps: int, num_images: int, num_labeled: int, generator: torch.Generator) -> MixParams:
        """Parameters for every image of every step, (T, B, ...), on the generator's device."""
        c, where = self.config, generator.device
        shape = (num_steps, num_images)

        def uniform(*more: int) -> Tensor:
            return torch.rand(*shape, *more, generator=generator, device=where)

        order = uniform()
        labeled, unlabeled = order[:, :num_labeled].argsort(dim=1), order[:, num_labeled:].argsort(dim=1)
        partner = torch.cat([labeled, num_labeled + unlabeled], dim=1)
        is_mixed = uniform() < c.mix_p
        one = torch.ones(shape, device=where)
        share = torch.where(is_mixed, self._beta(c.mixup, shape, generator), one) if c.mixup > 0 else one
        if c.cutmix == 0:
            return MixParams(partner, share)
        kept, place = self._beta(c.cutmix, shape, generator), uniform(2)
        box = torch.where(is_mixed[..., None], cut_box(kept, place, self.size), 0)
        is_cut = uniform() < (0.5 if c.mixup > 0 else 1.0)
        cut_share = 1.0 - (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1]) / self.size**2
        return MixParams(partner, torch.where(is_cut, cut_share, share), is_cut, box)

    @staticmethod
    def _beta(a: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Beta(a, a), from two gammas; where both have vanished (small a), either end by chance."""
        concentration = torch.full((2, *shape), a, dtype=torch.float64, device=generator.device)
        one, two = torch._standard_gamma(concentration, generator=generator).unbind()
        coin = torch.rand(shape, generator=generator, device=generator.device) < 0.5
        total = one + two
        return torch.where(total > 0, one / total.clamp(min=1e-300), coin.double()).float()

    def apply(self, x: Tensor, params: MixParams) -> tuple[Tensor, Mix]:
        """(B, channels, S, S) mixed, and how."""
        mix = Mix(params.partner, params.share)
        if params.is_cut is None or params.box is None:
            return mix.of(x), mix
        other = x[params.partner]
        pixel = torch.arange(self.size, device=x.device)
        top, left, bottom, right = (edge[:, None] for edge in params.box.unbind(1))  # (B, 1)
        rows, columns = (pixel >= top) & (pixel < bottom), (pixel >= left) & (pixel < right)  # (B, S)
        cut = torch.where((rows[:, :, None] & columns[:, None, :])[:, None], other, x)
        return choose(params.is_cut, cut, mix.of(x)), mix


def cut_box(kept: Tensor, place: Tensor, size: int) -> Tensor:
    """The box (..., 4) that is replaced: sides sqrt(1 - kept) of the image's, around a place in it, cut at the edges.

    Args:
        kept: (...) the share that stays, before the box is cut at the edges.
        place: (..., 2) in [0, 1): where its center is, down and right.
        size: of the image in pixels.
    """
    half = ((1.0 - kept).clamp(min=0.0).sqrt() * size).floor().div(2.0).floor()[..., None]  # (..., 1)
    center = (place * size).floor()
    return torch.cat([(center - half).clamp(min=0.0), (center + half).clamp(max=float(size))], dim=-1).long()
