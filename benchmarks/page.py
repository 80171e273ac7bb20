"""Fill the templates *.md.in from results/*.json, so that no number of a page is typed by hand.

python benchmarks/page.py

A template is Jinja, which comes with torch. NAME.md.in makes docs/NAME.md; where that page has the two marks below, it makes
only what stands between them. In a template `run` and `runs` give what a claim's file holds, and `x|f(".1f")` formats a
number as Python does. The other functions of this file derive what a template cannot say in a line.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
START, END = "<!-- made by benchmarks/page.py -->\n", "<!-- end -->"
# Until then the fast path had the statistics that came with the weights; since then it measures them on its own views.
MEASURED_SINCE = "2026-11-16"


def load(claim: str) -> dict[str, Any]:
    """The file of a claim."""
    return json.loads((HERE / "results" / f"{claim}.json").read_text(encoding="utf-8"))


def has(claim: str) -> bool:
    """Whether there is such a file."""
    return (HERE / "results" / f"{claim}.json").is_file()


def runs(claim: str, **where: Any) -> list[dict[str, Any]]:
    """Runs of a claim, oldest first. `where` picks by a run's own entries, its hardware and its numbers."""
    found = load(claim)["runs"]
    return [
        run
        for run in found
        if all((run["hardware"] | run["numbers"] | run).get(key) == value for key, value in where.items())
    ]


def run(claim: str, **where: Any) -> dict[str, Any]:
    """The numbers of the last such run."""
    return runs(claim, **where)[-1]["numbers"]


def latest(claim: str, **where: Any) -> dict[str, list[dict[str, Any]]]:
    """The rows of the tables by the data they are about, each from the last run that has that data."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in runs(claim, **where):
        tables: dict[str, list[dict[str, Any]]] = {}
        for row in one["numbers"]["table"]:
            tables.setdefault(row["data"], []).append(row)
        found |= tables
    return found


# --- OpenCon on CIFAR-100: All in percent, run by run -------------------------------------------------------------------


def alls(form: str, is_measured: bool | None = None) -> list[float]:
    """Of the forms "fast" and "plain"; of fast runs those with or without measured statistics."""
    some = [r for r in runs("fast_against_plain") if is_measured in (None, r["date"] >= MEASURED_SINCE)]
    return [100 * seed["all"] for r in some for seed in r["numbers"][form]["runs"]]


def recipe_runs(is_measured: bool) -> list[float]:
    """Every run of the recipe on record."""
    whole = [r["numbers"] for r in runs("wall_clock") if is_measured == (r["date"] >= MEASURED_SINCE)]
    found = [*alls("fast", is_measured), *(100 * r[cache]["all"] for r in whole for cache in ("cold", "warm"))]
    if is_measured:
        return found
    first = run("cifar100", what="running statistics, both views in one pass")
    own = next(row for row in method_rows("methods-cifar100") if row["name"] == "opencon")
    return [own["all"]["mean"], *found, 100 * first["all"]]


def plain_runs() -> list[float]:
    """Every run of the released form on record."""
    first = run("cifar100", what="batch statistics, each view in its own pass (the recipe)")
    return [*alls("plain"), 100 * first["all"]]


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def difference(some: list[float], others: list[float]) -> str:
    error = sum(statistics.variance(values) / len(values) for values in (some, others)) ** 0.5
    return f"{statistics.mean(some) - statistics.mean(others):+.2f}, standard error {error:.2f}"


# --- the methods --------------------------------------------------------------------------------------------------------


def method_rows(claim: str) -> list[dict[str, Any]]:
    """A row for each method that has finished, of its last run, best first, with its epochs."""
    rows = {}
    for one in runs(claim):
        for row in (row for section in one["numbers"]["table"] for row in section["rows"]):
            epochs = one["numbers"]["runs"][f"{row['name']}-{row['seeds'][0]}"]["epochs_done"]
            rows[row["name"]] = row | {"epochs": epochs}
    return sorted(rows.values(), key=lambda row: -row["all"]["mean"])


def seconds_alone() -> dict[str, float]:
    """Seconds of an epoch of each method on CIFAR-100."""
    found = {}
    for one in runs("epoch"):
        method, slash, data = one["numbers"]["recipe"].partition("/")
        if slash and data == "cifar100" and method != "simclr":
            found[method] = one["numbers"]["steady_seconds"]
    # These two cluster only after some epochs, later than those that were measured alone.
    return found | {
        r["numbers"]["method"]: statistics.median(r["numbers"]["seconds"][-20:]) for r in runs("clustering-epochs")
    }


# --- the worlds ---------------------------------------------------------------------------------------------------------


def worst_piles(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The piles more than two points below their best baseline, the worst first."""
    return sorted((r for r in rows if r["best"] - r["all"] > 2), key=lambda r: r["all"] - r["best"])


# --- the torture test ---------------------------------------------------------------------------------------------------

TRIED = {
    "kills": "kills, full disks and deleted folders at a file operation",
    "settings": "settings that nobody means",
    "tables": "tables of labels, lists and truth",
    "arrays": "rows and labels for the estimator",
    "images": "files that are called photos",
    "weights": "files of weights",
    "archives": "tars, Parquet files and archives of CIFAR",
    "damage": "damaged files in folders that commands wrote",
    "all": "**all**",
}


def tortured() -> list[dict[str, Any]]:
    """What was tried and what was lost, summed over the seeds on record."""
    tables = [{row["kind"]: row for row in one["numbers"]["kinds"]} for one in runs("torture")]
    counts = ("tried", "tracebacks", "hangs", "otherwise")
    return [
        {"what": what} | {key: sum(table[kind][key] for table in tables) for key in counts}
        for kind, what in TRIED.items()
    ]


def seeds(claim: str) -> str:
    """The seeds on record, in words."""
    numbers = [str(one["numbers"]["seed"]) for one in runs(claim)]
    if len(numbers) == 1:
        return f"Seed {numbers[0]}"
    return f"Seeds {', '.join(numbers[:-1])} and {numbers[-1]}"


# --- the pages ----------------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """Every page, as it should be."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters |= {"f": format, "mean": statistics.mean}
    given = (
        load,
        has,
        runs,
        run,
        latest,
        alls,
        recipe_runs,
        plain_runs,
        spread,
        difference,
        method_rows,
        seconds_alone,
        worst_piles,
        tortured,
        seeds,
    )
    jinja.globals |= {function.__name__: function for function in given} | {
        "measured_since": MEASURED_SINCE,
        "worst_piles": worst_piles,
    }
    out = {}
    for template in sorted(HERE.glob("*.md.in")):
        page, made = DOCS / template.stem, jinja.get_template(template.name).render().rstrip() + "\n"
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        before, mark, rest = text.partition(START)
        out[page] = before + mark + made + END + rest.partition(END)[2] if mark else made
    return out


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(page)
