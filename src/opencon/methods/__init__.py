"""Methods: one file, one class, one line here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opencon.config import MethodConfig
from opencon.methods.base import Assignment, Batch, Epoch, FeatureBank, Method, StepOutput, Task
from opencon.methods.opencon import OpenCon, OpenConConfig
from opencon.methods.simclr import SimCLR, SimCLRConfig
from opencon.registry import Registry

__all__ = [
    "METHODS",
    "Assignment",
    "Batch",
    "Epoch",
    "FeatureBank",
    "Method",
    "MethodEntry",
    "OpenCon",
    "OpenConConfig",
    "SimCLR",
    "SimCLRConfig",
    "StepOutput",
    "Task",
]


@dataclass(frozen=True)
class MethodEntry:
    """What the registry knows of a method."""

    build: type[Method[Any]]
    config: type[MethodConfig]
    title: str
    paper: str
    year: int


METHODS: Registry[MethodEntry] = Registry("method")
METHODS.add("opencon", MethodEntry(OpenCon, OpenConConfig, "OpenCon", "arXiv:2208.02764", 2023))
METHODS.add("simclr", MethodEntry(SimCLR, SimCLRConfig, "SimCLR", "arXiv:2002.05709", 2020))
