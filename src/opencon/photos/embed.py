"""Photos to features in shards, by any number of workers that may die: what `opencon embed` does.

    OUT/embed.json             the source, the encoder and the number of shards
    OUT/pieces.jsonl           which photos belong to which shard, a line each; written once, by the first worker
    OUT/shards/00017.npy       (n, F) float32 or float16: the features of the photos that can be read, to be mapped
    OUT/shards/00017.jsonl     a line for each photo: its name, its label, and why it cannot be read, if so
    OUT/shards/00017.done      written last: sizes and checksums of the two
    OUT/shards/00017.claim     a worker is at it; touched as it goes on

A shard depends on its piece and the encoder alone. So it does not matter who computes it, when, or how often: files are
renamed into place, and twice the same is the same. A claim only keeps workers from doing the same work. It ends with its
process on this machine, and elsewhere once it has not been touched for a while.

Letters: n photos that can be read, F features.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import platform
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opencon.data.decoders import MANY, DecodeIn, Slot, in_processes
from opencon.data.sources import decode_bytes
from opencon.errors import RunError
from opencon.files import PARTIAL, explained, parse_json, read_file, write_whole
from opencon.photos.features import FLOAT16_MAX, Extractor, FeatureSettings
from opencon.photos.pieces import Photo, Piece, pieces_of
from opencon.processes import Processes, usable_cores
from opencon.report.shards import damaged, read_records
from opencon.training.run_folder import RunFolder, holds_others

PLAN, PIECES, SHARDS = "embed.json", "pieces.jsonl", "shards"
SHARD = 1024  # photos in a shard of files, ours: some seconds on a GPU, a minute on a CPU; 5 MB
# Photos decoded together, while the network works on those before; a GPU wants more. And such parts that are decoded ahead.
PART_CPU, PART_GPU = 64, 256
AHEAD = 2
MANY_SHARDS = 8  # that are to do, from which processes decode on many cores for a GPU, ours: about as in `decoders`
STALE = 180.0  # seconds after which an untouched claim of another machine counts as that of a dead worker, ours

Rows = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]  # shards that are done, and all


@dataclass(frozen=True)
class Plan:
    """What is embedded, and how; the same for all workers of a folder."""

    out: Path
    record: dict[str, Any]  # embed.json

    @classmethod
    def read(cls, out: Path) -> Plan:
        """The plan that is there."""
        record = {"precision": "float32"} | RunFolder(out).read_json(PLAN)
        facts = record.get("encoder")
        facts = facts if isinstance(facts, dict) else {}
        texts = (facts.get("encoder"), facts.get("weights"), record.get("asked_for", ""))
        numbers = (record.get("shards"), record.get("features"), facts.get("image_size"))
        if not all(isinstance(text, str) for text in texts) or not all(type(n) is int and n >= 0 for n in numbers):
            raise RunError(f"{out / PLAN} is damaged: it does not say what was embedded. Embed into a new folder.")
        return cls(out, record)

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return int(self.record["shards"])

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line of pieces.jsonl begins."""
        with (self.out / PIECES).open("rb") as file:
            return [0, *itertools.accumulate(len(line) for line in file)]

    def piece(self, shard: int) -> Piece:
        """The photos of a shard."""
        try:
            with (self.out / PIECES).open("rb") as file:
                file.seek(self._starts[shard])
                return Piece.of(parse_json(file.readline()))
        except (OSError, ValueError, TypeError, IndexError) as err:
            where = f"{self.out / PIECES}, line {shard + 1}"
            raise RunError(f"{where} cannot be read ({err}). Embed into a new folder.") from err

    def file(self, shard: int, kind: str) -> Path:
        """A file of a shard: npy, jsonl, done or claim."""
        return self.out / SHARDS / f"{shard:05}.{kind}"

    def is_done(self, shard: int) -> bool:
        """Whether a shard is finished and its files have the sizes they were written with."""
        try:
            done = self.done(shard)
            return all(self.file(shard, kind).stat().st_size == done["bytes"][kind] for kind in ("npy", "jsonl"))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def done(self, shard: int) -> dict[str, Any]:
        """What the marker of a finished shard says; a ValueError where it is damaged."""
        record = parse_json(read_file(self.file(shard, "done")))
        wanted = {"photos": int, "readable": int, "bytes": dict, "sha256": dict}
        if not isinstance(record, dict) or any(type(record.get(key)) is not kind for key, kind in wanted.items()):
            raise ValueError("it is no marker of a shard")
        return record


