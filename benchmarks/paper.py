"""The page docs/paper.md: the paper's tables from results/paper/*.json; and how runs come in from a machine with a GPU.

python benchmarks/paper.py                                    the page
python benchmarks/paper.py give runs/paper                    the record into a sweep, whose runs are not repeated then
python benchmarks/paper.py take runs/paper/results.json NAME  what the record lacks into results/paper/NAME.json

There, the most telling runs first, seed by seed; --minutes lets one command end in time:

    python benchmarks/paper.py give runs/paper
    opencon paper unknown main novelty modified losses converged percentile labels pcl distributions umap10 umap20 \\
        sensitivity --data DIR --weights simclr.safetensors --at-once 4 --minutes 9 --out runs/paper
    (the same command until no run is left; runs/paper/figures has the pictures)
    python benchmarks/paper.py take runs/paper/results.json NAME

Only results.json has to leave the machine, and any time is a good one: `take` adds to a file that is there. A run that was
stopped half-way goes on where its folder is, runs/paper/cells, and begins anew elsewhere.

Each file is the results.json of `opencon paper` or `opencon sweep`. What is not measured is said, and so is a table that is
measured in part. A sentence for a cell more than two points from the published one stands in paper_notes.toml. A file's
"environment" may have a "state": a sentence that says at what commit it was measured, where the program could not tell.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from opencon.experiments.paper import (
    Manifest,
    Means,
    Plan,
    Row,
    chosen,
    far_cells,
    manifest_names,
    read_manifest,
    render_table,
)
from opencon.experiments.sweep_table import SweepRow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
RECORD = HERE / "results" / "paper"
PAGE = HERE.parent / "docs" / "paper.md"
HEAD = """# The paper, table by table

<!-- made by benchmarks/paper.py from benchmarks/results/paper -->

