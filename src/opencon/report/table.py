"""What a model says about photos, as one table: assignments.csv, JSON lines, the page and Python all come from it.

file               as it was listed
predicted          name of the class or group; empty for a photo that is unlike everything, or cannot be read
kind               seen, new, or empty
confidence         in the nearest class or group, in [0, 1]
novelty            larger is less like the seen classes
unlike_everything  yes or no
given              the label it came with
nearest            the most similar examples, separated by vertical bars; a bar within a name is written \\|
looks_like         a guess at what its new group shows, and how sure
twin_of            the photo that it is nearly the same as, and which counted for both
error              why it cannot be read

In CSV, text that a spreadsheet would take for a formula (=, +, - or @ at its start) begins with an apostrophe.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal, overload

from opencon.errors import MissingExtraError

COLUMNS = (
    "file",
    "predicted",
    "kind",
    "confidence",
    "novelty",
    "unlike_everything",
    "given",
    "nearest",
    "looks_like",
    "twin_of",
    "error",
)
FORMULA = re.compile(r"'*[=+\-@\t\r]")  # how a formula begins, behind any number of our own apostrophes
MOST_SHOWN = 10  # rows that a notebook shows, ours: the first few show what a table is like


@dataclass(frozen=True, kw_only=True)
class PhotoRow:
    """What the model says about one photo."""

    file: str
    closest: str | None  # name of the nearest class or group; None for a photo that cannot be read
    kind: Literal["seen", "new"] | None  # of the prediction; None where there is none
    confidence: float | None  # in [0, 1], that `closest` is right; None for a photo that cannot be read
    novelty: float | None  # larger is newer; None for a photo that cannot be read
    unlike_everything: bool  # whether it resembles no class and no group
    given: str | None = None  # the label it came with
    nearest: tuple[str, ...] = ()  # the most similar examples that the model keeps, nearest first
    looks_like: str | None = None  # a guess at what its new group shows: "dragonfly, 62%"
    twin_of: str | None = None  # the photo that it is nearly the same as, and which counted for both
    error: str | None = None  # why the photo cannot be read

    @classmethod
    def unread(cls, file: str, error: str, given: str | None = None) -> PhotoRow:
        """The row of a photo that cannot be read."""
        return cls(
            file=file,
            closest=None,
            kind=None,
            confidence=None,
            novelty=None,
            unlike_everything=False,
            given=given,
            error=error,
        )

    @property
    def predicted(self) -> str | None:
        """Name of the class or group; None for a photo that is unlike everything, or cannot be read."""
        return None if self.unlike_everything else self.closest

    def record(self) -> dict[str, Any]:
        """The columns as plain data."""
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True)
class Group:
    """A seen class or a new group, and how many unlabeled photos fell to it."""

    name: str
    kind: Literal["seen", "new"]
    size: int
    looks_like: str | None = None  # a guess at what a new group shows: "dragonfly, 62%"


@dataclass(frozen=True, eq=False)
class PhotoTable(Sequence[PhotoRow]):
    """A row for each photo, in order."""

    rows: tuple[PhotoRow, ...]
    class_names: tuple[str, ...]  # the seen classes, then the new groups
    num_seen: int

    @overload
    def __getitem__(self, index: int) -> PhotoRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PhotoRow]: ...
    def __getitem__(self, index: int | slice) -> PhotoRow | Sequence[PhotoRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def readable(self) -> tuple[PhotoRow, ...]:
        """The rows of the photos that could be read."""
        return tuple(row for row in self.rows if row.error is None)

    @cached_property
    def unreadable(self) -> tuple[PhotoRow, ...]:
        """The rows of the photos that could not be read."""
        return tuple(row for row in self.rows if row.error is not None)

    @cached_property
    def unlabeled(self) -> tuple[PhotoRow, ...]:
        """The readable rows that came without a label: what the model sorted."""
        return tuple(row for row in self.readable if row.given is None)

    @cached_property
    def num_unlike_everything(self) -> int:
        """How many unlabeled photos are unlike every class and group."""
        return sum(row.unlike_everything for row in self.unlabeled)

    @cached_property
    def num_twins(self) -> int:
        """How many photos are nearly the same as another one."""
        return sum(row.twin_of is not None for row in self.rows)

    @cached_property
    def groups(self) -> list[Group]:
        """Every class and group with its number of unlabeled photos; photos unlike everything belong to none."""
        sizes = Counter(row.predicted for row in self.unlabeled)
        names = dict.fromkeys(self.class_names)  # those with the same name count as one
        seen = set(self.class_names[: self.num_seen])
        guesses = {row.predicted: row.looks_like for row in self.unlabeled if row.looks_like}
        return [Group(name, "seen" if name in seen else "new", sizes[name], guesses.get(name)) for name in names]

    @cached_property
    def headline(self) -> str:
        """The outcome in one sentence, about the photos that had no label."""
        total, odd = len(self.unlabeled), self.num_unlike_everything
        if not self.readable:
            return f"{number_of(len(self), 'photo')}: none can be read" if len(self) else "no photo"
        if not total:
            labeled = len(self.readable)
            all_of_them = "The only photo carries" if labeled == 1 else f"All {labeled:,} photos carry"
            return f"{all_of_them} your label: nothing was left to discover"
        seen, new = (sum(row.kind == kind for row in self.unlabeled) for kind in ("seen", "new"))
        groups = number_of(sum(group.kind == "new" and group.size > 0 for group in self.groups), "new group")
        photos = number_of(total, "photo")
        if seen == total:
            return f"{photos}: {'it is something' if total == 1 else 'all are things'} you know, no new group"
        if new == total:
            falls = "it falls" if total == 1 else "none is a thing you know, they fall"
            return f"{photos}: {falls} into {groups}"
        parts = {
            f"{'1 is a thing' if seen == 1 else f'{seen:,} are things'} you know": seen,
            f"{'1 falls' if new == 1 else f'{new:,} fall'} into {groups}": new,
            f"{'1 is' if odd == 1 else f'{odd:,} are'} unlike everything": odd,
        }
        return f"{photos}: {', '.join(part for part, count in parts.items() if count)}"

    def to_csv(self) -> str:
        """A line for each photo below a line with the names of the columns."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in self.rows:
            numbers = ("" if value is None else f"{value:.4f}" for value in (row.confidence, row.novelty))
            unlike = "" if row.error else "yes" if row.unlike_everything else "no"
            texts = (row.predicted or "", row.kind or "")
            nearest = "|".join(name.replace("\\", "\\\\").replace("|", "\\|") for name in row.nearest)
            last = (row.given or "", nearest, row.looks_like or "", row.twin_of or "", row.error or "")
            table.writerow([as_text(row.file), *map(as_text, texts), *numbers, unlike, *map(as_text, last)])
        return text.getvalue()

    def to_json_lines(self) -> Iterator[str]:
        """One JSON object for each photo; null where there is nothing."""
        return (json.dumps(row.record()) for row in self.rows)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each photo."""
        try:
            import pandas as pd
        except ImportError as err:
            raise MissingExtraError("pandas", "pandas", "a data frame", err) from err
        return pd.DataFrame([row.record() for row in self.rows], columns=list(COLUMNS))

    def __repr__(self) -> str:
        return f"<PhotoTable: {self.headline}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the headline and the first rows."""
        shown = ("file", "predicted", "kind", "confidence", "given")
        head = "".join(f"<th>{name}</th>" for name in shown)
        body = "".join(
            f"<tr>{''.join(f'<td>{_cell(getattr(row, name))}</td>' for name in shown)}</tr>"
            for row in self.rows[:MOST_SHOWN]
        )
        more = f"<p>... and {len(self) - MOST_SHOWN:,} more</p>" if len(self) > MOST_SHOWN else ""
        title = escape(self.headline)
        return f"<p>{title}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def as_text(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula: whoever chose the name of a class could make it one."""
    return f"'{cell}" if FORMULA.match(cell) else cell


def from_text(cell: str) -> str:
    """What `as_text` made a cell from."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def number_of(count: int, one: str, many: str = "") -> str:
    """A count and its noun: '1 photo', '2,000 photos'."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return escape(text.encode("utf-8", "replace").decode())
