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
from collections import Counter
from collections.abc import Callable
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
from opencon.photos.embed import Embedded
from opencon.photos.listing import FEWEST, new_names
from opencon.report.table import PhotoRow, PhotoTable
from opencon.training.run_folder import RunFolder, holds_others

SETTINGS, MODEL, RESULT, FOLDER = "group.json", "model.safetensors", "result.json", "assignments"
SAMPLE = 50_000  # rows that are fitted, ours: 256 MB of 1280 features; the fit grows with its square
LABELED_SHARE = 0.5  # of the sample at most, ours: groups are found among the others
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


def draw_sample(embedded: Embedded, size: int, seed: int) -> Sampled:
    """Labeled photos, at most `LABELED_SHARE` and at least one of each class, and others at random; or all there are."""
    shards = range(embedded.plan.num_shards)
    texts = [[r.get("label", "") for r in embedded.records(k) if "error" not in r] for k in shards]
    names = tuple(sorted({text for shard in texts for text in shard if text}))
    number = {name: c for c, name in enumerate(names)} | {"": -1}
    labels = np.array([number[text] for shard in texts for text in shard], dtype=np.int64)  # (n,)
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
    ends = np.cumsum([len(shard) for shard in texts])
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    starts = [0, *ends[:-1].tolist()]
    rows = [np.array(embedded.rows(k)[part - start]) for k, (part, start) in enumerate(zip(parts, starts, strict=True))]
    x = torch.from_numpy(np.concatenate(rows))
    return Sampled(x, torch.from_numpy(labels[chosen]), names, len(labels), int((labels >= 0).sum()))


def group(
    features: Path,
    out: Path,
    config: OpenWorldConfig,
    *,
    sample: int = SAMPLE,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Fit a sample, assign everything, and write it to `out`. Returns the record that is also in result.json.

    Args:
        features: a folder of `opencon embed`.
        out: new, empty, or of the same command before.
        config: how many groups, and the seed.
        sample: rows that are fitted, at most.
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
    with folder.held():
        if not folder.has(MODEL):
            folder.write_json(SETTINGS, own)
            _fit(embedded, folder, own, config, sample, progress)
        model, facts = _load(folder)
        (out / FOLDER).mkdir(exist_ok=True)
        shards = RunFolder(out / FOLDER)
        total: Counter[str] = Counter()
        for shard in range(embedded.plan.num_shards):
            if not shards.has(f"{shard:05}.json"):
                _assign(embedded, shard, model, facts["class_names"], shards)
            total.update(shards.read_json(f"{shard:05}.json"))
            progress("assigning", shard + 1, embedded.plan.num_shards)
        names = facts["class_names"]
        record = {
            "photos": sum(total.values()),
            "unreadable": len(embedded.problems),
            "unlike_everything": total[UNLIKE],
            "groups": [
                {"name": name, "kind": "seen" if c < model.num_seen else "new", "size": total[name]}
                for c, name in enumerate(names)
            ],
            **{key: facts[key] for key in ("sampled", "sampled_labeled", "labeled", "count")},
        }
        folder.write_json(RESULT, record)
    return record


def _fit(
    embedded: Embedded, folder: RunFolder, own: dict[str, Any], config: OpenWorldConfig, sample: int, progress: Progress
) -> None:
    drawn = draw_sample(embedded, sample, config.seed)
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


def _assign(embedded: Embedded, shard: int, model: OpenWorldModel, names: list[str], shards: RunFolder) -> None:
    """One shard: its table, then its counts, which mark it as done."""
    records = embedded.records(shard)
    readable = [record for record in records if "error" not in record]
    rows: list[PhotoRow] = []
    if readable:
        x: npt.NDArray[np.float32] = np.array(embedded.rows(shard))
        said = model.predict(torch.from_numpy(x))
        columns = (said.classes, said.confidence, said.novelty, said.unlike_everything)
        for record, c, confidence, novelty, unlike in zip(readable, *(v.tolist() for v in columns), strict=True):
            kind = "seen" if c < model.num_seen else "new"
            rows.append(
                PhotoRow(
                    file=record["name"],
                    closest=names[c],
                    kind=None if unlike else kind,  # type: ignore[arg-type]
                    confidence=confidence,
                    novelty=novelty,
                    unlike_everything=unlike,
                    given=record.get("label"),
                )
            )
    unread = [PhotoRow.unread(r["name"], r["error"], r.get("label")) for r in records if "error" in r]
    table = PhotoTable((*rows, *unread), tuple(names), model.num_seen)
    shards.write_text(f"{shard:05}.csv", table.to_csv())
    shards.write_json(f"{shard:05}.json", Counter(row.predicted or UNLIKE for row in rows))
