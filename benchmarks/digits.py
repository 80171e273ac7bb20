"""The demonstration over five seeds: OpenCon on the digits beside k-means on their pixels.

python benchmarks/digits.py [--seeds 5] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from measure import save
from opencon.config import with_settings
from opencon.experiments.demo import pixel_kmeans
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import train
from opencon.experiments.workbench import open_run

MEASURES = ("all", "novel", "seen", "auroc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two seeds of five epochs")
    args = parser.parse_args()
    quick = ["train.epochs=5"] if args.quick else []
    device = torch.device("cpu")
    runs, kmeans = [], {}
    for seed in range(2 if args.quick else args.seeds):
        config = with_settings(get_recipe("digits"), [f"train.seed={seed}", *quick])
        with tempfile.TemporaryDirectory() as folder:
            runs.append({"seed": seed, **train(config, Path(folder) / "run", device)})
            kmeans = pixel_kmeans(open_run(Path(folder) / "run", device))
        print(seed, {key: round(runs[-1][key], 4) for key in (*MEASURES, "classes_in_use", "total_seconds")})
    summary = {
        key: {"mean": statistics.mean(r[key] for r in runs), "std": statistics.stdev(r[key] for r in runs)}
        for key in (*MEASURES, "total_seconds")
    }
    for key, value in summary.items():
        print(f"{key:>14}  {value['mean']:.4f} ± {value['std']:.4f}")
    print("k-means on pixels", {key: round(kmeans[key], 4) for key in ("all", "novel", "seen")})
    save(
        "digits-quick" if args.quick else "digits",
        {
            "protocol": runs[0]["protocol"],
            "on": runs[0]["on"],
            "num_images": runs[0]["num_images"],
            "n": len(runs),
            "opencon": summary,
            "kmeans_on_pixels": kmeans,
            "runs": runs,
        },
        device,
    )


if __name__ == "__main__":
    main()
