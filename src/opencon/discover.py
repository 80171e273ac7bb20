"""Photos, a few of them labeled, to classes and new groups: what `opencon discover` does.

    photos --features--> rows --openworld--> a class or group for each --> assignments.csv, embeddings.npy, model, report

    OUT/assignments.csv    a line for each photo
    OUT/embeddings.npy     (n, D) unit rows of the photos that could be read, in the order of assignments.csv
    OUT/model.json, model.safetensors   for `opencon predict`
    OUT/result.json, config.json, environment.json   what came out, what was asked, on what machine
    OUT/report.html        one page that opens offline

Letters: M photos, n that can be read, F features, D embedding size, S seen classes, C classes and groups together.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opencon.anchor_count import COUNTERS
from opencon.assignments import as_table
from opencon.class_count import CountEstimate
from opencon.data.listings import printable
from opencon.data.photos import Photos, check, new_names, some_names, typical_side
from opencon.encoders.pretrained import open_encoder
from opencon.errors import DataError, RunError
from opencon.features import Extractor, FeatureSettings, PhotoFeatures, photo_features
from opencon.finetune import check_finetune, finetune
from opencon.metrics import OpenWorldAccuracy, evaluate
from opencon.model import SETTINGS as MODEL
from opencon.model import OpenConModel, PhotoPrediction, identity
from opencon.openworld import Fitted, OpenWorldConfig, fit_features
from opencon.report.html import ReportData, headline, write_report
from opencon.report.map import map_positions
from opencon.runs import ASSIGNMENTS, DISCOVERY, EMBEDDINGS, RunFolder
from opencon.runtime import environment

SMALL_SIDE, SMALL_SIZE = 144, 128  # photos up to this side are looked at in this size: more pixels would be made up

Progress = Callable[[str, int, int], None]  # stage, done, all


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
    """What is asked of a discovery."""

    features: FeatureSettings
    fit: OpenWorldConfig
    finetune: bool = False  # train the encoder's last stage too

    def plain(self) -> dict[str, Any]:
        """Nested plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """A seen class or a new group, and how many unlabeled photos fell to it."""

    name: str
    is_new: bool
    size: int


@dataclass(frozen=True)
class Discovery:
    """What a discovery found, and where it was written."""

    headline: str
    groups: list[Group]
    count: CountEstimate | None
    num_outliers: int
    problems: list[tuple[str, str]]  # file, reason
    replaced: list[str]  # names that groups had been given in this folder; they have others now
    record: dict[str, Any]  # result.json
    report: Path


def settled(config: DiscoverConfig, photos: Photos) -> DiscoverConfig:
    """The same with the size in which the photos are looked at decided."""
    if config.features.image_size is not None or config.features.encoder != "efficientnet_lite0":
        return config
    side = typical_side(photos.paths)
    size = SMALL_SIZE if side is not None and side <= SMALL_SIDE else None
    return replace(config, features=replace(config.features, image_size=size))


def plan(photos: Photos, config: DiscoverConfig, device: torch.device) -> dict[str, str]:
    """What a discovery would do, in words; refuses what cannot work. Looks at no photo but times the encoder."""
    check(photos)
    f = config.features
    encoder = open_encoder(f.encoder, f.image_size)
    if config.finetune:
        check_finetune(encoder, len(photos.paths))
    seconds = len(photos.paths) * (1 + f.num_views) / _images_per_second(Extractor(encoder, f, device))
    about = f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"
    labeled, classes = photos.num_labeled, len(photos.class_names)
    looks = "as it is" if f.num_views == 0 else f"and {f.num_views} view{'s' * (f.num_views > 1)} of it"
    tuning = ", the encoder's last stage learns too" if config.finetune else ""
    if config.finetune and device.type == "cpu":
        tuning += ", which takes hours on a CPU"
    groups = "as many new groups as there seem to be" if config.fit.num_novel is None else f"{config.fit.num_novel} new"
    return {
        "photos": f"{len(photos.paths):,}: {labeled:,} labeled in {classes} class{'es' if classes > 1 else ''} "
        f"({some_names(photos.class_names)}), {len(photos.paths) - labeled:,} unlabeled",
        "encoder": f"{f.encoder} at {encoder.image_size} px, each photo {looks}: {about} "
        f"where nothing is cached; learning and the page come on top",
        "looks for": f"the {classes} seen and {groups}",
        "method": f"{config.fit.method}, seed {config.fit.seed}{tuning}",
    }


