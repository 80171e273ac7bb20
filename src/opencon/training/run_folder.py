"""The run folder: the settings, the split, the measurements, and how far the run has come.

    config.json        the RunConfig, written once all is prepared and before anything is trained
    split.json         which images are labeled
    environment.json   versions, hardware, command
    plugins.json       files and packages of somebody's own that it needs, if any
    metrics.jsonl      one line an epoch
    checkpoint.pt      method, optimizer and the number of finished epochs
    encoder.safetensors, result.json   once finished

Every file is written under a temporary name and renamed, so a killed run leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from opencon.config import differences, with_defaults
from opencon.errors import ConfigError, RunError
from opencon.files import ASSIGNMENTS as ASSIGNMENTS
from opencon.files import DISCOVERY as DISCOVERY
from opencon.files import EMBEDDINGS as EMBEDDINGS
from opencon.files import FEATURES as FEATURES
from opencon.files import write_whole
from opencon.plugins import recall

# Settings that may change when a run is resumed: where files lie, how they are read, how often the run logs and saves.
HARMLESS = {"data.root", "data.memory_gb", "encoder.weights", "train.log_every", "train.save_seconds", "eval.every"}


class RunFolder:
    """One folder on disk; only this class writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.pt"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def made(cls, path: Path) -> RunFolder:
        """The folder, which is made if it is missing."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise RunError(f"cannot create the folder {path} ({err.strerror}). Give another one.") from err
        return cls(path)

    @classmethod
    def open_for_training(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """Create the folder, or check that it holds a run of the same configuration."""
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise RunError(f"cannot create the run folder {path} ({err.strerror}). Give another --out.") from err
        _refuse_discovery(path)
        if (path / "config.json").exists():
            changed = _changes(folder.read_json("config.json"), config)
            if changed:
                lines = "\n".join(f"  {k}: {old!r} in the run, {new!r} now" for k, (old, new) in changed.items())
                raise ConfigError(
                    f"{path} holds a run with other settings:\n{lines}\n"
                    f"Start over in a new folder (--out), or put the settings back to resume."
                )
        elif any(path.iterdir()):
            raise RunError(f"{path} is not empty and holds no run. Give an empty or a new folder with --out.")
        return folder

    @classmethod
    def open_for_reading(cls, path: Path) -> RunFolder:
        """A folder that holds a run. The plugins that it needs are imported again."""
        if not (path / "config.json").is_file():
            raise RunError(f"{path} holds no run (no config.json). Give the folder that `opencon train --out` wrote.")
        _refuse_discovery(path)
        recall(path)
        return cls(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from training into this folder meanwhile. The lock ends with its process, however that ends."""
        try:
            import fcntl
        except ImportError:  # Windows has none
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as err:
                    message = f"another process is training into {self.path}. Wait for it, or give another --out."
                    raise RunError(message) from err
            yield
        finally:
            os.close(descriptor)

    def has(self, name: str) -> bool:
        """Whether the run has written this file."""
        return (self.path / name).is_file()

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write one JSON file."""
        text = _to_json(data, indent=1)
        self.write_file(name, lambda partial: partial.write_text(text, encoding="utf-8"))

    def write_text(self, name: str, text: str) -> None:
        """Write one text file. File names may hold bytes that are no text; they are written as they were."""
        encoded = text.encode("utf-8", "surrogateescape")
        self.write_file(name, lambda partial: partial.write_bytes(encoded))

    def write_array(self, name: str, array: NDArray[Any]) -> None:
        """Write one array as .npy."""

        def write(partial: Path) -> None:
            with partial.open("wb") as file:
                np.save(file, array, allow_pickle=False)

        self.write_file(name, write)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one JSON file of the run."""
        try:
            data = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as err:
            raise RunError(f"cannot read {self.path / name} ({err}). The run folder is damaged.") from err
        if not isinstance(data, dict):
            raise RunError(f"{self.path / name} does not hold a JSON object. The run folder is damaged.")
        return data

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        with _explained(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(_to_json(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every complete line of metrics.jsonl; a line torn by a kill is left out."""
        if not self.metrics.exists():
            return []
        records = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records

    def forget_metrics_from(self, epoch: int) -> None:
        """Drop the lines of epochs that will be trained again."""
        kept = [_to_json(r) + "\n" for r in self.read_metrics() if r.get("epoch", -1) < epoch]
        self.write_file(self.metrics.name, lambda partial: partial.write_text("".join(kept), encoding="utf-8"))

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; the old one survives whatever goes wrong."""
        self.write_file(self.checkpoint.name, lambda partial: torch.save(dict(state), partial))

    def load_checkpoint(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The checkpoint, on the CPU; refused if it was trained with another configuration."""
        if not self.checkpoint.exists():
            raise RunError(f"{self.path} has no checkpoint yet. Train it first: opencon train ... --out {self.path}")
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as err:  # torch raises many kinds for a damaged file
            why = f"{type(err).__name__}: {err}"  # some messages are no more than a number
            raise RunError(f"cannot read {self.checkpoint} ({why}). Delete it to start this run over.") from err
        changed = _changes(state["config"], config) if config is not None else {}
        if changed:
            lines = "\n".join(f"  {k}: {old!r} in the checkpoint, {new!r} now" for k, (old, new) in changed.items())
            raise ConfigError(
                f"{self.checkpoint} was trained with other settings:\n{lines}\n"
                f"Start over in a new folder (--out), or put the settings back to resume."
            )
        return state

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write weights as safetensors."""
        plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        self.write_file(name, lambda partial: save_file(plain, partial, metadata=dict(metadata)))

    def write_file(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write one file, whole or not at all; an error becomes one sentence."""
        with _explained(self.path / name):
            return write_whole(self.path / name, write)


def _refuse_discovery(path: Path) -> None:
    if (path / DISCOVERY).is_file():
        raise RunError(
            f"{path} holds a discovery (`opencon discover`), not a run of `opencon train`. Give another folder."
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ and would make it another run."""
    old, new = with_defaults(old), with_defaults(new)  # a run from before a setting existed has its default
    return {key: both for key, both in differences(old, new).items() if key not in HARMLESS}


def _to_json(data: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: a number that is not finite (an accuracy over no images, say) becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(data), indent=indent, allow_nan=False)


@contextlib.contextmanager
def _explained(path: Path) -> Any:
    """Turn a failed write into a sentence; torch reports a full disk as RuntimeError, others as OSError."""
    try:
        yield
    except (OSError, RuntimeError) as err:
        full = getattr(err, "errno", None) == errno.ENOSPC or "No space left" in str(err) or "write failed" in str(err)
        reason = "the disk is full" if full else (getattr(err, "strerror", None) or str(err).splitlines()[0])
        survives = f" What {path.name} held before is intact." if path.exists() else ""
        raise RunError(f"cannot write {path}: {reason}.{survives} Make room or choose another --out.") from err
