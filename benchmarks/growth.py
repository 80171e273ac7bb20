"""How the time of a training step grows with the batch, the classes and the images, one at a time.

python benchmarks/growth.py [--quick] [--steps 20]

On a CPU: the digits recipe. On a GPU: the CIFAR-100 recipe, recorded as a CUDA graph but not compiled, which would take half
a minute for each size. Images are made up. Freed memory stays with the process, as in every command of `opencon`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from made_up import made_up
from measure import Benchmark
from opencon.cli.base import keep_memory
from opencon.config import with_settings
from opencon.experiments.recipes import get_recipe
from opencon.experiments.workbench import assemble, build_loader
from opencon.runtime import pick_device
from opencon.training.optimizer import build_optimizer
from opencon.training.trainer import Captured, TrainStep

BATCHES, CLASSES, IMAGES = (128, 256, 512, 1024, 2048), (10, 100, 1000), (5_000, 20_000, 50_000)


def step_ms(device: torch.device, *, batch: int, classes: int, images: int, steps: int) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    recipe = get_recipe("cifar100" if on_gpu else "digits")
    settings = [f"train.batch_size={batch}", f"split.num_seen={classes // 2}", "train.compile=false"]
    config = with_settings(recipe, settings)
    bench = assemble(config, made_up(recipe.data.name, num_images=images, num_classes=classes), device)
    bench.method.embedder.fold_frozen()
    loader, optimizer = build_loader(bench), build_optimizer(bench.method, config.train)
    step = TrainStep(bench.method, optimizer, loader, torch.amp.GradScaler(device.type, enabled=False), config.train)
    bench.method.train()
    advance = Captured(step) if on_gpu else step
    step.start_epoch(0, loader.draw(0))
    times = []
    for number in range(steps + 5):
        if number % len(loader) == 0:
            step.start_epoch(number // len(loader), loader.draw(number // len(loader)))
        began = time.perf_counter()
        advance()
        if on_gpu:
            torch.cuda.synchronize()
        if number >= 5:
            times.append(1e3 * (time.perf_counter() - began))
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times), "n": steps}


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--steps", type=int, default=20)
    args = benchmark.begin()
    keep_memory()
    device = pick_device()
    torch.backends.cudnn.benchmark = True
    base = {"batch": 512, "classes": 100, "images": 20_000}
    sweeps = {"batch": BATCHES, "classes": CLASSES, "images": IMAGES}
    if args.quick:
        base, sweeps, args.steps = {"batch": 64, "classes": 10, "images": 2000}, {"batch": (32, 64)}, 3
    table = []
    for what, values in sweeps.items():
        for value in values:
            size = base | {what: value}
            row = {"grows": what, **size, **step_ms(device, **size, steps=args.steps)}
            table.append(row)
            print(
                f"{what:>8} {value:>7,} {row['ms']:8.2f} ms  ({row['ms_min']:.2f} to {row['ms_max']:.2f})", flush=True
            )
    benchmark.save({"base": base, "table": table}, device)


if __name__ == "__main__":
    main()
