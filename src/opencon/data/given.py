"""Your own files as data sets: a folder of classes, a list, a folder of classes beside a pile, held-out images.

Some images may carry no label: those of the pile, and those of a list whose class is empty. Then the files say which images
are labeled. Where somebody knows the classes of the others, they are read, too, to measure with; a learner never sees them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from opencon.config import DataConfig
from opencon.data.list_files import given_names, list_from_file, true_classes
from opencon.data.listings import Listing, images_at, list_folder, printable
from opencon.errors import ConfigError, DataError

FOLDERS = "folders"  # as data.truth: the sub-folders of the pile are the true classes


def list_files(config: DataConfig) -> tuple[Listing, Listing | None]:
    """Training and held-out images of `folder` or `list`, with the same classes."""
    train = _training(config)
    if config.test is None:
        return train, None
    place = Path(config.test).expanduser()
    test = list_folder(place) if place.is_dir() else list_from_file(place)
    names = (*train.class_names, *(name for name in test.class_names if name not in train.class_names))
    return replace(train, class_names=names), _renamed(replace(test, given=None), names)


def _training(config: DataConfig) -> Listing:
    if config.unlabeled is not None:
        pile = Path(config.unlabeled).expanduser()
        if not pile.is_dir():
            raise DataError(f"data.unlabeled = {printable(pile)} is not a folder. Give the folder of the other images.")
        labeled = list_folder(config.root) if config.root is not None else Listing((), (), ())
        return _with_pile(labeled, pile, config.truth)
    what = "the folder with one sub-folder per class" if config.name == "folder" else "the list file"
    if config.root is None:
        raise ConfigError(f"data.name = {config.name!r} needs data.root: {what}.")
    return list_folder(config.root) if config.name == "folder" else list_from_file(config.root)


def _with_pile(labeled: Listing, pile: Path, truth: str | None) -> Listing:
    """The images of class folders, then those of a pile. An image in both counts once, with its label."""
    known = {os.path.realpath(path) for path in labeled.paths}
    others = [path for path in images_at(pile) if os.path.realpath(path) not in known]
    if not others:
        raise DataError(f"every image in {printable(pile)} is labeled, too: nothing is left to discover.")
    true = _truth(others, pile, truth)
    names = given_names(labeled.class_names, true)
    number = {name: c for c, name in enumerate(names)}
    return Listing(
        paths=(*labeled.paths, *others),
        classes=(
            *(number[labeled.class_names[c]] for c in labeled.classes),
            *(number.get(name, -1) for name in true),
        ),
        class_names=names,
        problems=labeled.problems,
        given=(*(True for _ in labeled.paths), *(False for _ in others)),
    )


def _truth(paths: Sequence[Path], pile: Path, truth: str | None) -> list[str]:
    """The true class of each image of the pile, where somebody says it; else empty."""
    below = [path.relative_to(pile).as_posix() for path in paths]
    if truth is None:
        return ["" for _ in below]
    if truth == FOLDERS:
        true = [name.partition("/")[0] if "/" in name else "" for name in below]
    else:
        table = true_classes(truth)
        true = [table.get(name, table.get(Path(name).name, "")) for name in below]
    if not any(true):
        way = "no image lies in a sub-folder" if truth == FOLDERS else f"{truth} names none of its images"
        raise DataError(f"data.truth says the class of no image in {printable(pile)}: {way}. Paths start there.")
    return true


def _renamed(listing: Listing, names: Sequence[str]) -> Listing:
    """The same images, their classes numbered by other names."""
    number = {name: c for c, name in enumerate(names)}
    classes = tuple(number[listing.class_names[c]] if c >= 0 else -1 for c in listing.classes)
    return replace(listing, classes=classes, class_names=tuple(names))
