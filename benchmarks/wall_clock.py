"""`opencon train` from outside: seconds from the command to its result, without and with a warm compile cache.

python benchmarks/wall_clock.py cifar100 --data FOLDER --weights FILE [--set train.epochs=2] [--quick]

The first run (seed 0) has empty cache folders of its own for torch.compile and Triton, the second (seed 1) finds what the
first left there. Nothing else differs. Whether PyTorch lies there as bytecode, as pip leaves it, is written down: where it
does not, Python compiles its source at every start, which takes ten seconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from measure import Benchmark, settings
from opencon.runtime import pick_device


def timed(words: list[str], caches: Path) -> float:
    """Seconds of one command, whose caches lie in a folder."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "opencon", *words], check=True, env={**os.environ, **places})
    return time.perf_counter() - start


def summary(run: Path, wall: float) -> dict[str, Any]:
    """One run, from its own records."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = [record["seconds"] for record in records[2:]] or [records[-1]["seconds"]]
    final = {key: records[-1].get(key) for key in ("protocol", "on", "num_images", "seed", "all", "novel", "seen")}
    seconds = {"median": statistics.median(steady), "min": min(steady), "max": max(steady), "n": len(steady)}
    return final | {
        "epochs": len(records),
        "evaluations": sum("all" in record for record in records),
        "wall_seconds": wall,
        "first_epoch_seconds": records[0]["seconds"],
        "seconds_per_epoch": seconds,
    }


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("recipe")
    benchmark.add_settings()
    benchmark.add_argument("--out", type=Path, help="keep the two runs in this folder")
    args = benchmark.begin()
    words = ["train", args.recipe]
    for setting in [*settings(args), *(["train.epochs=2"] if args.quick else [])]:
        words += ["--set", setting]
    has_bytecode = Path(importlib.util.cache_from_source(torch.__file__)).exists()
    result: dict[str, Any] = {"recipe": args.recipe, "settings": args.settings, "has_bytecode": has_bytecode}
    with tempfile.TemporaryDirectory() as folder:
        runs = args.out or Path(folder, "runs")
        for seed, cache in enumerate(("cold", "warm")):
            out = runs / cache
            wall = timed([*words, "--seed", str(seed), "--out", str(out)], Path(folder))
            result[cache] = summary(out, wall)
            print(cache, json.dumps(result[cache]), flush=True)
    benchmark.save(result, pick_device())


if __name__ == "__main__":
    main()
