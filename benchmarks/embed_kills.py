"""Workers of `opencon embed` are killed at random moments: every photo once, and the bytes of an undisturbed run.

python benchmarks/embed_kills.py [--photos 200000] [--shards 200] [--workers 4] [--kills 50] [--scratch FOLDER] [--quick]

Photos are made: PNGs of 12 x 12 pixels, no two alike, in tars as WebDataset writes them. The encoder is the smallest there
is, the untrained network of the digits, so that most of the work is reading, decoding and writing. Once all workers
are left alone. Once a worker that has claimed a shard is ended by SIGKILL at each of the random moments, which are spread
over the shards, and another is started in its place.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import opencon
from measure import Benchmark
from opencon.files import parse_json, read_file
from opencon.photos.embed import SHARDS, Embedded

SIDE = 12  # pixels
PATIENCE = 3600  # seconds for a run


def make_tars(root: Path, photos: int, shards: int) -> None:
    root.mkdir()
    rng = np.random.default_rng(0)
    for shard, numbers in enumerate(np.array_split(np.arange(photos), shards)):
        with tarfile.open(root / f"{shard:05}.tar", "w") as tar:
            for number in numbers:
                content = io.BytesIO()
                pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(content, "PNG", compress_level=1)
                member = tarfile.TarInfo(f"{number:08}.png")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)


class Workers:
    """Processes of the same command."""

    def __init__(self, number: int, source: Path, out: Path, encoder: Path) -> None:
        words = ["embed", str(source), "--out", str(out), "--encoder", str(encoder), "--device", "cpu"]
        self.typed = [sys.executable, "-m", "opencon", *words]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(number)}
        self.out, self.running = out, [self.start() for _ in range(number)]

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.typed, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def done(self) -> int:
        return sum(1 for _ in (self.out / SHARDS).glob("*.done"))

    def at_work(self) -> list[int]:
        """Of those that have claimed a shard."""
        own, found = {process.pid for process in self.running}, []
        for claim in (self.out / SHARDS).glob("*.claim"):
            try:
                found.append(int(claim.read_text().rpartition(" ")[2]))
            except (OSError, ValueError):  # gone or just being written
                continue
        return [pid for pid in found if pid in own]

    def kill(self, rng: random.Random) -> bool:
        """End one of those at work, and start another."""
        pids = self.at_work()
        if not pids:
            return False
        pid = rng.choice(pids)
        os.kill(pid, signal.SIGKILL)
        at = next(i for i, process in enumerate(self.running) if process.pid == pid)
        self.running[at].wait()
        self.running[at] = self.start()
        return True

    def wait(self) -> None:
        for process in self.running:
            _, said = process.communicate(timeout=PATIENCE)
            if process.returncode:
                sys.exit(f"a worker failed: {said.decode()[-2000:]}")


def embed(source: Path, out: Path, encoder: Path, args: argparse.Namespace, kills: int) -> dict[str, Any]:
    """One run; killed workers at random moments between the first shard and the last ones."""
    rng, began, done = random.Random(0), time.perf_counter(), 0
    last = max(1, args.shards - 2 * args.workers)
    moments = sorted(rng.uniform(0, last) for _ in range(kills))
    workers = Workers(args.workers, source, out, encoder)
    while moments and any(process.poll() is None for process in workers.running):
        if workers.done() >= int(moments[0]):
            time.sleep(rng.uniform(0, 0.3))  # somewhere within a shard
            if workers.kill(rng):
                done += 1
                moments.pop(0)
        time.sleep(0.01)
    workers.wait()
    left = [path.name for path in (out / SHARDS).iterdir() if path.suffix not in (".npy", ".jsonl", ".done")]
    return {"seconds": time.perf_counter() - began, "kills": done, "files_left_by_the_killed": len(left)}


def checksums(out: Path) -> dict[str, str]:
    """Of every file of every shard, read again."""
    files = sorted(path for path in (out / SHARDS).iterdir() if path.suffix in (".npy", ".jsonl"))
    return {path.name: hashlib.sha256(read_file(path)).hexdigest() for path in files}


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--photos", type=int, default=200_000)
    benchmark.add_argument("--shards", type=int, default=200)
    benchmark.add_argument("--workers", type=int, default=4)
    benchmark.add_argument("--kills", type=int, default=50)
    benchmark.add_argument("--scratch", type=Path)
    args = benchmark.begin()
    if args.quick:
        args.photos, args.shards, args.kills = 4_000, 20, 5
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        root = Path(scratch)
        encoder = opencon.train("digits", out=root / "encoder", settings={"train.epochs": 0}, device="cpu").folder
        make_tars(root / "tars", args.photos, args.shards)
        print("made", flush=True)
        runs = {}
        for what, kills in (("undisturbed", 0), ("killed", args.kills)):
            runs[what] = embed(root / "tars", root / what, encoder, args, kills)
            print(what, runs[what], flush=True)
        sums = {what: checksums(root / what) for what in runs}
        embedded = Embedded.open(root / "killed")
        names = [record["name"] for shard in range(args.shards) for record in embedded.records(shard)]
        wrong = embedded.check()
        said = [parse_json(read_file(embedded.plan.file(k, "done")))["photos"] for k in range(args.shards)]
    numbers = {
        "photos": args.photos,
        "shards": args.shards,
        "workers": args.workers,
        **runs,
        "every_photo_once": sorted(names) == [f"{i:08}.png" for i in range(args.photos)] and sum(said) == args.photos,
        "lost": args.photos - len(set(names)),
        "twice": len(names) - len(set(names)),
        "shards_that_do_not_fit_their_checksum": len(wrong),
        "bytes_equal": sums["undisturbed"] == sums["killed"],
        "n": 1,
    }
    print(numbers)
    benchmark.save(numbers, torch.device("cpu"))
    if not (numbers["every_photo_once"] and numbers["bytes_equal"] and not wrong):
        sys.exit("a photo was lost or doubled, or bytes differ")


if __name__ == "__main__":
    main()
