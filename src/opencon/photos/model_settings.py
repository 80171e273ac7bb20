"""model.json, the plain part of a model, read with suspicion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opencon.errors import RunError
from opencon.files import parse_json, read_file

SETTINGS = "model.json"
FORMAT = 3  # of model.json; raise it when an older opencon could not read it


def read_settings(folder: Path) -> dict[str, Any]:
    """The plain data of a model, refused with a sentence where it is none of ours."""
    path = folder / SETTINGS
    if not path.is_file():
        wrote = "`opencon discover`, `train` or `export` wrote"
        raise RunError(f"{folder} holds no model (no {SETTINGS}). Give the folder that {wrote}.")
    try:
        settings = parse_json(read_file(path))
    except (OSError, ValueError) as err:
        raise damaged(folder, err) from err
    if not isinstance(settings, dict) or "format" not in settings:
        raise RunError(f"{path} is not a model of opencon (it names no format). Give the folder of a model.")
    number, version = settings["format"], settings.get("opencon")
    if isinstance(number, int) and number != FORMAT:
        way_out = "Run: pip install --upgrade opencon" if number > FORMAT else "Run the discovery again."
        raise RunError(
            f"the model in {folder} has format {number} (opencon {version}); this opencon reads format {FORMAT}. {way_out}"
        )
    return settings


def damaged(folder: Path, err: Exception) -> RunError:
    """What to say of a model that cannot be read."""
    why = str(err).splitlines()[0] if str(err) and not isinstance(err, KeyError) else f"{type(err).__name__} {err}"
    return RunError(f"the model in {folder} cannot be read ({why}). Copy it again, or run the discovery again.")
