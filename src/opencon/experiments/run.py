"""One run from configuration to result: plan, prepare, train, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opencon.config import EvaluationSet, Protocol, RunConfig, to_dict, with_settings
from opencon.counting import COUNTERS
from opencon.data.augment import Augment, plain_view
from opencon.data.benchmarks import Dataset, DatasetInfo, dataset_info, load_dataset
from opencon.data.loader import TwoStreamLoader
from opencon.data.split import Split, batch_shares, check_split, make_split
from opencon.data.streaming import Images
from opencon.encoders import ENCODERS, build_embedder
from opencon.errors import ConfigError
from opencon.experiments.keeper import Keeper, tensorboard_writer
from opencon.experiments.measures import class_count, draw_paper_figures, novelty_scores
from opencon.experiments.recipes import run_config
from opencon.methods import METHODS, Assignment, FeatureBank, Method, Task
from opencon.metrics import evaluate, knn_accuracy
from opencon.report.figures import embedding_figure
from opencon.runtime import environment, seeded
from opencon.training.embedding import BATCH, embed_images
from opencon.training.optimizer import build_optimizer
from opencon.training.run_folder import RunFolder
from opencon.training.trainer import fit

MOST_PROBLEMS = 10  # files set aside that are named one by one
MEASURED_STEPS = 50  # ours: of two views each, so that statistics scatter ten times less than a batch's
MOST_DRAWN = 1000  # images in a picture: more hide each other, and t-SNE takes its time


@dataclass(frozen=True)
class Callbacks:
    """What a run tells the outside: a line of text, progress in steps, the record of an epoch."""

    say: Callable[[str], None] = lambda text: None
    started: Callable[[int, int, int], None] = lambda first_epoch, num_epochs, steps: None
    stepped: Callable[[int, int], None] = lambda epoch, steps: None
    epoch_done: Callable[[dict[str, Any]], None] = lambda record: None


def plan(config: RunConfig, *, download: bool = False) -> dict[str, str]:
    """What a run would do, in words; refuses a configuration that does not fit the data. Loads no image."""
    info = dataset_info(config.data, download=download)
    check_fits(config, info)
    encoder = config.encoder
    start = f"weights from {encoder.weights}" if encoder.weights else "random weights"
    learns = {"all": "everything learns", "head": "only the head learns"}.get(
        encoder.train_from, f"{encoder.train_from} and the head learn"
    )
    shown = {
        "data": f"{info.title}: {info.num_train:,} training images of {info.num_classes} classes, {info.image_size} px",
        "method": f"{METHODS[config.method.name].title} ({METHODS[config.method.name].paper})",
        "encoder": f"{encoder.name}, {start}, {learns}",
        "training": f"{config.train.epochs} epochs, batches of {config.train.batch_size}, lr {config.train.lr:g} "
        f"({config.train.schedule}), {config.train.precision}, seed {config.train.seed}",
    }
    if config.train.epochs == 0:
        shown |= {"encoder": f"{encoder.name}, {start}, nothing learns", "training": "none: the start is evaluated"}
    if config.method.uses_labels:
        shown["split"] = (
            f"{config.split.num_seen} seen classes, {config.split.labeled_ratio:.0%} of their images labeled; "
            f"{(config.split.num_classes or info.num_classes) - config.split.num_seen} novel classes to find; "
            f"split seed {config.split.seed}"
        )
        on = {"unlabeled": "the unlabeled training images", "test": "the held-out test images"}[config.eval.on]
        shown["evaluation"] = f"protocol {config.eval.protocol}, on {on}"
    if encoder.weights is None and config.train.epochs == 0:
        shown["note"] = "random weights that learn nothing say little about the images: give --weights"
    elif encoder.weights is None and encoder.train_from != "all":
        shown["note"] = "frozen stages with random weights learn nothing: give --weights, or encoder.train_from=all"
    return shown


def check_fits(config: RunConfig, info: DatasetInfo) -> None:
    """Refuse what cannot work before anything is loaded."""
    num_train = info.num_train
    with torch.device("meta"), seeded(0):  # shapes alone
        encoder = ENCODERS[config.encoder.name].build(info.channels, config.augment.size or info.image_size)
        encoder.freeze(config.encoder.train_from)
    if config.train.epochs and not config.method.trains:
        raise ConfigError(f"{config.method.name} learns nothing: train.epochs = {config.train.epochs} must be 0.")
    # Without an epoch there is no batch: any size will do.
    batch, share = (config.train.batch_size, config.train.labeled_share) if config.train.epochs else (num_train, None)
    if config.method.uses_labels:
        check_split(config.split, info.num_classes, num_train, batch, share)
    elif batch > num_train:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size} is more than the {num_train} images there are."
        )
    if config.eval.on == "test" and not info.num_test:
        raise ConfigError(f"{config.data.name} has no held-out test images. Use eval.on=unlabeled (--on unlabeled).")
    if config.encoder.weights and not Path(config.encoder.weights).is_file():
        raise ConfigError(f"encoder.weights = {config.encoder.weights} is not a file. Give a checkpoint, or none.")


@dataclass(frozen=True)
class Workbench:
    """Everything a run computes with. The truth stays in `dataset`, which only `score` reads."""

    config: RunConfig
    dataset: Dataset
    split: Split
    method: Method[Any]
    device: torch.device
    images: Images  # training images on the device, uint8, or streamed to it
    labels: Tensor  # (M,) what the learner may know: the class of a labeled image, else -1
    view: Callable[[Tensor], Tensor]  # evaluation view

    def bank(self) -> FeatureBank:
        """The training images, embedded."""
        return FeatureBank(self.embed(self.images), self.labels)

    def embed(self, images: Images) -> Tensor:
        """(M, D), in order; streamed images pass by in the chunks that `embed_images` would cut."""
        rows = partial(embed_images, self.method, self.method.embed, view=self.view)
        if isinstance(images, Tensor):
            return rows(images)
        with closing(images.in_order(BATCH)) as chunks:
            return torch.cat([rows(chunk) for chunk in chunks])

    def judged(self, on: EvaluationSet) -> tuple[Tensor, Tensor]:
        """Which rows of the bank that `score` makes are judged, and their true classes."""
        if on == "test":
            truth = self.dataset.held_out().classes
            return len(self.labels) + torch.arange(len(truth)), truth
        return self.split.unlabeled, self.dataset.train.classes[self.split.unlabeled]

    def score(self, on: EvaluationSet, protocol: Protocol) -> tuple[dict[str, Any], FeatureBank, Assignment]:
        """Embed, assign and compare with the truth: the record, and what it was made from."""
        if not self.config.method.uses_labels:
            bank, truth = self.bank(), self.dataset.train.classes
            record: dict[str, Any] = {
                "on": "train",
                "seed": self.config.train.seed,
                "num_images": len(truth),
                "knn20": knn_accuracy(bank.z, truth),
            }
            return record, bank, Assignment(torch.full_like(self.labels, -1))
        bank = self.bank()
        if on == "test":  # after the training images, of which some are labeled: a method may need those
            z = self.embed(self.dataset.held_out().images.to(self.device))
            unknown = torch.full((len(z),), -1, device=self.device)
            bank = FeatureBank(torch.cat([bank.z, z]), torch.cat([bank.labels, unknown]))
        assignment = self.method.assign(bank)
        rows, truth = self.judged(on)
        novelty = assignment.novelty.cpu()[rows].numpy() if assignment.novelty is not None else None
        record = evaluate(
            assignment.classes.cpu()[rows].numpy(),
            truth.numpy(),
            num_seen=self.split.num_seen,
            num_classes=self.split.num_classes,
            protocol=protocol,
            on=on,
            novelty=novelty,
        )
        return record | {"seed": self.config.train.seed}, bank, assignment


def prepare(
    config: RunConfig, device: torch.device, *, split: Split | None = None, download: bool = False
) -> Workbench:
    """Check that the configuration fits, load the data, and assemble."""
    info = dataset_info(config.data, download=download)
    check_fits(config, info)
    return assemble(config, load_dataset(config.data, download=download), device, split=split)


def assemble(config: RunConfig, dataset: Dataset, device: torch.device, *, split: Split | None = None) -> Workbench:
    """Split a data set (or take the given split) and build the method on the device."""
    train = dataset.train
    split = split or make_split(train.classes, config.split, num_data_classes=dataset.info.num_classes)
    labels = split.visible_labels(train.classes)
    if not config.method.uses_labels:
        labels = torch.full_like(labels, -1)
    size = config.augment.size or train.images.shape[-1]
    with seeded(config.train.seed):
        embedder = build_embedder(
            config.encoder,
            in_channels=train.images.shape[1],
            image_size=size,
            precision=config.train.precision,
            projects=config.method.projects,
        )
        task = Task(split.num_seen, split.num_classes, split.labeled_ratio, len(train))
        method = METHODS[config.method.name].build(config.method, task, embedder)
    method.kernels = config.train.kernels
    if method.kernels and not method.differentiates_twice:
        embedder.encoder.fuse()
    return Workbench(
        config,
        dataset,
        split,
        method.to(device),
        device,
        train.images.to(device),
        labels.to(device),
        partial(plain_view, image_size=size),
    )


def build_loader(bench: Workbench) -> TwoStreamLoader:
    """The two streams of a workbench, two views an image."""
    config = bench.config
    size = config.augment.size or bench.images.shape[-1]
    kinds = [config.augment] if config.strong is None else [config.augment, config.strong]
    augments = [Augment(kind, image_size=size, channels=bench.images.shape[1]) for kind in kinds]
    for augment in augments:
        augment.kernels = config.train.kernels
        if config.train.compile:
            augment.plain = torch.compile(augment.plain)  # type: ignore[method-assign]
    shares = (0, config.train.batch_size)
    if config.method.uses_labels:
        shares = batch_shares(bench.split, config.train.batch_size, config.train.labeled_share)
    return TwoStreamLoader(
        bench.images,
        bench.labels,
        batch_shares=shares,
        augments=(augments[0], augments[-1]),
        seed=config.train.seed,
    )


def train(
    config: RunConfig,
    out: Path,
    device: torch.device,
    *,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 (frozen)
    download: bool = False,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Train into the folder `out`, resuming what is there; returns the final record, which is also in result.json."""
    start = time.perf_counter()
    make_writer = tensorboard_writer() if tensorboard else None  # its absence is said before anything is written
    folder = RunFolder.open_for_training(out, to_dict(config))
    if folder.has("result.json"):
        callbacks.say(f"{out} is finished already; this is its result.")
        return folder.read_json("result.json")
    started = folder.has("config.json")
    split = Split.from_json(folder.read_json("split.json")) if started else None
    # A checkpoint holds all weights: the file they started from is no longer needed.
    base = without_weights(config) if folder.checkpoint.exists() else config
    bench = prepare(base, device, split=split, download=download)
    if bench.method.embedder.load_report is not None:
        callbacks.say(str(bench.method.embedder.load_report))
    if not isinstance(bench.images, Tensor):
        gb = math.prod(bench.images.shape) / 1e9
        callbacks.say(f"The images would take {gb:.3g} GB: they are read from their files while training.")
    problems = bench.dataset.train.problems
    for problem in problems[:MOST_PROBLEMS]:
        callbacks.say(f"set aside: {problem}")
    if len(problems) > MOST_PROBLEMS:
        callbacks.say(f"... and {len(problems) - MOST_PROBLEMS} more files were set aside.")
    if not started:  # config.json last: it makes the folder a run
        folder.write_json("split.json", bench.split.to_json())
        folder.write_json("environment.json", environment(device))
        folder.write_json("config.json", to_dict(config))

    if config.train.epochs == 0:
        if folder.checkpoint.exists():
            bench.method.load_state_dict(folder.load_checkpoint(to_dict(config))["method"])
        bench.method.embedder.fold_frozen()  # as in training
        return finish(folder, bench, bench.score(config.eval.on, config.eval.protocol)[0], start)
    loader = build_loader(bench)
    optimizer = build_optimizer(bench.method, config.train)
    scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
    keeper = Keeper(folder, config, bench.method, optimizer, scaler)
    writer = make_writer(str(out / "tensorboard")) if make_writer else None

    def on_epoch(epoch: int, means: dict[str, float]) -> None:
        record = keeper.epoch_done(epoch, means, lambda: bench.score(config.eval.on, config.eval.protocol)[0])
        if writer is not None:
            for name, value in record.items():
                if isinstance(value, float) and math.isfinite(value):
                    writer.add_scalar(name, value, epoch)
        callbacks.epoch_done(record)

    with keeper:
        first_epoch = keeper.resume()
        if first_epoch:
            callbacks.say(f"Resuming {out} after {first_epoch} of {config.train.epochs} epochs.")
        else:
            bench.method.embedder.measure_frozen(loader.first_views(MEASURED_STEPS))
        bench.method.embedder.fold_frozen()
        torch.backends.cudnn.benchmark = True  # shapes never change, so trying out convolution algorithms once pays
        callbacks.started(first_epoch, config.train.epochs, len(loader))
        fit(
            bench.method,
            optimizer,
            loader,
            config.train,
            features=bench.bank,
            scaler=scaler,
            first_epoch=first_epoch,
            on_step=callbacks.stepped,
            on_epoch=on_epoch,
        )
    if writer is not None:
        writer.close()

    return finish(folder, bench, folder.read_metrics()[-1], start)


