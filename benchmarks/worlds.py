"""Piles of every kind: does opencon find the classes where their number, their sizes and most labels are unknown.

python benchmarks/worlds.py --data FOLDER [--cifar FOLDER --weights FILE] [--cache FOLDER] [--part reported]
    [--draws 1] [--only WORD] [--quick]

A scenario is a pile drawn by seed: some classes of one source, with equal, Zipf (1, 1/2, 1/3, ...) or extreme sizes (a class
has 40 times the rows of another), some of them seen, with a few labels each; sometimes with strangers (one or two rows each
of classes that are not in the pile) and twins (a fifth of the rows once more, nearly the same); sometimes no unlabeled row
is of a seen class ("absent").

Sources: photos in FOLDER/worlds (flowers, birds, things) and FOLDER/photos, features of efficientnet_lite0; scikit-learn's
digits; docstrings of installed packages, by subpackage, TF-IDF and SVD; with --cifar the 10,000 test images of CIFAR-100,
features of a ResNet-18 that SimCLR has trained on the others (--weights; minutes on a CPU, then they are in the cache).
Each source is cut in two by class: numbers are chosen on the scenarios of the development part alone (even classes), and
what is said of opencon is said of the reported part (odd classes, other seeds). With --draws each development scenario is
drawn several times, by other seeds: a few dozen piles are too few to choose by.

Measured on unlabeled rows that are no strangers: All (accuracy, protocol gcd, one matching over everything), the number of
classes found, whether its interval holds the truth, seconds, and by how much All differs over three seeds. The baselines are
in worlds_baselines.py; some of them are told the true number. They are computed once and kept in the cache.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor

from measure import Benchmark
from opencon.metrics import open_world_accuracy
from opencon.openworld.fit import OpenWorldConfig, fit_features
from worlds_baselines import BASELINES, UMAP_NAME, best_of

CPU = torch.device("cpu")
WORLDS = {"flowers": None, "birds": None, "things": 128}  # side in pixels; things are 64 pixels small
PACKAGES = ("networkx", "numpy", "scipy", "sklearn", "sympy", "torch")  # all that opencon or torch depends on
LEAST_WORDS, LEAST_TEXTS, MOST_TEXTS = 30, 40, 200  # of a docstring, and docstrings of a subpackage
TEXT_DIMS = 256
EXTREME = (1.0, 0.5, 0.225, 0.125, 0.0625, 0.025)  # 400, 200, 90, 50, 25, 10; further classes begin again
FEWEST = 4  # rows of the smallest class
TWINS, TWIN_NOISE = 0.2, 0.02  # share of the rows, and noise in standard deviations of a feature
SEEDS = 3  # of each fit
NEXT_DRAW = 10_000  # seeds from one draw of the scenarios to the next
STRANGERS = 12  # classes of which one or two rows are in the pile


@dataclass(frozen=True)
class Design:
    """What a pile is drawn by."""

    source: str
    num_classes: int
    sizes: str = "equal"
    seen: float = 0.5  # share of the classes
    labels: int = 20  # of each seen class; half of its rows at most
    rows: int = 0  # of the largest class; 0: all there are
    strangers: bool = False
    twins: bool = False
    absent: bool = False  # seen classes have labeled rows only

    @property
    def name(self) -> str:
        extra = "".join(f" +{word}" for word in ("strangers", "twins", "absent") if getattr(self, word))
        what = f"{round(self.seen * self.num_classes)} seen x{self.labels}" if self.seen and self.labels else "no label"
        return f"{self.source} {self.num_classes} {self.sizes} {what}{extra}"


@dataclass(frozen=True)
class Pile:
    """A scenario. Classes are numbered with the seen ones first; a stranger's class is -1."""

    name: str
    x: Tensor  # (M, F)
    labels: Tensor  # (M,) -1 where unlabeled
    truth: Tensor  # (M,) -1 for strangers
    num_seen: int
    num_classes: int
    seed: int

    def accuracy(self, classes: Tensor) -> float:
        rows = (self.labels < 0) & (self.truth >= 0)
        found = open_world_accuracy(classes[rows], self.truth[rows], num_seen=self.num_seen, protocol="gcd")
        return 100 * found.all


