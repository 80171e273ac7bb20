"""The public functions, one for each command; the command line is a thin skin over the same parts.

Everything here is importable from `opencon` itself. The rooms below are private: they may change with any version.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from opencon.config import RunConfig, with_settings
from opencon.counting import CountEstimate
from opencon.data.split import names_from_file
from opencon.errors import require, shown
from opencon.experiments.callbacks import Callback
from opencon.experiments.compare import Comparison, compare_runs
from opencon.experiments.evaluate import draw_side_by_side, evaluate_run
from opencon.experiments.recipes import run_config, start_config
from opencon.experiments.results import Confusion, Predictions, predictions_of, renamed
from opencon.experiments.train import train as train_run
from opencon.experiments.workbench import Workbench, data_settings
from opencon.experiments.workbench import open_run as open_bench
from opencon.methods import METHODS
from opencon.openworld.fit import OpenWorldConfig
from opencon.photos.discover import DiscoverConfig, Discovery, Progress, count_classes
from opencon.photos.discover_embedded import count_embedded, discover_prepared, open_embedded, prepare_source
from opencon.photos.export import export_folder
from opencon.photos.features import FeatureSettings, views_for
from opencon.photos.listing import Photos, find_photos, read_truth
from opencon.photos.model import OpenConModel
from opencon.photos.names import rename_from_table, rename_groups
from opencon.photos.sample import SAMPLE
from opencon.plugins import import_installed, recall
from opencon.runtime import pick_device
from opencon.training.run_folder import RunFolder

PathLike = str | Path


def discover(
    folder: PathLike | None = None,
    *,
    out: PathLike,
    labeled: PathLike | None = None,
    unlabeled: PathLike | None = None,
    labels: PathLike | None = None,
    manifest: PathLike | None = None,
    features: PathLike | None = None,
    sample: int = SAMPLE,
    novel: int | tuple[int, int] | Literal["auto"] = "auto",
    max_classes: int | None = None,
    encoder: PathLike = "efficientnet_lite0",
    size: int | None = None,
    steps: int = 0,
    views: int | None = None,
    finetune: bool = False,
    seed: int = 0,
    device: str = "auto",
    cache: PathLike | None = None,
    truth: PathLike | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Discovery:
    """Sort photos into the classes you named, and discover new groups among the rest.

    Examples:
        >>> import opencon
        >>> result = opencon.discover("photos/", out="runs/photos")  # doctest: +SKIP
        >>> result.headline, result.groups, result.table.to_pandas()  # doctest: +SKIP

    Args:
        folder: with labeled/ (one sub-folder per class) and unlabeled/ in it; or any folder, with `labels`.
        out: a folder for the results; what an earlier discovery wrote there is replaced.
        labeled: a folder with one sub-folder per class, beside `unlabeled`.
        unlabeled: a folder with the other photos; alone, no photo has a label.
        labels: a table path,label for the photos in `folder`; an empty label is none.
        manifest: a table path,label of all photos, paths relative to it.
        features: a folder of `opencon embed` in place of photos, with its own labels, or `labels` by name. Where it holds
            more photos than the sample, all of them are sorted and counted as well, in the folder `everything` of `out`.
        sample: photos of `features` that are fitted and shown, at most.
        novel: how many new groups to look for; (low, high): a number between these; "auto": as many as there seem to be.
        max_classes: the most classes and groups, together, where the number is not given; None: 100, or twice the seen.
        encoder: efficientnet_lite0, timm:NAME, or the folder of a run of `train`.
        size: side in pixels at which the encoder sees a photo; None: 224, or 128 for small photos.
        steps: steps of training a head on the features first. They gain nothing that can be measured.
        views: random views of each photo for the steps; None: 4 where there are steps.
        finetune: train the encoder's last stages too; minutes on a GPU, hours on a CPU.
        seed: of everything random.
        device: "auto", "cpu", "cuda" or "cuda:N".
        cache: a folder to keep features in for the next time; None: nowhere.
        truth: a table file,class, to measure accuracy with; the learner never sees it.
        progress: called as progress(stage, done, all).

    Returns:
        The table of the photos, the groups, the count of classes, and where everything was written.
    """
    asked: dict[str, Any] = {"encoder": encoder, "size": size, "steps": steps, "views": views, "finetune": finetune}
    config = discover_config(novel=novel, max_classes=max_classes, seed=seed, **asked)
    true, into = None if truth is None else read_truth(Path(truth)), Path(out).expanduser()
    photos = _paths(folder=folder, labeled=labeled, unlabeled=unlabeled, labels=labels, manifest=manifest)
    prepared = prepare_source(config, into, pick_device(device), features=_path(features), sample=sample, **photos)
    _say_notes(prepared.photos)
    return discover_prepared(prepared, into, cache=_path(cache), truth=true, progress=progress)


def discover_config(
    *,
    novel: int | tuple[int, int] | str | None,
    max_classes: int | None = None,
    encoder: PathLike,
    size: int | None,
    steps: int,
    views: int | None,
    finetune: bool,
    seed: int,
) -> DiscoverConfig:
    """What is asked of a discovery; the arguments are those of `discover`."""
    require(
        views is None or steps > 0, f"views = {views} are for steps to learn from, and there are none. Give steps too."
    )
    between = novel if isinstance(novel, tuple) else None
    if isinstance(novel, str) and novel != "auto":
        ends = novel.split("-")
        # Ours: nobody has more photos than nine digits say.
        are_numbers = len(ends) <= 2 and all(end.isdecimal() and len(end) < 10 for end in ends)
        require(are_numbers, f"novel = {shown(novel)} must be auto, a whole number, 0 or more, or a range such as 3-8.")
        novel, between = (int(ends[0]), None) if len(ends) == 1 else (None, (int(ends[0]), int(ends[1])))
    num_views = views if views is not None else views_for(steps)
    return DiscoverConfig(
        features=FeatureSettings(
            encoder=str(encoder), image_size=size, num_views=num_views
        ),  # any seed finds them again
        fit=OpenWorldConfig(
            num_novel=novel if isinstance(novel, int) else None,
            novel_range=between,
            max_classes=max_classes,
            steps=steps,
            seed=seed,
        ),
        finetune=finetune,
    )


def count(
    folder: PathLike | None = None,
    *,
    labeled: PathLike | None = None,
    unlabeled: PathLike | None = None,
    labels: PathLike | None = None,
    manifest: PathLike | None = None,
    features: PathLike | None = None,
    sample: int = SAMPLE,
    by: str = "engine",
    max_classes: int | None = None,
    encoder: PathLike = "efficientnet_lite0",
    size: int | None = None,
    seed: int = 0,
    device: str = "auto",
    cache: PathLike | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> CountEstimate:
    """Estimate how many classes the photos show, seen and new, with an interval and a reason.

    Args:
        by: "engine" (as `discover` counts), "tree", or as in the papers: "gcd", "dtc".

    The other arguments are those of `discover`.
    """
    if features is not None:
        found = open_embedded(
            Path(features).expanduser(), _path(labels), *map(_path, (folder, labeled, unlabeled, manifest))
        )
        return count_embedded(*found, sample=sample, seed=seed, by=by, max_classes=max_classes)
    paths = _paths(folder=folder, labeled=labeled, unlabeled=unlabeled, labels=labels, manifest=manifest)
    photos = find_photos(**paths)
    _say_notes(photos)
    settings, where = FeatureSettings(encoder=str(encoder), image_size=size), pick_device(device)
    return count_classes(
        photos,
        settings,
        cache=_path(cache),
        device=where,
        seed=seed,
        by=by,
        max_classes=max_classes,
        progress=progress,
    )


def name(run: PathLike, names: Mapping[str, str] | PathLike) -> dict[str, str]:
    """Give groups of a discovery the names you chose: the model and assignments.csv change.

    Args:
        run: the folder of a discovery.
        names: group to name, such as {"new-1": "dragonfly"}; or a table group,name as the report writes it.

    Returns:
        The new name of each group whose name changed.
    """
    folder = Path(run).expanduser()
    if isinstance(names, Mapping):
        return rename_groups(folder, {group: str(name) for group, name in names.items()})[0]
    return rename_from_table(folder, Path(names).expanduser())[0]


def export(run: PathLike, out: PathLike, *, onnx: bool | None = None) -> list[str]:
    """Write a model that needs nothing else: weights and a card in a folder, and one ONNX file.

    Args:
        run: the folder of a discovery, or of a run of `train`.
        out: a folder for the model.
        onnx: whether to write model.onnx; None: where the extra `onnx` is installed.

    Returns:
        A line about each thing that was written.
    """
    return list(export_folder(Path(run).expanduser(), Path(out).expanduser(), onnx=onnx))


@dataclass(frozen=True, eq=False)
class Run:
    """A trained run: its folder, what was measured, and what it says of its images."""

    folder: Path
    result: dict[str, Any]  # result.json: accuracies as shares, protocol, seconds, ...; empty if it is not finished
    data: str | None = None  # where its images lie now, if elsewhere
    device: str = "auto"
    truth: str | None = None  # the classes of its pile, where somebody knows them by now
    test: str | None = None  # held-out images, likewise

    def __repr__(self) -> str:
        shown = ("all", "novel", "seen", "held_out", "stability")
        scores = ", ".join(f"{key} {self.result[key]:.1%}" for key in shown if self.result.get(key) is not None)
        return f"<Run in {self.folder}: {scores or 'trained'}>"

    @property
    def config(self) -> RunConfig:
        """Every setting."""
        return run_config(RunFolder.open_for_reading(self.folder).read_json("config.json"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A record for each epoch: losses, seconds, and what was measured."""
        return RunFolder.open_for_reading(self.folder).read_metrics()

    def predictions(self, on: Literal["unlabeled", "test"] = "unlabeled") -> Predictions:
        """A class or group for each unlabeled (or held-out) image, with the matching of groups and true classes."""
        return self._said(on)[0]

    def embeddings(self, on: Literal["unlabeled", "test"] = "unlabeled") -> NDArray[np.float32]:
        """(M, D) a row for each image of `predictions`."""
        return self._said(on)[1]

    def confusion(self, on: Literal["unlabeled", "test"] = "unlabeled") -> Confusion:
        """True classes against groups."""
        return self.predictions(on).confusion()

    def model(self) -> OpenConModel:
        """The model for new images; the images that it was trained on are not needed."""
        return OpenConModel.from_pretrained(self.folder, self.device)

    @cached_property
    def _kept(self) -> dict[str, Any]:
        return {}

    def _bench(self) -> Workbench:
        files = data_settings(truth=self.truth, test=self.test)
        return open_bench(self.folder, pick_device(self.device), data_root=self.data, settings=files)

    def _said(self, on: Literal["unlabeled", "test"]) -> tuple[Predictions, NDArray[np.float32]]:
        if on not in self._kept:
            bench = self._bench()
            found, z = predictions_of(bench, on)
            self._kept[on] = renamed(found, RunFolder.open_for_reading(self.folder)), z
        said: tuple[Predictions, NDArray[np.float32]] = self._kept[on]
        return said


