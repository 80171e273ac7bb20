"""Data sets of photos by name: ImageNet, CUB, Stanford Cars, Herbarium19 and FGVC-Aircraft, as they are usually unpacked.

The text files in `lists/` say which classes are seen: seen classes come first in the class order, so that `split.num_seen`
picks them. Training images are those of the official training part (for Aircraft: training and validation). Held-out test
images are those of the official test or validation part, if it is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from opencon.config import DataConfig
from opencon.data.benchmarks import (
    DATASETS,
    IMAGE_SIZE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Dataset,
    DatasetEntry,
    DatasetInfo,
    data_root,
)
from opencon.data.layouts import Layout, car_names, class_order
from opencon.data.listings import Listing, printable
from opencon.data.sources import load_listing

Parts = tuple[Listing, Listing | None]  # training and held-out test images


def _add(layout: Layout, title: str, counts: tuple[int, int, int], parts: Callable[[Path], Parts]) -> None:
    """Register a data set: its classes, training and test images as published, and the function that lists its files."""

    def inspect(config: DataConfig, info: DatasetInfo, download: bool) -> DatasetInfo:
        train, test = parts(data_root(config))
        size = config.image_size if config.image_size is not None else info.image_size
        num_test = len(test.paths) if test else 0
        names = train.class_names
        return replace(info, num_train=len(train.paths), num_test=num_test, image_size=size, class_names=names)

    def load(config: DataConfig, info: DatasetInfo, download: bool) -> Dataset:
        listed, listed_test = parts(data_root(config))
        train = load_listing(listed, info.image_size, config.memory_gb, config.decode)
        # Test images stay in their files until they are needed: most runs never need them.
        test = load_listing(listed_test, info.image_size, 0, config.decode) if listed_test else None
        return Dataset(replace(info, num_train=len(train), num_test=len(test) if test else 0), train, test)

    needs = f"{layout.expected}; from {layout.source}"
    info = DatasetInfo(layout.name, title, *counts, IMAGE_SIZE, 3, needs, IMAGENET_MEAN, IMAGENET_STD)
    DATASETS.add(layout.name, DatasetEntry(info, inspect, load, is_resized=True))


# --- ImageNet ---------------------------------------------------------------------------------------------------------

IMAGENET100 = Layout(
    name="imagenet100",
    expected="train/WNID/*.JPEG and val/WNID/*.JPEG, with WNID such as n01558993; or the train folder itself",
    source="https://www.image-net.org/download.php",
    roots=(".", "imagenet", "ILSVRC/Data/CLS-LOC"),
    needed=("train",),
)
IMAGENET1K = replace(IMAGENET100, name="imagenet1k")


def _imagenet_folders(layout: Layout, root: Path) -> tuple[Path, Path]:
    """The folders of the training and of the validation images."""
    if not (root / "train").is_dir() and _wnids(root):
        return root, root.parent / "val" if root.name == "train" else root / "val"
    top = layout.find(root)
    return top / "train", top / "val"


def _wnids(folder: Path) -> list[str]:
    """Sub-folders that are named by a WordNet id, sorted."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(folder) if re.fullmatch(r"n[0-9]{8}", entry.name))


def _imagenet(layout: Layout, train: Path, val: Path, order: Sequence[str]) -> Parts:
    # Unpacked without its script, val is one folder of images without classes: then there are no test images.
    return layout.from_folders(train, order), layout.from_folders(val, order) if _wnids(val) else None


def _imagenet100(root: Path) -> Parts:
    order = class_order("imagenet100")
    return _imagenet(IMAGENET100, *_imagenet_folders(IMAGENET100, root), order.seen + order.novel)


def _imagenet1k(root: Path) -> Parts:
    train, val = _imagenet_folders(IMAGENET1K, root)
    order = _wnids(train)
    if len(order) != 1000:
        raise IMAGENET1K.error(f"imagenet1k has 1,000 classes, but {printable(train)} holds {len(order):,} of them.")
    return _imagenet(IMAGENET1K, train, val, order)


_add(IMAGENET100, "ImageNet-100", (100, 128_545, 5_000), _imagenet100)  # counts: ORCA's lists
_add(IMAGENET1K, "ImageNet-1k", (1000, 1_281_167, 50_000), _imagenet1k)  # counts: ILSVRC 2012


# --- CUB --------------------------------------------------------------------------------------------------------------

CUB = Layout(
    name="cub200",
    expected="the folder CUB_200_2011 with images/CLASS/*.jpg and the text files that say their classes and parts",
    source="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    roots=("CUB_200_2011", "."),
    needed=("images", "images.txt", "image_class_labels.txt", "train_test_split.txt"),
)


def _cub(root: Path) -> Parts:
    top = CUB.find(root)
    labels_file, split_file = top / "image_class_labels.txt", top / "train_test_split.txt"
    label_of, is_train = dict(CUB.rows(labels_file)), dict(CUB.rows(split_file))
    names: dict[int, str] = {}
    numbers: dict[str, int] = {}
    images: dict[str, list[tuple[Path, int]]] = {"1": [], "0": []}
    for image, path in CUB.rows(top / "images.txt"):
        for file, table in ((labels_file, label_of), (split_file, is_train)):
            if image not in table:
                raise CUB.error(f"{printable(file)} has no line for image {image}, which images.txt names.")
        c = CUB.class_number(label_of[image], 200, labels_file)
        folder = path.split("/")[0]
        if names.setdefault(c, folder) != folder or numbers.setdefault(folder, c) != c:
            raise CUB.error(f"{printable(labels_file)} gives class {c + 1} to {path}, against its other lines.")
        if is_train[image] not in images:
            raise CUB.error(f"{printable(split_file)} says {is_train[image]!r} of image {image}, which is not 0 or 1.")
        images[is_train[image]].append((top / "images" / path, c))
    order = class_order("cub200").of([names.get(c, f"number {c + 1}") for c in range(200)])
    train, test = (
        CUB.listing(((path, names[c]) for path, c in images[part]), order, top / "images.txt") for part in "10"
    )
    return train, test


