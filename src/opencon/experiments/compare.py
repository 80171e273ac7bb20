"""Runs side by side: mean and spread over seeds, as a table in Markdown, CSV, LaTeX or JSON.

What is compared is the accuracy; where nobody knows the classes, what can be said without them; after pre-training, the
20-NN accuracy. The best of each column is bold. Where rows share three seeds or more, p says how likely so large a
difference to the first row is by chance (`measures.paired_p`).
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from opencon.config import RunConfig, to_dict
from opencon.data.benchmarks import DATASETS
from opencon.errors import ConfigError, MissingPluginError, OpenConError, RunError
from opencon.experiments.measures import MEASURES, best_of, check_columns, measures_of, paired_p, shown_as, value_of
from opencon.experiments.recipes import SETTINGS, make_recipe, run_config
from opencon.methods import METHODS
from opencon.report.grid import latex, markdown, spread
from opencon.training.run_folder import RunFolder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCORES = MEASURES["all"]
PACE = "seconds_per_epoch"
FORMATS = ("table", "markdown", "csv", "latex", "json")
SUFFIXES = {".md": "markdown", ".csv": "csv", ".tex": "latex", ".json": "json"}
# Runs of one experiment may differ in the seed, and in settings that only say where files are or how a run was watched.
SEED = "train.seed"
INCIDENTAL = {"data.root", "train.save_seconds", "train.log_every", "eval.every"}
# Settings in which a run may differ from a recipe and still be it: another start, another draw, speed.
UNTOLD = {
    "encoder.weights",
    "split.seed",
    "split.num_classes",
    "data.memory_gb",
    "data.decode",
    "data.root",
    "eval.protocol",
}
UNTOLD |= {f"train.{key}" for key in ("precision", "compile", "capture", "kernels")}
IMAGES = {"unlabeled": "unlabeled training images", "test": "held-out test images", "train": "training images"}
WEIGHTS = "encoder.weights"  # another path to weights is the same experiment; no weights is another one


@dataclass(frozen=True)
class Run:
    """One finished run."""

    path: Path
    config: RunConfig
    result: Mapping[str, Any]
    seconds_per_epoch: float | None  # median without the first two epochs, in which kernels are compiled
    num_seen: int | None  # classes with labels; None: not a question here

    @property
    def record(self) -> dict[str, Any]:
        """What `measures.value_of` takes."""
        return {"result": self.result, PACE: self.seconds_per_epoch}

    @property
    def measures(self) -> tuple[str, ...]:
        """What is shown of it, unless columns are chosen."""
        return measures_of(self.result)

    @property
    def experiment(self) -> dict[str, Any]:
        """Its settings, flat, without the seed and what is incidental."""
        return experiment(self.config)


@dataclass(frozen=True)
class Row:
    """Runs that differ in nothing but their seed."""

    runs: tuple[Run, ...]
    label: str
    published: tuple[float, float, float] | None  # all, novel, seen in percent

    def score(self, column: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation over the runs; no deviation for one run, None for both where one lacks it."""
        values = list(self.by_seed(column).values())
        return spread(values) if len(values) == len(self.runs) else (None, None)

    def by_seed(self, column: str) -> dict[int, float]:
        """The number of each run that has it; shares in percent."""
        values = {run.config.train.seed: value_of(run.record, column) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None}

    @property
    def epochs(self) -> int:
        """Epochs that each run was trained for."""
        return self.runs[0].config.train.epochs

    @property
    def seconds_per_epoch(self) -> float | None:
        """Median over the runs."""
        known = [run.seconds_per_epoch for run in self.runs if run.seconds_per_epoch is not None]
        return statistics.median(known) if known else None


