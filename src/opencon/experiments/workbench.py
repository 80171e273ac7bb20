"""The workbench of a run: data, split and method, put together from a configuration or from a trained run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opencon.config import EvaluationSet, Protocol, RunConfig, with_settings
from opencon.data.augment import build_views, plain_view
from opencon.data.benchmarks import Dataset, dataset_info, load_dataset
from opencon.data.loader import TwoStreamLoader
from opencon.data.split import Split, batch_shares, make_split
from opencon.data.streaming import Images
from opencon.encoders import build_embedder
from opencon.experiments.plan import check_fits
from opencon.experiments.recipes import run_config
from opencon.methods import METHODS, Assignment, FeatureBank, Method, Task
from opencon.methods.parts import WeightAverage
from opencon.metrics import evaluate, knn_accuracy
from opencon.runtime import generator, seeded
from opencon.training.embedding import BATCH, embed_images
from opencon.training.judged import judged_weights
from opencon.training.run_folder import RunFolder

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
    view: Callable[[Tensor], Tensor]  # for evaluation

    def bank(self, *, mirror: bool = False) -> FeatureBank:
        """The training images, embedded."""
        return FeatureBank(self.embed(self.images, mirror=mirror), self.labels)

    def embed(self, images: Images, *, mirror: bool = False) -> Tensor:
        """(M, D), in order. Streamed images come in the chunks that `embed_images` would cut."""
        rows = partial(embed_images, self.method, self.method.embed, view=self.view, mirror=mirror)
        if isinstance(images, Tensor):
            return rows(images)
        with closing(images.in_order(BATCH)) as chunks:
            return torch.cat([rows(chunk) for chunk in chunks])

    def judged(self, on: EvaluationSet) -> tuple[Tensor, Tensor]:
        """The rows of the bank in `score` that are judged, and their true classes."""
        if on == "test":
            truth = self.dataset.held_out().classes
            return len(self.labels) + torch.arange(len(truth)), truth
        return self.split.unlabeled, self.dataset.train.classes[self.split.unlabeled]

    def score(self, on: EvaluationSet, protocol: Protocol) -> tuple[dict[str, Any], FeatureBank, Assignment]:
        """Embed, assign and compare with the true classes: the record, and what it was made from."""
        with judged_weights(self.method, self.plain() if self.config.eval.fresh_norms else None):
            return self._score(on, protocol)

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
        if not self.config.method.uses_labels:
            bank, truth = self.bank(mirror=mirror), self.dataset.train.classes
            record: dict[str, Any] = {
                "on": "train",
                "seed": self.config.train.seed,
                "num_images": len(truth),
                "knn20": knn_accuracy(bank.z, truth),
            }
            return record, bank, Assignment(torch.full_like(self.labels, -1))
        bank = self.bank(mirror=mirror)
        if on == "test":  # test images come after the training images: a method may need the labeled ones
            z = self.embed(self.dataset.held_out().images.to(self.device), mirror=mirror)
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
        if config.eval.average:
            method.twin = WeightAverage(method, config.eval.average, warms_up=True)
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
    """Batches of labeled and unlabeled images, with two views of each, and those of `config.views`."""
    config = bench.config
    augments, mixers = build_views(config, image_size=bench.images.shape[-1], channels=bench.images.shape[1])
    shares = (0, config.train.batch_size)
    if config.method.uses_labels:
        shares = batch_shares(bench.split, config.train.batch_size, config.train.labeled_share)
    return TwoStreamLoader(
        bench.images,
        bench.labels,
        batch_shares=shares,
        augments=tuple(augments),
        seed=config.train.seed,
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
    bench.method.load_state_dict(state["method"])
    bench.method.embedder.fold_frozen()  # as in training, so that evaluation repeats its numbers
    return bench


def without_weights(config: RunConfig) -> RunConfig:
    """The same configuration, starting from random weights."""
    return replace(config, encoder=replace(config.encoder, weights=None))
