"""Discovery at size: rows of 512 features from ten thousand to ten million, a sample fitted and all of them assigned.

python benchmarks/large.py [--rows 10000 100000 1000000 10000000] [--scratch FOLDER] [--sample 50000] [--quick]

Rows are made: a mixture of 40 classes of unequal size (shares fall from 9 % to 0.7 %) around random means. Half of the
classes are seen, with 20 labels each; the number of the others is not told. Shards hold float16, and are read from the
disk's cache.
Each size is a process of its own: a fit on a sample, then all rows in one pass, on the GPU where there is one. The tables
that it wrote are read again, line by line: every row once, counts as counts.json says, and classes beside the true ones.
Memory is the most that the process held, and the most that one of its helpers held.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from measure import Benchmark
from opencon.encoders.stored import EncoderFacts
from opencon.metrics import open_world_accuracy
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.photos.assign import COUNTS, assign
from opencon.photos.embed import PIECES, PLAN, SHARDS, Embedded
from opencon.photos.features import FeatureSettings
from opencon.photos.listing import new_names
from opencon.photos.model import OpenConModel
from opencon.photos.sample import SAMPLE, draw_sample, text_workers
from opencon.processes import Processes, can_share, usable_cores
from opencon.report.shards import UNLIKE
from opencon.runtime import pick_device

FEATURES, CLASSES, SEEN, LABELS = 512, 40, 20, 20
SHARD = 50_000  # rows
NOISE = 4.0  # standard deviation around the mean of a class, whose own numbers have 1
SHARES = 1 / (3 + np.arange(CLASSES)) / np.sum(1 / (3 + np.arange(CLASSES)))  # of the classes, largest first
MADE = EncoderFacts(name="made", in_channels=3, image_size=1, mean=(0.0,), std=(1.0,), fingerprint="")
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


def make(root: Path, rows: int, device: torch.device, workers: Executor) -> npt.NDArray[np.int16]:
    """Shards as `opencon embed` leaves them. Returns the true class of each row; seen ones are every second by size."""
    (root / SHARDS).mkdir(parents=True)
    g = torch.Generator(device).manual_seed(0)
    means = torch.randn(CLASSES, FEATURES, device=device, generator=g)
    order = np.random.default_rng(0)
    size_rank = np.concatenate([np.arange(0, CLASSES, 2), np.arange(1, CLASSES, 2)])  # of class c
    truth = order.choice(CLASSES, rows, p=SHARES[size_rank] / SHARES.sum()).astype(np.int16)
    labeled = {int(i) for c in range(SEEN) for i in np.flatnonzero(truth == c)[:LABELS]}
    starts = range(0, rows, SHARD)
    written = []
    for k, start in enumerate(starts):
        own = torch.from_numpy(truth[start : start + SHARD].astype(np.int64)).to(device)
        x = means[own] + NOISE * torch.randn(len(own), FEATURES, device=device, generator=g)
        marked = {i: int(truth[i]) for i in range(start, start + len(own)) if i in labeled}
        np.save(root / SHARDS / f"{k:05}.npy", x.half().cpu().numpy())
        written.append(workers.submit(write_records, root, k, start, len(own), marked))
    for one in written:
        one.result()
    (root / PIECES).write_text("")
    encoder = {"encoder": MADE.name, "image_size": MADE.image_size, "weights": MADE.fingerprint}
    (root / PLAN).write_text(json.dumps({"shards": len(starts), "features": FEATURES, "encoder": encoder}))
    return truth


def write_records(root: Path, shard: int, start: int, number: int, marked: dict[int, int]) -> None:
    lines = [f'{{"name": "{i}"}}\n' for i in range(start, start + number)]
    for i, c in marked.items():
        lines[i - start] = f'{{"name": "{i}", "label": "seen{c:02}"}}\n'
    (root / SHARDS / f"{shard:05}.jsonl").write_text("".join(lines))
    sizes = {kind: (root / SHARDS / f"{shard:05}.{kind}").stat().st_size for kind in ("npy", "jsonl")}
    done = {"photos": number, "readable": number, "bytes": sizes, "sha256": {}}
    (root / SHARDS / f"{shard:05}.done").write_text(json.dumps(done))


def discover(features: Path, out: Path, sample: int) -> dict[str, Any]:
    """In a process of its own: seconds by stage, and memory."""
    device, began = pick_device(), time.perf_counter()
    if device.type == "cuda":
        torch.zeros(1, device=device)
        began = time.perf_counter()
    first: list[float] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "assigning" and not first:
            first.append(time.perf_counter())

    embedded = Embedded.open(features)
    with text_workers(embedded) as workers:
        drawn = draw_sample(embedded, sample, 0, workers)
    fitted = fit_features(drawn.x.float(), drawn.labels, OpenWorldConfig())
    num_new = fitted.model.num_classes - fitted.model.num_seen
    names = (*drawn.class_names, *itertools.islice(new_names(drawn.class_names), num_new))
    files = [str(place) for place in drawn.places]
    model = OpenConModel.of(fitted, names, FeatureSettings(), MADE, files, drawn.labels)
    result = assign(embedded, model, out, device=device, progress=progress)
    end = time.perf_counter()
    most, helper = (resource.getrusage(w).ru_maxrss / 1e6 for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "seconds": end - began,
        "fit_seconds": first[0] - began,  # with the first shard
        "assign_seconds": end - first[0],
        "gigabytes": most,
        "helper_gigabytes": helper,
        "gpu_gigabytes": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        "feature_bytes": sum(path.stat().st_size for path in (features / SHARDS).glob("*.npy")),
        "record_bytes": sum(path.stat().st_size for path in (features / SHARDS).glob("*.jsonl")),
        "table_bytes": sum(path.stat().st_size for path in out.glob("*.csv")),
        "classes_found": len(result["groups"]),
        "sampled": len(drawn.x),
    }


def read_table(path: Path, names: dict[str, int]) -> npt.NDArray[np.int64]:
    """(2, n): the number of each row in a table, and the class it was given; UNLIKE is the last one."""
    with path.open(newline="") as file:
        lines = csv.reader(file)
        next(lines)
        return np.array([(int(row[0]), names[row[1]]) for row in lines], np.int64).T


def checked(out: Path, truth: npt.NDArray[np.int16], workers: Executor) -> dict[str, Any]:
    """What the tables say, beside counts.json and the truth."""
    result = json.loads((out / COUNTS).read_text())
    names = {row["name"]: c for c, row in enumerate(result["groups"])}
    names[UNLIKE] = len(names)
    tables = sorted(out.glob("*.csv"))
    predicted = np.full(len(truth), -1, np.int64)
    lines = 0
    for own, classes in workers.map(read_table, tables, [names] * len(tables)):
        predicted[own] = classes
        lines += len(own)
    counts = np.bincount(predicted[predicted >= 0], minlength=len(names))
    said = [row["size"] for row in result["groups"]] + [result["unlike_everything"]]
    every = lines == len(truth) and bool((predicted >= 0).all())
    scores = open_world_accuracy(predicted, truth.astype(np.int64), num_seen=SEEN, protocol="gcd")
    return {
        "every_row_once": every,
        "counts_exact": counts.tolist() == said and sum(said) == len(truth),
        "unlike_everything": result["unlike_everything"],
        "accuracy": {"all": scores.all, "seen": scores.seen, "novel": scores.novel},
    }


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--rows", type=int, nargs="+")
    benchmark.add_argument("--sample", type=int, default=SAMPLE)
    benchmark.add_argument("--scratch", type=Path, help="a folder for the shards: 1 kB for each row")
    benchmark.add_argument("--part", nargs=3, metavar=("FEATURES", "OUT", "JSON"), help=argparse.SUPPRESS)
    if "--part" in sys.argv:
        args = benchmark.parse_args()
        features, out, into = map(Path, args.part)
        into.write_text(json.dumps(discover(features, out, args.sample)))
        return
    args = benchmark.begin()
    device = pick_device()
    sizes = args.rows or ((2_000, 20_000) if args.quick else SIZES)
    table = []
    with (
        tempfile.TemporaryDirectory(dir=args.scratch) as scratch,
        Processes(usable_cores()) if can_share() and usable_cores() > 2 else ThreadPoolExecutor(1) as workers,
    ):
        for rows in sizes:
            root = Path(scratch, str(rows))
            began = time.perf_counter()
            truth = make(root / "features", rows, device, workers)
            made = time.perf_counter() - began
            into = root / "numbers.json"
            words = ["--part", str(root / "features"), str(root / "out"), str(into), "--sample", str(args.sample)]
            subprocess.run([sys.executable, __file__, *words], check=True, env=os.environ)
            began = time.perf_counter()
            row = {"rows": rows, **json.loads(into.read_text()), **checked(root / "out", truth, workers)}
            row |= {"make_seconds": made, "check_seconds": time.perf_counter() - began}
            table.append(row)
            print({k: (round(v, 3) if isinstance(v, float) else v) for k, v in row.items()}, flush=True)
            shutil.rmtree(root)
    setting = {"features": FEATURES, "classes": CLASSES, "seen": SEEN, "labels": LABELS, "noise": NOISE}
    benchmark.save({**setting, "shard": SHARD, "sample": args.sample, "curve": table, "n": 1}, device)
    if not all(row["every_row_once"] and row["counts_exact"] for row in table):
        sys.exit("a row was lost, or a count is wrong")


if __name__ == "__main__":
    import large  # so that workers find its functions, which they would not in a program's own module

    large.main()
