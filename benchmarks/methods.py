"""Every method on one data set: train each with `opencon train`, several at once, and compare them.

python benchmarks/methods.py digits --seeds 5 --pretrain --parallel 2 [--quick]
python benchmarks/methods.py cifar100 --data FOLDER --weights FILE --parallel 4 [--methods opencon,orca] [--seconds 560]

All start from the same encoder: from --weights, or (--pretrain) for each seed from SimCLR trained with that seed. Runs are
kept in --runs, so that the same command goes on where it was stopped; --seconds stops it. Seconds per epoch are those of a
run beside the others, so they are above what a run alone would take. A run that fails is tried again without compilation
and capture.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import Benchmark
from opencon.experiments.compare import compare_runs, render
from opencon.methods import METHODS
from opencon.runtime import pick_device

PLAIN = ["train.capture=false", "train.compile=false"]


class Job:
    """One run of `opencon train`, tried again in the plain form if it fails."""

    def __init__(self, method: str, seed: int, words: list[str], out: Path, settings: list[str]) -> None:
        self.method, self.seed, self.words, self.out = method, seed, words, out
        self.settings = settings
        self.tries = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, threads: int) -> None:
        """Run it, its words into a file beside the run."""
        self.tries += 1
        words = [*self.words, "--seed", str(self.seed), "--out", str(self.out)]
        for setting in self.settings:
            words += ["--set", setting]
        log = self.out.with_suffix(".log").open("ab")
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen([sys.executable, "-m", "opencon", *words], stdout=log, stderr=log, env=env)

    def ended(self) -> bool:
        """Whether it has; if it failed in the fast form, it is put back to be tried in the plain one."""
        assert self.process is not None
        if self.process.poll() is None:
            return False
        if self.process.returncode and self.tries == 1:
            print(f"{self.out.name}: exit {self.process.returncode}, see {self.out.with_suffix('.log')}", flush=True)
            self.out = self.out.with_name(self.out.name + "-plain")
            self.settings = [*self.settings, *PLAIN]
            self.process = None
        return True


def run_all(jobs: list[Job], parallel: int, deadline: float) -> None:
    """At most `parallel` at once, in order; what runs at the deadline is interrupted and can be resumed."""
    threads = max(1, (os.cpu_count() or 1) // parallel)
    waiting, running = [job for job in jobs if not (job.out / "result.json").is_file()], []
    while waiting or running:
        if time.monotonic() > deadline:
            for job in running:
                assert job.process is not None
                job.process.send_signal(signal.SIGINT)
            for job in running:
                assert job.process is not None
                job.process.wait(30)
            return
        for job in [job for job in running if job.ended()]:
            running.remove(job)
            print(f"{job.out.name}: {'again' if job.process is None else 'done'}", flush=True)
            waiting += [job] if job.process is None else []
        while waiting and len(running) < parallel:
            job = waiting.pop(0)
            job.start(threads)
            running.append(job)
        time.sleep(0.2)


def progress(run: Path) -> dict[str, Any]:
    """How far a run is, by its own records."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
    records = [json.loads(line) for line in lines]
    seconds = [record["seconds"] for record in records][2:]
    scored = [record for record in records if "all" in record]
    last = {key: scored[-1][key] for key in ("epoch", "all", "novel", "seen")} if scored else None
    return {
        "finished": (run / "result.json").is_file(),
        "epochs_done": len(records),
        "seconds_per_epoch": statistics.median(seconds) if seconds else None,
        "last_scored": last,
    }


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("dataset")
    everything = ",".join(name for name in METHODS.names() if METHODS[name].config.uses_labels)
    benchmark.add_argument("--methods", default=everything, help="separated by commas; default: all but pre-training")
    benchmark.add_argument("--seeds", type=int, default=1)
    benchmark.add_argument("--pretrain", action="store_true")
    benchmark.add_argument("--runs", type=Path, default=Path("runs/methods"))
    benchmark.add_argument("--parallel", type=int, default=1)
    benchmark.add_argument("--seconds", type=float, default=1e9)
    benchmark.add_settings()
    args = benchmark.begin()
    deadline = time.monotonic() + args.seconds
    if args.quick:
        args.seeds, args.settings = 1, [*args.settings, "train.epochs=2"]
    args.runs.mkdir(parents=True, exist_ok=True)
    place = ["--data", args.data] if args.data else []

    starts: dict[int, str | None] = dict.fromkeys(range(args.seeds), args.weights)
    if args.pretrain:
        pre = {seed: args.runs / f"simclr-{seed}" for seed in starts}
        words = ["pretrain", args.dataset, *place]
        run_all([Job("simclr", s, words, out, args.settings) for s, out in pre.items()], args.parallel, deadline)
        starts = {seed: str(out / "encoder.safetensors") for seed, out in pre.items()}
    jobs = []
    for seed, weights in starts.items():
        for method in args.methods.split(","):
            words = ["train", f"{method}/{args.dataset}", *place, *(["--weights", weights] if weights else [])]
            settings = args.settings if METHODS[method].config.trains else []
            jobs.append(Job(method, seed, words, args.runs / f"{method}-{seed}", settings))
    run_all(jobs, args.parallel, deadline)

    finished = [job.out for job in jobs if (job.out / "result.json").is_file()]
    sections = compare_runs(finished) if finished else []
    print(render(sections, "markdown"))
    result = {
        "data": args.dataset,
        "start": "SimCLR of the same seed" if args.pretrain else "given weights" if args.weights else "random",
        "settings": args.settings,
        "runs_at_once": args.parallel,
        "table": json.loads(render(sections, "json")),
        "runs": {job.out.name: progress(job.out) for job in jobs},
    }
    benchmark.claim = f"methods-{args.dataset}"
    benchmark.save(result, pick_device())


if __name__ == "__main__":
    main()
