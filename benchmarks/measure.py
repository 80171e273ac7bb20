"""What every benchmark shares: its arguments, the refusal of a dirty tree, and the record it leaves.

A claim has one file, results/CLAIM.json: {"claim": a sentence, "runs": [run, ...]}, oldest run first. A run holds

    command   as it was typed; of a path only the last part
    date      the day it ended (UTC)
    commit    of the checkout; with clean (bool): whether nothing in it differed from that commit
    state     where clean is false: a sentence that says in what state it was measured
    hardware  device, cpu, threads, platform
    versions  opencon, python, torch and other packages
    what      optional: what sets this run apart from others of the file
    numbers   what was measured, with settings, seeds or n

"published", beside "runs", holds figures of a paper to compare with.

Runs that were measured on another machine, with OPENCON_RESULTS=FOLDER there, come in by

    python benchmarks/measure.py FOLDER/*.json [--replace]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from opencon.runtime import environment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SOURCE = Path(inspect.getfile(environment)).resolve()
HARDWARE, VERSIONS = ("device", "cpu", "threads", "platform"), ("opencon", "python", "torch")
PACKAGES = ("numpy", "scikit-learn", "faiss-cpu")  # what some benchmarks compare with


class Benchmark(argparse.ArgumentParser):
    """The arguments of a script, and the file its runs go to: that of `claim`, by default the script's own name."""

    def __init__(self, doc: str) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.claim, self.sentence = Path(sys.argv[0]).stem, doc.partition("\n")[0]
        self.add_argument("--quick", action="store_true", help="try the script, small; nothing goes into the record")
        self.add_argument("--dirty-ok", action="store_true", help="measure a dirty tree; nothing goes into the record")
        self.add_argument("--replace", action="store_true", help="replace earlier runs of this command on this device")
        self.recorded: list[dict[str, Any]] = []

    def add_settings(self) -> None:
        """Where the files of a recipe lie, and its settings; `settings` makes one list of them."""
        self.add_argument("--data", help="folder of the data set")
        self.add_argument("--weights", help="file with encoder weights")
        self.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")

    def begin(self) -> argparse.Namespace:
        """Parse the command line, and refuse to measure what no commit describes."""
        args = self.parse_args()
        self.is_trial, self.replaces = args.quick or args.dirty_ok, args.replace
        self.commit, changes = checkout()
        if changes and not self.is_trial:
            shown = "\n  ".join(changes[:5])
            self.error(f"the tree is not a clean commit:\n  {shown}\nCommit first, or try with --dirty-ok or --quick.")
        aside = Path(tempfile.gettempdir(), "opencon-results") if self.is_trial else RESULTS
        self.folder = Path(os.environ.get("OPENCON_RESULTS", aside)).resolve()
        if self.is_trial and self.folder == RESULTS:
            self.error("OPENCON_RESULTS is the record, and a trial does not go into it.")
        return args

    def save(self, numbers: dict[str, Any], device: torch.device) -> Path:
        """Add a run to its claim's file. A tree that was changed while it was measured is no longer clean."""
        commit, changes = checkout()
        changed = changes or ([] if commit == self.commit else [f"another commit, {commit}"])
        is_clean = not changed and not self.is_trial
        folder = self.folder
        if changed and folder == RESULTS:
            folder = Path(tempfile.gettempdir(), "opencon-results")
            print(f"The tree changed meanwhile ({changed[0]}): this run does not go into the record.", file=sys.stderr)
        about = environment(device)
        own = ("--replace", "--dirty-ok")
        run: dict[str, Any] = {
            "command": " ".join(without_folder(word) for word in about["command"].split() if word not in own),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "commit": self.commit,
            "clean": is_clean,
        }
        if not is_clean:
            run["state"] = f"A trial at {self.commit}; changes in the tree: {', '.join(changed[:5]) or 'none'}."
        run["hardware"] = {key: about[key] for key in HARDWARE}
        run["versions"] = {key: about[key] for key in VERSIONS} | packages()
        path = add(
            folder / f"{self.claim}.json", self.sentence, [run | {"numbers": numbers}], self.replaces, self.recorded
        )
        print(path, flush=True)
        return path


def add(path: Path, sentence: str, runs: list[dict[str, Any]], replaces: bool, own: list[dict[str, Any]]) -> Path:
    """Append runs to a file; `replaces` drops those of the same command and device, but for the caller's `own`."""
    file = json.loads(path.read_text()) if path.is_file() else {"claim": sentence, "runs": []}

    def is_kept(old: dict[str, Any]) -> bool:
        return old in own or not any(kind(old) == kind(run) for run in runs)

    file["runs"] = [run for run in file["runs"] if not replaces or is_kept(run)] + runs
    own += runs
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(file, indent=1) + "\n")
    return path


def kind(run: dict[str, Any]) -> tuple[str, str]:
    return run["command"], run["hardware"]["device"]


def checkout() -> tuple[str, list[str]]:
    """The commit, and what differs from it: changed and untracked files but for the record, and a package from elsewhere."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    elsewhere = [] if SOURCE.is_relative_to(ROOT) else [f"opencon is imported from {SOURCE.parent}"]
    try:
        status = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
        changes = [line.strip() for line in status.splitlines()]
        return git("rev-parse", "--short", "HEAD").strip(), [*changes, *elsewhere]
    except (OSError, subprocess.CalledProcessError):
        return "unknown", ["no git checkout"]


def packages() -> dict[str, str]:
    found = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {name: found[name] for name in PACKAGES if name in found}


def without_folder(word: str) -> str:
    """A path by its last part: where a machine keeps its files says nothing about a number."""
    name, equals, value = word.rpartition("=")
    return name + equals + Path(value).name if "/" in value and Path(value).exists() else word


def settings(args: argparse.Namespace) -> list[str]:
    """Folder, weights and settings of `add_settings` as settings."""
    places = {"data.root": args.data, "encoder.weights": args.weights}
    return [*(f"{key}={value}" for key, value in places.items() if value), *args.settings]


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and standard deviation over seeds, with the values themselves."""
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "std": std, "n": len(values), "values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--replace", action="store_true")
    args = parser.parse_args()
    for path in args.files:
        found = json.loads(path.read_text())
        if not all(run["clean"] for run in found["runs"]):
            parser.error(f"{path}: a run of a dirty tree does not go into the record")
        print(add(RESULTS / path.name, found["claim"], found["runs"], args.replace, []))


if __name__ == "__main__":
    main()
