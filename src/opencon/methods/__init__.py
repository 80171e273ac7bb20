"""Methods: one file, one class, one line here."""

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
from opencon.methods.opencon import OpenCon, OpenConConfig
from opencon.methods.simclr import SimCLR, SimCLRConfig
from opencon.registry import Registry

__all__ = [
    "METHODS",
    "Assignment",
    "Batch",
    "Epoch",
    "FeatureBank",
    "Kind",
    "Method",
    "MethodEntry",
    "OpenCon",
    "OpenConConfig",
    "Schedule",
    "SimCLR",
    "SimCLRConfig",
    "StepOutput",
    "Task",
    "Variant",
]


@dataclass(frozen=True)
class MethodEntry:
    """What the registry knows of a method."""

    build: type[Method[Any]]
    title: str
    paper: str  # arXiv:... or doi:...
    year: int
    needs: str  # besides images, in a few words
    protocol: str = "orca"  # under which its own paper's numbers were made, or OpenCon's paper for it

    @property
    def config(self) -> type[MethodConfig]:
        """The class of its settings."""
        return self.build.settings


LABELS = "labels, number of classes"

METHODS: Registry[MethodEntry] = Registry("method")
METHODS.add("opencon", MethodEntry(OpenCon, "OpenCon", "arXiv:2208.02764", 2023, LABELS))
METHODS.add("simclr", MethodEntry(SimCLR, "SimCLR", "arXiv:2002.05709", 2020, "nothing: it pre-trains"))
