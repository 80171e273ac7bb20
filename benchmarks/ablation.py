"""Concord without each of its parts: a row a part, over some seeds.

python benchmarks/ablation.py digits [--seeds 3] [--quick]
python benchmarks/ablation.py cifar100 --data FOLDER --weights FILE --minutes 8 [--set KEY=VALUE]

The rows are a sweep in --runs, seed by seed, the most telling part first. The same command goes on where --minutes or a
kill has stopped it, and its record then replaces the one that it left before.
"""

from __future__ import annotations

from pathlib import Path

from measure import Benchmark, settings, spread
from opencon.experiments.recipes import get_recipe
from opencon.experiments.sweep import Cell, Sweep
from opencon.experiments.sweep_table import render, rows_of
from opencon.runtime import pick_device

CONTRAST = ("method.weight_contrast=0", "method.weight_labeled=0", "method.contrast_epochs=0")
AVERAGE = ("eval.average=0", "eval.fresh_norms=false")
SIMCLR = ("augment.crop_scale=[0.2,1.0]", "augment.jitter=[0.4,0.4,0.4,0.1]", "augment.gray_p=0.2")
SMALL_MOVES = ("augment.rotate=5", "augment.shift=0.08", "augment.zoom=[0.92,1.08]")
# What a row leaves out, and the settings that do so.
PARTS = {
    "cifar": {
        "nothing": (),
        "small crops": ("views=[]",),
        "balance of targets": ("method.rounds=0",),
        "new starts": ("method.restarts=[]",),
        "k-means: a start at random": ("method.num_starts=0",),
        "contrast": CONTRAST,
        "averaged weights": AVERAGE,
        "layers 1 to 3: layer4 alone learns": ("encoder.train_from=layer4",),
        "mild views: SimCLR's instead": SIMCLR,
        "mirror images": ("eval.mirror=false",),
        "labels in the classifier": ("method.weight_labels=0",),
        "labels in the contrast": ("method.weight_labeled=0",),
        "queue": ("method.queue=0",),
    },
    "digits": {
        "nothing": (),
        "wide views: those of the other methods": SMALL_MOVES,
        "balance of targets": ("method.rounds=0",),
        "k-means: a start at random": ("method.num_starts=0",),
        "contrast": CONTRAST,
        "epochs of contrast alone": ("method.contrast_epochs=0",),
        "150 of 250 epochs": ("train.epochs=100", "method.contrast_epochs=50"),
        "averaged weights": AVERAGE,
        "labels in the classifier": ("method.weight_labels=0",),
        "labels in the contrast": ("method.weight_labeled=0",),
        "queue": ("method.queue=0",),
    },
}
MEASURES = ("all", "novel", "seen")


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("dataset")
    benchmark.add_argument("--seeds", type=int, default=3)
    benchmark.add_argument("--parts", type=int, help="so many rows, the most telling ones; default: all")
    benchmark.add_argument("--minutes", type=float, help="begin no run that would not end within this time")
    benchmark.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    benchmark.add_settings()
    args = benchmark.begin()
    benchmark.replaces = True
    recipe = f"concord/{args.dataset}"
    parts = PARTS["digits" if args.dataset == "digits" else "cifar"]
    fixed, seeds = tuple(settings(args)), args.seeds
    if args.quick:
        fixed, seeds = (*fixed, "train.epochs=2"), 1
        parts = {part: tuple(s for s in own if "epochs" not in s) for part, own in parts.items()}
    rows = list(parts.items())[: args.parts]
    # A folder a commit: runs of different code are not put together.
    sweep = Sweep.made(
        args.runs / f"{args.dataset}-{benchmark.commit}{'-quick' if args.quick else ''}",
        [Cell(recipe, seed, (*fixed, *own), {"without": part}) for seed in range(seeds) for part, own in rows],
    )
    device = pick_device()
    sweep.run(device, seconds=None if args.minutes is None else 60 * args.minutes)

    print(render(rows_of(sweep), (*MEASURES, "seconds"), "markdown"))
    table = []
    for row in rows_of(sweep):
        if row.done:
            part, results = row.labels["without"], [run["result"] for run in row.done]
            measured = {key: spread([result[key] for result in results]) for key in (*MEASURES, "total_seconds")}
            table.append({"without": part, "settings": list(parts[part]), "n": len(results), **measured})
    for cell in sweep.left():
        print("left:", cell.title)
    about = {"recipe": recipe, "epochs": get_recipe(recipe).train.epochs, "settings": args.settings}
    benchmark.save({**about, "left": len(sweep.left()), "rows": table}, device)


if __name__ == "__main__":
    main()