# "photos" has 6 classes in each part, digits 5, the worlds 20 each, all of them together 66, texts 42.
DESIGNS = (
    Design("flowers", 20, seen=0.5, labels=20),
    Design("flowers", 20, seen=0.0, labels=0),
    Design("flowers", 12, "zipf", seen=0.5, labels=5),
    Design("flowers", 8, "extreme", seen=0.25, labels=5),
    Design("flowers", 16, seen=0.25, labels=1, twins=True),
    Design("flowers", 6, seen=1.0, labels=5, strangers=True),
    Design("birds", 20, seen=0.5, labels=20),
    Design("birds", 20, seen=0.25, labels=5),
    Design("birds", 10, "zipf", seen=0.5, labels=5),
    Design("birds", 10, seen=0.0, labels=0),
    Design("birds", 12, seen=1.0, labels=5),
    Design("things", 6, "extreme", seen=0.5, labels=20),
    Design("things", 6, "extreme", seen=0.5, labels=5),
    Design("things", 6, "extreme", seen=0.0, labels=0),
    Design("things", 10, seen=0.2, labels=5),
    Design("things", 10, seen=0.0, labels=0, strangers=True),
    Design("things", 20, "zipf", seen=0.5, labels=20, strangers=True),
    Design("things", 20, seen=0.5, labels=20),
    Design("things", 2, seen=0.5, labels=5),
    Design("things", 12, "zipf", seen=0.25, labels=1, twins=True),
    Design("photos", 6, seen=0.5, labels=20),
    Design("photos", 6, "extreme", seen=0.5, labels=5, strangers=False),
    Design("photos", 5, seen=0.0, labels=0),
    Design("every photo", 40, seen=0.5, labels=20, rows=45),
    Design("every photo", 60, seen=0.5, labels=5, rows=45),
    Design("every photo", 24, "zipf", seen=0.25, labels=5),
    Design("every photo", 30, "extreme", seen=0.5, labels=20, strangers=True, twins=True),
    Design("digits", 5, seen=0.4, labels=20),
    Design("digits", 5, "extreme", seen=0.4, labels=5),
    Design("digits", 5, seen=0.0, labels=0),
    Design("text", 12, seen=0.5, labels=20),
    Design("text", 8, "zipf", seen=0.5, labels=5),
    Design("text", 30, "zipf", seen=0.5, labels=20, rows=100),
    Design("flowers", 10, seen=0.5, labels=5, absent=True),
    Design("things", 8, "zipf", seen=0.25, labels=20, absent=True),
    Design("birds", 5, seen=0.2, labels=1),
    Design("every photo", 12, "extreme", seen=0.0, labels=0, twins=True),
    Design("photos", 2, seen=1.0, labels=1),
    Design("flowers", 4, "extreme", seen=0.25, labels=20),
    Design("text", 20, seen=1.0, labels=20, rows=60),
    Design("things", 16, seen=0.5, labels=1, rows=60, strangers=True),
)
WITH_CIFAR = (
    Design("cifar", 50, seen=0.5, labels=20),
    Design("cifar", 10, seen=0.2, labels=5),
    Design("cifar", 20, "zipf", seen=0.5, labels=20),
)


