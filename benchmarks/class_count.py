"""How many classes does opencon.class_count find where the number is known, and in which time.

python benchmarks/class_count.py [--by gcd] [--features photos=photos.npz ...] [--repeats 5] [--quick]

Data: Gaussian mixtures (every feature i scaled by i^-1/2, half of the classes seen, half of their rows labeled; `spread` is
the deviation within a class over the one between class means), scikit-learn's digits (5 of 10 seen, half labeled), and any
file given as NAME=FILE.npz with `x` (M, F), true classes `y` (M,) and `labels` (M,), -1 for none. Each repeat has its own
seed; from the second on, which classes are seen and which rows are labeled is drawn anew as well, in the same numbers.
--by gcd, dtc or orca counts as those papers do, on the digits and the files only.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from measure import Benchmark
from opencon.counting import COUNTERS
from opencon.runtime import generator

CPU = torch.device("cpu")
MIXTURES = [(k, spread, skew) for k in (3, 6, 12, 25, 50) for spread in (0.7, 1.0) for skew in (0.0, 1.0)]
QUICK = [(3, 0.7, 0.0), (12, 1.0, 0.0), (12, 0.7, 1.0)]


def mixture(num_classes: int, spread: float, skew: float, seed: int) -> tuple[Tensor, Tensor]:
    """50 rows of 64 features per class on average; class sizes are log-normal with deviation `skew`."""
    stream = generator(CPU, seed)
    scale = torch.arange(1, 65).pow(-0.5)
    means = torch.randn(num_classes, 64, generator=stream) * scale
    sizes = (50 * torch.exp(skew * torch.randn(num_classes, generator=stream))).round().long().clamp(min=4)
    y = torch.repeat_interleave(torch.arange(num_classes), sizes)
    return means[y] + spread * scale * torch.randn(len(y), 64, generator=stream), y


def draw(y: Tensor, num_seen: int, share: float, seed: int) -> tuple[Tensor, int]:
    """Labels of `share` of the rows (one at least) of `num_seen` random classes, numbered from 0."""
    stream = generator(CPU, seed, 1)
    labels = torch.full_like(y, -1)
    for name, c in enumerate(torch.randperm(int(y.max()) + 1, generator=stream)[:num_seen].tolist()):
        rows = (y == c).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=stream)]
        labels[rows[: max(1, round(share * len(rows)))]] = name
    return labels, num_seen


def again(y: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, int]:
    """The labels as they are (seed 0), or as many in as many classes, drawn anew."""
    num_seen = int(labels.max()) + 1
    if seed == 0:
        return labels, num_seen
    return draw(y, num_seen, float((labels >= 0).sum() / torch.isin(y, y[labels >= 0]).sum()), seed)


def measure(by: str, x: Tensor, y: Tensor, labels: Tensor, num_seen: int, seed: int) -> dict[str, Any]:
    begin = time.perf_counter(), time.process_time()
    found = COUNTERS[by](x, labels, num_seen=num_seen, seed=seed)
    return {
        "classes": len(torch.unique(y)),
        "found": found.num_classes,
        "low": found.low,
        "high": found.high,
        "seconds": time.perf_counter() - begin[0],
        "cpu_seconds": time.process_time() - begin[1],
    }


def show(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    found = " ".join(f"{run['found']} ({run['low']}-{run['high']})" for run in runs)
    inside = sum(run["low"] <= run["classes"] <= run["high"] for run in runs)
    seconds = statistics.median(run["cpu_seconds"] for run in runs)
    print(
        f"{name:32} {runs[0]['classes']:>4} | {found} | in the interval {inside}/{len(runs)} | {seconds:.1f} s",
        flush=True,
    )
    return {"data": name, "runs": runs}


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--features", nargs="*", default=[], metavar="NAME=FILE.npz")
    benchmark.add_argument("--repeats", type=int, default=5)
    benchmark.add_argument("--by", default="tree", choices=COUNTERS.names())
    args = benchmark.begin()
    torch.set_num_threads(1)
    repeats = range(2 if args.quick else args.repeats)
    print("data, classes | found (interval) of each repeat | CPU seconds, median, one thread")
    table = []
    for k, spread, skew in () if args.by != "tree" else QUICK if args.quick else MIXTURES:
        runs = []
        for seed in repeats:
            x, y = mixture(k, spread, skew, seed)
            runs.append(measure(args.by, x, y, *draw(y, -(-k // 2), 0.5, seed), seed))
        table.append(show(f"mixture, spread {spread}, skew {skew}", runs))
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    table.append(show("digits", [measure(args.by, x, y, *draw(y, 5, 0.5, seed), seed) for seed in repeats]))
    for name, path in (item.split("=", 1) for item in args.features):
        file = np.load(Path(path))
        x, y, labels = (torch.from_numpy(file[key]) for key in ("x", "y", "labels"))
        table.append(show(name, [measure(args.by, x, y, *again(y, labels, seed), seed) for seed in repeats]))
    benchmark.save({"by": args.by, "repeats": len(repeats), "table": table}, CPU)


if __name__ == "__main__":
    main()