_add(CUB, "CUB-200-2011", (200, 5_994, 5_794), _cub)


# --- Stanford Cars ----------------------------------------------------------------------------------------------------

CARS = Layout(
    name="stanford_cars",
    expected="cars_train/*.jpg, cars_test/*.jpg, devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat; or "
    "train/CLASS/*.jpg and test/CLASS/*.jpg, with CLASS such as 'Acura RL Sedan 2012'",
    source="https://github.com/pytorch/vision/issues/7545, which lists copies (the original page is gone)",
    roots=("stanford_cars", "."),
    needed=("cars_train", "devkit/cars_train_annos.mat"),
)


def _cars(root: Path) -> Parts:
    order = class_order("stanford_cars").of(car_names())
    for start in CARS.roots:
        top = root / start
        folders = [top / "train", top / "test"] if (top / "train").is_dir() else [top]
        named = [_car_folders(folder) for folder in folders]
        if named[0]:
            parts = [
                CARS.from_folders(folder, order, [names.get(name, name) for name in order])
                for folder, names in zip(folders, named, strict=True)
                if names
            ]
            return parts[0], parts[1] if len(parts) > 1 else None
    top = CARS.find(root)
    train = _annotated_cars(top / "devkit" / "cars_train_annos.mat", top / "cars_train", order)
    for folder in (top, top / "devkit"):
        if (folder / "cars_test_annos_withlabels.mat").is_file():
            return train, _annotated_cars(folder / "cars_test_annos_withlabels.mat", top / "cars_test", order)
    return train, None


def _car_folders(folder: Path) -> dict[str, str]:
    """Class name to the name of its folder; a slash, which no folder name may hold, is written in several ways."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    official = {plain(name): name for name in car_names()}
    inside = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
    return {official[plain(name)]: name for name in inside if plain(name) in official}


def _annotated_cars(annotations: Path, folder: Path, order: Sequence[str]) -> Listing:
    from scipy.io import loadmat  # a tenth of a second to import; the other data sets do not need it

    try:
        rows = np.atleast_1d(loadmat(annotations, squeeze_me=True)["annotations"])
        files, classes = [str(name) for name in rows["fname"]], [str(c) for c in rows["class"]]
    except Exception as err:  # a damaged file can raise nearly anything
        raise CARS.error(f"{printable(annotations)} holds no annotations ({type(err).__name__}: {err}).") from err
    folder = folder / folder.name if (folder / folder.name).is_dir() else folder  # some copies nest it
    names = car_names()
    numbers = [CARS.class_number(c, len(names), annotations) for c in classes]
    images = [(folder / file, names[c]) for file, c in zip(files, numbers, strict=True)]
    return CARS.listing(images, order, annotations)


_add(CARS, "Stanford Cars", (196, 8_144, 8_041), _cars)


# --- Herbarium19 ------------------------------------------------------------------------------------------------------

HERBARIUM = Layout(
    name="herbarium19",
    expected="small-train/CLASS/*.jpg and small-validation/CLASS/*.jpg, with CLASS from 0 to 682",
    source="https://github.com/visipedia/herbarium_comp (2019)",
    roots=("herbarium_19", "."),
    needed=("small-train",),
)


def _herbarium(root: Path) -> Parts:
    top = HERBARIUM.find(root)
    order = class_order("herbarium19").of(sorted(str(c) for c in range(683)))  # 0, 1, 10, 100, ...: as text
    # A twentieth of the images: a rare class may have none.
    test = HERBARIUM.from_folders(top / "small-validation", order, is_complete=False)
    return HERBARIUM.from_folders(top / "small-train", order), test if test.paths else None


_add(HERBARIUM, "Herbarium19", (683, 34_225, 2_679), _herbarium)


# --- FGVC-Aircraft ----------------------------------------------------------------------------------------------------

AIRCRAFT = Layout(
    name="fgvc_aircraft",
    expected="the folder fgvc-aircraft-2013b with data/images/*.jpg and the text files beside images",
    source="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
    roots=("fgvc-aircraft-2013b/data", "data", "."),
    needed=("images", "variants.txt", "images_variant_train.txt", "images_variant_val.txt"),
)


def _aircraft(root: Path) -> Parts:
    top = AIRCRAFT.find(root)
    variants = sorted(AIRCRAFT.lines(top / "variants.txt"))
    if len(set(variants)) != 100:
        raise AIRCRAFT.error(f"{printable(top / 'variants.txt')} names {len(set(variants))} variants, not 100.")
    order = class_order("fgvc_aircraft").of(variants)

    def part(*files: str) -> Listing:
        images = []
        for file in (top / name for name in files):
            for image, variant in AIRCRAFT.rows(file):
                if variant not in variants:
                    raise AIRCRAFT.error(
                        f"{printable(file)} has the variant {variant!r}, which is not in variants.txt."
                    )
                images.append((top / "images" / f"{image}.jpg", variant))
        return AIRCRAFT.listing(images, order, top / files[0])

    has_test = (top / "images_variant_test.txt").is_file()
    train = part("images_variant_train.txt", "images_variant_val.txt")  # both, as GCD does
    return train, part("images_variant_test.txt") if has_test else None


_add(AIRCRAFT, "FGVC-Aircraft", (100, 6_667, 3_333), _aircraft)