def open_run(
    folder: PathLike,
    *,
    data: PathLike | None = None,
    truth: PathLike | None = None,
    test: PathLike | None = None,
    device: str = "auto",
) -> Run:
    """A run that `train` or `opencon train` left in a folder.

    Args:
        folder: the run folder.
        data: where its images lie now, if elsewhere.
        truth: the classes of its pile, if somebody knows them by now: "folders", or a table file,class.
        test: held-out images with classes, likewise: a folder with one sub-folder per class, or a list.
        device: "auto", "cpu", "cuda" or "cuda:N".
    """
    run = RunFolder.open_for_reading(Path(folder).expanduser())
    result = run.read_json("result.json") if run.has("result.json") else {}
    where = {"data": _text(data), "truth": _text(truth), "test": _text(test)}
    return Run(run.path, result, device=device, **where)


def train(
    recipe: PathLike | RunConfig,
    *,
    out: PathLike,
    settings: Mapping[str, Any] | None = None,
    variant: str | None = None,
    data: PathLike | None = None,
    labeled: PathLike | None = None,
    unlabeled: PathLike | None = None,
    truth: PathLike | None = None,
    test: PathLike | None = None,
    weights: PathLike | None = None,
    seed: int | None = None,
    device: str = "auto",
    download: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a method on a data set; a run that was interrupted goes on, a finished one is shown.

    Examples:
        >>> import opencon
        >>> opencon.train("orca/digits", out="runs/orca", settings={"train.epochs": 5})  # doctest: +SKIP

    Args:
        recipe: a name as `opencon list recipes` shows it (METHOD/DATASET; a data set alone means OpenCon), a TOML or
            JSON file (the config.json of a run is one), or a configuration.
        out: the run folder.
        settings: settings to change, by their dotted name.
        variant: "released" (the default) or "paper", for a recipe by name.
        data: where the images lie (data.root).
        labeled: your own images instead of the recipe's: a folder with one sub-folder per class.
        unlabeled: a folder with images that carry no label, beside `labeled`.
        truth: their classes, to measure with: "folders" (the sub-folders of `unlabeled`), or a table file,class.
        test: held-out images with classes: a folder with one sub-folder per class, or a list.
        weights: a checkpoint to start from (encoder.weights), or "installed".
        seed: of training (train.seed).
        device: "auto", "cpu", "cuda" or "cuda:N".
        download: fetch the data set's archive if it is missing.
        callbacks: told of the run while it trains; loggers are callbacks, too.
    """
    files = {"labeled": labeled, "unlabeled": unlabeled, "truth": truth, "test": test}
    folder, where = Path(out).expanduser(), pick_device(device)
    recall(folder)  # a run that goes on may need what it was started with
    config = configure(recipe, settings, variant=variant, data=data, weights=weights, seed=seed, **files)
    result = train_run(config, folder, where, watchers=callbacks, download=download)
    return Run(folder, result, device=device)


def configure(
    recipe: PathLike | RunConfig,
    settings: Mapping[str, Any] | Iterable[str] | None = None,
    *,
    variant: str | None = None,
    data: PathLike | None = None,
    labeled: PathLike | None = None,
    unlabeled: PathLike | None = None,
    truth: PathLike | None = None,
    test: PathLike | None = None,
    weights: PathLike | None = None,
    seed: int | None = None,
) -> RunConfig:
    """The configuration of a run, every setting checked; the arguments are those of `train`.

    `settings` may also be a list of texts, as for `--set` on the command line: "train.epochs=5".
    """
    for problem in import_installed():
        warnings.warn(problem, stacklevel=3)
    files = {"root": labeled, "unlabeled": unlabeled, "truth": truth, "test": test}
    config = start_config(recipe, variant, {key: str(value) for key, value in files.items() if value is not None})
    short = {"data.root": data, "encoder.weights": weights, "train.seed": seed}
    changes = [f"{key}={json.dumps(value, default=str)}" for key, value in short.items() if value is not None]
    if isinstance(settings, Mapping):
        settings = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
    config = with_settings(config, [*changes, *(settings or ())])
    return replace(config, split=names_from_file(config.split))


def evaluate(
    run: PathLike | Run,
    *,
    protocol: str | None = None,
    on: str | None = None,
    data: PathLike | None = None,
    truth: PathLike | None = None,
    test: PathLike | None = None,
    device: str = "auto",
    picture: PathLike | None = None,
    figures: PathLike | None = None,
    classes: int = 10,
    novelty: bool = False,
    count: str | None = None,
) -> dict[str, Any]:
    """Measure a trained run again; by default as it was trained.

    Args:
        run: a run folder, or what `train` returned.
        protocol: "orca" or "gcd".
        on: "unlabeled" (training images) or "test" (held-out images).
        data: where the images lie now.
        truth: the classes of the run's pile, if somebody knows them by now: "folders", or a table file,class.
        test: held-out images with classes to measure on: a folder with one sub-folder per class, or a list.
        device: "auto", "cpu", "cuda" or "cuda:N".
        picture: also draw the embedding to this PNG.
        figures: also draw look-alikes of the paper's figures to this folder; a warning names those that cannot be drawn.
        classes: how many a figure of the embedding shows, 10 or 20.
        novelty: also compare every novelty score.
        count: also estimate the number of classes, by "engine", "tree", "gcd" or "dtc".

    Returns:
        Accuracies as shares, with their protocol, images and number.
    """
    folder = run.folder if isinstance(run, Run) else Path(run).expanduser()
    return evaluate_run(
        folder,
        pick_device(device),
        protocol=protocol,
        on=on,
        data_root=_text(data),
        truth=_text(truth),
        test=_text(test),
        picture=_path(picture),
        figures=_path(figures),
        num_drawn=classes,
        novelty=novelty,
        count=count,
        say=lambda text: warnings.warn(text, stacklevel=3),
    )


def draw(
    runs: PathLike | Run | Sequence[PathLike | Run],
    out: PathLike,
    *,
    classes: int = 10,
    data: PathLike | None = None,
    device: str = "auto",
) -> list[Path]:
    """Draw embeddings and confusion matrices of runs side by side. Returns the pictures.

    Args:
        runs: run folders, or what `train` returned, on the same data and split; or a single one of these.
        out: a folder for maps.png and confusions.png.
        classes: how many are shown, 10 or 20.
        data: where the images lie now, for runs that are given as folders.
        device: "auto", "cpu", "cuda" or "cuda:N", likewise.
    """
    each = [runs] if isinstance(runs, (str, Path, Run)) else list(runs)
    opened = [run if isinstance(run, Run) else open_run(run, data=data, device=device) for run in each]
    names = [run.folder.name for run in opened]
    titles = [
        f"{METHODS[run.config.method.name].title}, {name if names.count(name) == 1 else run.folder}"
        for run, name in zip(opened, names, strict=True)
    ]
    benches = [run._bench() for run in opened]
    return draw_side_by_side(dict(zip(titles, benches, strict=True)), Path(out).expanduser(), classes)


def compare(runs: PathLike | Run | Iterable[PathLike | Run]) -> Comparison:
    """Runs side by side: mean and standard deviation over seeds, seconds per epoch, and the published numbers.

    Args:
        runs: run folders, folders of runs, or what `train` returned; or a single one of these.
    """
    runs = [runs] if isinstance(runs, (str, Path, Run)) else runs
    folders = [run.folder if isinstance(run, Run) else Path(run).expanduser() for run in runs]
    left_out: list[str] = []
    return Comparison(compare_runs(folders, say=left_out.append), left_out)


def _say_notes(photos: Photos) -> None:
    for note in photos.notes:
        warnings.warn(f"set aside: {note}", stacklevel=3)


def _paths(**given: PathLike | None) -> dict[str, Any]:
    return {key: _path(value) for key, value in given.items()}


def _text(value: PathLike | None) -> str | None:
    return None if value is None else str(value)


def _path(value: PathLike | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
