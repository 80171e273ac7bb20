"""A method in a file of its own against the same file inside the package: seconds per epoch.

python benchmarks/plugin.py cifar100 --data FOLDER --weights FILE [--set train.epochs=10] [--rounds 1] [--quick]

The file is examples/swap.py. One run takes it with --import. The other uses a copy of the package in which it lies among
the methods. Both do the same steps with the same seed, in turns; on a CPU their losses are equal. The first run also
compiles what the second finds in the caches; two epochs of each run are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, SOURCE, Benchmark, settings
from opencon.runtime import pick_device

PLUGIN = ROOT / "examples" / "swap.py"


def built_in(folder: Path) -> Path:
    """A copy of the package that has the method inside. Returns the folder to import it from."""
    package = folder / "opencon"
    shutil.copytree(SOURCE.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PLUGIN, package / "methods" / "swap.py")
    with (package / "methods" / "__init__.py").open("a") as file:
        file.write("\nfrom opencon.methods import swap as swap  # noqa: E402\n")
    return folder


def trained(words: list[str], out: Path, place: Path | None = None) -> list[dict[str, Any]]:
    """The records of one run, by the package in `place` or by the one that is installed."""
    path = {} if place is None else {"PYTHONPATH": str(place)}
    command = [sys.executable, "-m", "opencon", "train", *words, "--out", str(out)]
    subprocess.run(command, check=True, env={**os.environ, **path})
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    benchmark = Benchmark(__doc__ or "")
    benchmark.add_argument("data_set", help="digits, cifar100, ...")
    benchmark.add_settings()
    benchmark.add_argument("--rounds", type=int, default=1, help="how often each of the two runs")
    args = benchmark.begin()
    words = [f"swap/{args.data_set}"]
    for setting in [*settings(args), *(["train.epochs=3"] if args.quick else [])]:
        words += ["--set", setting]
    runs: dict[str, list[list[dict[str, Any]]]] = {"plugin": [], "built in": []}
    with tempfile.TemporaryDirectory() as folder:
        place = built_in(Path(folder))
        for turn in range(args.rounds):
            out = Path(folder, "runs", str(turn))
            runs["plugin"].append(trained([*words, "--import", str(PLUGIN)], out / "plugin"))
            runs["built in"].append(trained(words, out / "inside", place))
    numbers: dict[str, Any] = {"recipe": words[0], "settings": args.settings, "rounds": args.rounds}
    for name, found in runs.items():
        steady = [record["seconds"] for records in found for record in records[2:]]
        numbers[name] = {
            "n": len(steady),
            "median": statistics.median(steady),
            "min": min(steady),
            "max": max(steady),
            "losses": [record["loss"] for record in found[0]],
            "last": {key: found[0][-1].get(key) for key in ("all", "novel", "seen", "protocol", "on")},
        }
    numbers["ratio"] = numbers["plugin"]["median"] / numbers["built in"]["median"]
    numbers["same_losses"] = numbers["plugin"]["losses"] == numbers["built in"]["losses"]
    print(json.dumps(numbers), flush=True)
    benchmark.save(numbers, pick_device())


if __name__ == "__main__":
    main()