def make_plan(source: str, extractor: Extractor, out: Path, *, size: int = SHARD, half: bool = False) -> Plan:
    """The plan of a folder: the one that is there, if it is for the same source and encoder, or a new one."""
    own: dict[str, Any] = {"source": source if "://" in source else str(Path(source).expanduser().absolute())}
    own |= {"features": extractor.encoder.net.num_features, "photos_in_a_shard": size}
    own |= {"precision": "float16" if half else "float32"}
    own |= {"encoder": json.loads(json.dumps(extractor.identity()))}
    named = {"asked_for": extractor.settings.encoder}  # how to open it again; another path may lead to the same weights
    folder = RunFolder.made(out)
    with _alone(out):
        if (out / PLAN).is_file():
            plan = Plan.read(out)
            other = [key for key, value in own.items() if plan.record.get(key) != value]
            if other:
                raise RunError(
                    f"{out} holds features of another {' and '.join(other)}. Give another --out, or the same words as then."
                )
            return plan
        if holds_others(out, [PLAN, PIECES, SHARDS]):
            raise RunError(f"{out} is not empty and holds no features. Give an empty or a new folder with --out.")
        pieces = pieces_of(own["source"], size)
        lines = (json.dumps(piece.plain()) + "\n" for piece in pieces)
        text = "".join(lines).encode("utf-8", "surrogateescape")
        with explained(out / PIECES):
            (out / SHARDS).mkdir(exist_ok=True)
            write_whole(out / PIECES, lambda path: path.write_bytes(text))
        record = {"what": "features of `opencon embed`", "format": 1, **own, **named, "shards": len(pieces)}
        folder.write_json(PLAN, record)
    return Plan(out, record)


def work(
    plan: Plan,
    extractor: Extractor,
    progress: Progress = lambda done, total: None,
    *,
    decode_in: DecodeIn = "auto",
) -> int:
    """Compute the shards that nobody has computed or claimed. Returns how many are left, with other workers."""
    to_do = sum(not plan.is_done(shard) for shard in range(plan.num_shards))
    uses_processes = in_processes(decode_in, MANY if to_do >= MANY_SHARDS else 0, extractor.device)
    with Processes(usable_cores()) if uses_processes else ThreadPoolExecutor(usable_cores()) as decoders:
        return _work(plan, extractor, decoders, progress)


def _work(plan: Plan, extractor: Extractor, decoders: Executor, progress: Progress) -> int:
    order = list(range(plan.num_shards))
    random.Random(secrets.randbits(64)).shuffle(order)  # workers that start together begin at different shards
    done = 0
    left = []
    for shard in order:
        if not plan.is_done(shard):
            if _claim(plan, shard):
                try:
                    with explained(plan.file(shard, "npy")):
                        _embed(plan, shard, extractor, decoders)
                finally:
                    with contextlib.suppress(OSError):
                        plan.file(shard, "claim").unlink()
            else:
                left.append(shard)
                continue
        done += 1
        progress(done, plan.num_shards)
    _tidy(plan)
    return sum(not plan.is_done(shard) for shard in left)


