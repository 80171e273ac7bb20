"""The demonstration over five seeds: OpenCon on the digits beside k-means on their pixels.

python benchmarks/digits.py [--seeds 5] [--quick]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from measure import Benchmark, spread
from opencon.config import with_settings
from opencon.experiments.demo import pixel_kmeans
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import train
from opencon.experiments.workbench import open_run

MEASURES = ("all", "novel", "seen", "auroc")


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--seeds", type=int, default=5)
    args = benchmark.begin()
    quick = ["train.epochs=5"] if args.quick else []
    device = torch.device("cpu")
    runs, kmeans = [], {}
    for seed in range(2 if args.quick else args.seeds):
        config = with_settings(get_recipe("digits"), [f"train.seed={seed}", *quick])
        with tempfile.TemporaryDirectory() as folder:
            runs.append({"seed": seed, **train(config, Path(folder) / "run", device)})
            kmeans = pixel_kmeans(open_run(Path(folder) / "run", device))
        print(seed, {key: round(runs[-1][key], 4) for key in (*MEASURES, "classes_in_use", "total_seconds")})
    summary = {key: spread([run[key] for run in runs]) for key in (*MEASURES, "total_seconds")}
    for key, value in summary.items():
        print(f"{key:>14}  {value['mean']:.4f} ± {value['std']:.4f}")
    print("k-means on pixels", {key: round(kmeans[key], 4) for key in ("all", "novel", "seen")})
    benchmark.save(
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
