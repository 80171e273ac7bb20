"""A sweep as a table: mean and spread over seeds, a row for every combination of what varies, columns by choice."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opencon.errors import ConfigError
from opencon.experiments.measures import MEASURES, SHARES, SHORT, measures_of, shown_as, value_of
from opencon.experiments.sweep import Sweep
from opencon.methods import METHODS
from opencon.report.grid import latex, markdown, spread
from opencon.report.sweep_chart import Point, sweep_chart

FORMATS = ("table", "markdown", "csv", "latex", "json")


@dataclass(frozen=True)
class SweepRow:
    """Cells that differ in nothing but their seed."""

    labels: Mapping[str, str]
    done: tuple[Mapping[str, Any], ...]  # records
    wanted: int  # seeds asked for
    failed: int

    def score(self, column: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation over the finished seeds; shares in percent."""
        found = [value_of(record, column) for record in self.done]
        return spread([value for value in found if value is not None])

    @property
    def label(self) -> str:
        """What sets it apart, in words."""
        return ", ".join(f"{key} {value}" for key, value in shown_labels(self.labels).items())

    @property
    def seeds(self) -> str:
        """How many seeds there are: 3, or "2 of 5", or "2 of 5, 1 failed"."""
        text = str(len(self.done)) if len(self.done) == self.wanted else f"{len(self.done)} of {self.wanted}"
        return f"{text}, {self.failed} failed" if self.failed else text


def default_columns(rows: Sequence[SweepRow]) -> list[str]:
    """What is shown of a sweep, unless columns are chosen: by what its runs could be measured."""
    found = (measures_of(record["result"]) for row in rows for record in row.done)
    measures = next(filter(None, found), MEASURES["all"])
    return [*(name for name in measures if name != SHORT["classes"]), "classes", "seconds"]


def rows_of(sweep: Sweep) -> list[SweepRow]:
    """The rows in the order of the sweep, unfinished ones too."""
    known = sweep.results()
    groups: dict[str, list[tuple[Mapping[str, str], Mapping[str, Any] | None]]] = {}
    for cell in sweep.cells:
        record = known.get(cell.name)
        groups.setdefault(json.dumps([cell.recipe, dict(cell.labels)]), []).append((cell.labels, record))
    rows = []
    for same in groups.values():
        records = [record for _, record in same if record is not None]
        done = tuple(record for record in records if record["state"] == "done")
        rows.append(SweepRow(same[0][0], done, len(same), len(records) - len(done)))
    return rows


def cells_of(rows: Sequence[SweepRow], columns: Sequence[str]) -> tuple[list[str], list[list[str]], int]:
    """Heads, rows as text, and how many columns at the left hold text."""
    keys = list(dict.fromkeys(key for row in rows for key in row.labels)) or ["run"]
    lines = []
    for row in rows:
        labels = shown_labels(row.labels)
        numbers = [shown_as(column, *row.score(column)) for column in columns]
        lines.append([*(labels.get(key, "") for key in keys), *numbers, row.seeds])
    return [*keys, *columns, "seeds"], lines, len(keys)


def shown_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels with methods by their title."""
    return {k: METHODS[v].title if k == "method" and v in METHODS else v for k, v in labels.items()}


def render(rows: Sequence[SweepRow], columns: Sequence[str], form: str) -> str:
    """The table as text."""
    heads, lines, text_columns = cells_of(rows, columns)
    if form == "markdown":
        return markdown(heads, lines, text_columns=text_columns) + "\n"
    if form == "latex":
        return latex(heads, lines, text_columns=text_columns) + "\n"
    if form == "json":
        numbers = [
            {"labels": dict(row.labels), "n": len(row.done), "wanted": row.wanted, "failed": row.failed}
            | {column: dict(zip(("mean", "std"), row.score(column), strict=True)) for column in columns}
            for row in rows
        ]
        return json.dumps(numbers, indent=1) + "\n"
    if form != "csv":
        raise ConfigError(f"--format {form!r} must be one of {', '.join(FORMATS)}.")
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*heads[:text_columns], *(f"{c}_{s}" for c in columns for s in ("mean", "std")), "seeds", "wanted"])
    for row, line in zip(rows, lines, strict=True):
        stats = [value for column in columns for value in row.score(column)]
        writer.writerow([*line[:text_columns], *stats, len(row.done), row.wanted])
    return out.getvalue()


def plot(rows: Sequence[SweepRow], columns: Sequence[str], path: Path, *, title: str) -> Path:
    """Draw the first column. x is the last thing that varies; what varies besides makes the series.

    Where one thing varies alone, all columns that are shares are drawn, a series each.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row.labels)) or ["run"]
    x = keys[-1]
    shares = [column for column in columns if SHORT.get(column, column) in SHARES]
    drawn = shares if len(keys) == 1 and len(shares) > 1 else [columns[0]]
    series: dict[str, list[Point]] = {}
    for row in rows:
        labels = shown_labels(row.labels)
        for column in drawn:
            mean, std = row.score(column)
            name = column if len(drawn) > 1 else ", ".join(labels[key] for key in keys[:-1] if key in labels)
            if mean is not None:
                series.setdefault(name, []).append((labels.get(x, ""), mean, std))
    if not series:
        raise ConfigError("there is no finished cell to draw.")
    unit = " (%)" if SHORT.get(drawn[0], drawn[0]) in SHARES else ""
    y_title = ("accuracy" if len(drawn) > 1 else drawn[0]) + unit
    return sweep_chart(series, x_title=x, y_title=y_title, title=title, path=path)
