"""The workbench of a run: data, split and method, put together from a configuration or from a trained run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.config import EvaluationSet, Protocol, RunConfig, with_settings
from opencon.data.augment import build_views, plain_view
from opencon.data.benchmarks import Dataset, dataset_info, labeled_part, load_dataset
from opencon.data.loader import TwoStreamLoader
from opencon.data.split import Split, batch_shares, make_split, validation_split
from opencon.data.streaming import Images
from opencon.encoders import Embedder, build_embedder
from opencon.encoders.synchronized import synchronize_norms
from opencon.experiments.plan import check_fits
from opencon.experiments.recipes import run_config
from opencon.methods import METHODS, Assignment, FeatureBank, Method, Task
from opencon.methods.parts import WeightAverage
from opencon.metrics import classes_in_use, evaluate, knn_accuracy, open_world_accuracy
from opencon.openworld.engine import count_classes
from opencon.runtime import generator, seeded
from opencon.training.embedding import BATCH, embed_images
from opencon.training.judged import judged_weights
from opencon.training.ranks import gather_pieces, my_piece, num_ranks, rank
from opencon.training.run_folder import RunFolder

NEIGHBORS = 20  # that vote on the class of an image, where a method uses no labels; see `knn_accuracy`
OTHER_VIEW = 3  # purpose of the random stream of `stability`, apart from those of the loader
NORM_BATCHES = 20  # ours: their statistics then scatter less than one in a hundred


@dataclass(frozen=True)
class Workbench:
    """Everything a run computes with. The true classes stay in `dataset`; no method sees them."""

    config: RunConfig
    dataset: Dataset
    split: Split
    method: Method[Any]
    device: torch.device
    images: Images  # training images on the device, uint8, or streamed to it
    labels: Tensor  # (M,) what the method may know: the class of a labeled image, -1 for an unlabeled one

    def bank(self, *, mirror: bool = False) -> FeatureBank:
        """The training images, embedded."""
        return FeatureBank(self.embed(self.images, mirror=mirror), self.labels)

    @property
    def size(self) -> int:
        """Side at which images are judged."""
        return int(self.config.eval.size or self.config.augment.size or self.images.shape[-1])

    def view(self, images: Tensor) -> Tensor:
        """Images for evaluation: as they are, at the size at which they are judged."""
        return plain_view(images, self.size)

    def embed(
        self,
        images: Images,
        *,
        mirror: bool = False,
        view: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """(M, D) by the method (or another way), in order. Each rank embeds a piece.

        Streamed images come in the chunks that `embed_images` would cut.
        """
        rows = partial(embed_images, self.method, by or self.method.embed, view=view or self.view, mirror=mirror)
        own = my_piece(len(images))
        if isinstance(images, Tensor):
            return gather_pieces(rows(images[own.start : own.stop]), len(images))
        with closing(images.in_order(BATCH, own)) as chunks:
            return gather_pieces(torch.cat([rows(chunk) for chunk in chunks]), len(images))

    def judged(self, on: EvaluationSet) -> tuple[Tensor, Tensor]:
        """The rows of the bank in `score` that are judged, and their true classes. Images of unknown class are not."""
        if on == "test":
            truth = self.dataset.held_out().classes
            rows = len(self.labels) + torch.arange(len(truth))
        else:
            rows, truth = self.split.unlabeled, self.dataset.train.classes[self.split.unlabeled]
        return rows[truth >= 0], truth[truth >= 0]

    @property
    def kept_back(self) -> Tensor:
        """Images whose label was given but kept back, to measure with."""
        given = self.dataset.train.given
        return torch.empty(0, dtype=torch.int64) if given is None else self.split.unlabeled[given[self.split.unlabeled]]

    def knows_novel(self, on: EvaluationSet) -> bool:
        """Whether the true class is known of images that no label was kept back from, so that accuracy can be measured."""
        return on == "test" or len(self.judged(on)[0]) > len(self.kept_back)

    def score(self, on: EvaluationSet, protocol: Protocol) -> tuple[dict[str, Any], FeatureBank, Assignment]:
        """Embed, assign and compare with the true classes: the record, and what it was made from.

        Where the classes of unlabeled images are unknown, the record says what can be said without them.
        """
        with self.judged_weights():
            return self._score(on, protocol)

    def judged_weights(self) -> AbstractContextManager[None]:
        """Within it the method has the weights that are judged."""
        return judged_weights(self.method, self.plain() if self.config.eval.fresh_norms else None)

    def plain(self) -> Iterator[Tensor]:
        """Some training images as evaluation sees them, in batches, the same ones each time."""
        order = torch.randperm(len(self.images), generator=generator(torch.device("cpu"), 0))
        parts = torch.split(order[: NORM_BATCHES * BATCH], BATCH)
        if isinstance(self.images, Tensor):
            yield from (self.view(self.images[rows.to(self.device)]) for rows in parts)
            return
        with closing(self.images.batches(parts, self.images.buffer(BATCH))) as chunks:
            yield from map(self.view, chunks)

    def _score(self, on: EvaluationSet, protocol: Protocol) -> tuple[dict[str, Any], FeatureBank, Assignment]:
        mirror = self.config.eval.mirror
        bank = self.bank(mirror=mirror)
        if not self.config.method.uses_labels:
            return self._neighbors(), bank, Assignment(torch.full_like(self.labels, -1))
        if on == "test":  # test images come after the training images: a method may need the labeled ones
            z = self.embed(self.dataset.held_out().images.to(self.device), mirror=mirror)
            unknown = torch.full((len(z),), -1, device=self.device)
            bank = FeatureBank(torch.cat([bank.z, z]), torch.cat([bank.labels, unknown]))
        assignment = self.method.assign(bank)
        classes = assignment.classes.cpu()
        if self.knows_novel(on):
            rows, truth = self.judged(on)
            record = evaluate(
                classes[rows].numpy(),
                truth.numpy(),
                num_seen=self.split.num_seen,
                num_classes=self.split.num_classes,
                protocol=protocol,
                on=on,
                novelty=assignment.novelty.cpu()[rows].numpy() if assignment.novelty is not None else None,
            )
        else:
            record = {"on": on, "num_images": len(self.split.unlabeled), "num_known": 0}
            record["classes_in_use"] = classes_in_use(classes[self.split.unlabeled], self.split.num_classes)
            record["stability"] = self.stability(classes)
        if len(self.kept_back):
            right = classes[self.kept_back] == self.dataset.train.classes[self.kept_back]
            record |= {"held_out": float(right.float().mean()), "num_held_out": len(right)}
        record["classes_in_use_all"] = len(torch.unique(classes[: len(self.labels)]))  # over all training images
        return record | {"seed": self.config.train.seed}, bank, assignment

    def features(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) in [0, 1] -> (B, F), unit length: what is in front of any head, and all that is handed on."""
        return F.normalize(self.method.embedder.features(images), dim=1)

    def _neighbors(self) -> dict[str, Any]:
        """The record of a method that uses no labels: do the neighbors of an image show the same class?"""
        truth = self.dataset.train.classes
        rows = (truth >= 0).nonzero().flatten()
        record: dict[str, Any] = {"on": "train", "seed": self.config.train.seed, "num_images": len(rows)}
        if len(rows) > NEIGHBORS:
            z = self.embed(self.images, mirror=self.config.eval.mirror, by=self.features)
            z = z if len(rows) == len(truth) else z[rows.to(z.device)]
            record["knn20"] = knn_accuracy(z, truth[rows], k=NEIGHBORS)
        return record

    def stability(self, classes: Tensor) -> float:
        """Share of the unlabeled images that stay in their group when a random view takes the place of each image.

        Groups are matched one to one, because a method that clusters numbers them anew. Without any truth it tells groups
        that the images themselves suggest from arbitrary ones.
        """
        draw = generator(self.device, self.config.train.seed, 0, OTHER_VIEW)
        (augment, *_), _ = build_views(self.config, image_size=self.size, channels=self.images.shape[1])

        def view(images: Tensor) -> Tensor:
            height, width = images.shape[-2:]
            return augment.apply(images, augment.draw(len(images), (height, width), draw))

        z = self.embed(self.images, mirror=self.config.eval.mirror, view=view)
        other = self.method.assign(FeatureBank(z, self.labels)).classes.cpu()
        rows = self.split.unlabeled
        same = open_world_accuracy(other[rows].numpy(), classes[rows].numpy(), num_seen=0, protocol="gcd")
        return same.all


