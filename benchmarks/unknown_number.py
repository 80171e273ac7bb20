"""OpenCon on the digits with the number of classes known, estimated and three times too large.

python benchmarks/unknown_number.py [--quick] [--seeds 5] [--runs runs/unknown_number] [--others]

    known            10, as `opencon train digits` has it
    estimated        split.num_classes=auto: counted before training, decided anew while training
    30, corrected    split.num_classes=30 method.correct=true: decided while training
    30               split.num_classes=30, as released: nothing is decided

--others: three choices of other seen digits, two seeds each, known and corrected. The runs are one sweep; the same command
goes on with it. Accuracies are shares of the unlabeled images, protocol orca.
"""

from __future__ import annotations

from pathlib import Path

import torch

from measure import Benchmark, spread
from opencon.experiments.sweep import Cell, Sweep

TOLD = {
    "known": [],
    "estimated": ["split.num_classes=auto"],
    "30, corrected": ["split.num_classes=30", "method.correct=true"],
    "30": ["split.num_classes=30"],
}
OTHERS = {"5 to 9": "56789", "odd": "13579", "7 to 9": "789"}
MEASURES = ("all", "novel", "seen", "classes_in_use")


def cells_of(row: dict[str, str], seeds: int, extra: list[str]) -> list[Cell]:
    seen = ",".join(f'"{digit}"' for digit in OTHERS.get(row["seen"], ""))
    settings = [*TOLD[row["told"]], *extra, *([f"split.seen_classes=[{seen}]"] if seen else [])]
    return [Cell("opencon/digits", seed, tuple(settings), row) for seed in range(seeds)]


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--seeds", type=int, default=5)
    benchmark.add_argument("--runs", type=Path, default=Path("runs/unknown_number"))
    benchmark.add_argument("--others", action="store_true")
    args = benchmark.begin()
    extra, device = ["train.epochs=4"] if args.quick else [], torch.device("cpu")
    seeds = 1 if args.quick else args.seeds
    rows = [{"seen": "0 to 4", "told": told} for told in TOLD]
    if args.others:
        rows = [{"seen": seen, "told": told} for seen in OTHERS for told in ("known", "30, corrected")]
        seeds = min(seeds, 2)
    cells = {row["seen"] + row["told"]: cells_of(row, seeds, extra) for row in rows}
    sweep = Sweep.made(
        args.runs, sorted((cell for some in cells.values() for cell in some), key=lambda cell: cell.seed)
    )
    for number, cell in enumerate(sweep.cells, start=1):
        Sweep(args.runs, (cell,)).run(device)
        print(f"{number} of {len(sweep.cells)}", cell.title, flush=True)
    if sweep.left():
        raise SystemExit(
            f"{len(sweep.left())} runs are left, failed or with another process: the same command goes on."
        )
    known, table = sweep.results(), []
    for row in rows:
        results = [known[cell.name]["result"] for cell in cells[row["seen"] + row["told"]]]
        table.append({**row, **{key: spread([float(result[key]) for result in results]) for key in MEASURES}})
        shown = (f"{key} {table[-1][key]['mean']:.3f} ± {table[-1][key]['std']:.3f}" for key in MEASURES)
        print(f"{row['seen']}, {row['told']}: {', '.join(shown)}", flush=True)
    benchmark.save({"recipe": "opencon/digits", "n": seeds, "rows": table}, device)


if __name__ == "__main__":
    main()
