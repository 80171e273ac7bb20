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
    path.write_text(json.dumps({"date": date, "environment": environment(device), "result": result}, indent=1) + "\n")
    return path
