"""Some of very many embedded photos, on which a discovery is fitted and which its page and its review show.

Letters: n photos that can be read, m of them sampled, F features, S seen classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opencon.data.listings import IMAGE_SUFFIXES
from opencon.errors import DataError, require
from opencon.files import explained
from opencon.photos.embed import Embedded
from opencon.photos.listing import FEWEST, Photos, common_root
from opencon.processes import FEWEST_CORES, Processes, can_share, usable_cores
from opencon.report.shards import damaged, labels_of

SAMPLE = 50_000  # photos, ours: 256 MB of 1280 features; time and memory of a fit are linear in them
LABELED_SHARE = 0.5  # of the sample at most, ours: groups are found among the others
MANY = 100_000  # photos whose text is read and written by processes, ours: as much work as it takes to start them
COPIES = "photos"  # in the folder of a discovery: sampled photos that are no files of their own
LONGEST_NAME = 80  # letters of a photo's own name in that of its copy, ours


@dataclass(frozen=True)
class Sampled:
    """The rows that are fitted."""

    x: Tensor  # (m, F)
    labels: Tensor  # (m,) class in [0, S), or -1
    class_names: tuple[str, ...]  # S
    places: list[tuple[int, int]]  # m: shard, and which of its readable photos
    num_photos: int  # n
    num_labeled: int  # among all


def text_workers(embedded: Embedded) -> Executor:
    """Those that read and write text: processes where there is much of it, and cores for them; else a thread."""
    is_much = len(embedded) >= MANY and usable_cores() >= FEWEST_CORES and can_share()
    return Processes(usable_cores()) if is_much else ThreadPoolExecutor(1)


def draw_sample(
    embedded: Embedded, size: int, seed: int, workers: Executor, labels: Mapping[str, str] | None = None
) -> Sampled:
    """Labeled photos, at most `LABELED_SHARE` and at least one of each class, and others at random; or all there are.

    Args:
        embedded: all of them.
        size: m, at most.
        seed: of the draw.
        workers: who reads the text.
        labels: of photos by name, in place of those that came with the photos.
    """
    require(size >= FEWEST, f"a sample of {size} photos is too small. Give at least {FEWEST}.")
    shards = range(embedded.plan.num_shards)
    calls = [workers.submit(labels_of, embedded.plan.file(k, "jsonl"), labels) for k in shards]
    found = [call.result() for call in calls]
    names = tuple(sorted({name for own, _ in found for name in own}))
    number = {name: c for c, name in enumerate(names)}
    parts = [np.array([*(number[name] for name in own), -1], np.int32)[of] for own, of in found]
    for k, part in enumerate(parts):
        if len(part) != len(embedded.rows(k)):
            why = f"it has {len(part)} photos that can be read, and not as many features"
            raise damaged(embedded.plan.file(k, "jsonl"), why)
    classes = np.concatenate(parts)  # (n,)
    if len(classes) < FEWEST:
        raise DataError(f"{len(classes)} photos are too few to find groups in. Give at least {FEWEST}.")
    if labels and not names:
        raise DataError("the table of labels names no photo of these. Its names are those in the .jsonl files.")
    rng = np.random.default_rng(seed)
    if len(classes) <= size:
        chosen = np.arange(len(classes))
    else:
        labeled = rng.permutation(np.flatnonzero(classes >= 0))
        firsts = labeled[np.unique(classes[labeled], return_index=True)[1]]  # one of each class
        room = max(int(size * LABELED_SHARE), len(firsts))
        labeled = np.unique(np.concatenate([firsts, labeled[: room - len(firsts)]]))
        others = np.flatnonzero(classes < 0)
        others = others[rng.choice(len(others), min(size - len(labeled), len(others)), replace=False)]
        chosen = np.sort(np.concatenate([labeled, others]))
    ends = np.cumsum([len(part) for part in parts])
    shard_of = np.searchsorted(ends, chosen, side="right")
    within = chosen - np.concatenate([[0], ends[:-1]])[shard_of]
    rows = [embedded.rows(k)[within[shard_of == k]] for k in np.unique(shard_of).tolist()]
    x = torch.from_numpy(np.concatenate(rows))
    own = torch.from_numpy(classes[chosen].astype(np.int64))
    places = list(zip(shard_of.tolist(), within.tolist(), strict=True))
    return Sampled(x, own, names, places, len(classes), int((classes >= 0).sum()))


def sample_rows(
    embedded: Embedded, size: int = SAMPLE, seed: int = 0
) -> tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.object_]]:
    """X (m, F) and y (m,) for `OpenWorldClassifier.fit`: a sample, with the names of classes, or None.

    Examples:
        >>> X, y = sample_rows(Embedded.open("features/"))  # doctest: +SKIP
    """
    with text_workers(embedded) as workers:
        drawn = draw_sample(embedded, size, seed, workers)
    return drawn.x.numpy(), np.array([*drawn.class_names, None], dtype=object)[drawn.labels.numpy()]


def sampled_photos(embedded: Embedded, sampled: Sampled, out: Path, *, copies: bool = True) -> Photos:
    """The sampled photos as files. Those from archives and addresses are copied into the folder of the discovery.

    A photo that is no longer there has a path without a file: it is in the table, and the page shows no picture.

    Args:
        embedded: all photos.
        sampled: which of them.
        out: the folder of the discovery.
        copies: whether to copy; else the paths are those that copies would have.
    """
    paths: list[Path] = []
    for shard, places in groupby(sampled.places, key=lambda place: place[0]):
        paths += _paths(embedded, shard, [row for _, row in places], out / COPIES, copies)
    root = common_root(*{path.parent for path in paths})
    return Photos(tuple(paths), tuple(sampled.labels.tolist()), sampled.class_names, root)


def _paths(embedded: Embedded, shard: int, wanted: list[int], folder: Path, copies: bool) -> list[Path]:
    piece, records = embedded.plan.piece(shard), embedded.records(shard)
    readable = [i for i, record in enumerate(records) if "error" not in record]
    if piece.kind == "files" and not any("://" in records[readable[row]]["name"] for row in wanted):
        return [Path(piece.place) / records[readable[row]]["name"] for row in wanted]
    name_of = {readable[row]: folder / _copy_name(shard, row, records[readable[row]]["name"]) for row in wanted}
    if copies and not all(path.is_file() for path in name_of.values()):
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for i, photo in enumerate(piece.photos()):
                if i in name_of and not (found := photo.read())[1]:
                    name_of[i].write_bytes(found[0])
    return list(name_of.values())


def _copy_name(shard: int, row: int, name: str) -> str:
    """A file name that leads nowhere else, whatever the photo is called in its archive."""
    plain = re.sub(r"[^\w.-]", "_", name.rpartition("/")[2], flags=re.ASCII)[-LONGEST_NAME:]
    ending = "" if Path(plain).suffix.lower() in IMAGE_SUFFIXES else ".jpg"
    return f"{shard:05}-{row:06}-{plain}{ending}"
