"""Training from files: what limits it (decoding, the copy to the device, or the step), and how many cores would feed it.

python benchmarks/worker_path.py [--quick] [--repeats 3]

Files: crops of scikit-learn's two sample photos as JPEGs of 500 x 375 pixels (ImageNet's usual size) and of 2000 x 1500
(a camera's), quality 90, in a temporary folder; more images than files are hard links to them. They come from the system's
cache, so the disk is not part of any number.

  decode   images/s through StreamedImages to the host, by threads and by processes; with JPEG draft mode and without
  headers  files/s when a streamed set is opened (each header is read once)
  copy     bytes/s from page-locked and from ordinary memory to the device (CUDA only)
  step     images/s of the same training, fed from memory, and from files decoded by threads and by processes: the
           imagenet100 recipe on a GPU; on a CPU a small network, to run at all. What files take longer than memory, the
           device waits
  embed    photos/s of `opencon embed` with its usual encoder, decoded by threads and by processes

Each number is the median of the repeats, with the lowest and the highest.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image, JpegImagePlugin
from sklearn.datasets import load_sample_images

from measure import Benchmark
from opencon.config import RunConfig, with_settings
from opencon.data.benchmarks import load_dataset
from opencon.data.decoders import DecodeIn
from opencon.data.listings import list_folder
from opencon.data.sources import _decode, load_listing
from opencon.data.streaming import StreamedImages
from opencon.experiments.recipes import get_recipe
from opencon.experiments.workbench import assemble, build_loader
from opencon.photos.embed import make_plan, work
from opencon.photos.features import Extractor, FeatureSettings
from opencon.processes import usable_cores
from opencon.runtime import pick_device
from opencon.training.optimizer import build_optimizer
from opencon.training.trainer import fit

NUM_CLASSES = 4
KINDS: tuple[DecodeIn, ...] = ("threads", "processes")
IMAGENET = 1_281_167  # training images of ImageNet-1k
CPU_SETTINGS = ["encoder.name=convnet", "encoder.train_from=all", "augment.size=32", "train.batch_size=32"]


def make_files(root: Path, shape: tuple[int, int], num_files: int, num_images: int) -> list[Path]:
    """`num_images` names in class folders, for `num_files` different JPEGs."""
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    rng, paths = np.random.default_rng(0), []
    for i in range(num_images):
        path = root / f"class{i % NUM_CLASSES}" / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i < num_files:
            photo, share = photos[i % len(photos)], rng.uniform(0.6, 1.0)
            width, height = photo.width * share, photo.width * share * shape[1] / shape[0]
            height = min(height, photo.height)
            left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
            box = (left, top, left + width, top + height)
            photo.resize(shape, Image.Resampling.BICUBIC, box=box).save(path, quality=90)
        else:
            path.hardlink_to(paths[i % num_files])
        paths.append(path)
    return paths


def measured(work: Callable[[], float], repeats: int) -> dict[str, float]:
    """Median, lowest and highest of a rate, after one round that does not count."""
    work()
    rates = [work() for _ in range(repeats)]
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates), "n": repeats}


def rate(count: float, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


@contextmanager
def draft(is_on: bool) -> Iterator[None]:
    if is_on:
        yield
    else:
        with mock.patch.object(JpegImagePlugin.JpegImageFile, "draft", return_value=None):
            yield


def decode_rate(paths: list[Path], size: int, kind: DecodeIn, workers: int, repeats: int) -> dict[str, float]:
    images = StreamedImages(paths, size, _decode, threads=workers, decode_in=kind)

    def all_of_them() -> None:
        for _ in images.in_order(64):
            pass

    return measured(lambda: rate(len(paths), all_of_them), repeats)


def embed_rate(root: Path, kind: DecodeIn, device: torch.device, num_photos: int) -> dict[str, float]:
    """Photos/s of all shards but the first two of each kind, while which processes start and algorithms are tried out."""
    extractor = Extractor.open(FeatureSettings(), device)
    with tempfile.TemporaryDirectory() as out:
        plan, ends = make_plan(str(root), extractor, Path(out), size=num_photos // 8), [time.perf_counter()]
        work(plan, extractor, lambda done, total: ends.append(time.perf_counter()), decode_in=kind)
    rates = [num_photos // 8 / (b - a) for a, b in pairwise(ends[2:9])]  # a last shard may be shorter
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates), "n": len(rates)}


def copy_rates(device: torch.device, num_bytes: int, repeats: int) -> dict[str, dict[str, float]]:
    place = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copies(source: torch.Tensor) -> None:
        for _ in range(10):
            place.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    ordinary = torch.ones(num_bytes, dtype=torch.uint8)
    sources = {"page_locked": ordinary.pin_memory(), "ordinary": ordinary}
    return {
        kind: measured(lambda source=source: rate(10 * num_bytes, lambda: copies(source)), repeats)
        for kind, source in sources.items()
    }


def step_rate(config: RunConfig, device: torch.device, memory_gb: float, kind: DecodeIn = "auto") -> dict[str, float]:
    """Images/s of every epoch but the first two, in which the step is recorded and algorithms are tried out."""
    config = with_settings(config, [f"data.memory_gb={memory_gb}", f"data.decode={kind}"])
    bench = assemble(config, load_dataset(config.data), device)
    assert isinstance(bench.images, StreamedImages) == (memory_gb == 0)
    loader, ends = build_loader(bench), [time.perf_counter()]
    bench.method.embedder.fold_frozen()
    fit(
        bench.method,
        build_optimizer(bench.method, config.train),
        loader,
        config.train,
        features=bench.bank,
        scaler=torch.amp.GradScaler(device.type, enabled=False),
        on_epoch=lambda epoch, means: ends.append(time.perf_counter()),  # means() has waited for the device
    )
    images = len(loader) * config.train.batch_size
    rates = [images / (b - a) for a, b in pairwise(ends[2:])]
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates), "n": len(rates)}


def show(what: str, row: dict[str, float], unit: str = "images/s", scale: float = 1.0) -> None:
    low, median, high = (scale * row[key] for key in ("low", "median", "high"))
    print(f"{what:<44} {median:10,.1f} {unit}  ({low:,.1f} to {high:,.1f}, n = {row['n']})", flush=True)


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--repeats", type=int)
    benchmark.add_argument("--set", action="append", default=[], dest="settings")
    args = benchmark.begin()
    repeats = args.repeats or (1 if args.quick else 3)
    device, cores = pick_device(), usable_cores()
    torch.backends.cudnn.benchmark = True
    is_cuda = device.type == "cuda"
    num_decoded = 200 if args.quick else 400
    num_trained = (8192 if args.quick else 16384) if is_cuda else (256 if args.quick else 512)
    settings = [f"train.epochs={4 if args.quick else 2 + repeats}", "split.num_seen=2", "train.log_every=100000"]
    settings += [] if is_cuda else [*CPU_SETTINGS, "train.precision=fp32", "train.compile=false"]
    settings += ["train.compile=false"] if args.quick else []
    result: dict[str, Any] = {"cores": cores, "settings": [*settings, *args.settings], "decode": []}

    with tempfile.TemporaryDirectory() as folder:
        own_files = ["data.name=folder", f"data.root={folder}/train"]
        config = with_settings(get_recipe("imagenet100"), [*own_files, *settings, *args.settings])
        size = config.data.image_size
        assert size is not None
        small = make_files(Path(folder, "train"), (500, 375), num_decoded, num_trained)
        large = make_files(Path(folder, "large"), (2000, 1500), 16, 32 if args.quick else 64)
        kilobytes = statistics.mean(path.stat().st_size for path in small[:num_decoded]) / 1e3
        result |= {"image_size": size, "file_kb": kilobytes, "num_decoded": num_decoded, "num_trained": num_trained}
        print(f"{device}, {cores} cores; JPEGs of 500 x 375, {kilobytes:.0f} kB, to {size} pixels")

        def cpu_seconds() -> float:
            start = time.thread_time()
            for path in small[:num_decoded]:
                _decode(path, size)
            return (time.thread_time() - start) / num_decoded

        # A core's time, not the clock's: what else runs on the machine does not count.
        result["decode_core_seconds"] = measured(cpu_seconds, repeats)
        show("decode 500x375, one core's time", result["decode_core_seconds"], "ms", 1e3)

        def decode_row(kind: str, count: int, is_drafted: bool, paths: list[Path], **rates: float) -> float:
            where = {
                "kind": kind,
                "workers": count,
                "draft": is_drafted,
                "shape": "500x375" if paths is not large else "2000x1500",
            }
            result["decode"].append(where | rates)
            drafted = "draft" if is_drafted else "no draft"
            show(f"decode {where['shape']}, {drafted}, {count} {kind}", rates)
            return rates["median"]

        paths = small[:num_decoded] * max(1, cores // 4)
        counts = sorted({2**k for k in range(8) if 2**k < cores} | {cores, 2 * cores})
        by_count = {}
        for kind in KINDS:
            for n in counts:
                by_count[kind, n] = decode_row(kind, n, True, paths, **decode_rate(paths, size, kind, n, repeats))
        for n in sorted({1, cores}):
            with draft(False):
                decode_row("threads", n, False, paths, **decode_rate(paths, size, "threads", n, repeats))
            for is_drafted in (True, False):
                with draft(is_drafted):
                    decode_row("threads", n, is_drafted, large, **decode_rate(large, size, "threads", n, repeats))

        listing = list_folder(Path(folder, "train"))
        result["headers"] = measured(lambda: rate(num_trained, lambda: load_listing(listing, size, 0.0)), repeats)
        show("headers", result["headers"], "files/s")

        batch_bytes = config.train.batch_size * 3 * size**2
        if is_cuda:
            result["copy"] = copy_rates(device, batch_bytes, repeats)
            for kind, rates in result["copy"].items():
                show(f"copy from {kind} memory", rates, "GB/s", 1e-9)

        result["step"] = {
            "memory": step_rate(config, device, 1000.0),
            "files, threads": step_rate(config, device, 0.0, "threads"),
            "files, processes": step_rate(config, device, 0.0, "processes"),
        }
        for kind, rates in result["step"].items():
            show(f"train from {kind}, batches of {config.train.batch_size}", rates)
        result["embed"] = {kind: embed_rate(Path(folder, "train"), kind, device, num_trained) for kind in KINDS}
        for kind, rates in result["embed"].items():
            show(f"embed, decoded by {kind}", rates, "photos/s")

    decode, compute = max(by_count[kind, cores] for kind in KINDS), result["step"]["memory"]["median"]
    limits = {"decode": decode, "compute": compute}
    if is_cuda:
        limits["copy"] = result["copy"]["page_locked"]["median"] / (3 * size**2)
    else:
        limits["decode and compute on the same cores"] = 1 / (1 / decode + 1 / compute)
    slowest, fed = min(limits, key=limits.__getitem__), result["step"]["files, processes"]["median"]
    waiting = {kind: 1 - result["step"][f"files, {kind}"]["median"] / compute for kind in KINDS}
    cores_to_feed = compute * result["decode_core_seconds"]["median"]
    result["verdict"] = {
        "limits": limits,
        "limited_by": slowest,
        "share_waiting": waiting,
        "share_of_limit": fed / limits[slowest],
        "cores_to_feed": cores_to_feed,
        "imagenet_pass_minutes": IMAGENET / fed / 60,
    }
    benchmark.save(result, device)
    print("limits in images/s: " + ", ".join(f"{name} {value:,.0f}" for name, value in limits.items()))
    print("the device waits " + ", ".join(f"{share:.0%} of the time with {kind}" for kind, share in waiting.items()))
    print(f"limited by {slowest}; training from files reaches {fed / limits[slowest]:.0%} of that limit")
    print(f"{cores_to_feed:.1f} cores that do nothing else would feed the step at its speed from memory")
    print(f"one pass over ImageNet-1k from files: {IMAGENET / fed / 60:,.0f} minutes")


if __name__ == "__main__":
    main()
