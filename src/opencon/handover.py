"""After a discovery: names for its groups, and a copy to take elsewhere."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from opencon.assignments import renamed_table
from opencon.data.listings import printable
from opencon.errors import DataError, MissingExtraError, RunError
from opencon.export import export_onnx
from opencon.model import OpenConModel, identity
from opencon.runs import ASSIGNMENTS, RunFolder

ONNX = "model.onnx"


def rename_groups(run: Path, table: Path) -> tuple[dict[str, str], list[str]]:
    """Give groups the names in a table group,name; the model and assignments.csv change.

    A group goes by the name it has, or by the one it had first (new-1), which the report shows: a table may be used again
    with more names or corrected ones. Groups with the same name count as one. A table that a report wrote says of which
    discovery it is, and is refused by another one, whose groups have other numbers.

    Returns:
        Old to new name where they differ, and the names that several classes or groups carry now.
    """
    names, of = read_names(table)
    before = OpenConModel.from_pretrained(run)
    if of and of != {identity(RunFolder(run))}:
        raise RunError(
            f"{printable(table)} holds names for another discovery than the one that is in {run} now: groups have other "
            f"numbers there. Name them in its present report.html, or remove the column `discovery` from the table."
        )
    after = before.renamed(names)
    changed = {old: new for old, new in names.items() if before.renamed({old: new}).class_names != before.class_names}
    text = renamed_table(run, before, after) if (run / ASSIGNMENTS).is_file() else None
    after.save(run)
    if text is not None:
        RunFolder(run).write_text(ASSIGNMENTS, text)
    return changed, [name for name, number in Counter(after.class_names).items() if number > 1]


def read_names(table: Path) -> tuple[dict[str, str], set[str]]:
    """Group to name, from a CSV file with the columns group and name; and what its column `discovery` says, if any."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            delimiter = ";" if ";" in head and "," not in head else ","
            rows = list(csv.DictReader(file, delimiter=delimiter, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise DataError(
            f"{printable(table)} cannot be read ({err}). Give a CSV file with the columns group,name."
        ) from err
    if not rows or not {"group", "name"} <= set(rows[0]):
        raise DataError(f"{printable(table)} must have the columns group,name and at least one row.")
    named: dict[str, str] = {}
    for row in rows:
        group, name = ((row[key] or "").strip() for key in ("group", "name"))
        if name and named.setdefault(group, name) != name:
            raise DataError(f"{printable(table)} gives {group!r} two names, {named[group]!r} and {name!r}. Keep one.")
    if not named:
        raise DataError(f"{printable(table)} gives no name: its column `name` is empty.")
    return named, {row["discovery"].strip() for row in rows if row.get("discovery")}


def export_folder(run: Path, out: Path, *, onnx: bool | None) -> Iterator[str]:
    """Write a model that needs nothing else; yields a line for each thing written. `onnx` None: where it can be."""
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
    (out / ONNX).unlink(missing_ok=True)  # of another model, if there is one
    yield f"{out}: model, encoder and card. In Python: OpenConModel.from_pretrained({str(out)!r})"
    if onnx is False:
        return
    try:
        written = export_onnx(model, out / ONNX)
    except MissingExtraError as err:
        if onnx:
            raise
        yield f"No {ONNX}: {err}"
        return
    yield f"{written.path}: the same as one ONNX graph, within {max(written.difference.values()):.1g} of torch"
