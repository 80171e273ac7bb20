"""Names to things, one registry per kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from opencon.errors import ConfigError

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean X?' when a known name is close, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class Registry(Generic[T]):
    """Names to entries, for one kind of thing. Two things never share a name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register `entry`; a second entry under the same name is a programmer's error."""
        if name in self._entries:
            raise RuntimeError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

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
            return self._entries[name]
        hint = did_you_mean(name, self._entries)
        raise ConfigError(f"unknown {self.kind} {name!r}.{hint} Known: {', '.join(self.names())}.")
