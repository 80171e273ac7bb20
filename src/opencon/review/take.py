"""Take it with you: photos into folders, tables, and a data set that others read. No photo is changed or moved.

    DIR/CLASS/photo.jpg        a copy, a hard link or a symbolic link
    DIR/sorted.jsonl           what was made, line by line, before it was made; `undo_sort` takes exactly that back
    DIR/metadata.csv           only for an image folder: file_name,label, as Hugging Face `datasets` reads it

Nothing is ever written over. A name that a file system would not take is spelled another way.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opencon.errors import ConfigError, RunError
from opencon.files import parse_json, read_file
from opencon.review.run import JUNK, STRANGERS
from opencon.review.state import State

MANIFEST, METADATA = "sorted.jsonl", "metadata.csv"
WAYS = ("copy", "hardlink", "symlink", "imagefolder")
STRANGE = "unlike everything"  # the folder of photos that belong to no group
LONGEST = 100  # bytes of a folder's name, ours: with a file's name it stays below what file systems take (255)
# Names that Windows keeps for itself.
KEPT = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Taken:
    """A photo and what it was called."""

    file: str
    label: str  # empty for a photo that belongs to no group
    looked: bool  # by a person


def taken(state: State, *, looked_only: bool = False) -> list[Taken]:
    """Every photo with its name now; junk is left out."""
    return [
        Taken(state.run.files[i], "" if g == STRANGERS else state.groups[g].name, bool(state.looked[i]))
        for i, g in enumerate(state.place.tolist())
        if g != JUNK and (state.looked[i] or not looked_only)
    ]


def labels_csv(rows: list[Taken]) -> str:
    """path,label,looked_at: `opencon discover PHOTOS --labels` reads it."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "label", "looked_at"))
    table.writerows((row.file, row.label, "yes" if row.looked else "no") for row in rows)
    return text.getvalue()


def labels_jsonl(rows: list[Taken]) -> str:
    """The same as JSON lines."""
    lines = ({"path": row.file, "label": row.label, "looked_at": row.looked} for row in rows)
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_table(rows: list[Taken], path: Path) -> None:
    """A table as CSV or JSON lines, by the end of its name; an existing file is left alone."""
    forms = {".csv": labels_csv, ".jsonl": labels_jsonl}
    if path.suffix not in forms:
        raise ConfigError(f"{path} must end in .csv or .jsonl.")
    try:
        with path.open("xb") as file:
            file.write(forms[path.suffix](rows).encode("utf-8", "surrogateescape"))
    except FileExistsError as err:
        raise RunError(f"{path} exists already. Give another name; nothing is written over.") from err
    except OSError as err:
        raise RunError(f"cannot write {path} ({err.strerror}).") from err


def sort_photos(
    rows: list[Taken], root: Path, into: Path, *, way: str = "copy", progress: Progress = lambda done, total: None
) -> dict[str, int]:
    """Put every photo into the folder of its class. Returns how many went into each.

    Args:
        rows: photos and their names.
        root: where the names of the photos start.
        into: a new or empty folder.
        way: one of WAYS; an image folder is copies with a table beside them.
        progress: called as progress(done, all).
    """
    if way not in WAYS:
        raise ConfigError(f"unknown way {way!r}. Choose one of {', '.join(WAYS)}.")
    into = into.expanduser()
    _empty(into)
    folders = folder_names({row.label or STRANGE for row in rows})
    counts: dict[str, int] = dict.fromkeys(sorted(folders), 0)
    used: set[str] = set()
    metadata: list[tuple[str, str]] = []
    try:
        with (into / MANIFEST).open("x", encoding="utf-8") as manifest:
            for number, row in enumerate(rows, start=1):
                source = Path(os.path.abspath(root / row.file))
                name = _free_name(folders[row.label or STRANGE], Path(row.file).name, used)
                manifest.write(json.dumps({"made": name, "from": str(source), "way": way}) + "\n")
                manifest.flush()
                _make(source, into / name, way)
                metadata.append((name, row.label))
                counts[row.label or STRANGE] += 1
                progress(number, len(rows))
            if way == "imagefolder":
                manifest.write(json.dumps({"made": METADATA, "from": "", "way": "table"}) + "\n")
                manifest.flush()
                (into / METADATA).write_bytes(_metadata(metadata).encode("utf-8", "surrogateescape"))
    except OSError as err:
        raise RunError(
            f"stopped at {err.filename or into} ({err.strerror}). What was made so far is listed in {into / MANIFEST}; "
            f"`opencon sort --undo {into}` takes it back."
        ) from err
    return {name: count for name, count in counts.items() if count}


