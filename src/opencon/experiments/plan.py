"""What a run would do, and whether it can: asked before any image is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from opencon.config import RunConfig
from opencon.data.augment import AUGMENTATIONS
from opencon.data.benchmarks import DatasetInfo, dataset_info
from opencon.data.split import check_given, check_split, validation_split
from opencon.encoders import INSTALLED, encoder_entry
from opencon.errors import ConfigError
from opencon.methods import METHODS
from opencon.registry import did_you_mean
from opencon.runtime import seeded
from opencon.training.optimizer import OPTIMIZERS, SCHEDULES, unread

MOST_NAMES = 20  # classes named in a message, ours


def plan(config: RunConfig, *, download: bool = False) -> dict[str, str]:
    """What a run would do, in words. It refuses a configuration that does not fit the data, and loads no image."""
    info = dataset_info(config.data, download=download)
    check_fits(config, info)
    encoder = config.encoder
    start = f"weights from {encoder.weights}" if encoder.weights else "random weights"
    start = "the weights that come with it" if encoder.weights == INSTALLED else start
    learns = {"all": "everything learns", "head": "only the head learns"}.get(
        encoder.train_from, f"{encoder.train_from} and the head learn"
    )
    if config.split.validation:
        info, config = _labeled_info(config, info), replace(config, split=validation_split(config.split))
    shown = {
        "data": f"{info.title}: {_images(info)}, {info.image_size} px",
        "method": f"{METHODS[config.method.name].title} ({METHODS[config.method.name].paper})",
        "encoder": f"{encoder.name}, {start}, {learns}",
        "training": f"{config.train.epochs} epochs, batches of {config.train.batch_size}, {config.train.optimizer}, "
        f"lr {config.train.lr:g} ({config.train.schedule}), {config.train.precision}, seed {config.train.seed}",
    }
    if config.train.epochs == 0:
        shown |= {"encoder": f"{encoder.name}, {start}, nothing learns", "training": "none: the start is evaluated"}
    if config.method.uses_labels:
        shown["split"], shown["evaluation"] = _split(config, info), _evaluation(config, info)
    if config.views:
        full = config.augment.size or info.image_size
        further = [f"{view.count} of {view.size or full} px" for view in config.views]
        judged = [f"judged at {config.eval.size} px"] if config.eval.size else []
        shown["views"] = ", ".join([f"2 of {full} px", *further, *judged])
    notes = []
    if encoder.weights is None and config.train.epochs == 0:
        notes.append("random weights that learn nothing say little about the images: give --weights")
    elif encoder.weights is None and encoder.train_from != "all":
        notes.append("frozen stages with random weights learn nothing: give --weights, or encoder.train_from=all")
    if config.train.epochs and (idle := unread(config.train)):
        notes.append(f"{', '.join(idle)} has no effect with {config.train.optimizer} and {config.train.schedule}")
    return shown | ({"note": "; ".join(notes)} if notes else {})


def _images(info: DatasetInfo) -> str:
    if info.given is None:
        return f"{info.num_train:,} training images of {info.num_classes} classes"
    return f"{info.num_train:,} training images, {info.given.num_labeled:,} of them labeled in {info.given.num_seen} classes"


def _split(config: RunConfig, info: DatasetInfo) -> str:
    split = config.split
    num_seen = split.num_seen or (info.given.num_seen if info.given is not None else 0)
    names = f" ({some_names(split.seen_classes)})" if split.seen_classes else ""
    told = info.num_classes if info.given is None and split.num_classes is None else None
    total = split.known_classes or told
    novel = f"{total - num_seen} novel classes" if total else "as many novel classes as the first features suggest"
    if info.given is None:
        labels = f"{split.labeled_ratio:.0%} of their images labeled"
    else:
        labels = "labeled as the files say" + (f", but {split.held_out:.0%} kept back" if split.held_out else "")
    return f"{num_seen} seen classes{names}, {labels}; {novel} to find; split seed {split.seed}"


def _evaluation(config: RunConfig, info: DatasetInfo) -> str:
    if config.eval.on == "test":
        return f"protocol {config.eval.protocol}, on the held-out test images"
    if info.given is not None and not info.given.num_known:
        return "no truth: the labels kept back, how stable the groups are, how many classes are in use"
    some = f"{info.given.num_known:,} of " if info.given and info.given.num_known < _num_unlabeled(info) else ""
    return f"protocol {config.eval.protocol}, on {some}the unlabeled training images"


def _num_unlabeled(info: DatasetInfo) -> int:
    return info.num_train - (info.given.num_labeled if info.given is not None else 0)


def some_names(names: tuple[str, ...], limit: int = 4) -> str:
    """The first few names."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def check_seen(config: RunConfig, info: DatasetInfo) -> None:
    """Refuse names of classes that the data does not have, or of which it gives no label."""
    known = info.class_names if info.given is None else info.class_names[: info.given.num_seen]
    for name in config.split.seen_classes if known else ():
        if name not in known:
            what = "no class" if info.given is None else "no labeled class"
            raise ConfigError(
                f"split.seen_classes: there is {what} {name!r}.{did_you_mean(name, known)} "
                f"There are: {some_names(known, MOST_NAMES)}."
            )


