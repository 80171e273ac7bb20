"""Which image files there are, and the class of each: a folder with one sub-folder per class, or a list file.

Nothing is decoded here, so a plan can be made, and most mistakes found, before anything slow begins.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opencon.errors import DataError
from opencon.registry import did_you_mean

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Photos all the same: listed, so that they are named among what cannot be read instead of missing without a word.
OTHER_SUFFIXES = frozenset({".arw", ".avif", ".cr2", ".cr3", ".dng", ".heic", ".heif", ".nef", ".orf", ".raf", ".rw2"})
PART_NAMES = frozenset({"test", "train", "training", "val", "valid", "validation"})  # folders that are never classes


@dataclass(frozen=True)
class Listing:
    """Image files with their classes, found but not yet opened."""

    paths: tuple[Path, ...]
    classes: tuple[int, ...]
    class_names: tuple[str, ...]
    problems: tuple[str, ...] = ()


def printable(path: Path) -> str:
    """A path that any terminal can print, also where its bytes are no text."""
    return os.fsencode(path).decode("utf-8", "replace")


def find_images(folder: Path) -> list[Path]:
    """Every image file below a folder, by its suffix, sorted; hidden files and folders are left alone."""
    return [path for path in _files(folder) if path.suffix.lower() in IMAGE_SUFFIXES | OTHER_SUFFIXES]


def images_at(path: Path) -> list[Path]:
    """The path itself, or the images below a folder."""
    if not path.is_dir():
        return [path]
    if found := find_images(path):
        return found
    readable = ", ".join(sorted(IMAGE_SUFFIXES))
    raise DataError(f"there is no image in the folder {printable(path)}. Readable: {readable}.")


def list_folder(root: str | Path) -> Listing:
    """The images of a folder with one sub-folder per class."""
    root = Path(root).expanduser()
    if not root.exists():
        raise DataError(f"there is no folder {printable(root)}. Give the folder that holds one sub-folder per class.")
    if not root.is_dir():
        raise DataError(f"{printable(root)} is not a folder. Give the folder that holds one sub-folder per class.")
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    stray = sorted(p for p in root.iterdir() if p.is_file() and p.suffix.lower() in IMAGE_SUFFIXES)
    if not folders and stray:
        raise DataError(
            f"{len(stray)} images lie directly in {printable(root)}, but there is no class folder. Make one sub-folder "
            f"per class and move the images there."
        )
    if not folders:
        raise DataError(f"{printable(root)} holds no class folder ({_found(root)}). Make one sub-folder per class.")
    if {folder.name.lower() for folder in folders} <= PART_NAMES:
        parts = ", ".join(folder.name for folder in folders)
        raise DataError(f"{printable(root)} holds parts of a data set ({parts}), not classes. Give one of the parts.")
    by_class = [find_images(folder) for folder in folders]
    for folder, paths in zip(folders, by_class, strict=True):
        if not any(path.suffix.lower() in IMAGE_SUFFIXES for path in paths):
            raise DataError(
                f"class folder {printable(folder)} holds no image ({_found(folder)}). Remove it, or add images: "
                f"{', '.join(sorted(IMAGE_SUFFIXES))}."
            )
    return Listing(
        paths=tuple(path for paths in by_class for path in paths),
        classes=tuple(c for c, paths in enumerate(by_class) for _ in paths),
        class_names=tuple(folder.name for folder in folders),
        problems=tuple(f"{printable(path)} lies outside the class folders" for path in stray),
    )


def _files(folder: Path) -> list[Path]:
    def refuse(err: OSError) -> None:
        raise DataError(f"cannot look into {err.filename} ({err.strerror}). Make it readable, or remove it.") from err

    out: list[Path] = []
    visited: set[str] = set()  # linked folders are followed, but not in circles
    for here, inner, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(here)
        if real in visited:
            inner.clear()
            continue
        visited.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        out += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(out)


def _found(folder: Path) -> str:
    """What is there instead of images."""
    kinds = Counter(path.suffix.lower() or "no suffix" for path in _files(folder))
    if not kinds:
        return "it is empty"
    return "found only " + ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


# --- list files -------------------------------------------------------------------------------------------------------


def list_from_file(list_file: str | Path, root: str | Path | None = None) -> Listing:
    """The images that a list file names.

    One image a line: `path class`, where the class is the last word and the path may hold spaces; or CSV or
    tab-separated values below a header that names the columns `path` and `label` (`file`, `filename` and `class` do
    too). Paths are relative to the list's own folder, or to `root`. Classes are numbers from 0, or names, in sorted
    order. Leading lines `# classes: a b c` (or with commas) fix the classes and their order; other leading `#` lines
    are comments.
    """
    source = Path(list_file).expanduser()
    declared, rows = _read_rows(source)
    base = Path(root).expanduser() if root is not None else source.parent
    first: dict[str, tuple[int, str]] = {}  # file to the line that named it and its class
    paths: list[Path] = []
    repeated: list[str] = []
    for line, name, label in rows:
        path = Path(os.path.normpath(base / name))
        earlier, its_label = first.setdefault(str(path), (line, label))
        if earlier == line:
            paths.append(path)
        elif its_label == label:  # kept once: twice, it could be labeled and unlabeled at the same time
            repeated.append(f"{printable(source)}, line {line} repeats line {earlier}")
        else:
            raise DataError(
                f"{printable(source)} says that {name} is {its_label!r} in line {earlier} and {label!r} in line "
                f"{line}. Keep one of the two."
            )
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        more = f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else ""
        line = first[str(missing[0])][0]
        raise DataError(
            f"{printable(source)}, line {line}: there is no file {printable(missing[0])}{more}. Correct the path, or "
            f"remove the line; relative paths start at {printable(base)}."
        )
    classes, names = _number_classes(source, [first[str(path)] for path in paths], declared)
    return Listing(tuple(paths), classes, names, tuple(repeated))


def _read_rows(source: Path) -> tuple[list[str], list[tuple[int, str, str]]]:
    """The declared classes, and (line number, path, class) of every row."""
    try:
        lines = source.read_text("utf-8-sig").split("\n")
    except FileNotFoundError as err:
        raise DataError(
            f"there is no list file {printable(source)}. Give a file with one image and its class a line."
        ) from err
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"the list file {printable(source)} cannot be read as UTF-8 text ({err}).") from err
    declared: list[str] = []
    start = 0
    while start < len(lines) and (not lines[start].strip() or lines[start].startswith("#")):
        key, _, names = lines[start].lstrip("# ").partition(":")
        if key.strip().lower() == "classes":
            declared += [name.strip() for name in (names.split(",") if "," in names else names.split()) if name.strip()]
        start += 1
    rows = _table_rows(source, lines, start)
    if rows is None:
        words = [(i + 1, lines[i].strip().rsplit(maxsplit=1)) for i in range(start, len(lines)) if lines[i].strip()]
        bad = next((line for line, parts in words if len(parts) != 2), None)
        if bad is not None:
            raise _bad_line(source, bad, lines[bad - 1], "Expected 'path class', or a first line 'path,label'.")
        rows = [(line, parts[0], parts[1]) for line, parts in words]
    if not rows:
        raise DataError(f"the list file {printable(source)} names no image. Give one image and its class a line.")
    return declared, rows


def _table_rows(source: Path, lines: list[str], start: int) -> list[tuple[int, str, str]] | None:
    """Rows below a CSV or tab-separated header, or None if there is no such header."""
    for delimiter in ",\t":
        header = [cell.strip().lower() for cell in next(csv.reader(lines[start : start + 1], delimiter=delimiter), [])]
        path_at = next((i for i, cell in enumerate(header) if cell in ("path", "file", "filename")), None)
        label_at = next((i for i, cell in enumerate(header) if cell in ("label", "class")), None)
        if path_at is None or label_at is None:
            continue
        rows: list[tuple[int, str, str]] = []
        reader = csv.reader(lines[start + 1 :], delimiter=delimiter, strict=True)
        next_line = start + 2  # where the next row begins; one with a quoted line break ends later
        try:
            for cells in reader:
                line, next_line = next_line, start + 2 + reader.line_num
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header) or not cells[path_at].strip() or not cells[label_at].strip():
                    what = f"Expected {len(header)} filled columns ({', '.join(header)}); quote what holds a separator."
                    raise _bad_line(source, line, lines[line - 1], what)
                rows.append((line, cells[path_at].strip(), cells[label_at].strip()))
        except csv.Error as err:
            raise _bad_line(source, next_line, lines[next_line - 1], f"It is not valid CSV: {err}.") from err
        return rows
    return None


def _bad_line(source: Path, line: int, text: str, what: str) -> DataError:
    return DataError(f"{printable(source)}, line {line} cannot be understood: {text[:80]!r}. {what}")


def _number_classes(
    source: Path, labels: list[tuple[int, str]], declared: list[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class numbers and names for the (line, class) of every image."""
    given = {label for _, label in labels}
    if declared:
        names = tuple(dict.fromkeys(declared))
        for label in sorted(given - set(names)):
            line = next(line for line, other in labels if other == label)
            hint = did_you_mean(label, names)
            raise DataError(f"{printable(source)}, line {line}: class {label!r} is not among those declared.{hint}")
        _refuse_empty(source, (name for name in names if name not in given), len(names) - len(given))
    elif all(re.fullmatch(r"-?[0-9]+", label) for label in given):
        negative = next((line for line, label in labels if int(label) < 0), None)
        if negative is not None:
            raise DataError(f"{printable(source)}, line {negative}: a class number must not be negative. Count from 0.")
        labels = [(line, str(int(label))) for line, label in labels]  # 07 is 7
        given = {label for _, label in labels}
        most = max(map(int, given))
        _refuse_empty(source, (str(c) for c in itertools.count() if str(c) not in given), most + 1 - len(given))
        names = tuple(str(c) for c in range(most + 1))
    else:
        names = tuple(sorted(given))
    number = {name: c for c, name in enumerate(names)}
    return tuple(number[label] for _, label in labels), names


def _refuse_empty(source: Path, empty: Iterator[str], how_many: int) -> None:
    if how_many:
        more = f" and {how_many - 1} more" if how_many > 1 else ""
        raise DataError(
            f"class in the list without images: {next(empty)}{more} ({printable(source)}). Add images, or leave the "
            f"class out; class numbers run from 0 without a gap."
        )
