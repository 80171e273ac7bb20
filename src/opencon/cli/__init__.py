"""The command line: parse, call, show. No logic of its own.

An error that the user can fix ends with one sentence and exit code 2. Ctrl-C ends with code 130 and a run that can be
resumed.
"""

from __future__ import annotations

import sys

from opencon.cli import names, paper, photos, research, results
from opencon.cli.base import app, errors, keep_memory
from opencon.errors import OpenConError

__all__ = ["app", "main", "names", "paper", "photos", "research", "results"]


def main(argv: list[str] | None = None) -> None:
    """The entry point of the command `opencon`."""
    keep_memory()
    try:
        app(args=argv, standalone_mode=True)
    except OpenConError as err:
        errors.print(f"opencon: {err}")
        sys.exit(2)