def _labeled_info(config: RunConfig, info: DatasetInfo) -> DatasetInfo:
    """What the labeled images will be, about."""
    num_seen = config.split.num_seen or 0
    num_labeled = int(info.num_train * num_seen / info.num_classes * config.split.labeled_ratio)
    return replace(info, num_classes=num_seen, num_train=num_labeled, num_test=0)


def check_fits(config: RunConfig, info: DatasetInfo) -> None:
    """Refuse what cannot work before anything is loaded."""
    if config.split.validation:
        check_fits(replace(config, split=validation_split(config.split)), _labeled_info(config, info))
        return
    num_train = info.num_train
    full = config.augment.size or info.image_size
    OPTIMIZERS[config.train.optimizer], SCHEDULES[config.train.schedule]  # these and the next raise with a hint
    for kind in (config.augment, config.strong, *config.views):
        if kind is not None:
            AUGMENTATIONS[kind.name]
    entry = encoder_entry(config.encoder.name)
    with torch.device(entry.builds_on), seeded(0):  # shapes alone
        for size in dict.fromkeys([full, config.eval.size or full, *(view.size or full for view in config.views)]):
            encoder = entry.build(info.channels, size)
            encoder.freeze(config.encoder.train_from)
    if config.train.epochs and not config.method.trains:
        raise ConfigError(f"{config.method.name} learns nothing: train.epochs = {config.train.epochs} must be 0.")
    # Without an epoch there is no batch: any size will do.
    batch, share = (config.train.batch_size, config.train.labeled_share) if config.train.epochs else (num_train, None)
    check_seen(config, info)
    if config.method.uses_labels and info.given is not None:
        num_seen = config.split.num_seen if config.split.seen_classes else info.given.num_seen
        check_given(config.split, num_seen or 0, info.given.num_labeled, num_train, batch, share)
    elif config.method.uses_labels:
        check_split(config.split, info.num_classes, num_train, batch, share)
    elif batch > num_train:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size} is more than the {num_train} images there are."
        )
    if config.eval.on == "test" and not info.num_test:
        more = ", or give some (--test)" if config.data.name in ("folder", "list") else ""
        raise ConfigError(
            f"{config.data.name} has no held-out test images. Use eval.on=unlabeled (--on unlabeled){more}."
        )
    weights = config.encoder.weights
    if weights == INSTALLED and entry.load_installed is None:
        raise ConfigError(
            f"encoder.weights = {INSTALLED}: no weights come with {config.encoder.name!r}. Give a checkpoint, or none."
        )
    if weights and weights != INSTALLED and not Path(weights).is_file():
        raise ConfigError(f"encoder.weights = {weights} is not a file. Give a checkpoint, or none.")
