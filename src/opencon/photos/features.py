"""Photos to features, and features of random views where they are wanted; all are kept in a cache.

    paths --hash--> in the cache: take it
                    new: decode --> the photo and V random views of it --> encoder --> cache

Reading runs in threads ahead of the network. On a CPU each core takes a photo of its own through the network, with one
thread: several cores on one photo would wait for each other at every layer.

Letters: n photos that can be read, V views of each, F features, B images in a batch, S side in pixels.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from opencon.config import AugmentConfig, to_dict
from opencon.data.augment import Augment, ViewParams, plain_view
from opencon.data.color import to_gray
from opencon.data.decoders import in_processes
from opencon.data.listings import printable
from opencon.data.sources import read_images
from opencon.encoders.pretrained import PretrainedEncoder, open_encoder
from opencon.errors import require, require_seed
from opencon.photos.cache import FeatureCache
from opencon.processes import Processes, usable_cores
from opencon.runtime import fast_dtype, generator

# How a view differs from the photo. Ours, milder than for training from scratch: the encoder is fixed, and what is learned
# on top should ignore framing and light, not color.
VIEWS = AugmentConfig(crop_scale=(0.4, 1.0), flip_p=0.5, jitter=(0.2, 0.2, 0.2, 0.0), jitter_p=0.8, gray_p=0.0)
VIEWS_FOR_STEPS = 4  # ours: views of each photo where a head is trained on them; more gain nothing
VERSION = 2  # of all that leads from a file to features; raise it to have cached features computed again

# Ours: time to find out how long the photos will take, how many stand for all, and how many are computed at a time, so that
# several parts are done in that time.
PROBE_SECONDS, PROBED, PROBED_AT_ONCE = 2.0, 256, 16
READ_AT_ONCE = 64  # photos decoded together, ours: 10 MB at 224 pixels
READ_AT_ONCE_BY_PROCESSES = 256  # so that each of many has some
READ_AHEAD = 2  # such parts that are decoded while the network works on others
HASH_THREADS = 4  # ours: they mostly wait for the disk
# Images in one pass. Ours, on a CPU: more images leave its cache, fewer spend the time on moving weights.
ROWS_CPU, ROWS_GPU = 8, 512

FLOAT16_MAX = 65504.0


def views_for(steps: int) -> int:
    """How many views of each photo are wanted: some where steps learn from them, else none."""
    return VIEWS_FOR_STEPS if steps else 0


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """The settings that features depend on, besides the photos."""

    encoder: str = "efficientnet_lite0"  # see `open_encoder`
    image_size: int | None = None  # side in pixels; None: the usual one of the encoder
    num_views: int = 0  # V; only steps learn from views, see `VIEWS_FOR_STEPS`
    seed: int = 0  # of the views

    def __post_init__(self) -> None:
        size = self.image_size
        require(size is None or size >= 8, f"features.image_size = {size} must be at least 8 pixels.")
        require(self.num_views >= 0, f"features.num_views = {self.num_views} must not be negative.")
        require_seed(self.seed, "features.seed")


@dataclass(frozen=True, eq=False)
class PhotoFeatures:
    """Features of n photos."""

    plain: Tensor  # (n, F) float32, of the photo as it is
    views: Tensor  # (n, V, F) float16, of random views of it
    kept: list[int]  # index of the path of each of the n rows
    problems: dict[int, str]  # index of each other path: why it cannot be read


def photo_features(
    paths: Sequence[Path],
    extractor: Extractor,
    *,
    cache: Path | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PhotoFeatures:
    """Features of photos and of random views of each. Files of the same bytes are computed once, and kept in a cache.

    The views of a photo depend on the seed and its bytes alone, not on its name, its neighbors or their order.

    Args:
        paths: photo files; one that cannot be read is named in the result and otherwise ignored.
        extractor: computes the features.
        cache: a folder for the features, to use again next time; None: they are not kept.
        progress: called as progress(photos done, photos in all) whenever more are done.
    """
    store = FeatureCache(cache, extractor.encoder.name, extractor.identity())
    return stored_features(paths, extractor, store, lambda done: progress(done, len(paths)))


def stored_features(
    paths: Sequence[Path], extractor: Extractor, store: FeatureCache, progress: Callable[[int], None]
) -> PhotoFeatures:
    """The same with a cache that is open already."""
    encoder, num_views = extractor.encoder, extractor.settings.num_views
    uses_processes = in_processes("auto", len(paths), extractor.device)
    workers = Processes(usable_cores()) if uses_processes else None  # they start with the first photo that is not known
    at_once = READ_AT_ONCE_BY_PROCESSES if uses_processes else READ_AT_ONCE
    reader = Reader(paths, encoder.image_size, store, workers)
    plain = torch.zeros(len(paths), encoder.net.num_features)
    views = torch.zeros(len(paths), num_views, encoder.net.num_features, dtype=torch.float16)
    done = 0
    progress(done)
    try:
        with contextlib.closing(_computed(reader, extractor, at_once)) as parts:
            for part in parts:
                for index, key, rows in part.rows:
                    plain[index], views[index] = rows
                    if key:
                        store.put(key, *rows)
                more = len(part.rows) + part.others
                if more:
                    done += more
                    progress(done)
    finally:
        store.flush()
        if workers is not None:
            workers.shutdown()
    for index, first in reader.twins.items():
        if first in reader.problems:
            reader.problems[index] = reader.problems[first]
        else:
            plain[index], views[index] = plain[first], views[first]
    problems = dict(sorted(reader.problems.items()))
    kept = [i for i in range(len(paths)) if i not in problems]
    return PhotoFeatures(plain[kept] if problems else plain, views[kept] if problems else views, kept, problems)


def seconds_for(paths: Sequence[Path], extractor: Extractor, *, cache: Path | None) -> float:
    """About how long the features of these photos will take. A sample of them is computed for two seconds, and kept.

    The sample is spread over all photos, and goes the way of all: its share that is in the cache already stands for theirs.
    """
    store = FeatureCache(cache, extractor.encoder.name, extractor.identity())
    sample = [paths[i] for i in range(0, len(paths), max(1, math.ceil(len(paths) / PROBED)))]
    reader = Reader(sample, extractor.encoder.image_size, store)
    known = computed = 0
    began = first = last = time.perf_counter()
    before_first = 0
    with contextlib.closing(_computed(reader, extractor, min(extractor.photos_at_once, PROBED_AT_ONCE))) as parts:
        for part in parts:
            last = time.perf_counter()
            if part.is_computed:
                computed += len(part.rows)
                for _, key, rows in part.rows:
                    if key:
                        store.put(key, *rows)
                if not before_first:  # what comes before is starting up
                    first, before_first = last, computed
            else:
                known += len(part.rows) + part.others
            if last - began > PROBE_SECONDS:
                break
    store.flush()
    if computed == 0:
        return 0.0
    steady = computed > before_first
    each = (last - first) / (computed - before_first) if steady else (last - began) / computed
    return each * len(paths) * computed / (computed + known)


@dataclass(frozen=True, eq=False)
class Part:
    """Some photos on their way: features from the cache or computed, and photos whose features are still to compute."""

    rows: list[tuple[int, str, tuple[Tensor, Tensor]]]  # number of the path, key, features
    others: int = 0  # photos that need no work: unreadable ones, and twins of others
    indices: list[int] = field(default_factory=list)  # of the paths still to compute
    keys: list[str] = field(default_factory=list)
    images: Tensor | None = None  # of those paths, (B, 3, S, S) uint8
    is_computed: bool = False  # by the network, just now


class Reader:
    """Looks photos up in the cache and decodes the others. One thread may call `read` while another computes."""

    def __init__(
        self, paths: Sequence[Path], image_size: int, store: FeatureCache, workers: Executor | None = None
    ) -> None:
        self.paths = paths
        self.workers = workers  # who decodes; None: threads
        self.image_size = image_size
        self.store = store
        self.problems: dict[int, str] = {}
        self.twins: dict[int, int] = {}  # a path to an earlier one whose file has the same bytes
        self._first: dict[str, int] = {}  # key to path

    def read(self, numbers: range) -> Part:
        """The photos of these paths."""
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            keys = dict(zip(numbers, pool.map(lambda i: content_key(self.paths[i]), numbers), strict=True))
        rows, new = [], []
        for i, key in keys.items():
            first = self._first.setdefault(key, i) if key else i
            if first != i:
                self.twins[i] = first
                continue
            features = self.store.get(key) if key else None
            if features is None:
                new.append(i)
            else:
                rows.append((i, key, features))
        images, kept, lines = read_images([self.paths[i] for i in new], self.image_size, self.workers)
        failed = [i for at, i in enumerate(new) if at not in set(kept)]
        for i, line in zip(failed, lines, strict=True):
            self.problems[i] = line.removeprefix(f"{printable(self.paths[i])} ")
        new = [new[at] for at in kept]
        others = len(numbers) - len(rows) - len(new)
        return Part(rows, others, new, [keys[i] for i in new], images)


def content_key(path: Path) -> str:
    """SHA-256 of a file's bytes; empty for a file that cannot be read (decoding will say why)."""
    digest = hashlib.sha256()
    try:
        if not path.is_file():  # reading a pipe would wait forever
            return ""
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest()


