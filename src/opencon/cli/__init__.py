"""The command line: parse, call, show. No logic of its own.

An error that the user can fix ends with one sentence and exit code 2. Ctrl-C ends with code 130 and a run that can be
resumed.
"""

from __future__ import annotations

import os
import sys

from opencon.cli import embed, names, paper, photos, research, results, review
from opencon.cli.base import app, errors, is_out_of_memory, keep_memory, print_anything
from opencon.errors import OpenConError, shown

__all__ = ["app", "embed", "main", "names", "paper", "photos", "research", "results", "review"]


def main(argv: list[str] | None = None) -> None:
    """The entry point of the command `opencon`."""
    keep_memory()
    print_anything()
    try:
        app(args=argv, standalone_mode=True)
    except OpenConError as err:
        errors.print(f"opencon: {err}")
    except (
        OSError
    ) as err:  # what the system refuses, a user can put right: rights, a path too long, a disk that is gone
        where = f"{shown(os.fsdecode(err.filename))}: " if isinstance(err.filename, (str, bytes)) else ""
        errors.print(f"opencon: {where}{err.strerror or err}.")
    except (MemoryError, RuntimeError) as err:
        if not is_out_of_memory(err):
            raise
        errors.print(
            "opencon: there is not enough memory for this. Take smaller batches, images or layers, or fewer rows."
        )
    sys.exit(2)