def prepare(
    config: RunConfig,
    device: torch.device,
    *,
    split: Split | None = None,
    download: bool = False,
    dataset: Callable[[], Dataset] | None = None,
) -> Workbench:
    """Check that the configuration fits, load the data (unless `dataset` has it), and assemble."""
    info = dataset_info(config.data, download=download)
    check_fits(config, info)
    loaded = load_dataset(config.data, download=download) if dataset is None else dataset()
    return assemble(config, loaded, device, split=split)


def assemble(config: RunConfig, dataset: Dataset, device: torch.device, *, split: Split | None = None) -> Workbench:
    """Split a data set, unless `split` is given, and build the method on the device."""
    if config.split.seen_classes:
        dataset = dataset.seen_first(config.split.seen_classes)
    if config.split.validation:
        config, dataset = for_validation(config, dataset)
    train = dataset.train
    split = split or split_of(config, dataset, device)
    labels = split.visible_labels(train.classes)
    if not config.method.uses_labels:
        labels = torch.full_like(labels, -1)
    counted = is_counted(config, dataset)
    task = Task(split.num_seen, split.num_classes, split.labeled_ratio, len(train), counted)
    size = config.augment.size or train.images.shape[-1]
    method = build_method(config, task, in_channels=train.images.shape[1], image_size=size)
    return Workbench(
        config,
        dataset,
        split,
        method.to(device),
        device,
        train.images.to(device),
        labels.to(device),
    )


