"""Accuracy of the fast path against the plain one: the same `opencon train`, several seeds each.

python benchmarks/fast_against_plain.py cifar100 --data FOLDER --weights FILE --fast 0 1 --plain 0 1 [--together 4] [--quick]

Runs share the machine, so no time is read off them. Seeds only name the runs: on a GPU the same seed does not repeat.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import Benchmark, settings, spread
from opencon.runtime import pick_device

FORMS: dict[str, tuple[str, list[str]]] = {
    "fast": ("the recipe as it is", []),
    "plain": (
        "batch statistics in the frozen part, each view in its own pass; compiled; launched kernel by kernel; views and "
        "prototypes without kernels of their own",
        [
            "encoder.frozen_norm=batch",
            "encoder.views_together=false",
            "encoder.fold_frozen=false",
            "train.capture=false",
            "train.kernels=false",
        ],
    ),
}


def run(words: list[str], out: Path) -> dict[str, Any]:
    """One run's final record."""
    subprocess.run([sys.executable, "-m", "opencon", *words, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    print(out.name, f"{100 * found['all']:.2f}", flush=True)
    return found


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("recipe")
    benchmark.add_settings()
    benchmark.add_argument("--fast", type=int, nargs="*", default=[], metavar="SEED")
    benchmark.add_argument("--plain", type=int, nargs="*", default=[], metavar="SEED")
    benchmark.add_argument("--together", type=int, default=1, help="so many runs at a time")
    benchmark.add_argument("--out", type=Path, help="keep the runs here; those that are finished are not run again")
    args = benchmark.begin()
    quick = ["train.epochs=2"] if args.quick else []
    result: dict[str, Any] = {"recipe": args.recipe, "settings": [*args.settings, *quick]}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(args.together) as pool:
        folder, started = args.out or place, {}
        for form, (_, own) in FORMS.items():
            for seed in getattr(args, form):
                sets = [part for setting in [*settings(args), *quick, *own] for part in ("--set", setting)]
                command = ["train", args.recipe, *sets, "--seed", str(seed)]
                started[form, seed] = pool.submit(run, command, Path(folder, f"{form}-{seed}"))
        for form, (what, own) in FORMS.items():
            runs = [started[form, seed].result() for seed in getattr(args, form)]
            everyone = [record["all"] for record in runs]
            mean = spread(everyone) if runs else None
            result[form] = {"what": what, "settings": own, "n": len(runs), "all": mean, "runs": runs}
    benchmark.save(result, pick_device())


if __name__ == "__main__":
    main()
