"""Semi-supervised k-means on the digits: greedy starts against plain ones, and against GCD's algorithm in plain loops.

python benchmarks/kmeans_starts.py [--quick] [--seeds 60]

Rows are the 64 pixels. Half of the images of the seen digits are labeled, as `opencon train kmeans/digits` splits
them. Three contenders run with the same seeds:

    greedy    `kmeans`: each center is the best of several candidates (greedy k-means++)
    plain     one candidate for each center, then the same Lloyd iterations
    loops     one candidate, and Lloyd in plain loops with the tolerance of GCD's released code, every row at every step;
              with ten starts at most

"usual" has 0 to 4 seen and one split, so that seeds differ in the starts alone. "drawn" draws five seen digits and the
labeled images anew for each seed. All: accuracy over unlabeled images, in percent; inertia: the sum over all images of the
squared distance to their center. "difference" is greedy minus plain, seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from measure import Benchmark, spread
from opencon.cluster.kmeans import Rows, inertia, kmeans, lloyd, nearest
from opencon.config import SplitConfig
from opencon.data.split import make_split
from opencon.metrics import open_world_accuracy
from opencon.runtime import generator

CPU = torch.device("cpu")
CLASSES, SEEN, ITERATIONS, TOLERANCE = 10, 5, 200, 1e-4


def plain_starts(x: Tensor, chosen: Tensor, starts: int, stream: torch.Generator) -> Tensor:
    """(R, K, D): every new center is one row, drawn in proportion to its squared distance to the nearest center so far."""
    found = []
    for _ in range(starts):
        centers = chosen
        while len(centers) < CLASSES:
            weight = torch.cdist(x, centers).square().amin(dim=1)
            centers = torch.cat([centers, x[torch.multinomial(weight, 1, generator=stream)]])
        found.append(centers)
    return torch.stack(found)


def greedy(x: Tensor, labels: Tensor, starts: int, seed: int) -> Tensor:
    group = partial(kmeans, num_starts=starts, max_iterations=ITERATIONS, generator=generator(CPU, seed))
    return group(x, CLASSES, labels=labels, num_seen=SEEN).assignment


def plain(x: Tensor, labels: Tensor, starts: int, seed: int) -> Tensor:
    rows = Rows.of(x, CLASSES, labels)
    begin = plain_starts(rows.x, means(x, labels), starts, generator(CPU, seed))
    ends = lloyd(rows, begin, max_iterations=ITERATIONS, tolerance=TOLERANCE * float(x.var(dim=0).mean()))
    best = ends.centers[int(ends.explained.argmax())]
    return torch.where(labels >= 0, labels, nearest(x, best))


def loops(x: Tensor, labels: Tensor, starts: int, seed: int) -> Tensor:
    free, best, least = x[labels < 0], labels, float("inf")
    for centers in plain_starts(free, means(x, labels), starts, generator(CPU, seed)):
        for _ in range(ITERATIONS):
            found = labels.clone()
            found[labels < 0] = torch.cdist(free, centers).argmin(dim=1)
            new = torch.stack([x[found == k].mean(dim=0) if (found == k).any() else centers[k] for k in range(CLASSES)])
            moved, centers = float((new - centers).norm(dim=1).sum()), new
            if moved**2 < TOLERANCE:
                break
        if (total := inertia(x, centers, found)) < least:
            best, least = found, total
    return best


def means(x: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([x[labels == k].mean(dim=0) for k in range(SEEN)])


CONTENDERS: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {"greedy": greedy, "plain": plain, "loops": loops}


def contenders(starts: int) -> list[str]:
    return [name for name in CONTENDERS if name != "loops" or starts <= 10]


def measure(x: Tensor, truth: Tensor, labels: Tensor, starts: int, seed: int) -> dict[str, tuple[float, float]]:
    """All and inertia of every contender."""
    found = {}
    for name in contenders(starts):
        groups = CONTENDERS[name](x, labels, starts, seed)
        centers = torch.stack([x[groups == k].mean(dim=0) for k in range(CLASSES)])
        free = labels < 0
        score = open_world_accuracy(groups[free], truth[free], num_seen=SEEN, protocol="orca").all
        found[name] = (100 * score, inertia(x, centers, groups))
    return found


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--seeds", type=int, default=60)
    benchmark.add_argument("--starts", type=int, nargs="*", default=[10, 100])
    args = benchmark.begin()
    if args.quick:
        args.seeds, args.starts = 3, [2]
    digits = load_digits()
    x, classes = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    rows = []
    for starts in args.starts:
        for data in ("usual", "drawn"):
            runs = []
            for seed in range(args.seeds):
                truth, split_seed = classes, 0
                if data == "drawn":  # the first five of a random order are seen
                    truth, split_seed = torch.randperm(CLASSES, generator=generator(CPU, seed))[classes], seed
                split = make_split(truth, SplitConfig(num_seen=SEEN, seed=split_seed), num_data_classes=CLASSES)
                runs.append(measure(x, truth, split.visible_labels(truth), starts, seed))
            row = {"data": data, "starts": starts}
            for name in contenders(starts):
                row[name] = {key: spread([run[name][i] for run in runs]) for i, key in enumerate(("all", "inertia"))}
            row["difference"] = {
                key: spread([run["greedy"][i] - run["plain"][i] for run in runs])
                for i, key in enumerate(("all", "inertia"))
            }
            rows.append(row)
            shown = [
                f"{name} {row[name]['all']['mean']:.2f} ({row[name]['inertia']['mean']:.3f})"
                for name in contenders(starts)
            ]
            print(f"{data} {starts:4}: {', '.join(shown)}", flush=True)
    benchmark.save({"seeds": args.seeds, "rows": rows}, CPU)


if __name__ == "__main__":
    main()
