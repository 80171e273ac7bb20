"""Write files whole or not at all; and the names of the files that several rooms share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

# Files of `opencon discover`; the first makes a folder one of its own.
DISCOVERY, ASSIGNMENTS = "discovery.json", "assignments.csv"
EMBEDDINGS, FEATURES = "embeddings.npy", "features.npy"

def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Have `write` fill a file beside `path`, then rename it: a killed program leaves the old file or the new one.

    What `write` raises passes through, and nothing is left behind. The file beside `path` always has the same name: what a
    killed program left is written over, and two programs that write the same file at once may see FileNotFoundError.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.chmod(0o666 & ~_umask())  # safetensors would keep others from reading
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def _umask() -> int:
    """The rights that this process withholds from new files. The only way to read the mask is to set it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
