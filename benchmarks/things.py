"""Small photos of 40 things, 20 of them named: three methods from a folder and a pile, of which nobody says the classes.

python benchmarks/things.py --data FOLDER/worlds/things [--out FOLDER] [--epochs 200] [--side 96] [--device cuda] [--quick]

Half of the photos of the first 20 classes go into labeled/CLASS/; all others go into one pile, under numbers. The methods
get these two folders, the encoder that `opencon discover` has, and the number of classes, as in the papers. Each photo is
decoded once. The truth is a table that only the number in the end is made from: accuracy on the pile, protocols gcd and
orca. Settings are those of the recipe METHOD/photos, but for the size of a view and a cosine schedule.
"""

from __future__ import annotations

import csv
import random
import tempfile
import time
from pathlib import Path

import torch

import opencon
from measure import Benchmark

METHODS = ("opencon", "orca", "simgcd")
NUM_SEEN = 20
SEED = 0


def sort_out(source: Path, target: Path, limit: int | None) -> tuple[int, int]:
    """Make labeled/, pile/ and truth.csv of links to the photos. Returns how many are in each of the two folders."""
    draw = random.Random(SEED)
    classes = sorted(folder for folder in source.iterdir() if folder.is_dir())
    pile: list[tuple[Path, str]] = []
    num_labeled = 0
    for number, folder in enumerate(classes):
        photos = sorted(folder.glob("*.jpg"))[:limit]
        draw.shuffle(photos)
        half = len(photos) // 2 if number < NUM_SEEN else 0
        if half:
            (target / "labeled" / folder.name).mkdir(parents=True)
        for photo in photos[:half]:
            (target / "labeled" / folder.name / photo.name).symlink_to(photo.resolve())
        num_labeled += half
        pile += [(photo, folder.name) for photo in photos[half:]]
    draw.shuffle(pile)
    (target / "pile").mkdir()
    with (target / "truth.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "class"])
        for number, (photo, name) in enumerate(pile):
            (target / "pile" / f"{number:05}.jpg").symlink_to(photo.resolve())
            table.writerow([f"{number:05}.jpg", name])
    return num_labeled, len(pile)


def main() -> None:
    parser = Benchmark(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="a folder with one sub-folder of photos per class")
    parser.add_argument("--out", type=Path, help="where the runs go; default: nowhere")
    parser.add_argument("--epochs", type=int, default=200, help="ours: less than a minute a method on a GPU")
    parser.add_argument("--side", type=int, default=96, help="of a photo in pixels; they are 64 pixels small")
    parser.add_argument("--weights", default="installed", help="of efficientnet_lite0: those of its package, or a file")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.begin()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        num_labeled, num_pile = sort_out(args.data, root, 12 if args.quick else None)
        side, epochs = (32, 1) if args.quick else (args.side, args.epochs)
        settings = {
            "data.image_size": side,
            "augment.size": side,
            "split.num_classes": len(list(args.data.iterdir())),
            "split.held_out": 0.0,
            "train.epochs": epochs,
            "train.schedule": "cosine",
            "train.milestones": [],
            "train.batch_size": 64 if args.quick else 512,
            "train.compile": False,  # compiling takes longer than these few steps
            "eval.every": epochs,
        }
        rows = []
        for method in args.methods:
            start = time.perf_counter()
            run = opencon.train(
                f"{method}/photos",
                out=(args.out or root / "runs") / method,
                settings=settings,
                labeled=root / "labeled",
                unlabeled=root / "pile",
                weights=args.weights,
                seed=SEED,
                device=args.device,
            )
            seconds = time.perf_counter() - start
            rows.append({"method": method, "seconds": seconds, **measured(run, root / "truth.csv")})
            print(rows[-1], flush=True)
    numbers = {
        "photos": {"labeled": num_labeled, "pile": num_pile},
        "settings": settings,
        "seed": SEED,
        "rows": rows,
    }
    print(parser.save(numbers, torch.device(args.device)))


def measured(run: opencon.Run, truth: Path) -> dict[str, float]:
    """Accuracy on the pile under both protocols: the one place where the truth is read."""
    with truth.open(newline="") as file:
        true = {row["file"]: row["class"] for row in csv.DictReader(file)}
    found = run.predictions()
    names = list(found.names[: found.num_seen])
    names += sorted(set(true.values()) - set(names))
    classes = [names.index(true[Path(file).name]) for file in found.files]
    out: dict[str, float] = {"stability": run.result["stability"], "classes_in_use": run.result["classes_in_use"]}
    for protocol in ("gcd", "orca"):
        how = {"num_seen": found.num_seen, "protocol": protocol}
        score = opencon.open_world_accuracy(found.classes, classes, **how)
        out |= {f"{protocol}_{key}": getattr(score, key) for key in ("all", "novel", "seen")}
    return out


if __name__ == "__main__":
    main()
