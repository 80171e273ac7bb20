"""List files: each line names one image and its class."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opencon.data.listings import Listing, printable
from opencon.data.tables import LABEL_COLUMNS, PATH_COLUMNS, bad_line, read_table, rows_below_header
from opencon.errors import DataError
from opencon.files import read_file
from opencon.registry import did_you_mean

TRUTH: dict[str, tuple[str, ...]] = {"truth": ("truth",)}  # a column of classes to measure with


def list_from_file(list_file: str | Path, root: str | Path | None = None) -> Listing:
    """The images that a list file names.

    One image a line: `path class`, where the class is the last word and the path may hold spaces. Or CSV or
    tab-separated values below a header that names the columns `path` and `label` (`file`, `filename` and `class` work,
    too), or JSON lines with these keys. Paths are relative to the list's own folder, or to `root`. Classes are numbers
    from 0, or names, in sorted order. Leading lines `# classes: a b c` (or with commas) fix the classes and their order;
    other leading `#` lines are comments.

    In a table, an empty class means that the image carries no label, and then those that have a class are the labeled ones.
    So it is, too, with a column `truth`: the class of an image without label, to measure with.
    """
    source = Path(list_file).expanduser()
    declared, rows = _read_rows(source)
    base = Path(root).expanduser() if root is not None else source.parent
    first: dict[str, Row] = {}  # file to the row that named it
    paths: list[Path] = []
    repeated: list[str] = []
    for row in rows:
        path = Path(os.path.normpath(base / row.path))
        earlier = first.setdefault(str(path), row)
        if earlier is row:
            paths.append(path)
        elif (earlier.label, earlier.truth) == (row.label, row.truth):
            # kept once: otherwise it could be labeled and unlabeled at the same time
            repeated.append(f"{printable(source)}, line {row.line} repeats line {earlier.line}")
        else:
            raise DataError(
                f"{printable(source)} says that {row.path} is {earlier.said!r} in line {earlier.line} and {row.said!r} "
                f"in line {row.line}. Keep one of the two."
            )
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        more = f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else ""
        line = first[str(missing[0])].line
        raise DataError(
            f"{printable(source)}, line {line}: there is no file {printable(missing[0])}{more}. Correct the path, or "
            f"remove the line; relative paths start at {printable(base)}."
        )
    kept = [first[str(path)] for path in paths]
    if all(row.label and row.truth is None for row in kept):
        classes, names = _number_classes(source, [(row.line, row.label) for row in kept], declared)
        return Listing(tuple(paths), classes, names, tuple(repeated))
    names = given_names((row.label for row in kept), (row.truth or "" for row in kept), declared)
    number = {name: c for c, name in enumerate(names)}
    return Listing(
        tuple(paths),
        tuple(number.get(row.label or row.truth or "", -1) for row in kept),
        names,
        tuple(repeated),
        tuple(bool(row.label) for row in kept),
    )


@dataclass(frozen=True)
class Row:
    """An image of a list."""

    line: int
    path: str
    label: str  # empty: none
    truth: str | None = None  # its true class, empty: nobody knows; None: the list has no such column

    @property
    def said(self) -> str:
        """What the row says of the image's class."""
        return self.label or self.truth or "unlabeled"


def given_names(labels: Iterable[str], truth: Iterable[str], declared: Sequence[str] = ()) -> tuple[str, ...]:
    """Class names where some images carry a label: those of the labels, then those that only the truth has.

    Each part is in sorted order (numbers as numbers), but for `declared` names, which come in their own.
    """
    seen = {label for label in labels if label}
    others = {name for name in truth if name} - seen
    place = {name: i for i, name in enumerate(declared)}

    def order(names: set[str]) -> list[str]:
        is_number = all(re.fullmatch(r"[0-9]+", name) for name in names)
        return sorted(names, key=lambda name: (place.get(name, len(place)), int(name) if is_number else 0, name))

    return (*order(seen), *order(others))


def true_classes(table: str | Path) -> dict[str, str]:
    """File name to true class, from a table `file,class`; rows without a class are left out."""
    columns = {"path": PATH_COLUMNS, "label": (*LABEL_COLUMNS, "truth")}
    return {row["path"]: row["label"] for _, row in read_table(Path(table), columns) if row["label"]}


