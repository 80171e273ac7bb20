"""A copy of a discovery's model to take elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from opencon.errors import MissingExtraError, RunError
from opencon.photos.model import OpenConModel
from opencon.photos.onnx import export_onnx

ONNX = "model.onnx"


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
