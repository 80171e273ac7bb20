"""Methods: one file, one class, one line here.

`base.Method`      the contract
`METHODS`          every method by its name
`parts`, `extend`  pieces that several methods share
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opencon.config import MethodConfig
from opencon.methods.base import (
    Assignment,
    Batch,
    Epoch,
    FeatureBank,
    Kind,
    Method,
    Schedule,
    StepOutput,
    Task,
    Variant,
)
from opencon.methods.cgdl import CGDL, CGDLConfig
from opencon.methods.concord import Concord, ConcordConfig
from opencon.methods.crops import Crops, CropsConfig
from opencon.methods.ds3l import DS3L, DS3LConfig
from opencon.methods.dtc import DTC, DTCConfig
from opencon.methods.fixmatch import FixMatch, FixMatchConfig
from opencon.methods.gcd import GCD, GCDConfig
from opencon.methods.kmeans import KMeans, KMeansConfig
from opencon.methods.moco import MoCo, MoCoConfig
from opencon.methods.opencon import OpenCon, OpenConConfig
from opencon.methods.orca import ORCA, ORCAConfig
from opencon.methods.pcl import PCL, PCLConfig
from opencon.methods.rankstats import RankStats, RankStatsConfig
from opencon.methods.rankstats_plus import RankStatsPlus, RankStatsPlusConfig
from opencon.methods.simclr import SimCLR, SimCLRConfig
from opencon.methods.simgcd import SimGCD, SimGCDConfig
from opencon.methods.uno import UNO, UNOConfig
from opencon.registry import Registry

__all__ = [
    "CGDL",
    "DS3L",
    "DTC",
    "GCD",
    "METHODS",
    "ORCA",
    "PCL",
    "UNO",
    "Assignment",
    "Batch",
    "CGDLConfig",
    "Concord",
    "ConcordConfig",
    "Crops",
    "CropsConfig",
    "DS3LConfig",
    "DTCConfig",
    "Epoch",
    "FeatureBank",
    "FixMatch",
    "FixMatchConfig",
    "GCDConfig",
    "KMeans",
    "KMeansConfig",
    "Kind",
    "Method",
    "MethodEntry",
    "MoCo",
    "MoCoConfig",
    "ORCAConfig",
    "OpenCon",
    "OpenConConfig",
    "PCLConfig",
    "RankStats",
    "RankStatsConfig",
    "RankStatsPlus",
    "RankStatsPlusConfig",
    "Schedule",
    "SimCLR",
    "SimCLRConfig",
    "SimGCD",
    "SimGCDConfig",
    "StepOutput",
    "Task",
    "UNOConfig",
    "Variant",
]


@dataclass(frozen=True)
class MethodEntry:
    """What the registry knows about a method."""

    build: type[Method[Any]]
    title: str
    paper: str  # arXiv:..., doi:..., PMLR ..., or "ours" where there is none
    year: int
    needs: str  # besides images, in a few words
    protocol: str = "-"  # of the numbers in its own paper, if it is one of ours

    def __post_init__(self) -> None:
        if not hasattr(self.build, "settings"):
            raise TypeError(f"{self.build.__name__} does not say which settings it has: settings = ...Config")

    @property
    def config(self) -> type[MethodConfig]:
        """The class of its settings."""
        return self.build.settings


LABELS = "labels, count"  # some images labeled, and the number of classes

METHODS: Registry[MethodEntry] = Registry("method")
METHODS.add("cgdl", MethodEntry(CGDL, "CGDL", "arXiv:2003.08823", 2020, LABELS))
METHODS.add("concord", MethodEntry(Concord, "Concord", "ours", 2026, LABELS))
METHODS.add("crops", MethodEntry(Crops, "Crops", "ours", 2026, "nothing"))
METHODS.add("ds3l", MethodEntry(DS3L, "DS3L", "PMLR 119:3897-3906", 2020, LABELS))
METHODS.add("dtc", MethodEntry(DTC, "DTC", "arXiv:1908.09884", 2019, LABELS))
METHODS.add("fixmatch", MethodEntry(FixMatch, "FixMatch", "arXiv:2001.07685", 2020, LABELS))
METHODS.add("gcd", MethodEntry(GCD, "GCD", "arXiv:2201.02609", 2022, LABELS, "gcd"))
METHODS.add("kmeans", MethodEntry(KMeans, "k-means", "doi:10.5555/1283383.1283494", 2007, LABELS))
METHODS.add("moco", MethodEntry(MoCo, "MoCo v3", "arXiv:2104.02057", 2021, "nothing"))
METHODS.add("opencon", MethodEntry(OpenCon, "OpenCon", "arXiv:2208.02764", 2023, LABELS, "orca"))
METHODS.add("orca", MethodEntry(ORCA, "ORCA", "arXiv:2102.03526", 2022, LABELS, "orca"))
METHODS.add("pcl", MethodEntry(PCL, "PCL", "arXiv:2005.04966", 2021, LABELS))
METHODS.add("rankstats", MethodEntry(RankStats, "RankStats", "arXiv:2002.05714", 2020, LABELS))
METHODS.add("rankstats_plus", MethodEntry(RankStatsPlus, "RankStats+", "arXiv:2002.05714", 2020, LABELS))
METHODS.add("simclr", MethodEntry(SimCLR, "SimCLR", "arXiv:2002.05709", 2020, "nothing"))
METHODS.add("simgcd", MethodEntry(SimGCD, "SimGCD", "arXiv:2211.11727", 2023, LABELS, "gcd"))
METHODS.add("uno", MethodEntry(UNO, "UNO+", "arXiv:2108.08536", 2021, LABELS))
