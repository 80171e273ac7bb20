"""How far the frozen part's output is from that with batch statistics, as released: with the statistics that came with the
weights ("running"), and with those measured on the run's own views ("measured").

python benchmarks/frozen_norm.py cifar100 --data FOLDER --weights FILE [--quick]
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch
from torch import Tensor

from measure import Benchmark, settings
from opencon.config import with_settings
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import MEASURED_STEPS
from opencon.experiments.workbench import build_loader, prepare
from opencon.runtime import pick_device

BATCHES = 8  # compared: both views of four steps, which come after the measured ones


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("recipe")
    benchmark.add_settings()
    args = benchmark.begin()
    config = with_settings(
        get_recipe(args.recipe), [*settings(args), "encoder.fold_frozen=false", "train.compile=false"]
    )
    device, steps = pick_device(), 2 if args.quick else MEASURED_STEPS
    bench = prepare(config, device)
    loader, embedder = build_loader(bench), bench.method.embedder
    encoder = embedder.encoder
    later = list(itertools.islice(loader.first_views(steps + BATCHES // 2), 2 * steps, None))

    @torch.no_grad()
    def outputs(norm: str) -> list[Tensor]:
        encoder.freeze(config.encoder.train_from, norm)  # type: ignore[arg-type]
        encoder.train()
        found = []
        for view in later:
            x = embedder._normalized(view)
            for name in encoder.stages[: encoder.num_frozen]:
                x = getattr(encoder, name)(x)
            found.append(x)
        return found

    def apart(some: list[Tensor], others: list[Tensor]) -> dict[str, float]:
        far = [float((a - b).norm() / b.norm()) for a, b in zip(some, others, strict=True)]
        return {"mean": statistics.mean(far), "min": min(far), "max": max(far), "n": len(far)}

    kept = outputs("running")
    embedder.measure_frozen(loader.first_views(steps))
    measured = outputs("measured")
    batch = outputs("batch")  # last: it moves the running statistics
    result: dict[str, Any] = {
        "recipe": args.recipe,
        "measured_steps": steps,
        "images_per_batch": config.train.batch_size,
        "from_batch_statistics": {"running": apart(kept, batch), "measured": apart(measured, batch)},
    }
    print(result)
    benchmark.save(result, device)


if __name__ == "__main__":
    main()