Every table and figure of [OpenCon](https://arxiv.org/abs/2208.02764) is a manifest, and one command makes it:

    opencon paper main --data DIR --weights simclr.safetensors

`opencon paper all --dry-run` lists what there is and says what data or weights are missing. `--quick` tries everything on
the digits in minutes. All tables share one sweep in `--out`; a command that was stopped goes on. `--validate` chooses
settings on the seen classes alone, with as many trials for each method.

Below, *seeds* says how many runs a line has, or how many of those planned. Numbers are mean ± standard deviation over them,
in percent, protocol `orca` on the unlabeled training images. *Published* has the same columns, as printed in the paper,
whose encoders started from other weights. ResNet-18 runs start from our own SimCLR weights ([comparison](comparison.md)).
An empty field was not measured in that run. `python benchmarks/paper.py --help` says how further runs come in.
"""


def record(folder: Path = RECORD) -> dict[str, dict[str, Any]]:
    """Every file of the record, by name."""
    paths = sorted(folder.glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def measured(folder: Path = RECORD) -> dict[str, dict[str, Any]]:
    """Every finished or failed cell of the record, by name; later files replace earlier ones."""
    cells: dict[str, dict[str, Any]] = {}
    for file in record(folder).values():
        cells |= file["cells"]
    # To be told the number that CIFAR-100 has is to be told nothing.
    return {name.replace("-cifar100-num_classes=100-", "-cifar100-"): cell for name, cell in cells.items()}


def rows_of(manifest: Manifest, cells: dict[str, dict[str, Any]]) -> list[SweepRow]:
    """What the record has of a table."""
    return [row_of(row, cells) for row in manifest.rows]


def row_of(row: Row, cells: dict[str, dict[str, Any]]) -> SweepRow:
    names = [cell.name for cell in row.cells()]
    found = [cells[name] for name in names if name in cells]
    done = tuple(record for record in found if record["state"] == "done")
    return SweepRow(row.labels, done, len(names), len(found) - len(done))


def has_numbers(manifest: Manifest, row: Row, got: SweepRow) -> bool:
    """Whether any column was measured; a run of another table may lack them all."""
    return any(got.score(column)[0] is not None for column in row.columns or manifest.columns)


def section(manifest: Manifest, cells: dict[str, dict[str, Any]], notes: dict[str, Any]) -> str:
    """One table with its sentences; of a table that nothing is measured of, one line."""
    rows = rows_of(manifest, cells)
    pairs = list(zip(manifest.rows, rows, strict=True))
    kept = [(row, got) for row, got in pairs if got.failed or has_numbers(manifest, row, got)]
    title = f"## {manifest.title}\n\n{manifest.place}; `opencon paper {manifest.name}`."
    if not kept:
        return f"{title} Nothing of it is measured yet.\n"
    some = Manifest(**vars(manifest) | {"rows": tuple(row for row, _ in kept)})
    left = [row.label for row, got in pairs if (row, got) not in kept]
    parts = [title, render_table(some, [got for _, got in kept], "markdown")]
    own = notes.get(manifest.name, {})
    far: dict[str, list[str]] = {}
    for label, column, ours, published in far_cells(some, [got for _, got in kept]):
        far.setdefault(label, []).append(f"{column} {ours - published:+.1f}")
    for label, differences in far.items():
        note = own.get(label, "Not explained yet.")
        parts.append(f"- **{label}** ({', '.join(differences)}): {note}")
    if left:
        parts.append(f"Not measured: {'; '.join(left)}.")
    return "\n\n".join(parts) + "\n"


def origin(files: dict[str, dict[str, Any]]) -> str:
    """What each file was measured with."""
    lines = [
        "## Where the numbers come from\n",
        "A run counts by its name. Where a default has changed since, the commit of its file says what it was.\n",
    ]
    for name, file in files.items():
        about, number = file["environment"], len(file["cells"])
        state = about.get("state") or f"Measured at {about['commit']}."
        runs = f"{number} run{'s' * (number != 1)}, {about['device']}, torch {about['torch']}"
        lines.append(f"- [{name}](../benchmarks/results/paper/{name}): {runs}. {state}")
    return "\n".join(lines) + "\n"


def page(cells: dict[str, dict[str, Any]] | None = None) -> str:
    """The whole page."""
    found = measured() if cells is None else cells
    path = HERE / "paper_notes.toml"
    notes = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    parts = [HEAD, *(section(read_manifest(name), found, notes) for name in manifest_names())]
    parts.append(origin(record()))
    return "\n".join(parts)


def give(sweep: Path, folder: Path = RECORD) -> Path:
    """Put the record beside what a sweep has. As on the page, a run counts by its name, whatever settings came since."""
    plan = Plan.made(chosen(["all"]), Means.of(str(sweep), ["weights"], download=True))
    now = {cell.name: cell.fingerprint for cell in plan.cells}
    path = sweep / "results.json"
    file = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"environment": {}, "cells": {}}
    known = {
        name: {"also": []} | cell | {"fingerprint": now.get(name, cell.get("fingerprint"))}
        for name, cell in measured(folder).items()
    }
    sweep.mkdir(parents=True, exist_ok=True)
    return write(path, file | {"cells": known | file["cells"]})


def take(results: Path, name: str, state: str | None = None, folder: Path = RECORD) -> Path:
    """Put what a sweep has and the record lacks into a file of the record. Embeddings, which only figures need, stay out."""
    found = json.loads(results.read_text(encoding="utf-8"))
    known, new = measured(folder), {}
    for cell_name, cell in found["cells"].items():
        if cell["state"] != "done":
            continue
        slim = {key: value for key, value in cell["result"].items() if key != "embedding"}
        if cell_name not in known or known[cell_name]["result"] != slim:
            new[cell_name] = cell | {"result": slim, "also": [one for one in cell["also"] if one != "embedding"]}
    path = folder / f"{name}.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    about = found["environment"] | ({"state": state} if state else {})
    if old is not None and any(old["environment"][key] != about[key] for key in ("commit", "device")):
        raise SystemExit(f"{path} was measured elsewhere or at another commit. Give another name.")
    return write(path, {"environment": about, "cells": (old["cells"] if old else {}) | new})


def write(path: Path, file: dict[str, Any]) -> Path:
    path.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what")
    giving = what.add_parser("give")
    giving.add_argument("sweep", type=Path)
    taking = what.add_parser("take")
    taking.add_argument("results", type=Path)
    taking.add_argument("name")
    taking.add_argument("--state", help="at what commit, in a sentence, where the program could not tell")
    args = parser.parse_args()
    if args.what == "give":
        print(give(args.sweep))
        return
    if args.what == "take":
        print(take(args.results, args.name, args.state))
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
