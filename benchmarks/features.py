"""Photos to features on this machine: images/s from JPEG files, and how the time splits into reading and network.

python benchmarks/features.py [--threads 2] [--repeats 5] [--device cpu] [--quick]

The photos: crops of scikit-learn's two sample images, 500 x 375 pixels (the usual size in ImageNet) as JPEG of quality 90,
no two the same. Three measures take turns: everything (`photo_features` without a cache, opening the encoder included);
reading alone (hash and decode); and the network alone, on decoded images. Reading and network run side by side, so that
everything takes less than the two one after the other where cores are free. Images/s: the best, median and worst of the
repeats; processor milliseconds an image: the least, which other programs on the machine disturb less than images/s.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from measure import Benchmark
from opencon.encoders.pretrained import open_encoder
from opencon.photos import features
from opencon.photos.cache import FeatureCache
from opencon.photos.features import Extractor, FeatureSettings, Part, Reader, photo_features
from opencon.runtime import pick_device

PHOTO = (500, 375)


def make_photos(folder: Path, count: int) -> list[Path]:
    rng = np.random.default_rng(0)
    samples = [Image.fromarray(image) for image in load_sample_images().images]
    wide, high = (side - crop + 1 for side, crop in zip(samples[0].size, PHOTO, strict=True))
    places = rng.choice(wide * high, size=count, replace=False)  # for both samples, so that no crop comes twice
    paths = []
    for i, place in enumerate(places.tolist()):
        left, top = place % wide, place // wide
        paths.append(folder / f"{i}.jpg")
        samples[i % 2].crop((left, top, left + PHOTO[0], top + PHOTO[1])).save(paths[-1], quality=90)
    return paths


class Decoded(Reader):
    """Photos that have been read before."""

    parts: dict[int, Part]

    def read(self, numbers: range) -> Part:
        return self.parts[numbers.start]


def timed(run: Callable[[], Any], images: int) -> tuple[float, float]:
    """Images a second, and processor milliseconds an image."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return images / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / images


def measure(paths: list[Path], size: int, num_views: int, repeats: int, device: torch.device) -> dict[str, Any]:
    settings = FeatureSettings(image_size=size, num_views=num_views)
    nothing = FeatureCache(None, "", {})
    extractor = Extractor(open_encoder(settings.encoder, size), settings, device)
    starts = range(0, len(paths), features.READ_AT_ONCE)

    def read() -> dict[int, Part]:
        reader = Reader(paths, size, nothing)
        return {start: reader.read(range(start, min(start + features.READ_AT_ONCE, len(paths)))) for start in starts}

    decoded = Decoded(paths, size, nothing)
    decoded.parts = read()

    def network() -> None:
        assert sum(len(part.rows) for part in features._computed(decoded, extractor)) == len(paths)

    def everything() -> None:
        opened = Extractor(open_encoder(settings.encoder, size), settings, device)
        assert len(photo_features(paths, opened, cache=None).kept) == len(paths)

    kinds = {"all": everything, "reading": read, "network": network}
    network()  # the first pass finds the kernels
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, run in kinds.items():
            times[kind].append(timed(run, len(paths)))
    out: dict[str, Any] = {"image_size": size, "num_views": num_views, "photos": len(paths), "repeats": repeats}
    for kind, found in times.items():
        rates = sorted(rate for rate, _ in found)
        out[kind] = {
            "images_per_second": {"best": rates[-1], "median": statistics.median(rates), "worst": rates[0]},
            "processor_ms_per_image": min(ms for _, ms in found),
        }
    return out


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--threads", type=int, default=torch.get_num_threads())
    benchmark.add_argument("--repeats", type=int, default=5)
    benchmark.add_argument("--device", default="cpu")
    args = benchmark.begin()
    torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    count, repeats = (64, 1) if args.quick else (512, args.repeats)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        paths = make_photos(Path(folder), count)
        for size, num_views in ((224, 0), (128, 0), (224, 4)):
            few = paths if num_views == 0 else paths[: count // 4]
            found = measure(few, size, num_views, repeats, device)
            results.append(found)
            print(f"{size} px, {num_views} views, {len(few)} photos, {args.threads} threads, {repeats} repeats")
            for kind in ("all", "reading", "network"):
                rate, ms = found[kind]["images_per_second"], found[kind]["processor_ms_per_image"]
                print(f"  {kind:8} {rate['best']:7.1f} images/s (median {rate['median']:.1f}), {ms:6.2f} processor ms")
    what = {"photo": PHOTO, "precision": str(features.fast_dtype(device)), "measures": results}
    benchmark.save(what, device)


if __name__ == "__main__":
    main()
