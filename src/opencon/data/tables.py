"""Tables that people write, read strictly: CSV, tab-separated, with semicolons, or JSON lines.

A table names its columns in its first line. A line that cannot be understood is refused and named, because a row that is
read wrongly would be a wrong label.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from opencon.data.listings import printable
from opencon.errors import DataError
from opencon.files import parse_json, read_file

Row = tuple[int, dict[str, str]]  # number of the line, and the wanted columns; an empty text where there is no value

PATH_COLUMNS, LABEL_COLUMNS = ("path", "file", "filename", "file_name"), ("label", "class")  # names that they may have


def read_table(table: Path, columns: Mapping[str, Sequence[str]], *, optional: Sequence[str] = ()) -> list[Row]:
    """The rows of a table; refuses an empty table.

    Args:
        table: the file.
        columns: each wanted column, with the names that it may have.
        optional: columns that may be missing.
    """
    must = ",".join(name for name in columns if name not in optional)
    try:
        text = read_file(table.expanduser()).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError as err:
        raise DataError(f"there is no file {printable(table)}. Give a table with the columns {must}.") from err
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"{printable(table)} cannot be read as UTF-8 text ({err}).") from err
    if text.lstrip().startswith("{"):
        rows = _json_rows(table, text, columns, optional)
    else:
        below = rows_below_header(table, text.split("\n"), columns, optional=optional)
        if below is None:
            first = text.split("\n", 1)[0]
            raise DataError(
                f"{printable(table)} begins with {first[:80]!r}. Its first line must name the columns: {must}."
            )
        rows = below
    if not rows:
        raise DataError(f"{printable(table)} has no row. Give one for each, with the columns {must}.")
    return rows


def rows_below_header(
    table: Path,
    lines: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    *,
    start: int = 0,
    optional: Sequence[str] = (),
) -> list[Row] | None:
    """Rows below a header in line `start` (counted from 0); None where that line does not name the columns."""
    for delimiter in ",\t;":
        header = _header(lines[start], delimiter)
        at = {
            name: next((header.index(word) for word in words if word in header), None)
            for name, words in columns.items()
        }
        if any(where is None and name not in optional for name, where in at.items()):
            continue
        rows: list[Row] = []
        reader = csv.reader(io.StringIO("\n".join(lines[start + 1 :]), newline=""), delimiter=delimiter, strict=True)
        line = start + 2  # where the next row begins; a row with a quoted line break ends later
        try:
            for cells in reader:
                if any(cell.strip() for cell in cells[len(header) :]):  # a spreadsheet may end lines with separators
                    what = f"Expected {len(header)} columns ({', '.join(header)}); quote what holds a separator."
                    raise bad_line(table, line, lines[line - 1], what)
                if any(cell.strip() for cell in cells):
                    cells += [""] * (len(header) - len(cells))  # or leave them out
                    rows.append((line, {name: "" if i is None else cells[i].strip() for name, i in at.items()}))
                line = start + 2 + reader.line_num
        except csv.Error as err:
            raise bad_line(table, line, lines[line - 1], f"It is not valid CSV: {err}.") from err
        return rows
    return None


def bad_line(table: Path, line: int, text: str, what: str) -> DataError:
    """The error for a line that cannot be understood, with what was expected."""
    return DataError(f"{printable(table)}, line {line} cannot be understood: {text[:80]!r}. {what}")


def _header(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip().lower() for cell in next(csv.reader([line], delimiter=delimiter, strict=True), [])]
    except csv.Error:
        return []


def _json_rows(table: Path, text: str, columns: Mapping[str, Sequence[str]], optional: Sequence[str]) -> list[Row]:
    rows = []
    example = ", ".join(f'"{name}": ...' for name in columns if name not in optional)
    for line, entry in enumerate(text.split("\n"), start=1):
        if not entry.strip():
            continue
        try:
            record = parse_json(entry)
            values = {
                name: next((record[word] for word in words if word in record), None) for name, words in columns.items()
            }
            is_row = isinstance(record, dict) and any(value is not None for value in values.values())
        except (ValueError, TypeError) as err:
            raise bad_line(table, line, entry, f"Expected {{{example}}}.") from err
        if not is_row:
            raise bad_line(table, line, entry, f"Expected {{{example}}}.")
        rows.append((line, {name: "" if value is None else str(value).strip() for name, value in values.items()}))
    return rows
