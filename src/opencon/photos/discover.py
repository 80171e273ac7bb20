"""From photos, a few of them labeled, to classes and new groups: what `opencon discover` does.

    photos --features--> rows --openworld--> a class or group for each --> assignments.csv, embeddings.npy, model, report

    OUT/assignments.csv    a line for each photo
    OUT/embeddings.npy     (n, D) unit rows of the photos that could be read, in the order of assignments.csv
    OUT/neighbors.npy      (n, 6) how odd each is, and the classes of the five photos most like it
    OUT/features.npy       (n, F) what the encoder says of them, float16, to learn again from
    OUT/discovery.json     where the photos lie
    OUT/model.json, model.safetensors   for `opencon predict`
    OUT/result.json, config.json, environment.json   the result, the settings, the machine
    OUT/report.html        one page that opens offline

Letters: M photos, n that can be read, F features, D embedding size, S seen classes, C classes and groups together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from opencon.counting import CountEstimate
from opencon.data.listings import printable
from opencon.encoders.stored import EncoderFacts
from opencon.errors import DataError, RunError
from opencon.files import explained
from opencon.metrics import OpenWorldAccuracy, evaluate
from opencon.openworld.engine import COUNTERS
from opencon.openworld.fit import Fitted, OpenWorldConfig, fit_features
from opencon.openworld.stability import stability
from opencon.photos import set_aside
from opencon.photos.features import (
    FLOAT16_MAX,
    Extractor,
    FeatureSettings,
    PhotoFeatures,
    photo_features,
    seconds_for,
)
from opencon.photos.finetune import check_finetune, finetune
from opencon.photos.guesses import KNOWS, guess_names
from opencon.photos.listing import FEWEST, Photos, check, common_root, new_names, some_names, typical_side
from opencon.photos.model import OpenConModel, identity
from opencon.photos.model_settings import SETTINGS as MODEL
from opencon.photos.set_aside import SetAside
from opencon.report.doubt import doubt_of
from opencon.report.html import ReportData, write_report
from opencon.report.map import map_positions
from opencon.report.table import Group, PhotoRow, PhotoTable
from opencon.runtime import environment
from opencon.training.run_folder import ASSIGNMENTS, DISCOVERY, EMBEDDINGS, FEATURES, NEIGHBORS, RunFolder, holds_others

SMALL_SIDE, SMALL_SIZE = 144, 128  # photos up to this side are encoded at this size: more pixels would be made up
REPORT = "report.html"
WHAT = "a folder of `opencon discover`"

Progress = Callable[[str, int, int], None]  # stage, done, all


@dataclass(frozen=True, kw_only=True)
class DiscoverConfig:
    """The settings of a discovery."""

    features: FeatureSettings
    fit: OpenWorldConfig
    finetune: bool = False  # train the encoder's last stages too

    def plain(self) -> dict[str, Any]:
        """Nested plain data."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Discovery:
    """The result of a discovery, and where it was written."""

    table: PhotoTable  # a row for each photo
    count: CountEstimate | None  # None: the user said how many groups
    notes: list[str]  # what was set aside while the photos were listed
    replaced: list[str]  # names of groups that `opencon name` had set in this folder; they are gone now
    record: dict[str, Any]  # result.json
    folder: Path
    doubt: str = ""  # why the result is shaky and what would help; empty where nothing speaks against it
    everything: dict[str, Any] | None = None  # where the table is of a sample: exact counts over all photos

    @property
    def headline(self) -> str:
        """The outcome in a sentence; where it is shaky, a sentence before it says so."""
        return f"{self.doubt} {self.table.headline}".lstrip()

    @property
    def groups(self) -> list[Group]:
        """Every class and group with its number of unlabeled photos."""
        return self.table.groups

    @property
    def paths(self) -> dict[str, Path]:
        """The files of the page, the table and the embeddings."""
        return {"report": self.report, "table": self.folder / ASSIGNMENTS, "embeddings": self.folder / EMBEDDINGS}

    @property
    def report(self) -> Path:
        """The page that opens offline."""
        return self.folder / REPORT

    def __repr__(self) -> str:
        return f"<Discovery in {self.folder}: {self.headline}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.table._repr_html_()


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything that a discovery needs, checked, with the encoder open."""

    photos: Photos
    config: DiscoverConfig
    extractor: Extractor
    features: PhotoFeatures | None = None  # where they are there already
    sampled_from: int | None = None  # photos, of which these are a sample; None: these are all

    def plan(self, cache: Path | None) -> dict[str, str]:
        """What will be done, in words. Two seconds of it are done, to tell how long it will take."""
        photos, f, fit = self.photos, self.config.features, self.config.fit
        seconds = 0.0 if self.features else seconds_for(photos.paths, self.extractor, cache=cache)
        about = f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"
        labeled, classes = photos.num_labeled, len(photos.class_names)
        looks = "as it is" if f.num_views == 0 else f"and {f.num_views} view{'s' * (f.num_views > 1)} of it"
        groups = "as many new groups as there seem to be" if fit.num_novel is None else f"{fit.num_novel} new"
        groups = "{} to {} new".format(*fit.novel_range) if fit.novel_range else groups
        held = (
            f"{labeled:,} labeled in {classes} class{'es' if classes > 1 else ''} "
            f"({some_names(photos.class_names)}), {len(photos.paths) - labeled:,} unlabeled"
        )
        of = f", a sample of {self.sampled_from:,}" if self.sampled_from else ""
        takes = f"each photo {looks}: {about} {'where nothing is cached' if cache is None else 'from here'}"
        takes = "computed already" if self.features else takes
        return {
            "photos": f"{len(photos.paths):,}{of}: {held if labeled else 'none is labeled'}",
            "encoder": f"{f.encoder} at {self.extractor.encoder.image_size} px, {takes}; grouping and the page come on top",
            "looks for": f"the {classes} seen and {groups}" if classes else groups,
            "how": f"{self._learning()}, seed {fit.seed}",
        }

    def _learning(self) -> str:
        fit = self.config.fit
        steps = f"{fit.steps} steps of {fit.method} on the features, then " if fit.steps else ""
        tuning = ""
        if self.config.finetune:
            hours = " (hours on a CPU)" if self.extractor.device.type == "cpu" else ""
            tuning = f"the encoder's last stages learn too{hours}, then "
        return f"{tuning}{steps}groups by a mixture"


def prepare(photos: Photos, config: DiscoverConfig, device: torch.device) -> Prepared:
    """Refuse what cannot work, decide at which size photos are encoded, and open the encoder."""
    check(photos)
    if config.fit.steps and not photos.num_labeled:
        raise DataError("--steps learns from labels, and no photo has one. Label some photos, or leave --steps out.")
    config = replace(config, features=with_image_size(config.features, photos))
    extractor = Extractor.open(config.features, device)
    if config.finetune:
        check_finetune(extractor.encoder, len(photos.paths))
    return Prepared(photos, config, extractor)


def with_image_size(features: FeatureSettings, photos: Photos) -> FeatureSettings:
    """The same settings with a decision at which size the photos are encoded."""
    if features.image_size is not None or features.encoder != "efficientnet_lite0":
        return features
    side = typical_side(photos.paths)
    return replace(features, image_size=SMALL_SIZE if side is not None and side <= SMALL_SIDE else None)


def open_folder(out: Path) -> RunFolder:
    """A new or empty folder, or one that a discovery wrote before; others are refused before any work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / DISCOVERY).exists() and holds_others(out, [DISCOVERY]):
            raise RunError(f"{out} is not empty and holds no discovery. Give an empty or a new folder with --out.")
        folder = RunFolder(out)
        folder.write_json(DISCOVERY, {"what": WHAT})
    except OSError as err:
        raise RunError(f"cannot write to {out} ({err.strerror}). Give another --out.") from err
    return folder