def _embed(plan: Plan, shard: int, extractor: Extractor, decoders: Executor) -> None:
    """Compute one shard and write its files, the marker last."""
    rows, lines = [], []
    photos, claim = plan.piece(shard).photos(), plan.file(shard, "claim")
    for photo, row in _computed(photos, extractor, decoders, lambda: _touch(claim)):
        record = {"name": photo.name} | ({"label": photo.label} if photo.label else {})
        if isinstance(row, str):
            record["error"] = row
        else:
            rows.append(row)
        lines.append(json.dumps(record) + "\n")
    array = np.stack(rows) if rows else np.empty((0, extractor.encoder.net.num_features), np.float32)
    if plan.record["precision"] == "float16":
        array = array.clip(-FLOAT16_MAX, FLOAT16_MAX).astype(np.float16)
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    content = {"npy": buffer.getvalue(), "jsonl": "".join(lines).encode()}
    for kind, data in content.items():
        _put(plan.file(shard, kind), data)
    done = {
        "photos": len(lines),
        "readable": len(rows),
        "bytes": {kind: len(data) for kind, data in content.items()},
        "sha256": {kind: hashlib.sha256(data).hexdigest() for kind, data in content.items()},
    }
    _put(plan.file(shard, "done"), json.dumps(done).encode())


def _computed(
    photos: Iterator[Photo], extractor: Extractor, decoders: Executor, alive: Callable[[], None]
) -> Iterator[tuple[Photo, Rows | str]]:
    """Every photo with its features (F,), or why it has none. Photos are decoded ahead of the network."""
    size = extractor.encoder.image_size
    number = PART_GPU if extractor.device.type == "cuda" else PART_CPU
    free = [Slot.new((number, 3, size, size), decoders) for _ in range(AHEAD + 1)]
    decoding: deque[tuple[list[Photo], Slot, list[Future[list[str | None]]]]] = deque()
    while True:
        while free and (part := list(itertools.islice(photos, number))):
            slot = free.pop()
            decoding.append((part, slot, slot.fill(decoders, decode_photo, part)))
        if not decoding:
            return
        part, slot, pieces = decoding.popleft()
        reasons = [reason for piece in pieces for reason in piece.result()]
        rows = iter(_encoded(slot.pixels[[i for i, reason in enumerate(reasons) if reason is None]], extractor))
        yield from ((photo, reason or next(rows)) for photo, reason in zip(part, reasons, strict=True))
        free.append(slot)
        alive()


def decode_photo(photo: Photo, size: int) -> npt.NDArray[np.uint8] | str:
    """(3, size, size), or why it cannot be read."""
    content, error = photo.read()
    return error or decode_bytes(content, photo.name, size)


def _encoded(pixels: Tensor, extractor: Extractor) -> Iterator[Rows]:
    for some in torch.split(pixels, extractor.photos_at_once):
        for row, _ in extractor(some, [""] * len(some)):
            yield row.numpy()


# --- workers that share a folder --------------------------------------------------------------------------------------


def _claim(plan: Plan, shard: int) -> bool:
    """Claim a shard for this process, unless another live worker has it."""
    path = plan.file(shard, "claim")
    with explained(path), _beside(path) as partial:
        partial.write_text(f"{platform.node()} {os.getpid()}")
        try:
            os.link(partial, path)  # with its content or not at all: nobody could tell whose an empty one is
        except OSError:  # there is one, or the file system has no links
            if _is_alive(path):
                return False
            os.replace(partial, path)  # two that take over at once do the same work, which does no harm
    return True


def _is_alive(claim: Path) -> bool:
    """Whether the worker of a claim still works: by its process on this machine, by the time of its last touch elsewhere."""
    try:
        node, _, pid = claim.read_text().partition(" ")
        return _works(node, pid, claim)
    except (OSError, ValueError):
        return False


def _works(node: str, pid: str, trace: Path) -> bool:
    """Whether a worker still works that left this file."""
    age = time.time() - trace.stat().st_mtime
    if node == platform.node() and pid.isdecimal():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # somebody else's process
    return age < STALE


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)