class Extractor:
    """Photos to features, by the fastest form of the encoder: batch norms are folded, and bfloat16 is used where the
    processor computes with it, unless `dtype` says otherwise.
    """

    def __init__(
        self,
        encoder: PretrainedEncoder,
        settings: FeatureSettings,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        net, channels = encoder.net, encoder.net.in_channels
        self.encoder, self.settings, self.device = encoder, settings, device
        self.dtype = dtype or fast_dtype(device)
        net.to(device)
        if net.channels_last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        net.freeze("head", "running")
        net.eval()
        net.fold(self.dtype)
        self.augment = Augment(VIEWS, image_size=encoder.image_size, channels=3)
        self.mean, self.std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (encoder.mean, encoder.std))
        rows = ROWS_GPU if device.type == "cuda" else ROWS_CPU
        self.photos_at_once = max(1, rows // (1 + settings.num_views))
        self.is_gray = channels == 1

    @classmethod
    def open(cls, settings: FeatureSettings, device: torch.device) -> Extractor:
        """With the encoder that the settings name."""
        return cls(open_encoder(settings.encoder, settings.image_size), settings, device)

    def identity(self) -> dict[str, object]:
        """All that the features of a photo depend on besides its bytes."""
        e, s = self.encoder, self.settings
        return {
            "version": VERSION,
            "encoder": e.name,
            "weights": e.fingerprint,
            "image_size": e.image_size,
            "mean": e.mean,
            "std": e.std,
            "precision": str(self.dtype),
            "views": to_dict(VIEWS) if s.num_views else None,
            "num_views": s.num_views,
            "seed": s.seed if s.num_views else None,
        }

    @torch.inference_mode()
    def __call__(self, images: Tensor, keys: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """(B, 3, S, S) uint8 and the photos' keys -> for each (F,) float32 and (V, F) float16, on the CPU."""
        num, num_views = len(images), self.settings.num_views
        images = images.to(self.device)
        x = plain_view(images, self.encoder.image_size)
        if num_views:
            views = self.augment.apply(images.repeat_interleave(num_views, dim=0), self._draw(keys))
            x = torch.cat([x, views])  # ((1 + V) * B, 3, S, S): first the photos, then the views of each
        if self.is_gray:
            x = to_gray(x)
        x = x.sub_(self.mean).div_(self.std)
        if self.encoder.net.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        reduced = self.dtype != torch.float32 and self.encoder.net.folded is None
        with torch.autocast(self.device.type, dtype=self.dtype if reduced else torch.bfloat16, enabled=reduced):
            rows = self.encoder.net(x)
        rows = rows.float().cpu()
        halves = rows[num:].clamp_(-FLOAT16_MAX, FLOAT16_MAX).half().unflatten(0, (num, num_views))
        return list(zip(rows[:num], halves, strict=True))

    def _draw(self, keys: Sequence[str]) -> ViewParams:
        """The parameters of V views of each photo, from a stream of its own."""
        size, cpu = self.encoder.image_size, torch.device("cpu")
        drawn = []
        for key in keys:
            stream = generator(cpu, self.settings.seed, *(int(key[at : at + 16], 16) for at in range(0, len(key), 16)))
            drawn.append(self.augment.draw(self.settings.num_views, (size, size), stream))
        fields = zip(*drawn, strict=True)
        return ViewParams(*(None if of[0] is None else torch.cat(of).to(self.device) for of in fields))


def _computed(reader: Reader, extractor: Extractor, at_once: int) -> Generator[Part, None, None]:
    """Read and compute photos, `at_once` at a time; yields finished parts in order."""
    starts = range(0, len(reader.paths), at_once)
    threads = torch.get_num_threads()
    reading: deque[Future[Part]] = deque()
    computing: deque[Part | Future[Part]] = deque()

    def compute(part: Part) -> Part:
        assert part.images is not None
        rows = extractor(part.images, part.keys)
        return Part(list(zip(part.indices, part.keys, rows, strict=True)), is_computed=True)

    def begin(part: Part, pool: ThreadPoolExecutor) -> None:
        computing.append(Part(part.rows, part.others))
        step = extractor.photos_at_once
        for at in range(0, len(part.indices), step):
            piece = slice(at, at + step)
            assert part.images is not None
            todo = Part([], 0, part.indices[piece], part.keys[piece], part.images[piece])
            computing.append(pool.submit(compute, todo))

    def finished() -> Part:
        part = computing.popleft()
        return part if isinstance(part, Part) else part.result()

    with contextlib.ExitStack() as stack:
        # A new thread starts with the number of threads last set anywhere. Each gets one, see the top of this file.
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        workers = threads if extractor.device.type == "cpu" else 1
        read_pool, net_pool = (ThreadPoolExecutor(n) for n in (1, workers))
        for pool in (read_pool, net_pool):
            stack.callback(pool.shutdown, cancel_futures=True)
        for start in starts:
            numbers = range(start, min(start + at_once, len(reader.paths)))
            reading.append(read_pool.submit(reader.read, numbers))
            if len(reading) > READ_AHEAD:
                begin(reading.popleft().result(), net_pool)
            while len(computing) > at_once:
                yield finished()
        while reading:
            begin(reading.popleft().result(), net_pool)
            while len(computing) > at_once:
                yield finished()
        while computing:
            yield finished()