def open_folder(out: Path) -> RunFolder:
    """A new or empty folder, or one that a discovery wrote before; found out before any work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not (out / DISCOVERY).exists():
            raise RunError(f"{out} is not empty and holds no discovery. Give an empty or a new folder with --out.")
        folder = RunFolder(out)
        folder.write_json(DISCOVERY, {"what": "a folder of `opencon discover`"})
    except OSError as err:
        raise RunError(f"cannot write to {out} ({err.strerror}). Give another --out.") from err
    return folder


def names_given(folder: RunFolder, photos: Photos) -> list[str]:
    """Names that `opencon name` gave to groups of the discovery that is in a folder."""
    names: list[str] = []
    with contextlib.suppress(RunError, KeyError):  # none, or damaged: it is about to be replaced
        names = folder.read_json(MODEL)["class_names"]
    own = set(photos.class_names)
    return [name for name in dict.fromkeys(names) if name not in own and not re.fullmatch(r"new-\d+", name)]


def discover(
    photos: Photos,
    config: DiscoverConfig,
    out: Path,
    *,
    cache: Path | None,
    device: torch.device,
    truth: Mapping[str, str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Discovery:
    """Embed the photos, learn classes and groups, and write everything to `out`.

    Args:
        photos: which, and the labels of some.
        config: how.
        out: a folder; what an earlier discovery wrote there is replaced file by file.
        cache: where features are kept for the next time; None: nowhere.
        device: where the encoder runs.
        truth: the true class of photos by name, to measure with; never seen by the learner.
        progress: told what is being done.
    """
    check(photos)
    folder = open_folder(out)
    with folder.held():
        return _discover(photos, config, folder, cache, device, truth, progress)


def _discover(
    photos: Photos,
    config: DiscoverConfig,
    folder: RunFolder,
    cache: Path | None,
    device: torch.device,
    truth: Mapping[str, str] | None,
    progress: Progress,
) -> Discovery:
    start, out = time.perf_counter(), folder.path
    replaced = names_given(folder, photos)
    folder.write_json("config.json", config.plain())
    folder.write_json("environment.json", environment(device))
    found = read_features(photos, config.features, cache, device, progress)
    labels = _labels_of(photos, found)
    fitted = fit_features(
        found.plain, labels, config.fit, views=found.views, progress=lambda i, n: progress("learning", i, n)
    )
    features = config.features
    if config.finetune:
        features = finetune(
            [photos.paths[i] for i in found.kept],
            labels,
            features,
            num_classes=fitted.model.num_classes,
            out=folder,
            device=device,
            progress=lambda i, n: progress("fine-tuning", i, n),
        )
        found = read_features(photos, features, cache, device, progress)
        labels = _labels_of(photos, found)
        known = replace(config.fit, num_novel=fitted.model.num_classes - fitted.model.num_seen)
        count = fitted.count
        fitted = replace(fit_features(found.plain, labels, known, views=found.views), count=count)
    seconds = {"features and training": time.perf_counter() - start}

    progress("writing", 0, 1)
    names = photos.names()
    class_names = _class_names(photos, fitted)
    kept_names = [names[i] for i in found.kept]
    model = OpenConModel.of(fitted, class_names, features, kept_names, labels)
    model.save(folder)
    folder.write_array(EMBEDDINGS, fitted.z.numpy())
    problems = [(names[i], reason) for i, reason in found.problems.items()]
    said = [
        *model.judge_embedded(kept_names, fitted.z, among_examples=True),
        *itertools.starmap(PhotoPrediction.unread, problems),
    ]
    given = [class_names[label] if label >= 0 else "" for label in labels.tolist()] + [""] * len(problems)
    folder.write_text(ASSIGNMENTS, as_table(zip(said, given, strict=True)))
    record = _measured(kept_names, labels, fitted, photos, truth)
    data = _report(photos, found, labels, fitted, class_names, problems, record, out)
    record |= {
        "headline": headline(data),
        "photos": len(photos.paths),
        "unreadable": len(problems),
        "labeled": int((labels >= 0).sum()),
        "groups": [asdict(g) for g in groups_of(fitted, labels, class_names)],
        "count": asdict(fitted.count) if fitted.count else None,
        "outliers": int((fitted.prediction.is_outlier & (labels < 0)).sum()),
        "seconds": seconds | {"everything": time.perf_counter() - start},
    }
    facts = {
        "encoder": f"{config.features.encoder}, {1 + config.features.num_views} views of each photo",
        "method": f"{config.fit.method}, seed {config.fit.seed}",
        "seconds": f"{record['seconds']['everything']:.0f}",
        "made with": f"torch {torch.__version__} on {device}",
    }
    report = write_report(replace(data, facts=facts, names_for=identity(folder)), out / "report.html")
    folder.write_json("result.json", record)
    progress("writing", 1, 1)
    return Discovery(
        headline=record["headline"],
        groups=groups_of(fitted, labels, class_names),
        count=fitted.count,
        num_outliers=record["outliers"],
        problems=problems,
        replaced=replaced,
        record=record,
        report=report,
    )


def count_classes(
    photos: Photos,
    features: FeatureSettings,
    *,
    cache: Path | None,
    device: torch.device,
    seed: int,
    by: str = "tree",
    progress: Progress,
) -> CountEstimate:
    """How many classes the photos seem to show, seen and new, by one of `anchor_count.COUNTERS`."""
    count = COUNTERS[by]
    check(photos)
    found = read_features(photos, features, cache, device, progress)
    labels = _labels_of(photos, found)
    return count(found.plain, labels, num_seen=len(photos.class_names), seed=seed)


def read_features(
    photos: Photos, settings: FeatureSettings, cache: Path | None, device: torch.device, progress: Progress
) -> PhotoFeatures:
    """Features of every photo that can be read; refuses when too few are left."""
    found = photo_features(
        photos.paths, settings, cache=cache, device=device, progress=lambda i, n: progress("looking", i, n)
    )
    if len(found.kept) < 4:
        first = next(iter(found.problems.items()), None)
        reason = f" The first: {printable(photos.paths[first[0]])} {first[1]}" if first else ""
        raise DataError(f"only {len(found.kept)} of {len(photos.paths)} photos can be read; 4 are needed.{reason}")
    lost = set(range(len(photos.class_names))) - {photos.labels[i] for i in found.kept}
    if lost:
        name = photos.class_names[min(lost)]
        raise DataError(f"class {name!r} has no photo that can be read. Add one, or remove the class.")
    return found


def _labels_of(photos: Photos, found: PhotoFeatures) -> Tensor:
    return torch.tensor([photos.labels[i] for i in found.kept])


def _class_names(photos: Photos, fitted: Fitted) -> tuple[str, ...]:
    """The seen classes, then new-1, new-2, ..."""
    new = itertools.islice(new_names(photos.class_names), fitted.model.num_classes - fitted.model.num_seen)
    return (*photos.class_names, *new)


def groups_of(fitted: Fitted, labels: Tensor, class_names: tuple[str, ...]) -> list[Group]:
    """Every class and group with its number of unlabeled photos; what is unlike everything belongs to none."""
    said = fitted.prediction
    sizes = torch.bincount(said.classes[(labels < 0) & ~said.is_outlier], minlength=len(class_names)).tolist()
    return [Group(n, c >= fitted.model.num_seen, sizes[c]) for c, n in enumerate(class_names)]


def _measured(
    names: list[str], labels: Tensor, fitted: Fitted, photos: Photos, truth: Mapping[str, str] | None
) -> dict[str, Any]:
    """Accuracy on the unlabeled photos whose true class is given; nothing without truth."""
    if truth is None:
        return {}
    seen = {name: c for c, name in enumerate(photos.class_names)}
    others = sorted(set(truth.values()) - set(seen))
    number = seen | {name: len(seen) + i for i, name in enumerate(others)}
    true = {i: truth.get(name, truth.get(Path(name).name)) for i, name in enumerate(names) if labels[i] < 0}
    rows = [i for i, name in true.items() if name is not None]
    if not rows:
        raise DataError("--truth names none of the unlabeled photos. Its file names are those in assignments.csv.")
    classes = np.array([number[true[i]] for i in rows])  # type: ignore[index]
    return evaluate(
        fitted.prediction.classes[rows].numpy(),
        classes,
        num_seen=len(seen),
        num_classes=max(len(number), fitted.model.num_classes),
        protocol="gcd",
        on="unlabeled",
        novelty=fitted.prediction.novelty[rows].numpy(),
    )


def _report(
    photos: Photos,
    found: PhotoFeatures,
    labels: Tensor,
    fitted: Fitted,
    class_names: tuple[str, ...],
    problems: list[tuple[str, str]],
    record: Mapping[str, Any],
    out: Path,
) -> ReportData:
    names = photos.names()
    said, model = fitted.prediction, fitted.model
    projection, xy = map_positions(fitted.z.numpy(), seed=0)
    accuracy = None
    if record:
        accuracy = OpenWorldAccuracy(record["all"], record["novel"], record["seen"], record["protocol"])

    def picture(row: int) -> Image.Image | None:
        try:
            return Image.open(photos.paths[found.kept[row]])
        except (OSError, ValueError, Image.DecompressionBombError):  # gone or changed since it was read
            return None

    place = shlex.quote(str(out))
    return ReportData(
        title=photos.title,
        files=[names[i] for i in found.kept],
        picture=picture,
        predicted=said.classes.numpy(),
        class_names=class_names,
        num_seen=model.num_seen,
        given=labels.numpy(),
        confidence=said.confidence.numpy(),
        novelty=said.novelty.numpy(),
        novelty_threshold=float(model.novelty_threshold),
        is_outlier=said.is_outlier.numpy(),
        xy=xy,
        projection=projection,
        count=fitted.count,
        problems=problems,
        next_steps=[
            ("Sort new photos with this model", f"opencon predict {place} NEW_PHOTOS/ --csv sorted.csv"),
            ("Take the model elsewhere, as ONNX and as a folder", f"opencon export {place} --out model/"),
            ("Again, with more labels or another number", f"opencon discover ... --novel 8 --out {place}"),
        ],
        names_command=f"opencon name {place} names.csv",
        accuracy=accuracy,
    )


@torch.inference_mode()
def _images_per_second(extractor: Extractor) -> float:
    """How fast the encoder is here, from a moment's work."""
    size = extractor.encoder.image_size
    images = torch.zeros(extractor.photos_at_once, 3, size, size, dtype=torch.uint8)
    keys = ["0" * 64] * len(images)
    extractor(images, keys)
    began = time.perf_counter()
    extractor(images, keys)
    seconds = time.perf_counter() - began
    return len(images) * (1 + extractor.settings.num_views) / max(seconds, 1e-6)
