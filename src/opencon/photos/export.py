"""A copy of a discovery's model to take elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from opencon.errors import MissingExtraError, RunError
from opencon.files import parse_json, read_file
from opencon.photos.model import OpenConModel
from opencon.photos.onnx import export_onnx

ONNX = "model.onnx"


def export_folder(run: Path, out: Path, *, onnx: bool | None) -> Iterator[str]:
    """Write a model that needs nothing else; yields lines about it. `onnx` None: write that file if it can be."""
    model = OpenConModel.from_pretrained(run)
    facts = {}
    try:
        result = parse_json(read_file(run / "result.json"))
        facts = {"photos": f"{result['photos']:,}, of which {result['labeled']:,} labeled", "found": result["headline"]}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # an exported folder has no result, and a damaged one says nothing
    if out.resolve() == run.resolve():
        raise RunError(f"--out {out} is the discovery itself. Give another folder.")
    model.save_pretrained(out, facts=facts)
    (out / ONNX).unlink(missing_ok=True)  # it may belong to another model
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
