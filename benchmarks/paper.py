"""The page docs/paper.md: the paper's tables from results/paper/*.json.

python benchmarks/paper.py

Each file is the results.json of `opencon paper` or `opencon sweep`. What is not measured is said, and so is a table that is
measured in part. A sentence for a cell more than two points from the published one stands in paper_notes.toml. A file's
"environment" may have a "state": a sentence that says at what commit it was measured, where the program could not tell.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from opencon.experiments.paper import Manifest, Row, far_cells, manifest_names, read_manifest, render_table
from opencon.experiments.sweep_table import SweepRow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
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
"""


def record(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Every file of the record, by name."""
    paths = sorted((folder or HERE / "results" / "paper").glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def measured(folder: Path | None = None) -> dict[str, dict[str, Any]]:
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


def section(manifest: Manifest, cells: dict[str, dict[str, Any]], notes: dict[str, Any]) -> str:
    """One table with its sentences; of a table that nothing is measured of, one line."""
    rows = rows_of(manifest, cells)
    kept = [(row, got) for row, got in zip(manifest.rows, rows, strict=True) if got.done or got.failed]
    title = f"## {manifest.title}\n\n{manifest.place}; `opencon paper {manifest.name}`."
    if not kept:
        return f"{title} Nothing of it is measured yet.\n"
    some = Manifest(**vars(manifest) | {"rows": tuple(row for row, _ in kept)})
    left = [row.label for row, got in zip(manifest.rows, rows, strict=True) if not (got.done or got.failed)]
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
    lines = ["## Where the numbers come from\n"]
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