def _empty(into: Path) -> None:
    try:
        into.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in into.iterdir())
    except OSError as err:
        raise RunError(f"cannot make the folder {into} ({err.strerror}). Give another one.") from err
    if MANIFEST in held:
        raise RunError(
            f"{into} holds photos that were sorted before. Take them back with --undo, or give a new folder."
        )
    if held:
        raise RunError(
            f"{into} is not empty (it holds {held[0]}). Give a new or empty folder; nothing is written over."
        )


def folder_names(labels: set[str]) -> dict[str, str]:
    """A folder name for each label that every file system takes; no two are alike, in whatever case."""
    names: dict[str, str] = {}
    taken: set[str] = {MANIFEST, METADATA}
    for label in sorted(labels):
        text = "".join(letter if letter.isprintable() and letter not in '/\\:*?"<>|' else "_" for letter in label)
        text = text.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore").strip(" .") or "_"
        text = f"_{text}" if KEPT.fullmatch(text) or text.startswith("-") else text
        name = next(name for name in _numbered(text, "") if name.casefold() not in taken)
        taken.add(name.casefold())
        names[label] = name
    return names


def _free_name(folder: str, file: str, used: set[str]) -> str:
    """folder/file, or folder/file (2) where two photos of one name come together."""
    stem, suffix = os.path.splitext(file)
    name = next(name for name in _numbered(stem, suffix) if f"{folder}/{name}".casefold() not in used)
    used.add(f"{folder}/{name}".casefold())
    return f"{folder}/{name}"


def _numbered(stem: str, suffix: str) -> Iterator[str]:
    yield f"{stem}{suffix}"
    number = 2
    while True:
        yield f"{stem} ({number}){suffix}"
        number += 1


def _make(source: Path, target: Path, way: str) -> None:
    """One file; each of these ways fails where something is there already."""
    target.parent.mkdir(exist_ok=True)
    if not source.is_file():  # a pipe would wait forever
        raise FileNotFoundError(errno.ENOENT, "there is no such file any more", str(source))
    if way == "hardlink":
        os.link(source, target)
    elif way == "symlink":
        os.symlink(source, target)
    else:
        with source.open("rb") as read, target.open("xb") as write:
            shutil.copyfileobj(read, write)
        shutil.copystat(source, target)


def _metadata(rows: list[tuple[str, str]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("file_name", "label"))
    table.writerows(rows)
    return text.getvalue()


def undo_sort(into: Path) -> tuple[int, list[str]]:
    """Remove what `sort_photos` made, and nothing else. Returns how many files, and the names of those that were kept.

    A file that has been changed since is kept, and so is its folder.
    """
    into = into.expanduser()
    try:
        lines = read_file(into / MANIFEST).splitlines()
    except OSError as err:
        raise RunError(f"{into} holds no {MANIFEST}: nothing was sorted into it. Give the folder of --into.") from err
    removed, kept, folders = 0, [], set()
    for line in lines:
        try:
            entry: dict[str, Any] = parse_json(line)
            made, source, way = into / entry["made"], Path(entry["from"]), entry["way"]
            if not made.parent.resolve().is_relative_to(into.resolve()) or way not in (*WAYS, "table"):
                raise ValueError
        except (ValueError, KeyError, TypeError):  # the last line of a program that was killed, or not ours
            continue
        folders.add(made.parent)
        if not os.path.lexists(made):
            continue
        if _is_ours(made, source, way):
            made.unlink()
            removed += 1
        else:
            kept.append(entry["made"])
    for folder in sorted(folders - {into}):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if not kept:
        (into / MANIFEST).unlink()
    return removed, kept


def _is_ours(made: Path, source: Path, way: str) -> bool:
    """Whether a file is still what was made."""
    if way == "table":
        return made.is_file()
    if way == "symlink":
        return made.is_symlink() and Path(os.readlink(made)) == source
    if made.is_symlink() or not made.is_file() or not source.is_file():
        return False
    return os.path.samefile(made, source) if way == "hardlink" else _begins(source, made)


def _begins(whole: Path, part: Path) -> bool:
    """Whether a file begins with another one: a program that was killed leaves half a copy."""
    with whole.open("rb") as a, part.open("rb") as b:
        while piece := b.read(1 << 20):
            if a.read(len(piece)) != piece:
                return False
    return True