def build_method(config: RunConfig, task: Task, *, in_channels: int, image_size: int) -> Method[Any]:
    """The method of a run with the weights it starts from, on the CPU."""
    with seeded(config.train.seed):
        embedder = start_embedder(config, in_channels, image_size)
        method = METHODS[config.method.name].build(config.method, task, embedder)
        if config.eval.average:
            method.twin = WeightAverage(method, config.eval.average, warms_up=True)
    method.kernels = config.train.kernels
    if num_ranks() > 1 and config.train.sync_norms and not method.differentiates_twice:
        synchronize_norms(embedder.encoder)
    elif method.kernels and not method.differentiates_twice:
        embedder.encoder.fuse()
    return method


def start_embedder(config: RunConfig, in_channels: int, image_size: int) -> Embedder:
    """The network that a run starts from; random weights come from torch's default generator."""
    return build_embedder(
        config.encoder,
        in_channels=in_channels,
        image_size=image_size,
        precision=config.train.precision,
        projects=config.method.projects,
    )


def for_validation(config: RunConfig, dataset: Dataset) -> tuple[RunConfig, Dataset]:
    """The run within the labeled images of a run: nothing else is looked at."""
    outer = replace(config.split, validation=False, num_classes=None)
    split = make_split(dataset.train.classes, outer, num_data_classes=dataset.info.num_classes)
    part = labeled_part(dataset, split.labeled, split.num_seen)
    return replace(config, split=validation_split(config.split)), part


def is_counted(config: RunConfig, dataset: Dataset) -> bool:
    """Whether the number of classes is an estimate: asked for, or because nobody says it."""
    unsaid = dataset.train.given is not None and config.split.num_classes is None
    return config.method.uses_labels and (config.split.num_classes == "auto" or unsaid)


def split_of(config: RunConfig, dataset: Dataset, device: torch.device) -> Split:
    """The split of a new run; where nobody says how many classes there are, their number is estimated first."""
    train, told = dataset.train, dataset.info.num_classes
    known = replace(config.split, num_classes=config.split.known_classes)
    number = max(len(train.class_names), 2) if train.given is not None else None
    if is_counted(config, dataset):
        if train.given is not None:
            labels = torch.where(train.given, train.classes, -1)
        else:
            labels = make_split(train.classes, known, num_data_classes=told).visible_labels(train.classes)
        number = estimated_classes(config, dataset, labels, device)
    return make_split(train.classes, known, num_data_classes=told, given=train.given, num_classes=number)


def estimated_classes(config: RunConfig, dataset: Dataset, labels: Tensor, device: torch.device) -> int:
    """How many classes the training images seem to show, by the features that the run starts from; at least one is novel.

    A method that decides the number while it trains starts with twice the estimate (ours): too many do no harm there.
    """
    train = dataset.train
    size = config.augment.size or train.images.shape[-1]
    with seeded(config.train.seed):
        embedder = start_embedder(config, train.images.shape[1], size).to(device)
    view = partial(plain_view, image_size=config.eval.size or size)
    chunks = torch.split(train.images, BATCH) if isinstance(train.images, Tensor) else train.images.in_order(BATCH)
    z = torch.cat([embed_images(embedder, embedder.features, chunk.to(device), view).cpu() for chunk in chunks])
    num_seen = int(labels.max()) + 1
    count = count_classes(F.normalize(z, dim=1), labels, num_seen=num_seen, seed=config.split.seed)
    number = max(count.num_classes, num_seen + 1)
    return 2 * number if config.method.corrects(is_counted=True) else number


def build_loader(bench: Workbench) -> TwoStreamLoader:
    """Batches of labeled and unlabeled images, with two views of each, and those of `config.views`."""
    config = bench.config
    channels, image_size = bench.images.shape[1], bench.images.shape[-1]
    augments, mixers = build_views(config, image_size=image_size, channels=channels)
    shares = (0, config.train.batch_size)
    if config.method.uses_labels:
        shares = batch_shares(bench.split, config.train.batch_size, config.train.labeled_share)
    return TwoStreamLoader(
        bench.images,
        bench.labels,
        batch_shares=shares,
        augments=tuple(augments),
        seed=config.train.seed,
        rank=rank(),
        # A second derivative does not pass through what ranks say to each other: then each does all the work.
        num_ranks=1 if bench.method.differentiates_twice else num_ranks(),
        mixers=tuple(mixers),
    )


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
    with folder.restoring():
        bench.method.load_state_dict(state["method"])
    bench.method.embedder.fold_frozen()  # as in training, so that evaluation repeats its numbers
    return bench


def data_settings(**files: str | None) -> list[str]:
    """Settings of `data` for files that are given, as `open_run` takes them."""
    return [f"data.{key}={json.dumps(value)}" for key, value in files.items() if value is not None]


def without_weights(config: RunConfig) -> RunConfig:
    """The same configuration, starting from random weights."""
    return replace(config, encoder=replace(config.encoder, weights=None))