def _put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with _beside(path) as partial:
        partial.write_bytes(content)
        os.replace(partial, path)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A place for a file that is not whole yet, under the worker's name: several may write the same file at once."""
    partial = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}{PARTIAL}")
    try:
        yield partial
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _tidy(plan: Plan) -> None:
    """Remove what killed workers left: halves of files, and claims of shards that were done."""
    for path in (plan.out / SHARDS).iterdir():
        with contextlib.suppress(OSError):  # another worker was quicker
            if path.suffix == PARTIAL:
                node, _, pid = path.stem.split(".", 2)[-1].rpartition("-")
                is_litter = not _works(node, pid, path)
            else:
                is_litter = path.suffix == ".claim" and not _is_alive(path)
            if is_litter:
                path.unlink()


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Wait until no other worker makes the plan of this folder. The lock ends with its process."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    descriptor = os.open(out, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- what was embedded ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Embedded:
    """The features in a folder of `opencon embed`, mapped into memory: nothing is read before it is used.

    Examples:
        >>> embedded = Embedded.open("features/")  # doctest: +SKIP
        >>> for names, rows in embedded: ...  # doctest: +SKIP
    """

    plan: Plan

    @classmethod
    def open(cls, folder: str | Path) -> Embedded:
        """The features in a folder; refused where shards are missing."""
        folder = Path(folder).expanduser()
        if not (folder / PLAN).is_file():
            raise RunError(f"{folder} holds no features (no {PLAN}). Give the folder that `opencon embed --out` wrote.")
        plan = Plan.read(folder)
        missing = sum(not plan.is_done(shard) for shard in range(plan.num_shards))
        if missing:
            raise RunError(f"{missing} of {plan.num_shards} shards in {folder} are missing. Run `opencon embed` again.")
        return cls(plan)

    def records(self, shard: int) -> list[dict[str, str]]:
        """A record for each photo of a shard: name, label, error."""
        return read_records(self.plan.file(shard, "jsonl"))

    def rows(self, shard: int) -> Rows:
        """(n, F): the features of a shard, mapped into memory."""
        path, width = self.plan.file(shard, "npy"), self.plan.record["features"]
        try:
            rows: Rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as err:  # a damaged header raises nearly anything
            raise damaged(path, f"{type(err).__name__}: {err}") from err
        if rows.ndim != 2 or rows.shape[1] != width or rows.dtype not in (np.float32, np.float16):
            raise damaged(path, f"it holds {rows.dtype} of shape {rows.shape}, not rows of {width} features")
        return rows

    def __iter__(self) -> Iterator[tuple[list[dict[str, str]], Rows]]:
        """Shard by shard: the records of the photos that can be read, and their features."""
        for shard in range(self.plan.num_shards):
            yield [record for record in self.records(shard) if "error" not in record], self.rows(shard)

    def __len__(self) -> int:
        """How many photos can be read."""
        return sum(len(self.rows(shard)) for shard in range(self.plan.num_shards))

    def all_rows(self) -> Rows:
        """(n, F) of all shards: mapped where there is one shard, else copied into one array."""
        parts = [rows for _, rows in self]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def extractor(self, device: torch.device) -> Extractor:
        """The encoder that computed these features, for more photos; refused where it is another one now."""
        facts = self.plan.record["encoder"]
        settings = FeatureSettings(
            encoder=self.plan.record.get("asked_for", facts["encoder"]), image_size=facts["image_size"]
        )
        found = Extractor.open(settings, device)
        if found.encoder.fingerprint != facts["weights"]:
            raise RunError(
                f"{settings.encoder} has other weights than when {self.plan.out} was made. Embed the photos again."
            )
        return found

    @property
    def num_unreadable(self) -> int:
        """How many photos cannot be read."""
        done = (self.plan.done(shard) for shard in range(self.plan.num_shards))
        return sum(record["photos"] - record["readable"] for record in done)

    @property
    def problems(self) -> list[tuple[str, str]]:
        """Name and reason of every photo that cannot be read."""
        every = (record for shard in range(self.plan.num_shards) for record in self.records(shard))
        return [(record["name"], record["error"]) for record in every if "error" in record]

    def check(self) -> list[int]:
        """The shards whose files do not fit their checksums."""
        wrong = []
        for shard in range(self.plan.num_shards):
            for kind, digest in self.plan.done(shard)["sha256"].items():
                if hashlib.sha256(read_file(self.plan.file(shard, kind))).hexdigest() != digest:
                    wrong.append(shard)
        return sorted(set(wrong))
