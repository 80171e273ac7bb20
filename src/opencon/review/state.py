"""The groups as they are now: the discovery, and every decision replayed on it.

    move     photos: [..], to: group, JUNK or STRANGERS     the photos count as looked at
    new      photos: [..], name: text, id: group            a group of its own
    name     group, name: text
    merge    groups: [..], into: group
    split    group, parts: [[..], [..]], ids: [..]          the first part stays; each other one is a new group
    confirm  photos: [..]                                   these were looked at, and are where they belong
    apart    groups: [a, b]                                 these two are not the same
    learned  file: what `learn` found, groups: new names    accepted
    undo, redo

A photo that a decision does not name never moves. Undo and redo are decisions as well, so the log only grows.

Letters: n photos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from opencon.errors import OpenConError
from opencon.review.run import JUNK, STRANGERS, Run

MOST_LETTERS = 120  # of a name, ours: what fits on a line of the page
MOST_PARTS = 12  # of a split, ours: more cannot be seen at a glance
Photos = NDArray[np.int64]
Learned = tuple[NDArray[np.int32], NDArray[np.float32]]  # a place and a confidence for every photo


class RefusedError(OpenConError):
    """A decision that cannot be taken; the message is for the person at the page."""


@dataclass(frozen=True)
class Group:
    """A class or group."""

    name: str
    kind: Literal["seen", "new"]  # whether it was known before the discovery
    first: str  # its name in the discovery, by which it is found there; empty for a group that a person made
    is_named: bool = False  # by a person, here
    is_touched: bool = False  # merged, split or told apart by a person: it is a class of its own from now on


@dataclass(frozen=True, eq=False)
class Change:
    """What one decision changes, and what was there before."""

    photos: Photos
    place: NDArray[np.int32]  # after, for these photos
    looked: NDArray[np.bool_]
    groups: Mapping[int, Group | None] = field(default_factory=dict)  # after; None: gone
    apart: tuple[int, int] | None = None
    confidence: NDArray[np.float32] | None = None


class State:
    """Every photo's place. One thread at a time."""

    def __init__(self, run: Run, learned: Callable[[str], Learned] | None = None) -> None:
        """The groups of the discovery, before any decision.

        Args:
            run: the discovery.
            learned: reads what a decision `learned` names.
        """
        self.run, self._learned = run, learned
        self.place = run.place.copy()  # (n,)
        self.looked = run.given.copy()  # (n,) by a person
        self.confidence = run.confidence.copy()  # (n,)
        kinds = ("seen" if g < run.num_seen else "new" for g in range(len(run.names)))
        self.groups = {g: Group(name, kind, name) for g, (name, kind) in enumerate(zip(run.names, kinds, strict=True))}  # type: ignore[arg-type]
        self.apart: set[tuple[int, int]] = set()
        self._next_id = len(self.groups)
        self._done: list[tuple[Change, Change]] = []  # what a decision did, and what takes it back
        self._undone: list[tuple[Change, Change]] = []
        self._touched: list[Photos] = []  # by each entry of the log

    @property
    def version(self) -> int:
        """How many entries of the log have been replayed."""
        return len(self._touched)

    @property
    def can_undo(self) -> int:
        """How many decisions can be taken back."""
        return len(self._done)

    @property
    def can_redo(self) -> int:
        """How many can be taken again."""
        return len(self._undone)

    def members(self, group: int) -> Photos:
        """The photos of a group."""
        return np.flatnonzero(self.place == group)

    def changed_since(self, version: int) -> Photos:
        """The photos that entries after this version touched."""
        late = self._touched[version:]
        return np.unique(np.concatenate(late)) if late else np.empty(0, dtype=np.int64)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def complete(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What the page asked for as an entry of the log, with the numbers of new groups; refuses what cannot be done."""
        do = asked.get("do")
        if do in ("undo", "redo"):
            if not (self._done if do == "undo" else self._undone):
                raise RefusedError(f"There is nothing to {do}.")
            return {"do": do}
        checks: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "move": self._check_move,
            "new": self._check_new,
            "name": self._check_name,
            "merge": self._check_merge,
            "split": self._check_split,
            "confirm": lambda asked: {"photos": self._photos(asked.get("photos"))},
            "apart": lambda asked: {"groups": sorted(self._group_list(asked.get("groups"), most=2))},
        }
        if not isinstance(do, str) or do not in checks:
            raise RefusedError("This page is older or newer than the program. Load it again.")
        return {"do": do, **checks[do](asked)}

    def apply(self, entry: Mapping[str, Any]) -> None:
        """Replay one entry of the log."""
        do = entry["do"]
        if do == "undo":
            forward, back = self._done.pop()
            self._set(back)
            self._undone.append((forward, back))
        elif do == "redo":
            forward, back = self._undone.pop()
            self._set(forward)
            self._done.append((forward, back))
        else:
            forward = self._learned_entry(entry) if do == "learned" else getattr(self, f"_{do}")(entry)
            back = self._inverse(forward)
            self._set(forward)
            self._done.append((forward, back))
            self._undone.clear()
        self._touched.append(forward.photos)

    def _set(self, change: Change) -> None:
        self.place[change.photos] = change.place
        self.looked[change.photos] = change.looked
        if change.confidence is not None:
            self.confidence[change.photos] = change.confidence
        for g, group in change.groups.items():
            if group is None:
                self.groups.pop(g, None)
            else:
                self.groups[g] = group
                self._next_id = max(self._next_id, g + 1)
        if change.apart is not None:
            self.apart ^= {change.apart}

    def _inverse(self, change: Change) -> Change:
        where = change.photos
        return Change(
            where,
            self.place[where],
            self.looked[where],
            {g: self.groups.get(g) for g in change.groups},
            change.apart,
            None if change.confidence is None else self.confidence[where],
        )

    def _to(self, photos: Sequence[int] | Photos, place: int, groups: Mapping[int, Group | None]) -> Change:
        """Photos that a person put somewhere."""
        where = np.asarray(photos, dtype=np.int64)
        return Change(where, np.full(len(where), place, np.int32), np.ones(len(where), dtype=bool), groups)

    def _kept(self, photos: Photos, place: int | NDArray[np.int32], groups: Mapping[int, Group | None]) -> Change:
        """Photos that went along with their group; whether they were looked at does not change."""
        return Change(photos, np.broadcast_to(np.int32(place), len(photos)), self.looked[photos], groups)

    def _move(self, entry: Mapping[str, Any]) -> Change:
        return self._to(entry["photos"], entry["to"], {})

    def _new(self, entry: Mapping[str, Any]) -> Change:
        group = Group(entry["name"], "new", "", is_named=bool(entry.get("is_named")), is_touched=True)
        return self._to(entry["photos"], entry["id"], {entry["id"]: group})

    def _name(self, entry: Mapping[str, Any]) -> Change:
        named = replace(self.groups[entry["group"]], name=entry["name"], is_named=True)
        return self._to([], JUNK, {entry["group"]: named})

    def _merge(self, entry: Mapping[str, Any]) -> Change:
        into, others = entry["into"], [g for g in entry["groups"] if g != entry["into"]]
        after: dict[int, Group | None] = dict.fromkeys(others)
        after[into] = replace(self.groups[into], is_touched=True)
        return self._kept(np.flatnonzero(np.isin(self.place, others)), into, after)

    def _split(self, entry: Mapping[str, Any]) -> Change:
        group = self.groups[entry["group"]]
        after: dict[int, Group | None] = {entry["group"]: replace(group, is_touched=True)}
        names = self._free_names(group.name)
        parts = entry["parts"][1:]
        for g in entry["ids"]:
            after[g] = Group(next(names), "new", "", is_touched=True)
        photos = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        place = np.repeat(np.array(entry["ids"], np.int32), [len(part) for part in parts])
        return Change(photos, place, self.looked[photos], after)

    def _confirm(self, entry: Mapping[str, Any]) -> Change:
        where = np.asarray(entry["photos"], dtype=np.int64)
        return Change(where, self.place[where], np.ones(len(where), dtype=bool))

    def _apart(self, entry: Mapping[str, Any]) -> Change:
        a, b = entry["groups"]
        after: dict[int, Group | None] = {g: replace(self.groups[g], is_touched=True) for g in (a, b)}
        new = (a, b) not in self.apart
        return replace(self._to([], JUNK, after), apart=(a, b) if new else None)

    def _learned_entry(self, entry: Mapping[str, Any]) -> Change:
        assert self._learned is not None
        place, confidence = self._learned(entry["file"])
        place = self.unless_placed(place)
        where = np.flatnonzero((place != self.place) | (confidence != self.confidence))
        after: dict[int, Group | None] = dict.fromkeys(entry["gone"])
        after |= {int(g): Group(name, "new", "") for g, name in entry["groups"].items()}
        return Change(where, place[where], self.looked[where], after, confidence=confidence[where])

    def unless_placed(self, place: NDArray[np.int32]) -> NDArray[np.int32]:
        """Places (n,) for the photos that no person has placed; the others stay where they are."""
        return np.where(self.looked | (self.place == JUNK), self.place, place).astype(np.int32)

    # --- what the page may ask for ------------------------------------------------------------------------------------

    def _photos(self, value: object) -> list[int]:
        n = len(self.place)
        if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < n for i in value):
            raise RefusedError("Select some photos first.")
        if len(set(value)) != len(value):
            raise RefusedError("A photo was named twice.")
        return value

    def _group(self, value: object) -> int:
        if type(value) is not int or value not in self.groups:
            raise RefusedError("That group is gone: it was merged or taken back meanwhile.")
        return value

    def _group_list(self, value: object, most: int | None = None) -> list[int]:
        if not isinstance(value, list) or len(value) < 2 or (most is not None and len(value) > most):
            raise RefusedError("Choose two groups." if most == 2 else "Choose two groups or more.")
        groups = [self._group(g) for g in value]
        if len(set(groups)) != len(groups):
            raise RefusedError("Choose groups that differ.")
        return groups

    def name_for(self, value: object, own: int | None = None) -> str:
        """A name that a group can have; `own` is the group that may have it already."""
        text = " ".join(value.split()) if isinstance(value, str) else ""
        if not text or not text.isprintable():
            raise RefusedError("Give a name of letters, digits and spaces." if text else "Give the group a name.")
        if len(text) > MOST_LETTERS:
            raise RefusedError(f"This name has {len(text)} letters; {MOST_LETTERS} fit.")
        if any(group.name == text and g != own for g, group in self.groups.items()):
            raise RefusedError(f"There is a group “{text}” already. Merge the two, or choose another name.")
        return text

    def _free_names(self, base: str) -> Any:
        """base (2), base (3), ... that no group has."""
        taken = {group.name for group in self.groups.values()}
        stem = base[: MOST_LETTERS - 8]
        return (name for k in range(2, len(taken) + MOST_PARTS + 3) if (name := f"{stem} ({k})") not in taken)

    def new_name(self) -> str:
        """new-1, new-2, ...: the first that is free."""
        taken = {group.name for group in self.groups.values()} | set(self.run.names)
        return next(name for k in range(1, len(taken) + 2) if (name := f"new-{k}") not in taken)

    def new_ids(self, number: int) -> list[int]:
        """Numbers that no group ever had."""
        return list(range(self._next_id, self._next_id + number))

    def _check_move(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        to = asked.get("to")
        where = to if to in (JUNK, STRANGERS) and type(to) is int else self._group(to)
        return {"photos": self._photos(asked.get("photos")), "to": where}

    def _check_new(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        photos, name = self._photos(asked.get("photos")), asked.get("name")
        is_named = name not in (None, "")
        text = self.name_for(name) if is_named else self.new_name()
        return {"photos": photos, "name": text, "is_named": is_named, "id": self.new_ids(1)[0]}

    def _check_name(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        group = self._group(asked.get("group"))
        return {"group": group, "name": self.name_for(asked.get("name"), own=group)}

    def _check_merge(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        groups = self._group_list(asked.get("groups"))
        into = self._group(asked.get("into"))
        if into not in groups:
            raise RefusedError("The group to merge into must be one of them.")
        return {"groups": groups, "into": into}

    def _check_split(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        group, parts = self._group(asked.get("group")), asked.get("parts")
        if not isinstance(parts, list) or not 2 <= len(parts) <= MOST_PARTS:
            raise RefusedError(f"A group splits into 2 to {MOST_PARTS} parts.")
        lists = [self._photos(part) for part in parts]
        together = np.concatenate([np.asarray(part) for part in lists])
        if len(np.unique(together)) != len(together) or not (self.place[together] == group).all():
            raise RefusedError("Some of these photos have left the group meanwhile. Ask for the parts again.")
        return {"group": group, "parts": lists, "ids": self.new_ids(len(lists) - 1)}
