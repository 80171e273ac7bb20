"""Features on disk, looked up by the bytes of the photo they came from.

    cache/NAME-DIGEST/            one folder for each way of computing features (encoder, weights, size, views, ...)
        about.json                what DIGEST stands for, for people
        RANDOM.safetensors        a shard: keys, plain features and views of up to 256 photos

A shard is written once, under a temporary name, and then renamed. So a program killed at any moment leaves a whole shard or
none, and two programs may fill the same cache. A shard carries a checksum; a damaged one is removed, and its photos count as
new. A cache that cannot be written (a full disk, somebody else's folder) causes a warning, never an error.

Letters: F features, V views.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from opencon.files import parse_json, read_file, write_whole

SHARD = 256  # photos, ours: seconds of work to lose, few files; about 4 MB for four views of 1280 features
LOADED = 8  # shards kept in memory while reading, ours: photos mostly come in the order in which they were stored
STALE = 3600.0  # seconds after which a temporary file counts as left over by a dead program

KEY = 64  # hexadecimal digits of a SHA-256

Rows = tuple[Tensor, Tensor]  # (F,) float32 and (V, F) float16


class FeatureCache:
    """Features by key (the SHA-256 of a photo's bytes, as 64 digits), for one way of computing them.

    Args:
        root: the cache's folder, made if need be; None: nothing is kept.
        name: begins the name of the sub-folder.
        identity: all that the features depend on besides the photo; plain data.
    """

    def __init__(self, root: Path | None, name: str, identity: Mapping[str, Any]) -> None:
        about = json.dumps(identity, sort_keys=True, indent=1)
        digest = hashlib.sha256(about.encode()).hexdigest()[:16]
        plain_name = "".join(c if c.isalnum() or c in "_-." else "_" for c in name)[-40:].lstrip(".")
        self.folder = root / f"{plain_name}-{digest}" if root is not None else None
        self.is_writable = root is not None
        self._where: dict[str, tuple[Path, int]] = {}  # key to shard and row
        self._loaded: OrderedDict[Path, Rows] = OrderedDict()
        self._waiting: dict[str, Rows] = {}
        if self.folder is not None:
            with self._or_warn():
                self.folder.mkdir(parents=True, exist_ok=True)
                if not (self.folder / "about.json").exists():
                    with contextlib.suppress(FileNotFoundError):  # another program has just written it
                        write_whole(self.folder / "about.json", lambda partial: partial.write_bytes(about.encode()))
            self._look_through(self.folder)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def get(self, key: str) -> Rows | None:
        """The features of a photo, or None."""
        if key not in self._where:
            return None
        shard, row = self._where[key]
        if shard not in self._loaded:
            try:
                self._loaded[shard] = _load(shard)
            except (SafetensorError, OSError, KeyError, ValueError) as err:
                self._where = {k: (file, row) for k, (file, row) in self._where.items() if file != shard}
                warnings.warn(f"cached features {shard} are damaged ({err}) and will be computed again.", stacklevel=2)
                with contextlib.suppress(OSError):
                    shard.unlink()
                return None
            if len(self._loaded) > LOADED:
                self._loaded.popitem(last=False)
        plain, views = self._loaded[shard]
        return plain[row], views[row]

    def put(self, key: str, plain: Tensor, views: Tensor) -> None:
        """Keep the features of a photo; they are on disk after the next `flush`, or once a shard is full."""
        if self.is_writable and key not in self._where:
            self._waiting[key] = plain.clone(), views.clone()
            if len(self._waiting) >= SHARD:
                self.flush()

    def flush(self) -> None:
        """Write the features that wait."""
        if not self._waiting:
            return
        keys = "".join(self._waiting)
        plain, views = (torch.stack(rows) for rows in zip(*self._waiting.values(), strict=True))
        self._waiting.clear()
        metadata = {"keys": keys, "crc32": _checksum(keys, plain, views)}
        content = safetensors.torch.save({"plain": plain, "views": views}, metadata)
        assert self.folder is not None
        file = self.folder / f"{secrets.token_hex(8)}.safetensors"
        with self._or_warn():
            write_whole(file, lambda partial: partial.write_bytes(content))

    def _look_through(self, folder: Path) -> None:
        """Note which shard holds which key; only the headers are read."""
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            return  # the constructor has warned already
        for path in (folder / name for name in names):
            if path.suffix == ".partial":
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > STALE:
                        path.unlink()
            elif path.suffix == ".safetensors" and path.is_file():
                try:
                    keys = _metadata(path)["keys"]
                except (OSError, KeyError, TypeError, ValueError) as err:
                    warnings.warn(
                        f"cached features {path} are damaged ({err}) and will be computed again.", stacklevel=3
                    )
                    with contextlib.suppress(OSError):
                        path.unlink()
                    continue
                self._where.update((keys[at : at + KEY], (path, at // KEY)) for at in range(0, len(keys), KEY))

    @contextlib.contextmanager
    def _or_warn(self) -> Any:
        try:
            yield
        except OSError as err:
            self.is_writable = False
            warnings.warn(
                f"features cannot be kept in {self.folder} ({err.strerror or err}): they will be computed again next time.",
                stacklevel=4,
            )


def _metadata(path: Path) -> dict[str, str]:
    """The header of a shard: eight bytes say how long it is."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        metadata: dict[str, str] = parse_json(file.read(length))["__metadata__"]
        return metadata


def _load(path: Path) -> Rows:
    metadata = _metadata(path)
    tensors = safetensors.torch.load(read_file(path))
    plain, views = tensors["plain"], tensors["views"]
    if _checksum(metadata["keys"], plain, views) != metadata["crc32"]:
        raise ValueError("the checksum does not fit")
    return plain, views


def _checksum(keys: str, *tensors: Tensor) -> str:
    crc = zlib.crc32(keys.encode())
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
