"""Names to things, one registry per kind, and where each thing comes from if it is not ours."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from opencon.errors import ConfigError

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when a known name is close, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from: a file and its checksum, or an entry point and its package."""

    kind: str  # "file" or "entry point"
    place: str  # the file's path ("": it was typed into a session), or what the entry point names
    checksum: str  # SHA-256 of the file, or name and version of the package

    def __str__(self) -> str:
        return Path(self.place).name or "this session" if self.kind == "file" else self.checksum


class Registry(Generic[T]):
    """Names to entries, for one kind of thing. Two things never share a name."""

    every: ClassVar[weakref.WeakSet[Registry[Any]]] = weakref.WeakSet()
    _loading: ClassVar[list[Origin]] = []  # the plugins that are being imported just now

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[T, Origin | None, str]] = {}  # entry, its origin, the module that registered it
        Registry.every.add(self)

    def add(self, name: str, entry: T) -> T:
        """Register `entry`; a second entry under the same name is a programmer's error.

        A file that is imported again under another name, or a cell of a notebook that runs again, takes its own place.
        """
        module, origin = _caller()
        origin = self._loading[-1] if self._loading else origin
        if name in self._entries:
            _, before, by = self._entries[name]
            if origin is None or origin != before or (module == by and origin.place):
                raise RuntimeError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry, origin, module
        return entry

    @property
    def origins(self) -> dict[str, Origin]:
        """Where the entries come from that are not ours."""
        return {name: origin for name, (_, origin, _) in self._entries.items() if origin is not None}

    @classmethod
    @contextlib.contextmanager
    def loading(cls, origin: Origin) -> Iterator[None]:
        """What is registered inside comes from there, in whichever registry."""
        cls._loading.append(origin)
        try:
            yield
        finally:
            cls._loading.pop()

    @classmethod
    def forget(cls, origin: Origin) -> None:
        """Drop all entries of this origin, in every registry."""
        for registry in cls.every:
            for name in [name for name, known in registry.origins.items() if known == origin]:
                del registry._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name][0]
        hint = did_you_mean(name, self._entries)
        raise ConfigError(f"unknown {self.kind} {name!r}.{hint} Known: {', '.join(self.names())}.")


def _caller() -> tuple[str, Origin | None]:
    """The module that calls `Registry.add`, and its file; None for a file of ours."""
    module = sys._getframe(2).f_globals
    name = str(module.get("__name__", ""))
    if name.startswith("opencon."):
        return name, None
    try:
        path = Path(module["__file__"]).resolve()
        return name, Origin("file", str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    except (KeyError, TypeError, OSError):  # typed into a session
        return name, Origin("file", "", "")