def finish(folder: RunFolder, bench: Workbench, record: Mapping[str, Any], start: float) -> dict[str, Any]:
    """Write the encoder and the result, which makes the run a finished one."""
    config, result = bench.config, dict(record) | {"total_seconds": time.perf_counter() - start}
    if config.train.epochs == 0:
        folder.save_checkpoint({"config": to_dict(config), "epochs_done": 0, "method": bench.method.state_dict()})
    metadata = {"encoder": config.encoder.name, "method": config.method.name, "data": config.data.name}
    folder.save_tensors("encoder.safetensors", bench.method.embedder.encoder.state_dict(), metadata)
    folder.write_json("result.json", result)
    return result


def open_run(
    out: Path, device: torch.device, *, data_root: str | None = None, settings: Iterable[str] = ()
) -> Workbench:
    """The workbench of a trained run, with the weights of its checkpoint."""
    folder = RunFolder.open_for_reading(out)
    config = with_settings(run_config(folder.read_json("config.json")), settings)
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=data_root))
    state = folder.load_checkpoint()
    bench = prepare(without_weights(config), device, split=Split.from_json(folder.read_json("split.json")))
    bench.method.load_state_dict(state["method"])
    bench.method.embedder.fold_frozen()  # as in training, so that a measure repeats
    return bench


