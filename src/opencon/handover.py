"""After a discovery: names for its groups, and a copy to take elsewhere."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from opencon.data.listings import printable
from opencon.data.photos import new_names
from opencon.errors import DataError, RunError
from opencon.export import export_onnx
from opencon.model import OpenConModel
from opencon.runs import RunFolder


def rename_groups(run: Path, table: Path) -> dict[str, str]:
    """Give groups the names in a table group,name; the model and assignments.csv change. Returns old to new name.

    A group goes by the name it has, or by the one it had first (new-1), which the report shows: a table may be used again
    with more names or corrected ones.
    """
    model = OpenConModel.from_pretrained(run)
    now, seen = model.class_names, model.class_names[: model.num_seen]
    first = dict(zip(new_names(seen), now[model.num_seen :], strict=False))
    wanted = {(old if old in now else first.get(old, old)): new for old, new in read_names(table).items()}
    names = {old: new for old, new in wanted.items() if old != new}
    model.renamed(names).save(run)
    assignments = run / "assignments.csv"
    if assignments.is_file():
        text = io.StringIO()
        with assignments.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            rows = csv.DictReader(file)
            writer = csv.DictWriter(text, rows.fieldnames or [], lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow({**row, "predicted": names.get(row["predicted"], row["predicted"])})
        RunFolder(run).write_text(assignments.name, text.getvalue())
    return names


def read_names(table: Path) -> dict[str, str]:
    """Group to name, from a CSV file with the columns group and name."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise DataError(
            f"{printable(table)} cannot be read ({err}). Give a CSV file with the columns group,name."
        ) from err
    if not rows or not {"group", "name"} <= set(rows[0]):
        raise DataError(f"{printable(table)} must have the columns group,name and at least one row.")
    names = {(row["group"] or "").strip(): (row["name"] or "").strip() for row in rows}
    return {group: name for group, name in names.items() if name}


def export_folder(run: Path, out: Path, *, onnx: bool) -> Iterator[str]:
    """Write a model that needs nothing else; yields a line for each thing written."""
    model = OpenConModel.from_pretrained(run)
    facts = {}
    try:
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        facts = {"photos": f"{result['photos']:,}, of which {result['labeled']:,} labeled", "found": result["headline"]}
    except (OSError, ValueError, KeyError):
        pass  # an exported folder is exported again: it has no result
    if out.resolve() == run.resolve():
        raise RunError(f"--out {out} is the discovery itself. Give another folder.")
    model.save_pretrained(out, facts=facts)
    yield f"{out}: model, encoder and card. In Python: OpenConModel.from_pretrained({str(out)!r})"
    if onnx:
        written = export_onnx(model, out / "model.onnx")
        worst = max(written.difference.values())
        yield f"{written.path}: the same as one ONNX graph, within {worst:.1g} of torch"
