"""RankStats+: New Visual Categories with Ranking Statistics. Han et al., ICLR 2020, arXiv:2002.05714.

The form with one head in which Vaze et al. (GCD, arXiv:2201.02609) compare with it.

Letters: N rows (view by view), F features, S seen classes, C all classes, M images in a set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from opencon.methods.base import Assignment, FeatureBank
from opencon.methods.rankstats import RankStats, RankStatsConfig, squared_difference


@dataclass(frozen=True, kw_only=True)
class RankStatsPlusConfig(RankStatsConfig):
    """Settings of RankStats+, those of RankStats."""

    name: ClassVar[str] = "rankstats_plus"


class RankStatsPlus(RankStats):
    """RankStats with one head over all C classes: its first S outputs learn the labels, all of them the pairs.

    The losses are those of RankStats, with f_i the first S logits and p_i the softmax of all C. An output is a class: no
    naming afterwards.
    """

    settings: ClassVar[type[RankStatsConfig]] = RankStatsPlusConfig

    def build_heads(self, num_features: int) -> nn.ModuleDict:
        """One for all classes."""
        return nn.ModuleDict({"all": nn.Linear(num_features, self.task.num_classes)})

    def logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(N, F) -> the first S outputs, all C outputs."""
        every: Tensor = self.heads["all"](features)
        return every[:, : self.task.num_seen], every

    def inconsistency(self, seen: Tensor, every: Tensor) -> Tensor:
        """Squared difference of the probabilities of two views, of the one head."""
        return squared_difference(every)

    @torch.no_grad()
    def assign(self, bank: FeatureBank) -> Assignment:
        """The largest output."""
        seen, every = self.logits(bank.z)
        return Assignment(classes=every.argmax(dim=1), p=every.softmax(dim=1), seen_logits=seen)
