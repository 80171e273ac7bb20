"""Ways to pre-train an encoder, each for the same time: 20-NN accuracy of its features, and what they lead to.

python benchmarks/pretrain.py digits --minutes 0.3 [--quick]
python benchmarks/pretrain.py cifar100 --data FOLDER --minutes 4 [--weights FILE] [--then concord/cifar100]
    --ways simclr crops "moco views=[] method.momentum=0.996"

A way is a method and settings, separated by spaces. Three epochs tell how long one takes; then it is trained for as many as
fit into the minutes, on its whole schedule. Only epochs count, not the start of a program. With --then the recipe is trained
from each encoder. Encoders stay in --runs. The same command goes on where it was stopped.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from measure import Benchmark
from opencon.api import configure
from opencon.experiments.train import train
from opencon.runtime import pick_device

KEYS = ("knn20", "num_images", "all", "novel", "seen", "protocol", "on", "total_seconds")


def seconds_of(run: Path) -> list[float]:
    """Of each epoch."""
    return [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("dataset")
    benchmark.add_argument("--minutes", type=float, default=4.0)
    benchmark.add_argument("--ways", nargs="+", default=["simclr", "crops", "moco"])
    benchmark.add_argument("--then", help="a recipe to train from each encoder")
    benchmark.add_argument("--then-set", action="append", default=[], metavar="KEY=VALUE")
    benchmark.add_argument("--seed", type=int, default=0)
    benchmark.add_argument("--runs", type=Path, default=Path("runs/pretrain"))
    benchmark.add_settings()
    args = benchmark.begin()
    device, minutes = pick_device(), 0.02 if args.quick else args.minutes
    rows: list[dict[str, Any]] = []
    for way in args.ways:
        method, *own = way.split()
        start = {"data": args.data, "weights": args.weights, "seed": args.seed}
        folder = args.runs / way.replace(" ", "-").replace("/", "-")
        settings = [*args.settings, *own]
        config = configure(f"{method}/{args.dataset}", [*settings, "train.epochs=3", "train.warmup_epochs=0"], **start)
        train(config, folder / "trial", device)
        seconds = statistics.median(seconds_of(folder / "trial")[1:])  # the first one compiles and records
        # The trial would differ when it is asked again, so the number of epochs is kept with the run.
        kept = folder / "epochs.json"
        if not kept.is_file():
            kept.write_text(json.dumps(max(4, int(60 * minutes / seconds))))
        epochs = json.loads(kept.read_text())
        config = configure(f"{method}/{args.dataset}", [*settings, f"train.epochs={epochs}"], **start)
        result = train(config, folder / "run", device)
        spent = seconds_of(folder / "run")
        row = {"way": way, "epochs": epochs, "seconds": sum(spent), "seconds_per_epoch": statistics.median(spent)}
        row |= {key: result[key] for key in KEYS if key in result}
        if args.then:
            start["weights"] = str(folder / "run" / "encoder.safetensors")
            found = train(configure(args.then, args.then_set, **start), folder / "then", device)
            row["then"] = {key: found[key] for key in KEYS if key in found}
        rows.append(row)
        print(json.dumps(row), flush=True)
    numbers = {
        "data": args.dataset,
        "start": "given weights" if args.weights else "random weights",
        "minutes": minutes,
        "settings": args.settings,
        "then": args.then,
        "then_settings": args.then_set,
        "seed": args.seed,
        "ways": rows,
    }
    benchmark.save(numbers, device)


if __name__ == "__main__":
    main()
