"""`fit_features` beside what one would type first: k-means, self-training, label spreading, HDBSCAN.

python benchmarks/openworld.py [--photos FOLDER] [--cifar FEATURES] [--cifar-all] [--seeds 5] [--cifar-seeds 2] [--quick]

Accuracy on the unlabeled rows, protocol gcd (one matching over everything), in percent. "number": known, unknown, or doubled
(twice as many classes asked for as there are). A seed changes the algorithm; on digits and CIFAR-100 the split, too.

--photos  a folder with labeled/CLASS/*, unlabeled/* and truth.csv (file, class); features of efficientnet_lite0, 4 views
--cifar   a .npz with x (50000, F), in the order of the training images, and y (50000,); without --cifar-all, contenders that
          take minutes on it are left out: self-training, label spreading, and the doubled number
"""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.cluster import HDBSCAN, KMeans
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from torch import Tensor

from measure import Benchmark, spread
from opencon.cluster.kmeans import kmeans
from opencon.config import SplitConfig
from opencon.data.split import make_split
from opencon.metrics import open_world_accuracy
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.runtime import generator

CPU = torch.device("cpu")
QUADRATIC = 5000  # rows up to which baselines that compare all with all are run


class Problem(NamedTuple):
    x: Tensor
    labels: Tensor
    truth: Tensor
    views: Tensor | None = None

    @property
    def num_seen(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def num_classes(self) -> int:
        return int(self.truth.max()) + 1


def digits(seed: int) -> Problem:
    data = load_digits()
    truth = torch.from_numpy(data.target).long()
    split = make_split(truth, SplitConfig(num_seen=5, seed=seed), num_data_classes=10)
    return Problem(torch.from_numpy(data.data).float(), split.visible_labels(truth), truth)


def cifar(path: Path, seed: int) -> Problem:
    data = np.load(path)
    truth = torch.from_numpy(data["y"]).long()
    split = make_split(truth, SplitConfig(num_seen=50, seed=seed), num_data_classes=100)
    return Problem(torch.from_numpy(data["x"]).float(), split.visible_labels(truth), truth)


def photos(folder: Path) -> Problem:
    from opencon.encoders.pretrained import open_encoder
    from opencon.photos.features import VIEWS_FOR_STEPS, Extractor, FeatureSettings, photo_features

    with (folder / "truth.csv").open() as file:
        truth = {row["file"]: row["class"] for row in csv.DictReader(file)}
    seen = sorted(path.name for path in (folder / "labeled").iterdir())
    names = seen + sorted(set(truth.values()) - set(seen))
    paths = [(p, names.index(c), names.index(c)) for c in seen for p in sorted((folder / "labeled" / c).iterdir())]
    paths += [(folder / "unlabeled" / file, -1, names.index(c)) for file, c in sorted(truth.items())]
    settings = FeatureSettings(num_views=VIEWS_FOR_STEPS)
    extractor = Extractor(open_encoder(settings.encoder), settings, CPU)
    found = photo_features([p for p, _, _ in paths], extractor, cache=None)
    labels, classes = (torch.tensor([paths[i][k] for i in found.kept]) for k in (1, 2))
    return Problem(found.plain, labels, classes, found.views)


# --- what one would type first ----------------------------------------------------------------------------------------


def plain_kmeans(p: Problem, num_classes: int, seed: int) -> Tensor:
    return torch.from_numpy(KMeans(num_classes, n_init=10, random_state=seed).fit_predict(p.x.numpy())).long()


def semi_supervised(p: Problem, num_classes: int, seed: int) -> Tensor:
    stream = generator(CPU, seed)
    return kmeans(p.x, num_classes, labels=p.labels, num_seen=p.num_seen, generator=stream).assignment


def group_the_rest(p: Problem, classes: np.ndarray, is_sure: np.ndarray, num_classes: int, seed: int) -> Tensor:
    """Rows that no seen class is sure of go to k-means."""
    num_novel = min(num_classes - p.num_seen, int((~is_sure).sum()))
    if num_novel:
        groups = KMeans(num_novel, n_init=10, random_state=seed).fit_predict(p.x.numpy()[~is_sure])
        classes[~is_sure] = p.num_seen + groups
    return torch.from_numpy(classes).long()


def self_training(p: Problem, num_classes: int, seed: int) -> Tensor:
    x = StandardScaler().fit_transform(p.x.numpy())
    model = SelfTrainingClassifier(LogisticRegression(max_iter=200), threshold=0.75).fit(x, p.labels.numpy())
    return group_the_rest(p, model.predict(x), model.labeled_iter_ >= 0, num_classes, seed)


def label_spreading(p: Problem, num_classes: int, seed: int) -> Tensor:
    x = StandardScaler().fit_transform(p.x.numpy())
    model = LabelSpreading(kernel="knn", n_neighbors=7).fit(x, p.labels.numpy())
    return group_the_rest(
        p, model.transduction_.copy(), model.label_distributions_.max(axis=1) > 0.75, num_classes, seed
    )


def hdbscan(p: Problem, num_classes: int, seed: int) -> Tensor:
    return torch.from_numpy(HDBSCAN(min_cluster_size=10, copy=True).fit_predict(p.x.numpy()) + 1).long()


def ours(num_novel: int | None, steps: int = 0) -> Callable[[Problem, int, int], Tensor]:
    def run(p: Problem, num_classes: int, seed: int) -> Tensor:
        config = OpenWorldConfig(num_novel=num_novel, seed=seed, steps=steps)
        return fit_features(p.x, p.labels, config, views=p.views).prediction.classes

    return run


def contenders(p: Problem) -> Iterator[tuple[str, str, int, Callable[[Problem, int, int], Tensor]]]:
    """Name, what is known of the number, the number of classes, and how to run it."""
    known, doubled = p.num_classes, 2 * p.num_classes
    yield "opencon", "known", known, ours(known - p.num_seen)
    yield "opencon, 100 steps", "known", known, ours(known - p.num_seen, steps=100)
    yield "k-means", "known", known, plain_kmeans
    yield "semi-supervised k-means", "known", known, semi_supervised
    yield "self-training + k-means", "known", known, self_training
    yield "label spreading + k-means", "known", known, label_spreading
    yield "opencon", "unknown", known, ours(None)
    if len(p.x) <= QUADRATIC:
        yield "HDBSCAN", "unknown", known, hdbscan
    yield "opencon", "doubled", doubled, ours(doubled - p.num_seen)
    yield "k-means", "doubled", doubled, plain_kmeans
    yield "semi-supervised k-means", "doubled", doubled, semi_supervised


def takes_minutes(name: str, number: str) -> bool:
    """On 50,000 rows."""
    return number == "doubled" or name in ("self-training + k-means", "label spreading + k-means")


def measure(
    title: str, make: Callable[[int], Problem], seeds: range, *, short: bool = False
) -> list[dict[str, object]]:
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in seeds:
        p = make(seed)
        rows = p.labels < 0
        for name, number, num_classes, run in contenders(p):
            if short and takes_minutes(name, number):
                continue
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # convergence of the baselines
                classes = run(p, num_classes, seed)
            seconds = time.process_time() - start
            got = open_world_accuracy(classes[rows], p.truth[rows], num_seen=p.num_seen, protocol="gcd")
            record = {"all": got.all, "seen": got.seen, "novel": got.novel, "groups": len(classes.unique())}
            runs.setdefault((name, number), []).append(record | {"cpu_seconds": seconds})
    table = []
    print(f"\n{title}, {len(seeds)} seeds")
    for (name, number), records in runs.items():
        row: dict[str, object] = {"data": title, "name": name, "number": number, "n": len(records)}
        for key in records[0]:
            row[key] = spread([r[key] for r in records])
        table.append(row)
        shown = "  ".join(
            f"{key} {100 * row[key]['mean']:5.1f} ± {100 * row[key]['std']:4.1f}"  # type: ignore[index]
            for key in ("all", "seen", "novel")
        )
        groups, seconds = row["groups"]["mean"], row["cpu_seconds"]["mean"]  # type: ignore[index]
        print(f"{number:>8}  {name:<26} {shown}  {groups:5.1f} groups  {seconds:6.1f} s", flush=True)
    return table


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--photos", type=Path)
    benchmark.add_argument("--cifar", type=Path)
    benchmark.add_argument("--seeds", type=int, default=5)
    benchmark.add_argument(
        "--cifar-all", action="store_true", help="two of its baselines take a quarter of an hour each"
    )
    benchmark.add_argument("--cifar-seeds", type=int, default=2)
    args = benchmark.begin()
    seeds = range(2 if args.quick else args.seeds)
    table = measure("digits, 64 pixels", digits, seeds)
    if args.photos is not None and not args.quick:
        found = photos(args.photos)
        table += measure("photos, efficientnet_lite0", lambda seed: found, seeds)
    if args.cifar is not None and not args.quick:
        title, few = "CIFAR-100, SimCLR ResNet-18", range(args.cifar_seeds)
        table += measure(title, lambda seed: cifar(args.cifar, seed), few, short=not args.cifar_all)
    result = {"protocol": "gcd", "on": "unlabeled", "table": table}
    benchmark.save(result, CPU)


if __name__ == "__main__":
    main()
