"""Seconds per epoch of recipes, one after the other with nothing beside them.

python benchmarks/epoch.py cifar100 --epochs 8 [--set train.capture=false] [--profile] [--quick]
python benchmarks/epoch.py orca/cifar100 gcd/cifar100 --data FOLDER --weights FILE

Without --data the images are made up, of the right shape: the speed of a step does not depend on what they show. Clustering
before an epoch does, so methods that do it want --data and --weights, and more --epochs than come before the first.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch

from made_up import made_up
from measure import Benchmark, settings
from opencon.config import with_settings
from opencon.data.benchmarks import load_dataset
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import MEASURED_STEPS
from opencon.experiments.workbench import assemble, build_loader
from opencon.runtime import pick_device
from opencon.training.optimizer import build_optimizer
from opencon.training.trainer import fit

# Kernels by what they do; the first pattern that a name contains counts.
KINDS = {
    "convolution, forward": ("fprop", "implicit_convolve"),
    "convolution, gradient of the input": ("dgrad",),
    "convolution, gradient of the weights": ("wgrad",),
    "batch norm, ReLU and additions": (
        *("batch_norm", "threshold_backward", "relu"),
        *("_statistics", "_normalize", "_gradient_sums", "_gradient"),
    ),
    "convolution, of a kind its name does not tell": ("ImplicitGemmConvolution",),
    "matrix products": ("gemm", "cutlass", "bmm", "gemv", "splitK"),
    "views, and what else is compiled": ("triton_", "_views"),
}


def by_kind(profiler: torch.profiler.profile) -> dict[str, float]:
    """Milliseconds on the device by kind of kernel."""
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.self_device_time_total > 0 and event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((k for k, parts in KINDS.items() if any(p in event.key for p in parts)), "everything else")
            found[kind] = found.get(kind, 0.0) + event.self_device_time_total / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measure(recipe: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train for a few epochs."""
    start = time.perf_counter()
    config = with_settings(get_recipe(recipe), [f"train.epochs={args.epochs}", *settings(args)])
    dataset = load_dataset(config.data) if args.data else made_up(config.data.name, num_images=args.num_train)
    bench = assemble(config, dataset, device)
    loader, optimizer = build_loader(bench), build_optimizer(bench.method, config.train)
    measuring = time.perf_counter()
    bench.method.embedder.measure_frozen(loader.first_views(MEASURED_STEPS))
    bench.method.embedder.fold_frozen()
    if device.type == "cuda":
        torch.cuda.synchronize()
    measuring = time.perf_counter() - measuring
    torch.backends.cudnn.benchmark = not args.no_cudnn_benchmark
    profiler = torch.profiler.profile() if args.profile else None
    ends: list[float] = []

    def on_epoch(epoch: int, means: dict[str, float]) -> None:
        ends.append(time.perf_counter())  # means() has waited for the device
        if profiler and epoch == args.epochs - 2:
            profiler.start()

    began = time.perf_counter()
    fit(
        bench.method,
        optimizer,
        loader,
        config.train,
        features=bench.bank,
        scaler=torch.amp.GradScaler(device.type, enabled=False),
        on_epoch=on_epoch,
    )
    if profiler:
        profiler.stop()
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70))
    seconds = [b - a for a, b in zip([began, *ends], ends, strict=False)]
    steady = seconds[2:] if len(seconds) > 2 else seconds[-1:]
    evaluate = time.perf_counter()
    bench.score("unlabeled", "orca")
    evaluate = time.perf_counter() - evaluate
    row = {
        "recipe": recipe,
        "settings": args.settings,
        "steps_per_epoch": len(loader),
        "images_per_step": config.train.batch_size,
        "prepare_seconds": began - start,
        "measure_seconds": measuring,  # of these, for the statistics of the frozen part
        "first_epoch_seconds": seconds[0],
        "steady_seconds": statistics.median(steady),
        "steady_min": min(steady),
        "steady_max": max(steady),
        "n": len(steady),
        "evaluate_seconds": evaluate,
        "profile_ms": by_kind(profiler) if profiler else None,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
    }
    print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in row.items()}, flush=True)
    return row


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("recipes", nargs="+", metavar="recipe")
    benchmark.add_settings()
    benchmark.add_argument("--epochs", type=int, default=8)
    benchmark.add_argument("--num-train", type=int)
    benchmark.add_argument("--profile", action="store_true")
    benchmark.add_argument("--no-cudnn-benchmark", action="store_true")
    args = benchmark.begin()
    if args.data and args.num_train:
        benchmark.error("--num-train is for made-up images")
    if args.profile and args.epochs < 2:
        benchmark.error("--profile takes at least two epochs: the last one is profiled")
    if args.quick:
        args.epochs, args.num_train = 2, args.num_train or 2048
    device = pick_device()
    for recipe in args.recipes:
        benchmark.save(measure(recipe, args, device), device)
        torch.compiler.reset()
        gc.collect()  # a compiled method and its object hold each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
