"""Which classes of a named data set are seen, and where its files may lie.

The classes are facts from papers; text files hold them, `lists/NAME.txt`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path

from opencon.data.listings import Listing, find_images, printable
from opencon.errors import DataError
from opencon.files import read_file

# --- lists ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassOrder:
    """Seen and novel classes of a data set, as its list has them: WordNet ids, or numbers from 0."""

    seen: tuple[str, ...]
    novel: tuple[str, ...]

    def of(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names that the numbers stand for, seen ones first."""
        return tuple(names[int(number)] for number in self.seen + self.novel)


def class_order(name: str) -> ClassOrder:
    """The order in lists/NAME.txt, whose lines are `seen ...` and `novel ...`."""
    words = [line.split() for line in _list_lines(name)]
    order = {kind: tuple(classes) for kind, *classes in words}
    return ClassOrder(order["seen"], order["novel"])


def car_names() -> tuple[str, ...]:
    """The classes of Stanford Cars in the order of its devkit."""
    return tuple(_list_lines("stanford_cars_names"))


def _list_lines(name: str) -> list[str]:
    text = (resources.files("opencon.data") / "lists" / f"{name}.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


# --- looking for files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a data set lies on the disk, in words for the user and in paths for us."""

    name: str
    expected: str  # its files and folders, in words
    source: str  # where to get it
    roots: tuple[str, ...]  # folders that may hold it, below data.root; "." is data.root itself
    needed: tuple[str, ...]  # files and folders that it must have

    def find(self, root: Path) -> Path:
        """The first of the roots that has everything needed; else an error that lists them."""
        lost = {root / top: [n for n in self.needed if not (root / top / n).exists()] for top in self.roots}
        for folder, names in lost.items():
            if not names:
                return folder
        where = ", ".join(map(printable, lost))
        if not root.exists():
            where += f" (there is no folder {printable(root)})"
        for folder, names in lost.items():
            if len(names) < len(self.needed):
                where += f" ({', '.join(names)} missing in {printable(folder)})"
        raise self.error(f"{self.name} is not there: looked for {', '.join(self.needed)} in {where}.")

    def error(self, problem: str) -> DataError:
        """An error with a problem, followed by the expected layout."""
        return DataError(
            f"{problem} Expected: {self.expected}. Point data.root (--data) to it. It can be had from {self.source}; "
            f"--download cannot fetch it."
        )

    def listing(self, images: Iterable[tuple[Path, str]], order: Sequence[str], where: Path) -> Listing:
        """A listing of (file, class name), after a check that all files and all classes are there."""
        number = {name: c for c, name in enumerate(order)}
        pairs = [(path, number[name]) for path, name in images]
        missing = [path for path, _ in pairs if not os.path.isfile(path)]
        if missing:
            more = f" ({len(missing):,} of {len(pairs):,} images are missing)" if len(missing) > 1 else ""
            raise self.error(f"{printable(where)} names {printable(missing[0])}, which is not there{more}.")
        self.check_classes(order, {order[c] for _, c in pairs}, where)
        return Listing(tuple(path for path, _ in pairs), tuple(c for _, c in pairs), tuple(order))

    def from_folders(
        self, folder: Path, order: Sequence[str], folders: Sequence[str] | None = None, *, is_complete: bool = True
    ) -> Listing:
        """The images of class folders, class by class.

        Args:
            folder: holds the class folders.
            order: the classes.
            folders: names of the class folders, where they differ from those of the classes.
            is_complete: every class must have an image.
        """
        by_class = [find_images(folder / name) if (folder / name).is_dir() else [] for name in folders or order]
        if is_complete:
            self.check_classes(order, {name for name, paths in zip(order, by_class, strict=True) if paths}, folder)
        return Listing(
            paths=tuple(chain.from_iterable(by_class)),
            classes=tuple(c for c, paths in enumerate(by_class) for _ in paths),
            class_names=tuple(order),
        )

    def check_classes(self, order: Sequence[str], present: set[str], where: Path) -> None:
        """Refuse a class without an image."""
        empty = [name for name in order if name not in present]
        if empty:
            shown = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
            raise self.error(
                f"{printable(where)} has no image of {len(empty)} of the {len(order)} classes of {self.name} ({shown})."
            )

    def rows(self, path: Path) -> list[tuple[str, str]]:
        """The lines of a text file: the first word and the rest."""
        lines = [(i, line.split(maxsplit=1)) for i, line in enumerate(self.lines(path), start=1)]
        bad = next((i for i, words in lines if len(words) != 2), None)
        if bad is not None:
            raise self.error(f"{printable(path)}, line {bad} cannot be understood: expected an image and its value.")
        return [(words[0], words[1]) for _, words in lines]

    def lines(self, path: Path) -> list[str]:
        """The lines of a text file, without white space around them and without empty ones at the end."""
        try:
            return [line.strip() for line in read_file(path).decode("utf-8").rstrip().splitlines()]
        except (OSError, UnicodeDecodeError) as err:
            raise self.error(f"{printable(path)} cannot be read as text ({err}).") from err

    def class_number(self, number: str, num_classes: int, path: Path) -> int:
        """Turn a class number that counts from 1 into one that counts from 0."""
        if not re.fullmatch(r"[0-9]+", number) or not 1 <= int(number) <= num_classes:
            raise self.error(f"{printable(path)} has the class {number!r}, which is no number from 1 to {num_classes}.")
        return int(number) - 1
