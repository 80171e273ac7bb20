"""Every one of very many embedded photos to a class or group of a model, in one pass over the shards.

    OUT/assign.json     which features and which model
    OUT/00017.csv       a line for each photo of a shard, with the columns of assignments.csv
    OUT/00017.json      how many photos of the shard fell to each class
    OUT/counts.json     exact counts over all photos

Memory holds the model, one shard, and a few tables that wait to be written, whatever the number of photos. A stopped run
goes on with the shards that are left.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opencon.errors import ConfigError, RunError
from opencon.openworld.strangers import FALSE_ALARMS, check_false_alarms
from opencon.photos.embed import Embedded
from opencon.photos.model import OpenConModel
from opencon.photos.sample import text_workers
from opencon.report.shards import UNLIKE, write_table
from opencon.training.run_folder import RunFolder, holds_others

SETTINGS, COUNTS, EVERYTHING = "assign.json", "counts.json", "everything"
AHEAD = 64  # tables that wait to be written, ours: a few for each of many cores; a megabyte each
CPU = torch.device("cpu")

Progress = Callable[[str, int, int], None]  # stage, done, all


def assign(
    embedded: Embedded,
    model: OpenConModel,
    out: Path,
    *,
    labels: Mapping[str, str] | None = None,
    false_alarms: float = FALSE_ALARMS,
    device: torch.device = CPU,
    starts_over: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write a table for each shard. Returns the counts, which are also in counts.json.

    Args:
        embedded: the photos.
        model: of a discovery with the same encoder.
        out: new, empty, or of the same words before.
        labels: of photos by name, for the column `given`, in place of those that came with the photos.
        false_alarms: the share of photos of known classes that may be called unlike everything.
        device: where photos are assigned.
        starts_over: whether tables of another model or other features are replaced; else they are refused.
        progress: called as progress("assigning", done, all).
    """
    check_false_alarms(false_alarms)
    if embedded.plan.record["encoder"]["weights"] != model.encoder.fingerprint:
        raise ConfigError(
            f"the features in {embedded.plan.out} are of another encoder than the model's ({model.encoder.name})."
        )
    folder = RunFolder.made(out)
    own = {"features": str(embedded.plan.out.absolute()), "model": _digest(model), "false_alarms": false_alarms}
    if not folder.has(SETTINGS) and holds_others(out, [SETTINGS]):
        raise RunError(f"{out} is not empty and holds no tables. Give an empty or a new folder with --out.")
    with folder.held():
        if folder.has(SETTINGS) and folder.read_json(SETTINGS) != own:
            if not starts_over:
                raise ConfigError(f"{out} holds tables of other features or another model. Give a new folder (--out).")
            for shard in out.glob("[0-9]*.json"):
                shard.unlink()
        folder.write_json(SETTINGS, own)
        with text_workers(embedded) as workers:
            total = _assign_all(embedded, model, folder, labels, false_alarms, device, workers, progress)
        seen = set(model.class_names[: model.num_seen])
        kinds = {name: "seen" if name in seen else "new" for name in model.names}
        record = {
            "photos": sum(total.values()),
            "unreadable": embedded.num_unreadable,
            "unlike_everything": total[UNLIKE],
            "groups": [{"name": name, "kind": kind, "size": total[name]} for name, kind in kinds.items()],
        }
        folder.write_json(COUNTS, record)
    return record


def _digest(model: OpenConModel) -> str:
    """Of all that the tables depend on."""
    digest = hashlib.sha256("\0".join((*model.class_names, str(model.num_seen))).encode("utf-8", "surrogateescape"))
    for tensor in model.classifier.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _assign_all(
    embedded: Embedded,
    model: OpenConModel,
    folder: RunFolder,
    labels: Mapping[str, str] | None,
    false_alarms: float,
    device: torch.device,
    workers: Executor,
    progress: Progress,
) -> Counter[str]:
    """Every shard's table. Returns how many photos fell to each name."""
    classifier = copy.deepcopy(model.classifier).to(device)
    writing: deque[Future[None]] = deque()
    number = embedded.plan.num_shards
    try:
        for shard in range(number):
            if _counted(folder, shard) is None:
                said = None
                if len(embedded.rows(shard)):
                    x = torch.from_numpy(np.array(embedded.rows(shard))).to(device)
                    prediction = classifier.predict(x, false_alarms=false_alarms)
                    which, confidence = model.which_names(prediction)
                    columns = (which, confidence, prediction.novelty, prediction.unlike_everything)
                    said = tuple(column.cpu().numpy() for column in columns)
                records, names = embedded.plan.file(shard, "jsonl"), (model.names, model.num_seen_names)
                writing.append(workers.submit(write_table, records, said, *names, labels, folder.path, shard))
            while len(writing) > AHEAD:
                writing.popleft().result()
            progress("assigning", shard + 1, number)
        while writing:
            writing.popleft().result()
    finally:
        for call in writing:
            call.cancel()
    total: Counter[str] = Counter()
    for shard in range(number):
        total.update(_counted(folder, shard) or {})
    return total


def _counted(folder: RunFolder, shard: int) -> dict[str, int] | None:
    """How many photos of a shard fell to each name; None where its table or its counts are not there, or damaged."""
    if not folder.has(f"{shard:05}.json") or not folder.has(f"{shard:05}.csv"):
        return None
    try:
        counts = folder.read_json(f"{shard:05}.json")
    except RunError:
        return None
    return counts if all(type(number) is int and number >= 0 for number in counts.values()) else None
