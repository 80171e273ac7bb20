"""What a person decided: an append-only file of JSON lines beside the run. Who comes after can replay it.

    {"what": "decisions of `opencon review`", "run": IDENTITY, "photos": 412}
    {"do": "move", "photos": [3, 17], "to": 2, "at": "2026-05-04T10:11:12Z"}
    {"do": "undo", "at": ...}

A line is on the disk before the page says that something is done. A program that is killed while it writes leaves a line
without its end; nobody was told of it, so it is cut off when the file is opened again.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opencon.errors import RunError
from opencon.files import parse_json, read_file

LOG, LOCK = "decisions.jsonl", "lock"
WHAT = "decisions of `opencon review`"

Entry = dict[str, Any]


class DecisionLog:
    """One file, open for one program."""

    def __init__(self, folder: Path, identity: str, photos: int) -> None:
        """Open the log in a folder, or begin one.

        Args:
            folder: made if it is missing.
            identity: of the run; a log of another run is refused.
            photos: how many there are, for whoever reads the file.
        """
        self.path = folder / LOG
        self.entries: list[Entry] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / LOCK)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as err:
            raise RunError(f"cannot write decisions to {folder} ({err.strerror}). Copy the run where you may.") from err
        try:
            end = self.path.stat().st_size
            self.entries, used = _read(self.path, identity)
            if used < end:
                os.ftruncate(self._file, used)
                os.fsync(self._file)
        except RunError:
            self.close()
            raise
        if not used:
            self._write({"what": WHAT, "run": identity, "photos": photos})
            self._sync_folder(folder)

    def append(self, entry: Mapping[str, Any]) -> Entry:
        """Write one decision. It is on the disk when this returns."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        stamped = {**entry, "at": now.replace("+00:00", "Z")}
        self._write(stamped)
        self.entries.append(stamped)
        return stamped

    def _write(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        start = os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as err:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)  # a full disk: half a line must not stand before the next one
            raise RunError(f"cannot write {self.path} ({err.strerror}). Nothing was changed; make room.") from err

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        """The name of a new file is on the disk only once its folder is."""
        with contextlib.suppress(OSError):  # some systems cannot
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Let go of the file."""
        for descriptor in (self._file, self._lock):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def read_log(path: Path, identity: str) -> list[Entry]:
    """The decisions about a run so far; none where there is no log."""
    return _read(path, identity)[0] if path.is_file() else []


def _read(path: Path, identity: str) -> tuple[list[Entry], int]:
    """Every decision, and how many bytes of the file are whole lines."""
    try:
        data = read_file(path)
    except OSError as err:
        raise RunError(f"cannot read {path} ({err.strerror}). Repair it, or --start-over.") from err
    end = data.rfind(b"\n") + 1
    entries: list[Entry] = []
    for number, line in enumerate(data[:end].splitlines(), start=1):
        try:
            entry = parse_json(line)
            if not isinstance(entry, dict):
                raise ValueError("no JSON object")
        except ValueError as err:
            raise RunError(f"{path}, line {number} is damaged ({err}). Repair it, or --start-over.") from err
        entries.append(entry)
    if entries and entries[0].get("run") != identity:
        raise RunError(
            f"{path} holds decisions about another discovery than the one that is in the folder now. "
            f"Start over with `opencon review --start-over`, which keeps them aside."
        )
    return entries[1:], end


def _locked(path: Path) -> int:
    """A file that one program holds at a time; the system lets go of it when the program ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        import fcntl
    except ImportError:  # Windows
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(descriptor)
        raise RunError(f"{path.parent.parent} is being reviewed already. Use that page, or stop it first.") from err
    return descriptor
