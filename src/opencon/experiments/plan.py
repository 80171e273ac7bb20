"""What a run would do, and whether it can: asked before any image is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from opencon.config import RunConfig
from opencon.data.augment import AUGMENTATIONS
from opencon.data.benchmarks import DatasetInfo, dataset_info
from opencon.data.split import check_split
from opencon.encoders import ENCODERS
from opencon.errors import ConfigError
from opencon.methods import METHODS
from opencon.runtime import seeded
from opencon.training.optimizer import OPTIMIZERS, SCHEDULES


def plan(config: RunConfig, *, download: bool = False) -> dict[str, str]:
    """What a run would do, in words. It refuses a configuration that does not fit the data, and loads no image."""
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
        "training": f"{config.train.epochs} epochs, batches of {config.train.batch_size}, {config.train.optimizer}, "
        f"lr {config.train.lr:g} ({config.train.schedule}), {config.train.precision}, seed {config.train.seed}",
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
    if config.views:
        full = config.augment.size or info.image_size
        further = [f"{view.count} of {view.size or full} px" for view in config.views]
        shown["views"] = ", ".join([f"2 of {full} px", *further])
    if encoder.weights is None and config.train.epochs == 0:
        shown["note"] = "random weights that learn nothing say little about the images: give --weights"
    elif encoder.weights is None and encoder.train_from != "all":
        shown["note"] = "frozen stages with random weights learn nothing: give --weights, or encoder.train_from=all"
    return shown


def check_fits(config: RunConfig, info: DatasetInfo) -> None:
    """Refuse what cannot work before anything is loaded."""
    num_train = info.num_train
    full = config.augment.size or info.image_size
    OPTIMIZERS[config.train.optimizer], SCHEDULES[config.train.schedule]  # these and the next raise with a hint
    for kind in (config.augment, config.strong, *config.views):
        if kind is not None:
            AUGMENTATIONS[kind.name]
    with torch.device("meta"), seeded(0):  # shapes alone
        for size in dict.fromkeys([full, *(view.size or full for view in config.views)]):
            encoder = ENCODERS[config.encoder.name].build(info.channels, size)
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
