"""After a discovery: names for its groups, and a copy to take elsewhere."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from opencon.data.listings import printable
from opencon.errors import DataError, RunError
from opencon.export import export_onnx
from opencon.model import OpenConModel
from opencon.runs import ASSIGNMENTS, EMBEDDINGS, RunFolder


def rename_groups(run: Path, table: Path) -> tuple[dict[str, str], list[str]]:
    """Give groups the names in a table group,name; the model and assignments.csv change.

    A group goes by the name it has, or by the one it had first (new-1), which the report shows: a table may be used again
    with more names or corrected ones. Groups with the same name count as one.

    Returns:
        Old to new name where they differ, and the names that several classes or groups carry now.
    """
    names = read_names(table)
    before = OpenConModel.from_pretrained(run)
    after = before.renamed(names)
    changed = {old: new for old, new in names.items() if before.renamed({old: new}).class_names != before.class_names}
    text = renamed_assignments(run, after) if (run / ASSIGNMENTS).is_file() else None
    after.save(run)
    if text is not None:
        RunFolder(run).write_text(ASSIGNMENTS, text)
    return changed, [name for name, number in Counter(after.class_names).items() if number > 1]


def renamed_assignments(run: Path, model: OpenConModel) -> str:
    """assignments.csv with the model's names, as text; what it says of each photo comes from embeddings.npy."""
    with (run / ASSIGNMENTS).open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        table = csv.DictReader(file)
        columns, rows = table.fieldnames or [], list(table)
    z = torch.from_numpy(np.load(run / EMBEDDINGS, allow_pickle=False))
    read = [row for row in rows if not row["error"]]
    if len(read) != len(z):
        raise RunError(
            f"{run / ASSIGNMENTS} has {len(read)} photos and {EMBEDDINGS} {len(z)}: one of them was changed. "
            f"Run the discovery again, or take {ASSIGNMENTS} out of the folder."
        )
    seen = model.class_names[: model.num_seen]
    for row, name, confidence in zip(read, *model.named(model.head.predict_embedded(z).p), strict=True):
        row |= {"predicted": name, "kind": "seen" if name in seen else "new", "confidence": f"{confidence:.4f}"}
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
