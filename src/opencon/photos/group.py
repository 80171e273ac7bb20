"""Classes and groups for very many photos: a fit on a sample, then everything in one pass over the shards.

    OUT/group.json               the settings: which features, how large a sample
    OUT/model.safetensors        the classifier, fitted to the sample
    OUT/assignments/00017.csv    a line for each photo of a shard, with the columns of assignments.csv
    OUT/assignments/00017.json   how many photos of the shard fell to each class
    OUT/result.json              exact counts over all photos, and what was sampled

Memory holds the sample, one shard and the labels, whatever the number of photos. A stopped run goes on with the shards that
are left.

Letters: n photos that can be read, m of them sampled, F features, S seen classes, C classes and groups.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from opencon.errors import ConfigError, DataError, RunError, require
from opencon.files import read_file
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.openworld.model import OpenWorldModel
from opencon.photos.embed import Embedded, read_records
from opencon.photos.listing import FEWEST, new_names
from opencon.processes import FEWEST_CORES, Processes, can_share, usable_cores
from opencon.report.table import PhotoRow, PhotoTable
from opencon.training.run_folder import RunFolder, holds_others

SETTINGS, MODEL, RESULT, FOLDER = "group.json", "model.safetensors", "result.json", "assignments"
SAMPLE = 50_000  # rows that are fitted, ours: 256 MB of 1280 features; time and memory of the fit are linear in them
LABELED_SHARE = 0.5  # of the sample at most, ours: groups are found among the others
MANY = 100_000  # photos whose tables are written by processes, ours: as much work as it takes to start them
AHEAD = 64  # tables that wait to be written, ours: a few for each of many cores; a megabyte each
CPU = torch.device("cpu")
UNLIKE = ""  # in the counts: photos that are unlike everything

Progress = Callable[[str, int, int], None]  # stage, done, all


@dataclass(frozen=True)
class Sampled:
    """The rows that are fitted."""

    x: Tensor  # (m, F)
    labels: Tensor  # (m,) class in [0, S), or -1
    class_names: tuple[str, ...]  # S
    num_photos: int  # n
    num_labeled: int  # among all


def draw_sample(embedded: Embedded, size: int, seed: int, workers: Executor) -> Sampled:
    """Labeled photos, at most `LABELED_SHARE` and at least one of each class, and others at random; or all there are."""
    shards = range(embedded.plan.num_shards)
    found = list(workers.map(labels_of, (embedded.plan.file(k, "jsonl") for k in shards)))
    names = tuple(sorted({name for own, _ in found for name in own}))
    number = {name: c for c, name in enumerate(names)}
    parts = [np.array([*(number[name] for name in own), -1], np.int32)[of] for own, of in found]
    labels = np.concatenate(parts)  # (n,)
    if len(labels) < FEWEST:
        raise DataError(f"{len(labels)} photos are too few to find groups in. Give at least {FEWEST}.")
    rng = np.random.default_rng(seed)
    if len(labels) <= size:
        chosen = np.arange(len(labels))
    else:
        labeled = rng.permutation(np.flatnonzero(labels >= 0))
        firsts = labeled[np.unique(labels[labeled], return_index=True)[1]]  # one of each class
        room = max(int(size * LABELED_SHARE), len(firsts))
        labeled = np.unique(np.concatenate([firsts, labeled[: room - len(firsts)]]))
        others = rng.permutation(np.flatnonzero(labels < 0))[: size - len(labeled)]
        chosen = np.sort(np.concatenate([labeled, others]))
    ends = np.cumsum([len(part) for part in parts])
    of_shard = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    starts = [0, *ends[:-1].tolist()]
    rows = [embedded.rows(k)[part - start] for k, (part, start) in enumerate(zip(of_shard, starts, strict=True))]
    x = torch.from_numpy(np.concatenate(rows))
    wanted = torch.from_numpy(labels[chosen].astype(np.int64))
    return Sampled(x, wanted, names, len(labels), int((labels >= 0).sum()))


def labels_of(path: Path) -> tuple[list[str], npt.NDArray[np.int32]]:
    """The labels in a shard's file of records, and for each readable photo which of them it has, or -1."""
    number = {"": -1}
    texts = (record.get("label", "") for record in read_records(path) if "error" not in record)
    of = np.array([number.setdefault(text, len(number) - 1) for text in texts], np.int32)
    return list(number)[1:], of


