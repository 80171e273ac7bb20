"""Write files whole or not at all, read what others may have damaged, and name the files that several rooms share."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opencon.errors import RunError

PARTIAL = ".partial"  # ends the name of a file that is not whole yet
# How a full disk is reported by those who do not raise OSError: safetensors by the system's words, torch by its own.
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("No space left", "Disk quota exceeded", "write failed")
DEEPEST = 100  # levels of nesting in a JSON file, ours: our own files have six; Python gives up at about a thousand

# Files of `opencon discover`; the first makes a folder one of its own.
DISCOVERY, ASSIGNMENTS = "discovery.json", "assignments.csv"
EMBEDDINGS, FEATURES, NEIGHBORS = "embeddings.npy", "features.npy", "neighbors.npy"


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Have `write` fill a file beside `path`, then rename it: a killed program leaves the old file or the new one.

    What `write` raises passes through, and nothing is left behind. The file beside `path` always has the same name: what a
    killed program left is written over, and two programs that write the same file at once may see FileNotFoundError.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        write(partial)
        partial.chmod(0o666 & ~_umask())  # safetensors would keep others from reading
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a failed write of `path` into one sentence, whoever wrote: Python, torch or safetensors."""
    from safetensors import SafetensorError  # not at the top: `opencon --help` answers at once

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as err:
        survives = f" What {path.name} held before is intact." if os.path.isfile(path) else ""
        raise RunError(
            f"cannot write {path}: {_reason(path, err)}.{survives} Make room or choose another --out."
        ) from err


def _reason(path: Path, err: Exception) -> str:
    words = str(err)
    if getattr(err, "errno", None) in FULL or any(word in words for word in FULL_WORDS):
        return "the disk is full"
    if not os.path.isdir(path.parent):
        return "its folder is gone"
    # torch begins with a line of its own source code, which helps nobody.
    return getattr(err, "strerror", None) or (
        "torch could not write it; the disk may be full" if "enforce fail" in words else _first(words)
    )


def _first(words: str) -> str:
    return (words.splitlines() or ["unknown reason"])[0].rstrip(".")


def read_file(path: Path) -> bytes:
    """The content of a regular file. A pipe, which would wait for a writer forever, is refused with an OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_bytes()


def parse_json(text: str | bytes) -> Any:
    """JSON to plain data. Whatever is wrong with the text is a ValueError: bytes that are no UTF-8, endless nesting too."""
    try:
        data = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
    if _is_deep(data):
        raise ValueError("it is nested too deeply")
    return data


def _is_deep(data: Any, level: int = 0) -> bool:
    if not isinstance(data, (dict, list)):
        return False
    inner = data.values() if isinstance(data, dict) else data
    return level >= DEEPEST or any(_is_deep(value, level + 1) for value in inner)


def _umask() -> int:
    """The rights that this process withholds from new files. The only way to read the mask is to set it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
