"""The run folder: the settings, the split, the measurements, and how far the run has come.

    config.json        the RunConfig, written first, once all is prepared: it makes the folder a run
    split.json         which images are labeled
    environment.json   versions, hardware, command
    plugins.json       files and packages of somebody's own that it needs, if any
    metrics.jsonl      one line an epoch
    checkpoint.pt      method, optimizer and the number of finished epochs
    checkpoint.before.pt   the checkpoint before that, until the run is finished
    encoder.safetensors, result.json   once finished

Every file is written under a temporary name and renamed, so a killed run leaves the old file or the new one. A checkpoint
is a zip archive with a checksum of each part. If one does not fit, the checkpoint before it is taken.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from opencon.files import NEIGHBORS as NEIGHBORS
from opencon.files import PARTIAL, explained, parse_json, read_file, write_whole
from opencon.plugins import recall

# Settings that may change when a run is resumed: where files lie, how they are read, how often the run logs and saves.
HARMLESS = {
    "data.root",
    "data.memory_gb",
    "data.decode",
    "encoder.weights",
    "train.log_every",
    "train.save_seconds",
    "eval.every",
}
HARMLESS |= {"data.decode"}
HARMLESS |= {"train.sync_norms"}  # only with several ranks, whose number may change, too


class RunFolder:
    """One folder on disk; only this class writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint, self.checkpoint_before = path / "checkpoint.pt", path / "checkpoint.before.pt"
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
        elif holds_others(path, ["config.json"]):
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
        with explained(self.path):
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
            data = parse_json(read_file(self.path / name))
        except (OSError, ValueError) as err:
            raise RunError(f"cannot read {self.path / name} ({err}). The run folder is damaged.") from err
        if not isinstance(data, dict):
            raise RunError(f"{self.path / name} does not hold a JSON object. The run folder is damaged.")
        return data

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        with explained(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(_to_json(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The record of every epoch in metrics.jsonl; lines that are torn or damaged are left out. It is only a log."""
        records = []
        with contextlib.suppress(OSError):
            for line in read_file(self.metrics).splitlines():
                with contextlib.suppress(ValueError):
                    record = parse_json(line)
                    if isinstance(record, dict) and type(record.get("epoch")) is int:
                        records.append(record)
        return records

    def forget_metrics_from(self, epoch: int) -> None:
        """Drop the lines of epochs that will be trained again."""
        kept = [_to_json(r) + "\n" for r in self.read_metrics() if r["epoch"] < epoch]
        self.write_file(self.metrics.name, lambda partial: partial.write_text("".join(kept), encoding="utf-8"))

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from."""
        return self.checkpoint.exists() or self.checkpoint_before.exists()

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, and keep the one before it; at every moment one of them is whole."""

        def write(partial: Path) -> None:
            torch.save(dict(state), partial)
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.checkpoint, self.checkpoint_before)

        self.write_file(self.checkpoint.name, write)

    def forget_older_checkpoint(self) -> None:
        """Remove the checkpoint before the last one: a finished run needs one."""
        with explained(self.checkpoint_before):
            self.checkpoint_before.unlink(missing_ok=True)

    def forget_checkpoints(self) -> None:
        """Remove all there is to resume from."""
        self.forget_older_checkpoint()
        with explained(self.checkpoint):
            self.checkpoint.unlink(missing_ok=True)

    def load_checkpoint(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The last checkpoint that is whole, on the CPU; refused if it was trained with another configuration."""
        files = [file for file in (self.checkpoint, self.checkpoint_before) if file.exists()]
        if not files and self.has("result.json"):
            raise RunError(
                f"{self.path} is finished, and its checkpoint is gone. A sweep keeps none unless it is told to (--keep). "
                f"Train it again in another folder: opencon train --config {self.path / 'config.json'} --out FOLDER"
            )
        if not files:
            raise RunError(f"{self.path} has no checkpoint yet. Train it first: opencon train ... --out {self.path}")
        damaged: dict[Path, str] = {}
        for file in files:
            try:
                state = _read_checkpoint(file)
            except Exception as err:  # torch raises many kinds for a damaged file
                # Some messages are no more than a number; others go on for pages.
                damaged[file] = f"{type(err).__name__}: {(str(err).splitlines() or [''])[0]}"
                continue
            if damaged:
                warnings.warn(
                    f"{self.checkpoint} is damaged ({damaged[self.checkpoint]}). The checkpoint before it is taken, after "
                    f"{state['epochs_done']} epochs.",
                    stacklevel=2,
                )
            _refuse_other(file, state, config)
            return state
        file, why = next(iter(damaged.items()))
        both = f" {self.checkpoint_before.name}, too, if it is there." if len(files) > 1 else ""
        raise RunError(f"cannot read {file} ({why}). Delete it to start this run over.{both}")

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Inside, a checkpoint is put into its modules; one that does not fit them becomes a sentence."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as err:
            first = (str(err).splitlines() or [""])[0].rstrip(":")
            raise RunError(
                f"the checkpoint in {self.path} does not fit this run ({type(err).__name__}: {first}). Its files come from "
                f"different runs, or from another version of opencon. Start over in a new folder (--out)."
            ) from err

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write weights as safetensors."""
        plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        self.write_file(name, lambda partial: save_file(plain, partial, metadata=dict(metadata)))

    def write_file(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write one file, whole or not at all; an error becomes one sentence."""
        with explained(self.path / name):
            return write_whole(self.path / name, write)


def holds_others(path: Path, names: Iterable[str]) -> bool:
    """Whether a folder holds anything but these files, half of one of which a killed program may have left."""
    own = {name + ending for name in names for ending in ("", PARTIAL)}
    return any(file.name not in own for file in path.iterdir())


def _read_checkpoint(file: Path) -> dict[str, Any]:
    """A checkpoint whose checksums fit; torch does not look at them."""
    if not file.is_file():
        raise OSError("it is not a file")
    with zipfile.ZipFile(file) as archive:
        torn = archive.testzip()
    if torn is not None:
        raise ValueError(f"the checksum of {torn} does not fit")
    state = torch.load(file, map_location="cpu", weights_only=True)
    kinds = {"config": Mapping, "epochs_done": int, "method": Mapping}
    if not isinstance(state, dict) or not all(isinstance(state.get(key), kind) for key, kind in kinds.items()):
        raise ValueError("it is no checkpoint of a run")
    return state


def _refuse_other(file: Path, state: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
    changed = _changes(state["config"], config) if config is not None else {}
    if changed:
        lines = "\n".join(f"  {k}: {old!r} in the checkpoint, {new!r} now" for k, (old, new) in changed.items())
        raise ConfigError(
            f"{file} was trained with other settings:\n{lines}\n"
            f"Start over in a new folder (--out), or put the settings back to resume."
        )


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
