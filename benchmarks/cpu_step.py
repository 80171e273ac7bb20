"""On a CPU: our training step and our views against straightforward forms of the same work.

python benchmarks/cpu_step.py [--quick] [--threads 2] [--repeats 7]

The straightforward step is what one would write first, and what released code does: views image by image with Pillow, one
(2B x 2B) similarity matrix under three masks, prototypes moved by a Python loop over the batch. Network, batch and optimizer
are the same. Both forms take turns, so that a busy machine slows both; a table row is the median of the repeats. Freed
memory stays with the process, as in every command of `opencon`.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from torch import Tensor

from measure import Benchmark
from opencon.cli.base import keep_memory
from opencon.config import AugmentConfig
from opencon.data.augment import Augment
from opencon.experiments.recipes import get_recipe
from opencon.experiments.workbench import Workbench, build_loader, prepare
from opencon.runtime import generator
from opencon.training.optimizer import build_optimizer
from opencon.training.trainer import TrainStep

CPU = torch.device("cpu")


# --- views -------------------------------------------------------------------------------------------------------------


def pillow_view(image: Image.Image, config: AugmentConfig, rng: random.Random) -> Image.Image:
    """One view as torchvision makes it: crop and resize, flip, color jitter in random order, gray."""
    width, height = image.size
    assert config.crop_scale is not None
    for _ in range(10):
        area = width * height * rng.uniform(*config.crop_scale)
        ratio = math.exp(rng.uniform(math.log(config.crop_ratio[0]), math.log(config.crop_ratio[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            break
    left, top = rng.randint(0, width - w), rng.randint(0, height - h)
    image = image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
    if rng.random() < config.flip_p:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < config.jitter_p:
        brightness, contrast, saturation, hue = config.jitter
        operations: list[Callable[[Image.Image], Image.Image]] = [
            lambda i: ImageEnhance.Brightness(i).enhance(rng.uniform(1 - brightness, 1 + brightness)),
            lambda i: ImageEnhance.Contrast(i).enhance(rng.uniform(1 - contrast, 1 + contrast)),
            lambda i: ImageEnhance.Color(i).enhance(rng.uniform(1 - saturation, 1 + saturation)),
            lambda i: turn_hue(i, rng.uniform(-hue, hue)),
        ]
        rng.shuffle(operations)
        for operation in operations:
            image = operation(image)
    return image.convert("L").convert("RGB") if rng.random() < config.gray_p else image


def turn_hue(image: Image.Image, turn: float) -> Image.Image:
    h, s, v = image.convert("HSV").split()
    turned = (np.asarray(h).astype(np.int16) + int(turn * 255)) % 256
    return Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8)), s, v)).convert("RGB")


def pillow_views(images: list[Image.Image], config: AugmentConfig, rng: random.Random) -> Tensor:
    views = [np.asarray(pillow_view(image, config, rng), dtype=np.float32) / 255 for image in images]
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)


def measure_views(num_images: int, repeats: int) -> dict[str, Any]:
    config = AugmentConfig()
    pixels = torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8, generator=generator(CPU, 0))
    pictures = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pixels]
    augment = Augment(config, image_size=32, channels=3)
    compiled = torch.compile(augment.plain)
    stream, rng = generator(CPU, 1), random.Random(1)
    forms: dict[str, Callable[[], Any]] = {
        "one by one with Pillow": lambda: pillow_views(pictures, config, rng),
        "batched": lambda: augment(pixels, stream),
        "batched, compiled": lambda: compiled(pixels, augment.draw(num_images, (32, 32), stream)),
    }
    return turns(forms, repeats, per=num_images)


# --- a whole step ------------------------------------------------------------------------------------------------------


def straightforward(bench: Workbench) -> Callable[[], None]:
    """The step of OpenCon (released settings) on the digits as one would first write it."""
    method, config, S = bench.method, bench.config, bench.split.num_seen
    c: Any = config.method
    optimizer = build_optimizer(method, config.train)
    loader = build_loader(bench)
    pictures = [Image.fromarray(image[0].numpy()) for image in bench.images]
    rng, rows = random.Random(0), loader.indices(0)
    a = config.augment
    step = 0

    def view(picture: Image.Image) -> np.ndarray:
        side = picture.size[0]
        zoom, angle = rng.uniform(*a.zoom), math.radians(rng.uniform(-a.rotate, a.rotate))
        dx, dy = (rng.uniform(-a.shift, a.shift) * side for _ in range(2))
        cos, sin, center = math.cos(angle) / zoom, math.sin(angle) / zoom, (side - 1) / 2
        matrix = (cos, sin, center - cos * (center + dx) - sin * (center + dy))
        matrix += (-sin, cos, center + sin * (center + dx) - cos * (center + dy))
        return np.asarray(picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR))

    def info_nce(similarity: Tensor, member: Tensor, group: Tensor, temperature: float) -> Tensor:
        logits = similarity / temperature
        off = ~torch.eye(len(logits), dtype=torch.bool)
        candidates = member[:, None] & member[None, :] & off
        positives = candidates & (group[:, None] == group[None, :])
        log_p = logits - torch.logsumexp(logits.masked_fill(~candidates, -1e9), dim=1, keepdim=True)
        per_anchor = -(log_p * positives).sum(1) / positives.sum(1).clamp(min=1)
        anchors = positives.any(1)
        return (per_anchor * anchors).sum() / anchors.sum().clamp(min=1)

    def one_step() -> None:
        nonlocal step
        chosen = rows[step % len(rows)]
        step += 1
        labels = bench.labels[chosen]
        views = [np.stack([view(pictures[i]) for i in chosen.tolist()]) for _ in range(2)]
        batch = [torch.from_numpy(v).float()[:, None] / 255 for v in views]
        z = method.embedder(torch.cat(batch))
        B, L = len(labels), int((labels >= 0).sum())
        with torch.no_grad():
            cosine = z[:B] @ method.prototypes.T
            scaled = (cosine - cosine.mean(1, keepdim=True)) / cosine.std(1, keepdim=True)
            score = scaled[:, :S].amax(1)
            novel = score < torch.quantile(score[:L], 1 - c.percentile / 100)
            novel[:L] = False
            pseudo = torch.where(labels >= 0, labels, cosine.argmax(1))
        similarity = z @ z.T
        labeled = (labels >= 0).repeat(2)
        loss = c.weight_novel * info_nce(similarity, novel.repeat(2), pseudo.repeat(2), c.temperature_novel)
        loss = loss + c.weight_labeled * info_nce(similarity, labeled, labels.repeat(2), c.temperature_labeled)
        image = torch.arange(B).repeat(2)
        loss = loss + c.weight_unlabeled * info_nce(similarity, ~labeled, image, c.temperature_unlabeled)
        p = (10 * z[L:B] @ method.prototypes.T).softmax(1).mean(0).clamp(min=1e-5)
        loss = loss + c.weight_prior * (p * (p / method.prior).log()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for i in range(B):
                k = int(labels[i]) if labels[i] >= 0 else int(cosine[i].argmax())
                if labels[i] >= 0 or k >= S:
                    moved = c.momentum * method.prototypes[k] + (1 - c.momentum) * z[i]
                    method.prototypes[k] = F.normalize(moved, dim=0)

    return one_step


def measure_step(repeats: int) -> dict[str, Any]:
    def ours(*, compiled: bool) -> Callable[[], None]:
        bench = prepare(get_recipe("digits"), CPU)
        loader = build_loader(bench)
        optimizer = build_optimizer(bench.method, bench.config.train)
        config = replace(bench.config.train, compile=compiled)
        step = TrainStep(bench.method, optimizer, loader, torch.amp.GradScaler("cpu", enabled=False), config)
        step.start_epoch(0, loader.draw(0))

        def one_step() -> None:
            if int(step.index) == len(loader):
                step.start_epoch(1, loader.draw(1))
            step()

        return one_step

    forms = {
        "straightforward": straightforward(prepare(get_recipe("digits"), CPU)),
        "opencon": ours(compiled=False),
    }
    return turns(forms, repeats, per=get_recipe("digits").train.batch_size)


def turns(forms: dict[str, Callable[[], Any]], repeats: int, *, per: int) -> dict[str, Any]:
    """Seconds of each form, taken in turn; the first is what the others are compared with."""
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form(), form()  # compilation, caches
    for _ in range(repeats):
        for name, form in forms.items():
            began = time.perf_counter()
            form()
            taken[name].append(time.perf_counter() - began)
    base = statistics.median(next(iter(taken.values())))
    rows = {}
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        rows[name] = {
            "ms": 1e3 * middle,
            "ms_min": 1e3 * min(seconds),
            "ms_max": 1e3 * max(seconds),
            "images_per_second": per / middle,
            "times_faster": base / middle,
            "n": repeats,
        }
        print(f"  {name:26} {1e3 * middle:8.1f} ms {per / middle:10.0f} images/s {base / middle:6.1f} x", flush=True)
    return rows


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--threads", type=int, default=2)
    benchmark.add_argument("--repeats", type=int, default=7)
    args = benchmark.begin()
    repeats, num_images = (2, 128) if args.quick else (args.repeats, 1024)
    keep_memory()
    torch.set_num_threads(args.threads)
    print(f"one view of {num_images} images of 32 pixels, {args.threads} threads")
    views = measure_views(num_images, repeats)
    print("one training step on the digits, 256 images, 2 views")
    step = measure_step(repeats)
    benchmark.save({"threads": args.threads, "num_images": num_images, "views": views, "step": step}, CPU)


if __name__ == "__main__":
    main()