def _read_rows(source: Path) -> tuple[list[str], list[Row]]:
    """The declared classes, and every row."""
    try:
        text = read_file(source).decode("utf-8-sig")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except FileNotFoundError as err:
        raise DataError(
            f"there is no list file {printable(source)}. Give a file with one image and its class a line."
        ) from err
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"the list file {printable(source)} cannot be read as UTF-8 text ({err}).") from err
    if lines[0].lstrip().startswith("{"):
        return [], [Row(line, row["path"], row["label"], row.get("truth")) for line, row in _json_rows(source, lines)]
    declared: list[str] = []
    start = 0
    while start < len(lines) and (not lines[start].strip() or lines[start].startswith("#")):
        key, _, names = lines[start].lstrip("# ").partition(":")
        if key.strip().lower() == "classes":
            declared += [name.strip() for name in (names.split(",") if "," in names else names.split()) if name.strip()]
        start += 1
    rows = _table_rows(source, lines, start) if start < len(lines) else []
    if rows is None:
        words = [(i + 1, lines[i].strip().rsplit(maxsplit=1)) for i in range(start, len(lines)) if lines[i].strip()]
        bad = next((line for line, parts in words if len(parts) != 2), None)
        if bad is not None:
            raise bad_line(source, bad, lines[bad - 1], "Expected 'path class', or a first line 'path,label'.")
        rows = [Row(line, parts[0], parts[1]) for line, parts in words]
    if not rows:
        raise DataError(f"the list file {printable(source)} names no image. Give one image and its class a line.")
    return declared, rows


def _table_rows(source: Path, lines: list[str], start: int) -> list[Row] | None:
    """Rows below a header, or None if there is no such header."""
    columns: dict[str, tuple[str, ...]] = {"path": PATH_COLUMNS, "label": LABEL_COLUMNS}
    table = rows_below_header(source, lines, columns | TRUTH, start=start)
    if table is None:
        table = rows_below_header(source, lines, columns, start=start)
    if table is None:
        return None
    for line, row in table:
        if not row["path"]:
            raise bad_line(source, line, lines[line - 1], "Expected a path; quote what holds a separator.")
    return [Row(line, row["path"], row["label"], row.get("truth")) for line, row in table]


def _json_rows(source: Path, lines: list[str]) -> list[tuple[int, dict[str, str]]]:
    columns = {"path": PATH_COLUMNS, "label": LABEL_COLUMNS, **TRUTH}
    rows = read_table(source, columns, optional=("label", "truth"))
    if not any(row["truth"] for _, row in rows):
        rows = [(line, {name: row[name] for name in ("path", "label")}) for line, row in rows]
    for line, row in rows:
        if not row["path"]:
            raise bad_line(source, line, lines[line - 1], "Expected a path.")
    return rows


def _number_classes(
    source: Path, labels: list[tuple[int, str]], declared: list[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class numbers and names for the (line, class) of every image."""
    used = {label for _, label in labels}
    if declared:
        names = tuple(dict.fromkeys(declared))
        for label in sorted(used - set(names)):
            line = next(line for line, other in labels if other == label)
            hint = did_you_mean(label, names)
            raise DataError(f"{printable(source)}, line {line}: class {label!r} is not among those declared.{hint}")
        _refuse_empty(source, (name for name in names if name not in used), len(names) - len(used))
    elif all(re.fullmatch(r"-?[0-9]{1,18}", label) for label in used):  # more digits would not fit into 64 bits
        negative = next((line for line, label in labels if int(label) < 0), None)
        if negative is not None:
            raise DataError(f"{printable(source)}, line {negative}: a class number must not be negative. Count from 0.")
        labels = [(line, str(int(label))) for line, label in labels]  # 07 is 7
        used = {label for _, label in labels}
        most = max(map(int, used))
        _refuse_empty(source, (str(c) for c in itertools.count() if str(c) not in used), most + 1 - len(used))
        names = tuple(str(c) for c in range(most + 1))
    else:
        names = tuple(sorted(used))
    number = {name: c for c, name in enumerate(names)}
    return tuple(number[label] for _, label in labels), names


def _refuse_empty(source: Path, empty: Iterator[str], how_many: int) -> None:
    if how_many:
        more = f" and {how_many - 1} more" if how_many > 1 else ""
        raise DataError(
            f"class in the list without images: {next(empty)}{more} ({printable(source)}). Add images, or leave the "
            f"class out; class numbers run from 0 without a gap."
        )
