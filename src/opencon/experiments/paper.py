"""The paper by one command: each table and figure of arXiv:2208.02764 is a manifest, and all share one sweep.

A manifest (manifests/NAME.toml) has a title, the place in the paper, the columns, and rows: a recipe, the settings that
change it, seeds, and what was published. Runs that several tables share are trained once. What cannot be had, for want of
data or of weights, is said.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from opencon.config import with_settings
from opencon.data.benchmarks import dataset_info
from opencon.errors import ConfigError, OpenConError, require
from opencon.experiments.recipes import SETTINGS, get_recipe
from opencon.experiments.sweep import Cell, Sweep
from opencon.experiments.sweep_table import SweepRow
from opencon.methods import METHODS
from opencon.registry import did_you_mean
from opencon.report.grid import latex, markdown, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAIN = "cifar100"  # the data set that a weights file without a name is for
HEADS = {"classes_in_use_all": "in use, all images", "classes_in_use": "in use, unlabeled"}
WHOLE = {"classes_in_use_all", "classes_in_use"}  # columns without a fraction
# In a quick try every data set is the digits, whose ten classes stand for a hundred.
QUICK = ("train.epochs=2", "train.batch_size=128", "eval.every=2")
FAR = 2.0  # points from the published number from which on a sentence is due


@dataclass(frozen=True)
class Row:
    """One line of a table, or one point of a figure."""

    labels: Mapping[str, str]
    recipe: str
    settings: tuple[str, ...] = ()
    seeds: int = 3
    published: tuple[float, ...] = ()  # in the order of the columns, maybe fewer
    columns: tuple[str, ...] = ()  # its own measures, where they differ from row to row
    also: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        """Its data set."""
        return self.recipe.partition("/")[2]

    @property
    def label(self) -> str:
        """In words."""
        return ", ".join(self.labels.values())

    def cells(self, settings: Sequence[str] = (), *, seeds: Iterable[int] | None = None) -> list[Cell]:
        """Its runs, with further settings."""
        wanted = range(self.seeds) if seeds is None else seeds
        return [Cell(self.recipe, s, (*settings, *self.settings), dict(self.labels), also=self.also) for s in wanted]


@dataclass(frozen=True)
class Manifest:
    """A table or a figure."""

    name: str
    title: str
    place: str  # in the paper
    kind: str  # "table" or "figure"
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    draw: str = ""  # of a figure: lines, bars, umap or distributions
    x: str = ""  # the label along the axis of lines and bars; rows are shown in its order, trained in their own
    classes: int = 10  # of umap


def manifest_names() -> list[str]:
    """Every table and figure, tables first."""
    found = [entry.name.removesuffix(".toml") for entry in files("opencon.experiments").joinpath("manifests").iterdir()]
    known = {name: read_manifest(name) for name in found if not name.startswith("_")}
    return sorted(known, key=lambda name: (known[name].kind != "table", _place(known[name].place), name))


def _place(text: str) -> tuple[int, str]:
    number = "".join(ch for ch in text if ch.isdigit())
    return int(number) if text.startswith(("Table", "Figure")) else 99, text


def read_manifest(name: str) -> Manifest:
    """One table or figure by its name."""
    path = files("opencon.experiments").joinpath("manifests").joinpath(f"{name}.toml")
    if not path.is_file():
        known = manifest_names()
        raise ConfigError(f"unknown table or figure {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = tuple(_row(row) for row in data.pop("rows"))
    return Manifest(name, rows=rows, **data | {"columns": tuple(data["columns"])})


def _row(data: Mapping[str, Any]) -> Row:
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Row(**plain)


def chosen(names: Sequence[str]) -> list[Manifest]:
    """Manifests by name; "all" is every one."""
    wanted = manifest_names() if "all" in names else list(dict.fromkeys(names))
    require(bool(wanted), f"name a table or figure, or all: {', '.join(manifest_names())}.")
    return [read_manifest(name) for name in wanted]


# --- what can be had --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Means:
    """Where data and weights lie."""

    data: str | None = None
    weights: Mapping[str, str] | None = None  # by data set or encoder
    quick: bool = False
    download: bool = False

    @classmethod
    def of(cls, data: str | None, weights: Sequence[str], *, quick: bool = False, download: bool = False) -> Means:
        """Weights as typed: FILE, for the CIFAR-100 of the main table, or NAME=FILE for a data set or an encoder."""
        named = [text.partition("=") if "=" in text else (MAIN, "=", text) for text in weights]
        return cls(data, {name: file for name, _, file in named}, quick, download)

    def settings(self, row: Row) -> list[str]:
        """Settings that say where the files of a row lie."""
        places = [] if self.data is None else [f"data.root={self.data}"]
        weights = self._weights(row)
        return [*places, *([] if weights is None else [f"encoder.weights={weights}"])]

    def _weights(self, row: Row) -> str | None:
        encoder = with_settings(get_recipe(row.recipe), row.settings).encoder.name
        given = self.weights or {}
        own = given.get(row.data) if encoder == SETTINGS[row.data].encoder else None
        return given.get(encoder) or own

    def missing(self, row: Row) -> str | None:
        """What a row lacks, in words; None: nothing."""
        if self.quick:
            return None
        config = with_settings(get_recipe(row.recipe), [*self.settings(row), *row.settings])
        try:
            dataset_info(config.data, download=self.download)
        except OpenConError as err:
            return f"data of {row.data} ({str(err).splitlines()[0]})"
        if self._weights(row) is None:
            return f"weights of {config.encoder.name} for {row.data}: --weights {row.data}=FILE"
        return None

    def cells(self, row: Row, seeds: Iterable[int] | None = None) -> list[Cell]:
        """The runs of a row."""
        if not self.quick:
            return row.cells(self.settings(row), seeds=seeds)
        settings = QUICK if METHODS[row.recipe.partition("/")[0]].config.trains else ()
        return quick_row(row).cells(settings, seeds=seeds)


def quick_row(row: Row) -> Row:
    """A row on the digits. Of its settings, those of the method and the split stay; a tenth of the classes are there."""
    method = row.recipe.partition("/")[0]
    kept = []
    for setting in row.settings:
        key, _, value = setting.partition("=")
        if key in ("split.num_seen", "split.num_classes") and value.isdecimal():
            kept.append(f"{key}={max(2, round(int(value) / 10))}")
        elif key.startswith(("method.", "split.")):
            kept.append(setting)
    # A ratio of a tenth leaves some of ten labeled images a class; batches of 128 then hold few, but some.
    return replace(row, recipe=f"{method}/digits", settings=tuple(kept), seeds=1)


@dataclass(frozen=True)
class Plan:
    """The runs of some tables, and what is left out."""

    manifests: tuple[Manifest, ...]
    means: Means
    cells: tuple[Cell, ...]  # of all tables, each once, seed by seed
    missing: tuple[tuple[str, str, str], ...]  # table, row, what it lacks
    quick_seeds: tuple[int, ...] | None = (
        None  # that a quick table shows; others show what is left of their manifest, too
    )

    @classmethod
    def made(cls, manifests: Sequence[Manifest], means: Means, *, seeds: Iterable[int] | None = None) -> Plan:
        """Collect the runs; those that several tables share have all further measures that any of them asks for."""
        if means.quick:  # the published numbers are not of digits
            manifests = [replace(m, rows=tuple(replace(row, published=()) for row in m.rows)) for m in manifests]
        found: dict[str, Cell] = {}
        missing = []
        chosen_seeds = None if seeds is None else list(seeds)
        for manifest in manifests:
            for row in manifest.rows:
                lack = means.missing(row)
                if lack is not None:
                    missing.append((manifest.name, row.label, lack))
                    continue
                for cell in means.cells(row, chosen_seeds):
                    also = tuple(sorted({*cell.also, *(found[cell.name].also if cell.name in found else ())}))
                    found[cell.name] = replace(cell, also=also, labels={})
        ordered = sorted(found.values(), key=lambda cell: cell.seed)  # stable: the order of the tables stays
        quick_seeds = tuple(chosen_seeds) if means.quick and chosen_seeds else None
        return cls(tuple(manifests), means, tuple(ordered), tuple(missing), quick_seeds)

    def title(self, manifest: Manifest) -> str:
        """Above a table or figure; a quick one says what it is made of."""
        return f"{manifest.title}: a quick try, on digits" if self.means.quick else manifest.title

    def measured(self, sweep: Sweep, manifest: Manifest) -> list[SweepRow]:
        """What has been measured of each row of a table."""
        return [row_of(sweep, row, self.means, self.quick_seeds) for row in manifest.rows]


# --- tables -----------------------------------------------------------------------------------------------------------


def row_of(sweep: Sweep, row: Row, means: Means, seeds: Sequence[int] | None = None) -> SweepRow:
    """What has been measured of a row."""
    known = sweep.results()
    cells = means.cells(row, seeds)
    records = [known[cell.name] for cell in cells if cell.name in known]
    done = tuple(record for record in records if record["state"] == "done")
    return SweepRow(row.labels, done, len(cells), len(records) - len(done))


def table_of(manifest: Manifest, rows: Sequence[SweepRow]) -> tuple[list[str], list[list[str]], int]:
    """Heads, lines and how many columns hold text: ours with spread, then what was published."""
    keys = list(dict.fromkeys(key for row in manifest.rows for key in row.labels))
    has_published = any(row.published for row in manifest.rows)
    heads = [*keys, *(HEADS.get(column, column) for column in manifest.columns)]
    heads += ["published"] if has_published else []
    lines = []
    for row, measured in in_order(manifest, rows):
        columns = row.columns or manifest.columns
        line = [row.labels.get(key, "") for key in keys]
        line += [shown(*measured.score(column)) for column in columns]
        if has_published:
            numbers = [
                f"{value:.0f}" if column in WHOLE else f"{value:.1f}"
                for value, column in zip(row.published, columns, strict=False)
            ]
            line.append(" / ".join(numbers))
        lines.append([*line, measured.seeds])
    return [*heads, "seeds"], lines, len(keys)


def in_order(manifest: Manifest, rows: Sequence[SweepRow]) -> list[tuple[Row, SweepRow]]:
    """Rows as a table shows them: where a number runs along an axis, by that number."""
    pairs = list(zip(manifest.rows, rows, strict=True))
    if not manifest.x:
        return pairs
    series = list(dict.fromkeys(_series(row, manifest.x) for row in manifest.rows))
    return sorted(
        pairs, key=lambda pair: (series.index(_series(pair[0], manifest.x)), float(pair[0].labels[manifest.x]))
    )


def _series(row: Row, x: str) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in row.labels.items() if key != x)


def far_cells(manifest: Manifest, rows: Sequence[SweepRow]) -> list[tuple[str, str, float, float]]:
    """Cells more than two points from the published one: row, column, ours, published."""
    found = []
    for row, measured in zip(manifest.rows, rows, strict=True):
        for column, value in zip(row.columns or manifest.columns, row.published, strict=False):
            mean, _ = measured.score(column)
            if mean is not None and column not in WHOLE and abs(mean - value) > FAR:
                found.append((row.label, column.rpartition(".")[2], mean, value))
    return found


def render_table(manifest: Manifest, rows: Sequence[SweepRow], form: str) -> str:
    """As "markdown" or "latex"."""
    heads, lines, text_columns = table_of(manifest, rows)
    if form == "latex":
        return latex(heads, lines, text_columns=text_columns)
    return markdown(heads, lines, text_columns=text_columns)


def write_tables(plan: Plan, sweep: Sweep, folder: Path) -> list[Path]:
    """Every table as Markdown and LaTeX; figures are drawn by `paper_drawings`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for manifest in plan.manifests:
        rows = plan.measured(sweep, manifest)
        for form, suffix in (("markdown", "md"), ("latex", "tex")):
            path = folder / f"{manifest.name}.{suffix}"
            path.write_text(render_table(manifest, rows, form) + "\n", encoding="utf-8")
            written.append(path)
    return written