class Sources:
    """Rows and classes by name, computed once."""

    def __init__(self, data: Path, cache: Path, cifar: tuple[Path, Path] | None) -> None:
        self.data, self.cache, self.cifar = data, cache, cifar
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        """(M, F) and (M,)."""
        if name not in self._kept:
            path = self.cache / f"{name}.pt"
            if name == "every photo":
                parts = [self[part] for part in (*WORLDS, "photos")]
                # Each part begins with an even class, so that the two halves of all are those of the parts.
                firsts = np.cumsum([0, *(-(-(int(y.max()) + 1) // 2) * 2 for _, y in parts)])
                shifted = [y + int(first) for (_, y), first in zip(parts, firsts, strict=False)]
                self._kept[name] = torch.cat([x for x, _ in parts]), torch.cat(shifted)
            elif path.is_file():
                self._kept[name] = torch.load(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._kept[name] = self._compute(name)
                torch.save(self._kept[name], path)
        return self._kept[name]

    def _compute(self, name: str) -> tuple[Tensor, Tensor]:
        if name == "digits":
            digits = load_digits()
            return torch.from_numpy(digits.data).float(), torch.from_numpy(digits.target).long()
        if name == "text":
            return texts()
        if name == "cifar":
            assert self.cifar is not None
            return cifar(*self.cifar)
        files = photos_of(self.data / "photos") if name == "photos" else world_of(self.data / "worlds" / name)
        names = sorted({word for _, word in files})
        classes = torch.tensor([names.index(word) for _, word in files])
        return self._features([path for path, _ in files], WORLDS.get(name)), classes

    def _features(self, paths: list[Path], size: int | None) -> Tensor:
        from opencon.encoders.pretrained import open_encoder
        from opencon.photos.features import Extractor, FeatureSettings, photo_features

        settings = FeatureSettings(image_size=size, num_views=0)
        extractor = Extractor(open_encoder(settings.encoder, size), settings, CPU)
        found = photo_features(paths, extractor, cache=self.cache / "photos")
        assert not found.problems, found.problems
        return found.plain


def world_of(folder: Path) -> list[tuple[Path, str]]:
    return [(path, path.parent.name) for path in sorted(folder.glob("*/*"))]


def photos_of(folder: Path) -> list[tuple[Path, str]]:
    with (folder / "truth.csv").open() as file:
        unlabeled = [(folder / "unlabeled" / row["file"], row["class"]) for row in csv.DictReader(file)]
    return [*world_of(folder / "labeled"), *unlabeled]


def cifar(folder: Path, weights: Path) -> tuple[Tensor, Tensor]:
    """The test images of CIFAR-100 in front of the head of a pre-trained encoder."""
    from opencon.config import with_settings
    from opencon.data.augment import plain_view
    from opencon.data.benchmarks import load_dataset
    from opencon.encoders import build_embedder
    from opencon.experiments.recipes import get_recipe
    from opencon.training.embedding import embed_images

    config = with_settings(get_recipe("kmeans/cifar100"), [f"data.root={folder}", f"encoder.weights={weights}"])
    test = load_dataset(config.data).held_out()
    embedder = build_embedder(config.encoder, in_channels=3, image_size=32, precision="fp32", projects=False)
    assert isinstance(test.images, Tensor)
    return embed_images(embedder, embedder.features, test.images, lambda part: plain_view(part, 32)), test.classes


def texts() -> tuple[Tensor, Tensor]:
    """Docstrings by subpackage, in the main directions of their words."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    found: dict[str, list[str]] = {}
    for module, text in docstrings():
        found.setdefault(module, []).append(text)
    kept = {module: sorted(set(of)) for module, of in sorted(found.items()) if len(set(of)) >= LEAST_TEXTS}
    rng = np.random.default_rng(0)
    lines, classes = [], []
    for number, of in enumerate(kept.values()):
        lines += [of[i] for i in sorted(rng.permutation(len(of))[:MOST_TEXTS])]
        classes += [number] * min(len(of), MOST_TEXTS)
    words = TfidfVectorizer(stop_words="english", min_df=3, max_df=0.3, sublinear_tf=True).fit_transform(lines)
    x = TruncatedSVD(TEXT_DIMS, random_state=0).fit_transform(words)
    return torch.from_numpy(x).float(), torch.tensor(classes)


def docstrings() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            if not {"tests", "testing", "externals", "_vendor"}.isdisjoint(parts):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old escapes in strings
                tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
                if text and len(text.split()) >= LEAST_WORDS:
                    yield ".".join(parts[:2]), text


# --- drawing a pile ---------------------------------------------------------------------------------------------------


def shares(sizes: str, num_classes: int) -> list[float]:
    """Rows of each class, as a share of those of the largest."""
    if sizes == "equal":
        return [1.0] * num_classes
    if sizes == "zipf":
        return [1 / (i + 1) for i in range(num_classes)]
    return [EXTREME[i % len(EXTREME)] for i in range(num_classes)]


def draw(design: Design, sources: Sources, part: str, seed: int) -> Pile:
    """Even classes for the development part, odd ones for the reported part; "both" takes all."""
    x, y = sources[design.source]
    rng = np.random.default_rng([seed, ["development", "reported", "both"].index(part)])
    available = [
        c for c in np.unique(y.numpy()).tolist() if part == "both" or c % 2 == ("development", "reported").index(part)
    ]
    drawn = rng.permutation(available)
    inside, outside = drawn[: design.num_classes].tolist(), drawn[design.num_classes :].tolist()
    rows_of = {c: rng.permutation((y == c).nonzero()[:, 0].numpy()) for c in inside + outside}
    largest = max(len(rows_of[c]) for c in inside)
    largest = min(largest, design.rows or largest)
    share = rng.permutation(shares(design.sizes, design.num_classes))
    num_seen = round(design.seen * design.num_classes) if design.labels else 0
    rows: list[NDArray[Any]] = []
    truth: list[int] = []
    labels: list[int] = []
    for name, c in enumerate(inside):  # the classes were drawn at random, so the first ones may be the seen ones
        own = rows_of[c][: max(FEWEST, round(share[name] * largest))]
        named = min(design.labels, len(own) // 2) if name < num_seen else 0
        own = own[:named] if design.absent and named else own
        rows.append(own)
        truth += [name] * len(own)
        labels += [name] * named + [-1] * (len(own) - named)
    if design.strangers:
        for c in outside[:STRANGERS]:
            own = rows_of[c][: 1 + int(rng.integers(2))]
            rows.append(own)
            truth += [-1] * len(own)
            labels += [-1] * len(own)
    pile, of, given = x[np.concatenate(rows)], np.array(truth), np.array(labels)
    if design.twins:
        again = rng.permutation(len(of))[: round(TWINS * len(of))]
        noise = torch.from_numpy(rng.standard_normal((len(again), x.shape[1]))).float()
        pile = torch.cat([pile, pile[again] + TWIN_NOISE * pile.std(dim=0) * noise])
        of, given = np.concatenate([of, of[again]]), np.concatenate([given, np.full(len(again), -1)])
    order = rng.permutation(len(of))
    name = f"{part} {design.name}"
    return Pile(
        name,
        pile[order],
        torch.from_numpy(given[order]),
        torch.from_numpy(of[order]),
        num_seen,
        design.num_classes,
        seed,
    )


def piles(sources: Sources, part: str, only: str = "", draws: int = 1) -> Iterator[Pile]:
    """The scenarios of a part whose name has the word `only`, each drawn so many times; no seed comes twice."""
    designs = DESIGNS + (WITH_CIFAR if sources.cifar is not None else ())
    first = 0 if part == "development" else 1000
    firsts = [first + NEXT_DRAW * again for again in range(draws)]
    drawn = [(design, part, first + number) for first in firsts for number, design in enumerate(designs)]
    if part == "reported":  # more classes than one half has: some of them are in the development part as well
        drawn.append((Design("every photo", 80, seen=0.5, labels=5, rows=45), "both", 2000))
    yield from (draw(design, sources, of, seed) for design, of, seed in drawn if only in f"{of} {design.name}")


# --- measuring --------------------------------------------------------------------------------------------------------


def ours(pile: Pile) -> dict[str, Any]:
    """The result with the pile's own seed, and All with the others."""
    found = [fitted(pile, pile.seed + i) for i in range(SEEDS)]
    return found[0] | {"of_seeds": [one["all"] for one in found]}


def fitted(pile: Pile, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        found = fit_features(pile.x, pile.labels, OpenWorldConfig(seed=seed))
    except Exception as err:  # what is refused counts as nothing found
        return {"all": 0.0, "found": 0, "low": 0, "high": 0, "holds": False, "error": str(err), "seconds": 0.0}
    assert found.count is not None
    return result(pile, found.prediction.classes, found.count.low, found.count.high, start)


def result(pile: Pile, classes: Tensor, low: int, high: int, start: float) -> dict[str, Any]:
    seconds = time.perf_counter() - start
    found = len(torch.cat([classes, torch.arange(pile.num_seen)]).unique())
    return {
        "all": pile.accuracy(classes),
        "found": found,
        "low": low,
        "high": high,
        "holds": low <= pile.num_classes <= high,
        "seconds": seconds,
    }


def baselines(pile: Pile, cache: Path) -> dict[str, float]:
    """All of each baseline, the better of raw and PCA features; kept in the cache."""
    path = cache / "baselines" / f"{pile.name} {pile.seed}.json"
    kept: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
    for name, run in BASELINES.items():
        if name not in kept:
            kept[name] = best_of(run, pile)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kept, indent=1))
    return kept


def measure(pile: Pile, cache: Path, run: Callable[[Pile], dict[str, Any]]) -> dict[str, Any]:
    others = baselines(pile, cache)
    others = {name: value for name, value in others.items() if value is not None}
    best = max(others, key=lambda name: others[name])
    record = {"name": pile.name, "rows": len(pile.x), "classes": pile.num_classes, "seed": pile.seed}
    return record | run(pile) | {"best_baseline": best, "best": others[best], "baselines": others}


def show(record: dict[str, Any]) -> None:
    holds = "in" if record["holds"] else "not in"
    print(
        f"{record['name']:55} {record['rows']:5} rows  All {record['all']:5.1f}  best {record['best']:5.1f} "
        f"({record['best_baseline']:22})  {record['found']:3} of {record['classes']:2} {holds} "
        f"{record['low']}-{record['high']}  {record['seconds']:5.1f} s",
        flush=True,
    )


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in records[0]["baselines"] if all(name in r["baselines"] for r in records)]
    means = {name: statistics.mean(r["baselines"][name] for r in records) for name in names}
    off = [abs(r["found"] - r["classes"]) / r["classes"] for r in records]
    worst = min(records, key=lambda r: r["all"] - r["best"])
    with_labels = [r for r in records if "semi-supervised, told" in r["baselines"]]
    equal = [o for o, r in zip(off, records, strict=True) if " equal " in r["name"]]
    return {
        "scenarios": len(records),
        "mean_all": statistics.mean(r["all"] for r in records),
        "mean_best_baseline_each": statistics.mean(r["best"] for r in records),
        "mean_of_each_baseline": means,
        "best_told": best_told(records),
        "with_labels": {
            "scenarios": len(with_labels),
            "mean_all": statistics.mean(r["all"] for r in with_labels),
            "mean_semi_supervised_told": statistics.mean(r["baselines"]["semi-supervised, told"] for r in with_labels),
        },
        "worst": {"name": worst["name"], "loss": worst["best"] - worst["all"]},
        "within_5_points": statistics.mean(r["all"] >= r["best"] - 5 for r in records),
        "median_error_of_number": statistics.median(off),
        "number_within_20_percent": statistics.mean(o <= 0.2 for o in off),
        "equal_sizes": {
            "scenarios": len(equal),
            "median_error_of_number": statistics.median(equal),
            "number_within_20_percent": statistics.mean(o <= 0.2 for o in equal),
        },
        "interval_holds": statistics.mean(bool(r["holds"]) for r in records),
        "interval_ratio": statistics.median(r["high"] / max(r["low"], 1) for r in records),
        "median_spread_of_seeds": statistics.median(max(r["of_seeds"]) - min(r["of_seeds"]) for r in records),
        "seconds": sum(r["seconds"] for r in records),
    }


def best_told(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The best mean of a baseline that is told the number; where one needs labels that are not there, k-means stands in."""
    names = {name for r in records for name in r["baselines"] if name.endswith("told")}
    means = {
        name: statistics.mean(r["baselines"].get(name, r["baselines"]["k-means, told"]) for r in records)
        for name in sorted(names)
    }
    best = max(means, key=lambda name: means[name])
    return {"name": best, "all": means[best]}


def arguments(benchmark: Benchmark) -> argparse.Namespace:
    benchmark.add_argument("--data", type=Path, required=True, help="folder with worlds/ and photos/")
    benchmark.add_argument("--cifar", type=Path, help="folder with the files of CIFAR-100; needs --weights")
    benchmark.add_argument("--weights", type=Path, help="of a ResNet-18 that SimCLR has trained on CIFAR-100")
    benchmark.add_argument("--cache", type=Path, default=Path("/tmp/opencon-worlds"), help="of features and baselines")
    benchmark.add_argument("--part", default="reported", choices=("development", "reported"))
    benchmark.add_argument("--draws", type=int, default=1, help="of each scenario; only of the development part")
    benchmark.add_argument("--only", default="", help="scenarios whose name has this word")
    args = benchmark.begin()
    if args.draws != 1 and args.part == "reported":
        benchmark.error("--draws: the reported piles are drawn once. Choose by --part development.")
    if (args.cifar is None) != (args.weights is None):
        benchmark.error("--cifar and --weights belong together.")
    if args.cifar is None:
        print("No --cifar: its piles are left out.", file=sys.stderr)
    args.cifar = None if args.cifar is None else (args.cifar, args.weights)
    return args


def main() -> None:
    benchmark = Benchmark(__doc__)
    args = arguments(benchmark)
    if UMAP_NAME not in BASELINES:
        print(f"umap-learn is not installed: {UMAP_NAME} is left out. pip install 'opencon[bench]'", file=sys.stderr)
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    chosen = list(piles(Sources(args.data, args.cache, args.cifar), args.part, args.only, args.draws))
    records = []
    for pile in chosen[:: 8 if args.quick else 1]:
        records.append(measure(pile, args.cache, ours))
        show(records[-1])
    total = summary(records)
    print(json.dumps(total, indent=1))
    benchmark.save({"part": args.part, "protocol": "gcd", "on": "unlabeled", "summary": total, "table": records}, CPU)


if __name__ == "__main__":
    main()
