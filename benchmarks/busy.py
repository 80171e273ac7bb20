"""How much longer a fit takes beside other programs on the same cores, by how waiting threads wait.

python benchmarks/busy.py [--quick] [--repeats 3]

The fit is that of OpenWorldClassifier to scikit-learn's digits, number of classes unknown, in a process of its own that has
fitted something small before. The other programs are Python processes that run in circles. Threads wait in four ways:

    spinning          as GNU's OpenMP does by itself, for milliseconds
    spinning briefly  a thirtieth of that
    sleeping          as `import opencon` asks for
    torch first       torch was imported before opencon, which can then only add a thread (`runtime.calm_threads`)
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from measure import Benchmark

WAYS = {
    "spinning": ("opencon", "300000"),  # what GNU's OpenMP does when nothing is said
    "spinning briefly": ("opencon", "10000"),
    "sleeping": ("opencon", None),
    "torch first": ("torch", None),
}
SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
MOST_OTHERS = 0.1  # ours: cores that other programs may use before we begin
FIT = """
import {first}, time
import numpy as np
from opencon import OpenWorldClassifier
from sklearn.datasets import load_digits
X, truth = load_digits(return_X_y=True)
X, truth = X[:{rows}], truth[:{rows}]
y = np.where((truth < 5) & (np.random.default_rng(0).random(len(truth)) < 0.5), truth, -1)
OpenWorldClassifier(5).fit(X[:300], y[:300])
began = time.perf_counter()
OpenWorldClassifier().fit(X, y)
print(time.perf_counter() - began)
"""


def fit_seconds(way: str, rows: int) -> float:
    """Seconds of one fit, in a new process."""
    first, spins = WAYS[way]
    environ = {name: value for name, value in os.environ.items() if name not in (*SAID, "OMP_NUM_THREADS")}
    environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "src")
    if spins is not None:
        environ["GOMP_SPINCOUNT"] = spins
    code = FIT.format(first=first, rows=rows)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    return float(run.stdout)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that use a core each."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def cores_in_use(seconds: float = 2.0) -> float:
    """How many cores are at work, from the kernel's counts."""

    def counts() -> tuple[float, float]:
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        ticks = [float(word) for word in words[:8]]
        return sum(ticks), ticks[3] + ticks[4]  # all, idle

    before = counts()
    time.sleep(seconds)
    total, idle = (after - earlier for after, earlier in zip(counts(), before, strict=True))
    return (os.cpu_count() or 1) * (1 - idle / max(total, 1.0))


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--repeats", type=int, default=3)
    args = benchmark.begin()
    used = cores_in_use()
    print(f"{used:.2f} cores are in use", flush=True)
    if used > MOST_OTHERS and not benchmark.is_trial:
        benchmark.error(f"{used:.2f} cores are in use by others. Measure on an idle machine, or try with --quick.")
    rows, repeats = (300, 1) if args.quick else (1797, args.repeats)
    seconds: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for beside in (0, 1) if args.quick else (0, 1, 2):
        for _ in range(repeats):
            for way in WAYS:
                with busy(beside):
                    took = fit_seconds(way, rows)
                seconds[way].setdefault(str(beside), []).append(took)
                print(f"{way:>16}, beside {beside}: {took:6.2f} s", flush=True)
    median = {way: {beside: statistics.median(times) for beside, times in of.items()} for way, of in seconds.items()}
    numbers = {
        "rows": rows,
        "cores": os.cpu_count(),
        "repeats": repeats,
        "seconds": seconds,
        "median": median,
        "alone_to_spinning": {way: of["0"] / median["spinning"]["0"] for way, of in median.items()},
        "beside_one_to_alone": {way: of["1"] / of["0"] for way, of in median.items()},
    }
    for name in ("alone_to_spinning", "beside_one_to_alone"):
        print(name, {way: round(value, 2) for way, value in numbers[name].items()})
    benchmark.save(numbers, torch.device("cpu"))


if __name__ == "__main__":
    main()