def names_in(folder: RunFolder, photos: Photos) -> list[str]:
    """Names that `opencon name` gave to the groups of the discovery in a folder."""
    names: list[str] = []
    with contextlib.suppress(
        RunError, KeyError, TypeError
    ):  # the model is missing or damaged, and about to be replaced
        names = [str(name) for name in folder.read_json(MODEL)["class_names"]]
    own = set(photos.class_names)
    return [name for name in dict.fromkeys(names) if name not in own and not re.fullmatch(r"new-\d+", name)]


def discover_photos(
    prepared: Prepared,
    out: Path,
    *,
    cache: Path | None,
    truth: Mapping[str, str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Discovery:
    """Embed the photos, find classes and groups, and write everything to `out`.

    Args:
        prepared: which photos, the labels of some, and how.
        out: a folder; what an earlier discovery wrote there is replaced file by file.
        cache: a folder for the features, to use again next time; None: they are not kept.
        truth: the true class of photos by name, to measure with; the learner never sees it.
        progress: called as progress(stage, done, all).
    """
    folder = open_folder(out)
    with folder.held():
        start, photos = time.perf_counter(), prepared.photos
        replaced = names_in(folder, photos)
        folder.write_json(DISCOVERY, {"what": WHAT, "photos": os.path.abspath(photos.root)})
        folder.write_json("config.json", prepared.config.plain())
        folder.write_json("environment.json", environment(prepared.extractor.device))
        learned = _learn(prepared, folder, cache, progress)
        seconds = {"features and training": time.perf_counter() - start}

        progress("writing", 0, 1)
        table = _write_results(photos, learned, folder)
        record = _measured(table, learned, photos, truth)
        stable = stability(
            learned.fitted.model, learned.features.plain, learned.fitted.prediction.classes, learned.labels
        )
        doubt = doubt_of(table, learned.fitted.count, dict(zip(table.class_names, stable.tolist(), strict=True)))
        data = _page(photos, learned, table, record, folder.path)
        if prepared.sampled_from:
            record |= {"sampled_from": prepared.sampled_from}
        record |= {
            "headline": table.headline,
            "doubt": doubt,
            "photos": len(photos.paths),
            "unreadable": len(table.unreadable),
            "labeled": int((learned.labels >= 0).sum()),
            "groups": [asdict(group) for group in table.groups],
            "count": asdict(learned.fitted.count) if learned.fitted.count else None,
            "unlike_everything": table.num_unlike_everything,
            "twins": table.num_twins,
            "seconds": seconds | {"everything": time.perf_counter() - start},
        }
        facts = _facts(prepared, record["seconds"]["everything"])
        with explained(folder.path / REPORT):
            page = replace(data, facts=facts, doubt=doubt, names_for=identity(folder))
            write_report(page, folder.path / REPORT)
        folder.write_json("result.json", record)
        folder.forget_checkpoints()  # of --finetune: until here, the same command need not train again
        progress("writing", 1, 1)
        return Discovery(table, learned.fitted.count, list(photos.notes), replaced, record, folder.path, doubt)


@dataclass(frozen=True, eq=False)
class _Learned:
    """The features, and the fit to them."""

    features: PhotoFeatures
    settings: FeatureSettings  # of these features
    encoder: EncoderFacts
    labels: Tensor  # (n,)
    fitted: Fitted
    aside: SetAside
    known: Tensor | None  # (n, F) features that names are guessed from


def _learn(prepared: Prepared, folder: RunFolder, cache: Path | None, progress: Progress) -> _Learned:
    """Compute features and fit a model to them; with fine-tuning, do so again with the tuned encoder."""
    photos, config, extractor = prepared.photos, prepared.config, prepared.extractor

    def learn(settings: FeatureSettings, fit: OpenWorldConfig, extractor: Extractor) -> _Learned:
        features = prepared.features or read_features(photos, extractor, cache, progress)
        labels = torch.tensor(photos.labels_of(features.kept))
        aside = set_aside.find(features.plain, [photos.paths[i] for i in features.kept], labels, FEWEST)
        fitted = set_aside.fit_those_that_count(
            features.plain,
            aside,
            lambda rows: fit_features(
                features.plain[rows],
                labels[rows],
                fit,
                views=features.views[rows] if settings.num_views else None,
                progress=lambda i, n: progress("learning", i, n),
            ),
        )
        known = features.plain if settings.encoder == KNOWS else None
        return _Learned(features, settings, EncoderFacts.of(extractor.encoder), labels, fitted, aside, known)

    first = learn(config.features, config.fit, extractor)
    if not config.finetune:
        return first
    settings = finetune(
        [photos.paths[i] for i in first.features.kept],
        first.labels,
        first.fitted.prediction.classes,
        config.features,
        num_classes=first.fitted.model.num_classes,
        out=folder,
        device=extractor.device,
        progress=lambda i, n: progress("fine-tuning", i, n),
    )
    tuned = Extractor.open(settings, extractor.device)
    num_novel = first.fitted.model.num_classes - first.fitted.model.num_seen
    second = learn(settings, replace(config.fit, num_novel=num_novel), tuned)
    known = first.known if second.features.kept == first.features.kept else None  # a photo may have gone meanwhile
    return replace(second, fitted=replace(second.fitted, count=first.fitted.count), known=known)


def _write_results(photos: Photos, learned: _Learned, folder: RunFolder) -> PhotoTable:
    """Write the model, the embeddings and the table."""
    names, fitted, labels = photos.names(), learned.fitted, learned.labels
    num_new = fitted.model.num_classes - fitted.model.num_seen
    class_names = (*photos.class_names, *itertools.islice(new_names(photos.class_names), num_new))
    files = [names[i] for i in learned.features.kept]
    said = fitted.prediction
    classes = torch.where((labels < 0) & ~said.unlike_everything, said.classes, -1)
    guesses = guess_names(learned.known, classes, fitted.model.num_seen, fitted.model.num_classes)
    model = OpenConModel.of(
        fitted, class_names, learned.settings, learned.encoder, files, labels, guesses, learned.aside.counts
    )
    model.save(folder)
    folder.write_array(EMBEDDINGS, fitted.z.numpy())
    folder.write_array(NEIGHBORS, torch.cat([fitted.prediction.oddness[:, None], fitted.near], dim=1).numpy())
    folder.write_array(FEATURES, learned.features.plain.clamp(-FLOAT16_MAX, FLOAT16_MAX).half().numpy())
    label_names = [class_names[label] if label >= 0 else None for label in labels.tolist()]
    unread = [PhotoRow.unread(names[i], reason) for i, reason in learned.features.problems.items()]
    twin_of = [None if twin < 0 else files[twin] for twin in learned.aside.twin_of.tolist()]
    table = model.training_table(files, fitted.z, said, label_names, unread, twin_of)
    folder.write_text(ASSIGNMENTS, table.to_csv())
    return table


def count_classes(
    photos: Photos,
    features: FeatureSettings,
    *,
    cache: Path | None,
    device: torch.device,
    seed: int,
    by: str = "engine",
    max_classes: int | None = None,
    progress: Progress,
) -> CountEstimate:
    """How many classes the photos seem to show, seen and new, by one of `COUNTERS`."""
    count = COUNTERS[by]
    check(photos)
    features = with_image_size(features, photos)
    extractor = Extractor.open(features, device)
    rows = read_features(photos, extractor, cache, progress)
    labels = torch.tensor(photos.labels_of(rows.kept))
    return count(rows.plain, labels, num_seen=len(photos.class_names), seed=seed, max_classes=max_classes)


def read_features(photos: Photos, extractor: Extractor, cache: Path | None, progress: Progress) -> PhotoFeatures:
    """Features of every photo that can be read. Refuses photos of which too few can be read."""
    features = photo_features(
        photos.paths, extractor, cache=cache, progress=lambda done, total: progress("looking", done, total)
    )
    if len(features.kept) < FEWEST:
        first = next(iter(features.problems.items()), None)
        reason = f" The first: {printable(photos.paths[first[0]])} {first[1]}" if first else ""
        raise DataError(
            f"only {len(features.kept)} of {len(photos.paths)} photos can be read; {FEWEST} are needed.{reason}"
        )
    lost = set(range(len(photos.class_names))) - {photos.labels[i] for i in features.kept}
    if lost:
        name = photos.class_names[min(lost)]
        raise DataError(f"class {name!r} has no photo that can be read. Add one, or remove the class.")
    return features


def _measured(table: PhotoTable, learned: _Learned, photos: Photos, truth: Mapping[str, str] | None) -> dict[str, Any]:
    """Accuracy on the unlabeled photos whose true class is known; empty without `truth`."""
    if truth is None:
        return {}
    fitted, seen = learned.fitted, {name: c for c, name in enumerate(photos.class_names)}
    others = sorted(set(truth.values()) - set(seen))
    number = seen | {name: len(seen) + i for i, name in enumerate(others)}
    files = [row.file for row in table.readable]
    true_name = {
        i: truth.get(name, truth.get(Path(name).name)) for i, name in enumerate(files) if learned.labels[i] < 0
    }
    rows = [i for i, name in true_name.items() if name is not None]
    if not rows:
        raise DataError("--truth names none of the unlabeled photos. Its file names are those in assignments.csv.")
    classes = np.array([number[true_name[i]] for i in rows])  # type: ignore[index]
    return evaluate(
        fitted.prediction.classes[rows].numpy(),
        classes,
        num_seen=len(seen),
        num_classes=max(len(number), fitted.model.num_classes),
        protocol="gcd",
        on="unlabeled",
        novelty=fitted.prediction.novelty[rows].numpy(),
    )


def _page(photos: Photos, learned: _Learned, table: PhotoTable, record: Mapping[str, Any], out: Path) -> ReportData:
    projection, xy = map_positions(learned.fitted.z.numpy(), seed=0)
    accuracy = None
    if record:
        accuracy = OpenWorldAccuracy(record["all"], record["novel"], record["seen"], record["protocol"])

    def picture(row: int) -> Image.Image | None:
        path = photos.paths[learned.features.kept[row]]
        try:
            return Image.open(path) if path.is_file() else None
        except (OSError, ValueError, Image.DecompressionBombError):  # gone or changed since it was read
            return None

    folder = shlex.quote(os.path.abspath(out))
    steps = [
        (
            "Sort photos with this model; give others in place of these",
            f"opencon predict {folder} {_pile(photos)} --csv sorted.csv",
        ),
        ("Take the model elsewhere, as ONNX and as a folder", f"opencon export {folder} --out model"),
    ]
    if again := _again(max(learned.fitted.model.num_classes - learned.fitted.model.num_seen, 1)):
        steps.append(("Again, with more labels in the same place or another number of groups", again))
    return ReportData(
        title=photos.title,
        table=table,
        picture=picture,
        novelty_threshold=0.0,
        xy=xy,
        projection=projection,
        count=learned.fitted.count,
        next_steps=steps,
        names_command=f"opencon name {folder} ~/Downloads/names.csv",
        accuracy=accuracy,
    )


def _pile(photos: Photos) -> str:
    """The folder of the unlabeled photos, for a command."""
    folders = {path.parent for path, label in zip(photos.paths, photos.labels, strict=True) if label < 0}
    return shlex.quote(str(common_root(*folders)))


def _again(num_novel: int) -> str:
    """The command that this program was started with, from any folder, and with a number of groups; empty in Python."""
    if sys.argv[1:2] != ["discover"]:
        return ""
    words = [os.path.abspath(word) if os.path.exists(word) else word for word in sys.argv[1:]]
    while "--novel" in words:
        at = words.index("--novel")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--novel=")]
    return shlex.join(["opencon", *words, "--novel", str(num_novel)])


def _facts(prepared: Prepared, seconds: float) -> dict[str, object]:
    """The footer of the page."""
    features = prepared.config.features
    views = f", {1 + features.num_views} views of each photo" if features.num_views else ""
    of = prepared.sampled_from
    sample: dict[str, object] = {"a sample": f"{len(prepared.photos.paths):,} of {of:,} photos"} if of else {}
    return sample | {
        "encoder": f"{features.encoder}{views}",
        "how": f"{prepared._learning()}, seed {prepared.config.fit.seed}",
        "seconds": f"{seconds:.0f}",
        "made with": f"torch {torch.__version__} on {prepared.extractor.device}",
    }