def without_weights(config: RunConfig) -> RunConfig:
    """The same, starting from random weights."""
    return replace(config, encoder=replace(config.encoder, weights=None))


def evaluate_run(
    out: Path,
    device: torch.device,
    *,
    protocol: str | None = None,
    on: str | None = None,
    data_root: str | None = None,
    picture: Path | None = None,
    figures: Path | None = None,
    novelty: bool = False,
    count: str | None = None,
) -> dict[str, Any]:
    """Measure a trained run again; protocol and images default to the run's own. Draws what has a path.

    `novelty` adds every novelty score; `count`, a name in COUNTERS, an estimate of the number of classes.
    """
    if count is not None:
        COUNTERS[count]
    changes = {"eval.protocol": protocol, "eval.on": on}
    bench = open_run(out, device, data_root=data_root, settings=[f"{k}={v}" for k, v in changes.items() if v])
    how = bench.config.eval
    if (picture or figures) is not None and how.on == "test":
        raise ConfigError("--picture and --figures show the unlabeled training images. Use them with --on unlabeled.")
    if (protocol or on) and not bench.config.method.uses_labels:
        raise ConfigError(f"{bench.config.method.name} looks at no label: it has a 20-NN accuracy, and no protocol.")
    record, bank, assignment = bench.score(how.on, how.protocol)
    if novelty:
        record["novelty"] = novelty_scores(bench, bank, assignment, how.on)
    if count is not None:
        record["count"] = class_count(bench, bank, count)
    if picture is not None:
        draw(bench, bank, assignment, picture)
    if figures is not None:
        draw_paper_figures(bench, bank, assignment, figures)
    return record


def draw(bench: Workbench, bank: FeatureBank, assignment: Assignment, path: Path) -> Path:
    """The embedding of the unlabeled training images and their novelty scores, as a PNG."""
    if assignment.novelty is None or assignment.novelty_threshold is None:
        raise ConfigError(f"{bench.config.method.name} has no novelty score of its own, with a threshold, to draw.")
    every = -(-len(bench.split.unlabeled) // MOST_DRAWN)
    rows = bench.split.unlabeled[::every]
    return embedding_figure(
        bank.z.cpu()[rows].numpy(),
        bench.dataset.train.classes[rows].numpy(),
        assignment.classes.cpu()[rows].numpy(),
        assignment.novelty.cpu()[rows].numpy(),
        num_seen=bench.split.num_seen,
        threshold=float(assignment.novelty_threshold),
        class_names=bench.dataset.train.class_names,
        title=f"{bench.dataset.info.title}: {len(rows):,} of the unlabeled images",
        path=path,
    )