@dataclass(frozen=True)
class Section:
    """Rows that can be compared: same data, same split, same protocol, same images."""

    title: str
    rows: tuple[Row, ...]  # best first

    @property
    def measures(self) -> tuple[str, ...]:
        """The columns, unless some are chosen."""
        return self.rows[0].runs[0].measures

    def p(self, column: str) -> list[float | None]:
        """How likely so large a difference to the first row is by chance, for each row; None for the first."""
        first = self.rows[0].by_seed(column)
        return [None, *(paired_p(first, row.by_seed(column)) for row in self.rows[1:])]

    def cells(self, columns: Sequence[str] | None = None) -> tuple[list[str], list[list[str]], set[tuple[int, int]]]:
        """Heads, rows as text, and which cells are the best of their column."""
        columns = columns or self.measures
        p = self.p(columns[0])
        has_p, has_pace = any(chance is not None for chance in p), PACE not in columns
        heads = ["method", *columns, *["p"] * has_p, "runs", "epochs", *["s/epoch"] * has_pace]
        has_published = any(row.published for row in self.rows)
        heads += ["published"] if has_published else []  # all / novel / seen
        lines, best = [], set()
        for j, column in enumerate(columns):
            means = [row.score(column)[0] for row in self.rows]
            top = best_of(column, means)
            best |= {(i, j + 1) for i, mean in enumerate(means) if mean is not None and mean == top}
        for row, chance in zip(self.rows, p, strict=True):
            line = [row.label, *(shown_as(column, *row.score(column)) for column in columns)]
            line += ["" if chance is None else "<0.001" if chance < 0.0005 else f"{chance:.3f}"] * has_p
            line += [str(len(row.runs)), str(row.epochs)]
            line += ["" if row.seconds_per_epoch is None else f"{row.seconds_per_epoch:.2f}"] * has_pace
            if has_published:
                line.append("/".join(f"{value:.1f}" for value in row.published or ()))
            lines.append(line)
        return heads, lines, best


def experiment(config: RunConfig) -> dict[str, Any]:
    """The settings of a run, flat, without the seed and what is incidental."""
    flat = {key: value for section in to_dict(config).items() for key, value in _flat(*section)}
    flat[WEIGHTS] = "none" if flat[WEIGHTS] is None else "given"
    return {key: value for key, value in flat.items() if key != SEED and key not in INCIDENTAL}


def compare_runs(paths: Iterable[Path], say: Callable[[str], None] = lambda text: None) -> list[Section]:
    """Finished runs in groups: first by what can be compared at all, then by experiment.

    A run that is named must fit. One that was only listed in a folder is left out if it does not fit, and `say` is told;
    so is one whose method cannot be found, named or not.
    """
    runs: dict[tuple[str, str, int], Run] = {}
    left_out: OpenConError | None = None
    for path, is_named in find_runs(paths).items():
        try:
            run = read_run(path)
            twin = runs.setdefault((_title(run), _experiment(run), run.config.train.seed), run)
            if twin is not run:
                raise ConfigError(
                    f"{path} is the same experiment as {twin.path}, with the same seed {run.config.train.seed}. Leave out "
                    f"one of them."
                )
        except OpenConError as err:
            if is_named and not isinstance(err, MissingPluginError):
                raise
            say(f"Left out: {err}")
            left_out = err
    if not runs:
        raise RunError(f"there is no finished run to compare. {left_out or ''}".rstrip())
    groups: dict[str, list[Run]] = {}
    for run in runs.values():
        groups.setdefault(_title(run), []).append(run)
    return [Section(title, _rows(group)) for title, group in groups.items()]


def find_runs(paths: Iterable[Path]) -> dict[Path, bool]:
    """Run folders, and whether each was named. A folder that is not a run stands for those in it."""
    folders: dict[Path, bool] = {}
    for path in paths:
        is_run = (path / "config.json").is_file()
        places = [*path.glob("*/config.json"), *path.glob("cells/*/config.json")]  # the cells of a sweep are runs
        inside = [path] if is_run else sorted(place.parent for place in places)
        if not inside:
            raise RunError(f"{path} is not a run, and no run is in it. Give folders that `opencon train` has made.")
        known = {p.resolve() for p in folders}
        folders |= {p: is_run for p in inside if p.resolve() not in known}
    return folders


def read_run(path: Path) -> Run:
    """One finished run, from its own files."""
    folder = RunFolder.open_for_reading(path)
    settings = folder.read_json("config.json")
    if not folder.has("result.json"):
        raise RunError(f"{path} is not finished. Resume it with the command that made it, or leave it out.")
    try:
        config = run_config(settings)
    except ConfigError as err:
        raise RunError(f"{path / 'config.json'} is not the configuration of a run: {err}") from err
    result = folder.read_json("result.json")
    if result.get("on") == "train" and not measures_of(result):
        raise ConfigError(
            f"{path}: {config.method.name} learns without labels and is measured by the classes of its training images. "
            f"Nobody knows these, so there is nothing to compare."
        )
    numbers = [result[key] for names in MEASURES.values() for key in names if result.get(key) is not None]
    fits = result.get("on") in IMAGES and isinstance(result.get("num_images"), int)
    fits = fits and bool(measures_of(result)) and ("all" not in result or "protocol" in result)
    if not fits or not all(isinstance(number, (int, float)) for number in numbers):
        raise RunError(f"{path / 'result.json'} is damaged: it is not the result of a run. Train it again.")
    num_seen = config.split.num_seen if config.method.uses_labels else None
    if num_seen is None and config.method.uses_labels:  # the labels that came with the files said it
        num_seen = folder.read_json("split.json").get("num_seen")
    seconds = [record.get("seconds") for record in folder.read_metrics()]
    steady = [value for value in seconds if isinstance(value, (int, float))][2:]
    return Run(path, config, result, statistics.median(steady) if steady else None, num_seen)


