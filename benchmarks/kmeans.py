"""Our k-means against scikit-learn's and, where it is installed, FAISS's: seconds and inertia on the same data.

python benchmarks/kmeans.py [--quick] [--threads 2] [--repeats 1]

The data: a mixture of Gaussians around K directions, every feature i scaled by i^-1/2 (as embeddings are: few strong
directions, many weak ones), put on the unit sphere; `spread` is the deviation within a class over the one between class
means. At 0.7 the classes hardly touch, at 1.0 they do, at 1.5 k-means has an NMI of about 0.7 as on CIFAR-100 embeddings.
Contenders take turns, with the same number of threads; a table row is the median over the repeats.

Ours and scikit-learn's do the same work: as many starts by greedy k-means++, Lloyd until the same tolerance, the best kept.
FAISS has no tolerance and no k-means++: 25 iterations (its default) from random rows. Semi-supervised: half of the classes
are seen and half of their rows labeled, so a part cannot change; its inertia counts every row at its nearest center.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits
from torch import Tensor

from measure import Benchmark
from opencon.cluster.kmeans import inertia, kmeans, nearest
from opencon.runtime import generator, pick_device

MAX_ITERATIONS = 300  # scikit-learn's default; no start here needs as many
CPU = torch.device("cpu")


def mixture(rows: int, features: int, clusters: int, spread: float) -> tuple[Tensor, Tensor]:
    stream = generator(CPU, 0)
    scale = torch.arange(1, features + 1).pow(-0.5)
    means = torch.randn(clusters, features, generator=stream) * scale
    classes = torch.randint(0, clusters, (rows,), generator=stream)
    x = F.normalize(means[classes] + spread * scale * torch.randn(rows, features, generator=stream), dim=1)
    is_labeled = (classes < clusters // 2) & (torch.rand(rows, generator=stream) < 0.5)
    return x, torch.where(is_labeled, classes, -1)


def ours(x: Tensor, labels: Tensor, clusters: int, starts: int, seed: int, device: torch.device = CPU) -> Tensor:
    how = {"num_starts": starts, "max_iterations": MAX_ITERATIONS, "generator": generator(CPU, seed)}
    return kmeans(x.to(device), clusters, **how).centers.cpu()


def semi_supervised(
    x: Tensor, labels: Tensor, clusters: int, starts: int, seed: int, device: torch.device = CPU
) -> Tensor:
    """Half of the classes are seen, half of their rows labeled."""
    how = {"num_starts": starts, "max_iterations": MAX_ITERATIONS, "generator": generator(CPU, seed)}
    return kmeans(x.to(device), clusters, labels=labels, num_seen=clusters // 2, **how).centers.cpu()


def scikit_learn(x: Tensor, labels: Tensor, clusters: int, starts: int, seed: int) -> Tensor:
    found = KMeans(clusters, n_init=starts, max_iter=MAX_ITERATIONS, tol=1e-4, random_state=seed).fit(x.numpy())
    return torch.from_numpy(found.cluster_centers_)


def faiss(x: Tensor, labels: Tensor, clusters: int, starts: int, seed: int) -> Tensor:
    import faiss as package

    package.omp_set_num_threads(torch.get_num_threads())
    found = package.Kmeans(x.shape[1], clusters, niter=25, nredo=starts, seed=seed, max_points_per_centroid=len(x))
    found.train(x.numpy())
    return torch.from_numpy(found.centroids)


def contenders(only: str) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {
        "opencon": ours,
        "opencon, semi-supervised": semi_supervised,
        "scikit-learn": scikit_learn,
    }
    if importlib.util.find_spec("faiss"):
        found["faiss"] = faiss
    if torch.cuda.is_available():
        found["opencon, GPU"] = lambda *args: ours(*args, device=pick_device())
        found["opencon, semi-supervised, GPU"] = lambda *args: semi_supervised(*args, device=pick_device())
    return {name: run for name, run in found.items() if only in name}


def measure(
    name: str, x: Tensor, labels: Tensor, clusters: int, starts: int, repeats: int, only: str = ""
) -> list[dict[str, Any]]:
    taken: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(repeats):
        for contender, run in contenders(only).items():
            wall, cpu = time.perf_counter(), time.process_time()
            centers = run(x, labels, clusters, starts, seed)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            taken.setdefault(contender, []).append((wall, cpu, inertia(x, centers, nearest(x, centers))))
    rows = []
    for contender, results in taken.items():
        wall, cpu, found = (statistics.median(column) for column in zip(*results, strict=True))
        base_wall, base_cpu, base_found = (
            statistics.median(column) for column in zip(*taken.get("scikit-learn", results), strict=True)
        )
        row = {
            "data": name,
            "shape": [*x.shape, clusters, starts],
            "contender": contender,
            "seconds": wall,
            "cpu_seconds": cpu,
            "times_faster": base_wall / wall,
            "times_less_cpu": base_cpu / cpu,
            "inertia": found,
            "inertia_over_scikit_learn": found / base_found,
            "all": results,
        }
        rows.append(row)
        print(
            f"{name:14} {contender:29} {wall:9.2f} s {cpu:9.2f} s {base_wall / wall:8.2f} x {base_cpu / cpu:8.2f} x"
            f" {found:13.1f} {100 * (found / base_found - 1):+8.2f} %",
            flush=True,
        )
    return rows


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--rows", type=int, default=50_000)
    benchmark.add_argument("--features", type=int, default=512)
    benchmark.add_argument("--clusters", type=int, default=100)
    benchmark.add_argument("--starts", type=int, default=10)
    benchmark.add_argument("--spreads", type=float, nargs="*", default=[0.7, 1.0, 1.5])
    benchmark.add_argument("--threads", type=int, default=2)
    benchmark.add_argument("--repeats", type=int, default=1)
    benchmark.add_argument("--only", default="", help="contenders whose name contains this")
    args = benchmark.begin()
    if args.quick:
        args.rows, args.features, args.clusters, args.starts = 5_000, 64, 20, 3
    torch.set_num_threads(args.threads)
    print(f"{'data':14} {'':29} {'wall':>11} {'CPU':>11} {'wall':>10} {'CPU':>10} {'inertia':>13} {'':>10}")
    rows = []
    with threadpool_limits(args.threads):
        found = load_digits()
        digits, classes = torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)
        labels = torch.where((classes < 5) & (torch.arange(len(classes)) % 2 == 0), classes, -1)
        measure("warming up", digits, labels, 10, 1, 1, args.only)
        rows += measure("digits", digits, labels, 10, args.starts, max(args.repeats, 5), args.only)
        for spread in args.spreads:
            x, labels = mixture(args.rows, args.features, args.clusters, spread)
            rows += measure(f"mixture {spread}", x, labels, args.clusters, args.starts, args.repeats, args.only)
    benchmark.save({"threads": args.threads, "repeats": args.repeats, "rows": rows}, pick_device())


if __name__ == "__main__":
    main()
