"""Where benchmark results go: results/NAME.json, with everything a number depends on."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import torch

from opencon.runtime import environment

RESULTS = Path(os.environ.get("OPENCON_RESULTS", Path(__file__).parent / "results"))


def save(name: str, result: Any, device: torch.device) -> Path:
    """Write one result; `OPENCON_RESULTS` names another folder."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = environment(device)
    about["command"] = without_folders(about["command"])
    path.write_text(json.dumps({"date": date, "environment": about, "result": result}, indent=1) + "\n")
    return path


def without_folders(command: str) -> str:
    """Paths by their last part: where a machine keeps its files says nothing about a number."""

    def shown(word: str) -> str:
        name, equals, value = word.rpartition("=")
        return name + equals + Path(value).name if "/" in value and Path(value).exists() else word

    return " ".join(shown(word) for word in command.split())