def published_numbers() -> dict[str, dict[str, list[float]]]:
    """Data set with recipes -> method -> accuracy in percent: all, novel, seen."""
    text = files("opencon.experiments").joinpath("published.toml").read_text(encoding="utf-8")
    numbers: dict[str, dict[str, list[float]]] = tomllib.loads(text)
    return numbers


def render(sections: Sequence[Section], form: str, columns: Sequence[str] | None = None) -> str:
    """The sections as text, with these measures; None: those of each section."""
    if form not in FORMATS[1:]:
        raise ConfigError(f"--format {form!r} must be one of {', '.join(FORMATS)}.")
    check_sections(sections, columns)
    return {"markdown": _markdown, "csv": _csv, "latex": _latex, "json": _json}[form](sections, columns)


def check_sections(sections: Sequence[Section], columns: Sequence[str] | None) -> None:
    """Refuse a column that no run has."""
    if columns is not None:
        check_columns((run.record for section in sections for row in section.rows for run in row.runs), columns)


# --- grouping ---------------------------------------------------------------------------------------------------------


def _title(run: Run) -> str:
    config, result = run.config, run.result
    name = config.data.name
    title = DATASETS[name].info.title if name in DATASETS else name
    if name in ("folder", "list"):  # every folder is another data set
        title += f" {' and '.join(place for place in (config.data.root, config.data.unlabeled) if place is not None)}"
    parts, split = [title], config.split
    if run.num_seen is not None:
        are_given = split.num_seen is None or config.data.unlabeled is not None or "num_held_out" in result
        is_counted = split.num_classes == "auto" or (are_given and split.num_classes is None)
        parts.append(f"{run.num_seen} seen classes")
        if is_counted or _is_told_otherwise(config):
            parts.append(f"{'a number that is estimated' if is_counted else split.num_classes} to look for")
        parts.append("labeled as the files say" if are_given else f"{split.labeled_ratio:.0%} labeled")
    parts += [f"split seed {split.seed}"] * bool(split.seed)
    how = f"protocol {result['protocol']}" if "all" in result else "20-NN" if "knn20" in result else "no truth"
    return f"{', '.join(parts)}; {how}, {int(result['num_images']):,} {IMAGES[str(result['on'])]}"


def _is_told_otherwise(config: RunConfig) -> bool:
    """Whether the method was told another number of classes than the data set has."""
    name, told = config.data.name, config.split.num_classes
    return told is not None and not (name in DATASETS and told == DATASETS[name].info.num_classes)


def _number(config: RunConfig) -> int | str | None:
    """Classes that the method was told to look for: a number, "auto", or those of the data set."""
    name, told = config.data.name, config.split.num_classes
    return told if told is not None or name not in DATASETS else DATASETS[name].info.num_classes or None


def _experiment(run: Run) -> str:
    return json.dumps(run.experiment, sort_keys=True, default=list)


def _rows(runs: Sequence[Run]) -> tuple[Row, ...]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_experiment(run), []).append(run)
    by_method: dict[str, list[list[Run]]] = {}
    for same in groups.values():
        by_method.setdefault(same[0].config.method.name, []).append(same)
    rows = [
        Row(tuple(same), label, _published(same[0]))
        for name, experiments in by_method.items()
        for same, label in zip(experiments, _labels(name, experiments), strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: row.score(runs[0].measures[0])[0] or 0.0, reverse=True))


def _labels(name: str, experiments: Sequence[Sequence[Run]]) -> list[str]:
    """The method's title. Where several experiments share it, the settings in which they differ follow."""
    settings = [runs[0].experiment for runs in experiments]
    keys = sorted(set().union(*settings))
    differ = [key for key in keys if len({json.dumps(s.get(key), default=list) for s in settings}) > 1]
    title = METHODS[name].title
    return [", ".join([title, *(f"{key}={s.get(key)}" for key in differ)]) for s in settings]