def group(
    features: Path,
    out: Path,
    config: OpenWorldConfig,
    *,
    sample: int = SAMPLE,
    device: torch.device = CPU,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Fit a sample, assign everything, and write it to `out`. Returns the record that is also in result.json.

    Args:
        features: a folder of `opencon embed`.
        out: new, empty, or of the same command before.
        config: how many groups, and the seed.
        sample: rows that are fitted, at most.
        device: where photos are assigned.
        progress: called as progress(stage, done, all).
    """
    require(sample >= FEWEST, f"--sample {sample} must be at least {FEWEST}.")
    embedded = Embedded.open(features)
    folder = RunFolder.made(out)
    if not folder.has(SETTINGS) and holds_others(out, [SETTINGS]):
        raise RunError(f"{out} is not empty and holds no groups. Give an empty or a new folder with --out.")
    own = {"features": str(features.absolute()), "sample": sample, "fit": asdict(config)}
    own = json.loads(json.dumps(own))
    if folder.has(SETTINGS) and {key: folder.read_json(SETTINGS).get(key) for key in own} != own:
        raise ConfigError(
            f"{out} holds groups of other settings. Start over in a new folder (--out), or put them back."
        )
    with folder.held(), _workers(embedded) as workers:
        if not folder.has(MODEL):
            folder.write_json(SETTINGS, own)
            _fit(embedded, folder, config, sample, workers, progress)
        model, facts = _load(folder)
        (out / FOLDER).mkdir(exist_ok=True)
        total = _assign_all(
            embedded, model.to(device), facts["class_names"], RunFolder(out / FOLDER), workers, progress
        )
        names = facts["class_names"]
        record = {
            "photos": sum(total.values()),
            "unreadable": embedded.num_unreadable,
            "unlike_everything": total[UNLIKE],
            "groups": [
                {"name": name, "kind": "seen" if c < model.num_seen else "new", "size": total[name]}
                for c, name in enumerate(names)
            ],
            **{key: facts[key] for key in ("sampled", "sampled_labeled", "labeled", "count")},
        }
        folder.write_json(RESULT, record)
    return record


def _workers(embedded: Embedded) -> Executor:
    """Those that read and write text: processes where there is much of it, and cores for them; else a thread."""
    is_much = len(embedded) >= MANY and usable_cores() >= FEWEST_CORES and can_share()
    return Processes(usable_cores()) if is_much else ThreadPoolExecutor(1)


def _fit(
    embedded: Embedded, folder: RunFolder, config: OpenWorldConfig, sample: int, workers: Executor, progress: Progress
) -> None:
    drawn = draw_sample(embedded, sample, config.seed, workers)
    fitted = fit_features(drawn.x, drawn.labels, config, progress=lambda i, n: progress("learning", i, n))
    num_new = fitted.model.num_classes - fitted.model.num_seen
    facts = {
        "class_names": [*drawn.class_names, *itertools.islice(new_names(drawn.class_names), num_new)],
        "classifier": fitted.model.settings(),
        "sampled": len(drawn.x),
        "sampled_labeled": int((drawn.labels >= 0).sum()),
        "labeled": drawn.num_labeled,
        "count": asdict(fitted.count) if fitted.count else None,
    }
    folder.save_tensors(MODEL, fitted.model.state_dict(), {"facts": json.dumps(facts)})


def _load(folder: RunFolder) -> tuple[OpenWorldModel, dict[str, Any]]:
    path = folder.path / MODEL
    try:
        content = read_file(path)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        facts = json.loads(header["__metadata__"]["facts"])
        model = OpenWorldModel.from_settings(facts["classifier"])
        model.load_state_dict(safetensors.torch.load(content))
    except Exception as err:  # a damaged file fails in many ways
        raise RunError(f"cannot read {path} ({type(err).__name__}: {err}). Delete it to fit again.") from err
    return model.eval(), facts


def _assign_all(
    embedded: Embedded,
    model: OpenWorldModel,
    names: list[str],
    shards: RunFolder,
    workers: Executor,
    progress: Progress,
) -> Counter[str]:
    """Every shard's table. Returns how many photos fell to each name."""
    writing: deque[Future[None]] = deque()
    number, device = embedded.plan.num_shards, model.prototypes.device
    for shard in range(number):
        if not shards.has(f"{shard:05}.json"):
            said = None
            if len(embedded.rows(shard)):
                all_said = model.predict(torch.from_numpy(np.array(embedded.rows(shard))).to(device))
                columns = (all_said.classes, all_said.confidence, all_said.novelty, all_said.unlike_everything)
                said = tuple(column.cpu().numpy() for column in columns)
            records = embedded.plan.file(shard, "jsonl")
            writing.append(workers.submit(write_table, records, said, names, model.num_seen, shards.path, shard))
        while len(writing) > AHEAD:
            writing.popleft().result()
        progress("assigning", shard + 1, number)
    for written in writing:
        written.result()
    total: Counter[str] = Counter()
    for shard in range(number):
        total.update(shards.read_json(f"{shard:05}.json"))
    return total


def write_table(
    records: Path,
    said: tuple[npt.NDArray[Any], ...] | None,
    names: list[str],
    num_seen: int,
    out: Path,
    shard: int,
) -> None:
    """One shard: its table, then its counts, which mark it as done.

    Args:
        records: the shard's file of photos.
        said: class, confidence, novelty and unlike everything, of each photo that can be read; None: there is none.
        names: of classes and groups.
        num_seen: how many of them are seen classes.
        out: the folder of tables.
        shard: its number.
    """
    photos = read_records(records)
    readable = [photo for photo in photos if "error" not in photo]
    columns = [values.tolist() for values in said] if said else [[]] * 4
    rows = [
        PhotoRow(
            file=photo["name"],
            closest=names[c],
            kind=None if unlike else "seen" if c < num_seen else "new",
            confidence=confidence,
            novelty=novelty,
            unlike_everything=unlike,
            given=photo.get("label"),
        )
        for photo, c, confidence, novelty, unlike in zip(readable, *columns, strict=True)
    ]
    unread = [PhotoRow.unread(p["name"], p["error"], p.get("label")) for p in photos if "error" in p]
    table, folder = PhotoTable((*rows, *unread), tuple(names), num_seen), RunFolder(out)
    folder.write_text(f"{shard:05}.csv", table.to_csv())
    folder.write_json(f"{shard:05}.json", Counter(row.predicted or UNLIKE for row in rows))
