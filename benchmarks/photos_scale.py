"""How `opencon discover` grows: many small photos from disk, and features alone up to 50,000 rows.

python benchmarks/photos_scale.py [--photos 5000] [--side 128] [--quick]

Photos are made up: crops of scikit-learn's two sample images, tinted by class, 20 classes, of which 10 are seen with 20
labels each. Memory is the most the process held.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from measure import Benchmark
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.photos.discover import DiscoverConfig, discover_photos, prepare
from opencon.photos.features import FeatureSettings
from opencon.photos.listing import from_two_folders

CPU = torch.device("cpu")
CLASSES, SEEN, LABELS = 20, 10, 20


def make_photos(root: Path, number: int, side: int) -> None:
    rng = np.random.default_rng(0)
    samples = load_sample_images().images
    tints = rng.uniform(0.3, 1.0, (CLASSES, 3))
    for i in range(number):
        c = i % CLASSES
        source = samples[c % 2]
        top, left = rng.integers(0, source.shape[0] - 2 * side), rng.integers(0, source.shape[1] - 2 * side)
        crop = source[top : top + 2 * side : 2, left : left + 2 * side : 2] * tints[c]
        folder = root / "labeled" / f"class-{c}" if c < SEEN and i < CLASSES * LABELS else root / "unlabeled"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(crop.astype(np.uint8)).save(folder / f"{i:06}.jpg", quality=90)


def mixture(rows: int, features: int = 1280) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    means = torch.randn(CLASSES, features, generator=g)
    classes = torch.randint(0, CLASSES, (rows,), generator=g)
    labels = torch.where((classes < SEEN) & (torch.rand(rows, generator=g) < 0.1), classes, -1)
    return means[classes] + 3.0 * torch.randn(rows, features, generator=g), labels


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--photos", type=int, default=5000)
    benchmark.add_argument("--side", type=int, default=128)
    args = benchmark.begin()
    sizes = (1000, 2000) if args.quick else (5_000, 10_000, 20_000, 50_000)
    number = 400 if args.quick else args.photos
    with tempfile.TemporaryDirectory() as scratch:
        make_photos(Path(scratch), number, args.side)
        photos = from_two_folders(Path(scratch, "labeled"), Path(scratch, "unlabeled"))
        began = time.perf_counter()
        prepared = prepare(photos, DiscoverConfig(features=FeatureSettings(), fit=OpenWorldConfig()), CPU)
        found = discover_photos(prepared, Path(scratch, "out"), cache=Path(scratch, "cache"))
        seconds = time.perf_counter() - began
        page = found.report.stat().st_size / 1e6
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{number:,} photos of {args.side} px: {seconds:.0f} s, {gigabytes:.2f} GB, page {page:.1f} MB", flush=True)
    table = []
    for rows in sizes:
        x, labels = mixture(rows)
        parts = {}
        for what, novel in (("fit, number known", CLASSES - SEEN), ("fit, number unknown", None)):
            began = time.perf_counter()
            fit_features(x, labels, OpenWorldConfig(num_novel=novel))
            parts[what] = time.perf_counter() - began
        table.append({"rows": rows, **parts})
        print(f"{rows:>7,} rows: " + ", ".join(f"{k} {v:.1f} s" for k, v in parts.items()), flush=True)
    result = {
        "photos": number,
        "side": args.side,
        "seconds": seconds,
        "gigabytes": gigabytes,
        "report_megabytes": page,
        "features": table,
        "n": 1,
    }
    benchmark.save(result, CPU)


if __name__ == "__main__":
    main()