def _published(run: Run) -> tuple[float, float, float] | None:
    """The paper's numbers for this method on this data set, if the run is its recipe and was measured the same way."""
    config, method = run.config, run.config.method.name
    if "all" not in run.result or run.result["on"] != "unlabeled" or _is_told_otherwise(config):
        return None
    for name, numbers in published_numbers().items():
        if name not in SETTINGS or method not in numbers or SETTINGS[name].protocol != run.result["protocol"]:
            continue
        if any(_is_same(config, make_recipe(method, name, variant)) for variant in ("released", "paper")):
            every, novel, seen = numbers[method]
            return every, novel, seen
    return None


def _is_same(config: RunConfig, recipe: RunConfig) -> bool:
    """Whether a run is a recipe: an ablation is not, and the numbers of the main tables do not belong beside it."""
    one, other = experiment(config), experiment(recipe)
    return all(one.get(key) == other.get(key) for key in {*one, *other} - UNTOLD)


def _flat(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for inner, v in value.items():
            yield from _flat(f"{key}.{inner}", v)
    else:
        yield key, value


# --- forms ------------------------------------------------------------------------------------------------------------


def _markdown(sections: Sequence[Section], columns: Sequence[str] | None) -> str:
    tables = [(section.title, *section.cells(columns)) for section in sections]
    return "\n".join(f"{title}\n\n{markdown(heads, lines, bold=best)}\n" for title, heads, lines, best in tables)


def _latex(sections: Sequence[Section], columns: Sequence[str] | None) -> str:
    tables = [(section.title, *section.cells(columns)) for section in sections]
    return "\n".join(f"% {title}\n{latex(heads, lines, bold=best)}\n" for title, heads, lines, best in tables)


def _csv(sections: Sequence[Section], columns: Sequence[str] | None) -> str:
    out = io.StringIO()
    chosen, columns = columns, columns or list(dict.fromkeys(name for section in sections for name in section.measures))
    writer = csv.writer(out)
    stats = [f"{column}_{what}" for column in columns for what in ("mean", "std")]
    published = [f"published_{key}" for key in SCORES]
    about = ["data", "seen_classes", "num_classes", "labeled_ratio", "protocol", "on", "num_images", "start", "epochs"]
    about += ["batch_size"]
    writer.writerow([*about, "method", *stats, "p", "runs", "seconds_per_epoch", *published])
    for section in sections:
        for row, p in zip(section.rows, section.p((chosen or section.measures)[0]), strict=True):
            config, result = row.runs[0].config, row.runs[0].result
            facts = [config.data.name, row.runs[0].num_seen, _number(config), config.split.labeled_ratio]
            facts += [result.get("protocol"), result["on"], result["num_images"]]
            facts += ["weights" if config.encoder.weights else "random", row.epochs, config.train.batch_size]
            numbers = [*(value for column in columns for value in row.score(column)), p]
            known = row.published or (None, None, None)
            writer.writerow([*facts, row.label, *numbers, len(row.runs), row.seconds_per_epoch, *known])
    return out.getvalue()


def _json(sections: Sequence[Section], columns: Sequence[str] | None) -> str:
    out = [
        {
            "title": section.title,
            "rows": [
                {
                    "method": row.label,
                    "name": row.runs[0].config.method.name,
                    "n": len(row.runs),
                    "epochs": row.epochs,
                    "seeds": sorted(run.config.train.seed for run in row.runs),
                    **{column: dict(zip(("mean", "std"), row.score(column), strict=True)) for column in shown},
                    "p": p,
                    "seconds_per_epoch": row.seconds_per_epoch,
                    "published": row.published,
                }
                for row, p in zip(section.rows, section.p(shown[0]), strict=True)
            ],
        }
        for section in sections
        for shown in [columns or section.measures]
    ]
    return json.dumps(out, indent=1) + "\n"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs side by side, a section for each data set: mean and spread over seeds, and the published numbers."""

    sections: list[Section]
    left_out: list[str]  # why runs that lay in a folder are not in the table

    def to(self, form: str, columns: Sequence[str] | None = None) -> str:
        """As "markdown", "csv", "latex" or "json", with these measures; None: those of each section."""
        forms = [name for name in FORMATS if name != "table"]
        if form not in forms:
            raise ConfigError(f"form {form!r} must be one of {', '.join(forms)}.")
        return render(self.sections, form, columns)

    def __repr__(self) -> str:
        return self.to("markdown")

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return self.to("markdown")
