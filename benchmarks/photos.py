"""`opencon discover` on a folder of photos whose classes are known: accuracy, number of classes, seconds, over seeds.

python benchmarks/photos.py --photos DIR [--seeds 5] [--unlabeled 160] [--quick]

DIR holds labeled/<class>/, unlabeled/ and truth.csv (file,class). The first discovery starts without a cache; the others use
the features it kept. k-means gets the same features and the number of classes. Protocol gcd, on the unlabeled photos.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans

from measure import Benchmark, spread
from opencon.metrics import open_world_accuracy
from opencon.openworld.fit import OpenWorldConfig
from opencon.photos.discover import DiscoverConfig, discover_photos, prepare
from opencon.photos.features import FeatureSettings, photo_features
from opencon.photos.listing import from_two_folders, read_truth

CPU = torch.device("cpu")


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--photos", type=Path, required=True)
    benchmark.add_argument("--seeds", type=int, default=5)
    benchmark.add_argument("--unlabeled", type=int, help="leave out all unlabeled photos but the first so many")
    args = benchmark.begin()
    seeds = 1 if args.quick else args.seeds
    photos = from_two_folders(args.photos / "labeled", args.photos / "unlabeled")
    if args.unlabeled is not None:
        most = photos.num_labeled + args.unlabeled  # labeled ones come first
        photos = replace(photos, paths=photos.paths[:most], labels=photos.labels[:most])
    truth = read_truth(args.photos / "truth.csv")
    classes = sorted(set(truth.values()) - set(photos.class_names))
    num_novel, num_seen = len(classes), len(photos.class_names)
    number = {name: c for c, name in enumerate((*photos.class_names, *classes))}
    rows: dict[str, list[dict[str, Any]]] = {"number known": [], "number unknown": [], "number doubled": []}
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch, "cache")
        for seed in range(seeds):
            ways = {"number unknown": None, "number known": num_novel, "number doubled": 2 * num_novel}
            for way, novel in ways.items():
                fit = OpenWorldConfig(num_novel=novel, seed=seed)
                began = time.perf_counter()
                prepared = prepare(photos, DiscoverConfig(features=FeatureSettings(), fit=fit), CPU)
                found = discover_photos(prepared, Path(scratch, "out"), cache=cache, truth=truth)
                seconds = time.perf_counter() - began
                r = found.record
                groups = sum(group.size > 0 for group in found.groups)
                row = {k: r[k] for k in ("all", "novel", "seen")} | {"seed": seed, "seconds": seconds, "in_use": groups}
                row["estimate"] = found.count.num_classes if found.count else None
                row["interval"] = [found.count.low, found.count.high] if found.count else None
                rows[way].append(row)
                print(f"seed {seed} {way:15} all {r['all']:.3f} novel {r['novel']:.3f} seen {r['seen']:.3f} "
                      f"classes {row['estimate'] or '':>3} in use {groups} {seconds:.1f} s", flush=True)  # fmt: skip
        features = photo_features(photos.paths, prepared.extractor, cache=cache)
    x = F.normalize(features.plain, dim=1).numpy()
    free = [i for i, label in enumerate(photos.labels) if label < 0]
    true = [number[truth[photos.paths[i].name]] for i in free]
    means = []
    for seed in range(seeds):
        groups = KMeans(num_seen + num_novel, n_init=10, random_state=seed).fit_predict(x)
        means.append(open_world_accuracy(groups[free], true, num_seen=num_seen, protocol="gcd").all)
    result = {
        "photos": len(photos.paths),
        "unlabeled": len(free),
        "classes": num_seen + num_novel,
        "protocol": "gcd",
        "n": seeds,
        "first_run_seconds": rows["number unknown"][0]["seconds"],
        "k-means, number known": {"all": spread(means)},
        **{way: {k: spread([r[k] for r in found]) for k in ("all", "novel", "seen")} for way, found in rows.items()},
        "rows": rows,
    }
    print({way: {k: round(v["mean"], 4) for k, v in result[way].items()} for way in rows}, spread(means)["mean"])
    benchmark.save(result, CPU)


if __name__ == "__main__":
    main()
