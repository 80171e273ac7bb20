"""Data sets by name: the digits that come with scikit-learn, CIFAR, and your own files. (`catalog` adds sets of photos.)

Each entry of `DATASETS` can say what it holds without loading an image (`dataset_info`), and load it (`load_dataset`).
"""

from __future__ import annotations

import codecs
import hashlib
import http.client
import io
import os
import pickle
import tarfile
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opencon.config import DataConfig
from opencon.data.cifar_images import CifarImages
from opencon.data.given import list_files
from opencon.data.sources import ImageSet, from_arrays, load_listing
from opencon.errors import ConfigError, DataError
from opencon.files import write_whole
from opencon.registry import Registry


@dataclass(frozen=True)
class Given:
    """Labels that come with the files."""

    num_seen: int  # classes of which there are labels
    num_labeled: int
    num_known: int  # images without a label whose class is known all the same, to measure with


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set before an image is loaded."""

    name: str
    title: str
    num_classes: int  # 0 in the registry's own entries for "folder" and "list": it depends on the files
    num_train: int  # likewise; for files it counts those listed, of which some may prove unreadable
    num_test: int
    image_size: int
    channels: int
    needs: str  # which files, in words
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()  # where they are known without loading
    given: Given | None = None  # where the files say which images are labeled; else the split draws them

    def require_test(self) -> None:
        """Raise a DataError where there are no held-out images."""
        if self.num_test == 0:
            raise DataError(f"{self.name} has no held-out test images; use eval.on=unlabeled")


@dataclass(frozen=True)
class Dataset:
    """Training images and, where the data set has them, held-out test images."""

    info: DatasetInfo
    train: ImageSet
    test: ImageSet | None

    def held_out(self) -> ImageSet:
        """The test images, or a DataError that says what to use instead."""
        self.info.require_test()
        assert self.test is not None
        return self.test

    def seen_first(self, names: Sequence[str]) -> Dataset:
        """The same images, the classes numbered so that these come first."""
        test = self.test.seen_first(names) if self.test is not None else None
        return replace(self, train=self.train.seen_first(names), test=test)


def labeled_part(dataset: Dataset, rows: Tensor, num_seen: int) -> Dataset:
    """These training images alone, which are of the first classes, and no test images."""
    train = dataset.train
    if not isinstance(train.images, Tensor):
        raise DataError("split.validation needs images in memory. Raise data.memory_gb, or lower data.image_size.")
    files = tuple(train.files[int(i)] for i in rows) if train.files else ()
    part = ImageSet(train.images[rows], train.classes[rows], train.class_names[:num_seen], files)
    return Dataset(replace(dataset.info, num_classes=num_seen, num_train=len(rows), num_test=0), part, None)


@dataclass(frozen=True)
class DatasetEntry:
    """How one named data set is inspected and loaded. Both functions get the entry's own info and `download`."""

    info: DatasetInfo
    inspect: Callable[[DataConfig, DatasetInfo, bool], DatasetInfo]
    load: Callable[[DataConfig, DatasetInfo, bool], Dataset]
    is_resized: bool = False  # photos of any size, stored at data.image_size


DATASETS: Registry[DatasetEntry] = Registry("data set")


def dataset_info(config: DataConfig, *, download: bool = False) -> DatasetInfo:
    """What the data set holds, from its files' names alone.

    Missing files are a DataError; with `download`, those that `load_dataset` could fetch are not.
    """
    entry = DATASETS[config.name]
    own_size = entry.info.image_size
    if not entry.is_resized and config.image_size not in (None, own_size):
        raise ConfigError(
            f"data.image_size = {config.image_size}, but the images of {config.name} are {own_size} pixels wide. Leave "
            f"image_size out; it is for data sets of photos, 'folder' and 'list'."
        )
    return entry.inspect(config, entry.info, download)


def load_dataset(config: DataConfig, *, download: bool = False) -> Dataset:
    """Load the images, after fetching what is missing if `download` says so."""
    info = dataset_info(config, download=download)
    return DATASETS[config.name].load(config, info, download)


def data_root(config: DataConfig) -> Path:
    """Where a data set's files lie: `data.root`, else $OPENCON_DATA, else ~/.cache/opencon."""
    return Path(config.root or os.environ.get("OPENCON_DATA") or "~/.cache/opencon").expanduser()


# --- digits -----------------------------------------------------------------------------------------------------------


def _inspect_digits(config: DataConfig, info: DatasetInfo, download: bool) -> DatasetInfo:
    if config.root is not None:
        warnings.warn(f"data.root = {config.root!r} has no effect: digits come with scikit-learn.", stacklevel=3)
    return info


def _load_digits(config: DataConfig, info: DatasetInfo, download: bool) -> Dataset:
    from sklearn.datasets import load_digits  # a second to import; the other data sets do not need it

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # the values are 0 to 16
    return Dataset(info, from_arrays(images, digits.target), None)


DIGITS = DatasetInfo(
    name="digits",
    title="Digits (8x8, scikit-learn)",
    num_classes=10,
    num_train=1797,
    num_test=0,
    image_size=8,
    channels=1,
    needs="nothing: comes with scikit-learn",
    mean=(0.3053,),  # of these images; a test computes them again
    std=(0.3759,),
    class_names=tuple("0123456789"),
)
DATASETS.add("digits", DatasetEntry(DIGITS, _inspect_digits, _load_digits))


# --- CIFAR ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CifarFiles:
    """The official files of one CIFAR data set and their MD5 sums (as published on the data sets' page)."""

    archive: str
    archive_md5: str
    folder: str  # inside the archive
    train: dict[str, str]
    test: dict[str, str]
    meta: dict[str, str]
    labels_key: str
    names_key: str

    @property
    def members(self) -> dict[str, str]:
        """Every file with its checksum."""
        return {**self.train, **self.test, **self.meta}


CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR_FILES = {
    "cifar10": CifarFiles(
        archive="cifar-10-python.tar.gz",
        archive_md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        meta={"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
        labels_key="labels",
        names_key="label_names",
    ),
    "cifar100": CifarFiles(
        archive="cifar-100-python.tar.gz",
        archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        meta={"meta": "7973b15100ade9c7d40fb424638fde48"},
        labels_key="fine_labels",
        names_key="fine_label_names",
    ),
}


def _inspect_cifar(config: DataConfig, info: DatasetInfo, download: bool) -> DatasetInfo:
    root = data_root(config)
    if images := _cifar_images(root, info):
        return replace(info, num_train=images.sizes[0], num_test=images.sizes[1], class_names=images.class_names)
    if not download:
        _find_cifar(root, info.name)
    return info


def _load_cifar(config: DataConfig, info: DatasetInfo, download: bool) -> Dataset:
    root, files = data_root(config), CIFAR_FILES[info.name]
    if images := _cifar_images(root, info):
        train, test = images.load(info.image_size)
        return Dataset(replace(info, num_train=len(train), num_test=len(test)), train, test)
    try:
        path = _find_cifar(root, info.name)
    except DataError:
        if not download:
            raise
        path = _download(CIFAR_URL + files.archive, root / files.archive, files.archive_md5)
    content = _read_archive(path, files) if path.is_file() else _read_folder(path, files)
    for name, md5 in files.members.items():
        if hashlib.md5(content[name], usedforsecurity=False).hexdigest() != md5:
            raise _corrupt(path if path.is_file() else path / name, f"{name} has the wrong checksum")
    plain = {name: unpickle_plain(content.pop(name), f"{name} in {path}") for name in files.members}
    names = tuple(plain[next(iter(files.meta))][files.names_key])

    def images_of(part: dict[str, str]) -> ImageSet:
        pixels = np.concatenate([plain[name]["data"] for name in part])
        labels = np.concatenate([plain[name][files.labels_key] for name in part])
        return ImageSet(torch.from_numpy(pixels.reshape(-1, 3, 32, 32)), torch.from_numpy(labels).long(), names)

    return Dataset(info, images_of(files.train), images_of(files.test))


def _cifar_images(root: Path, info: DatasetInfo) -> CifarImages | None:
    """The images as image files, where the official files are not there."""
    if _official_cifar(root, info.name) is not None:
        return None
    return CifarImages.find(root, info.name, info.num_classes)


def _official_cifar(root: Path, name: str) -> Path | None:
    """The unpacked folder (inside `root`, or `root` itself), or the archive."""
    files = CIFAR_FILES[name]
    for folder in (root / files.folder, root):
        if all((folder / member).is_file() for member in files.members):
            return folder
    return root / files.archive if (root / files.archive).is_file() else None


def _find_cifar(root: Path, name: str) -> Path:
    """The official files, or a DataError that says where they were looked for."""
    if (path := _official_cifar(root, name)) is not None:
        return path
    files = CIFAR_FILES[name]
    lost = [m for m in files.members if not (root / files.folder / m).is_file()]
    some = f" ({', '.join(lost)} missing there)" if (root / files.folder).is_dir() else ""
    raise DataError(
        f"{name} is not there: looked for {root / files.archive} and the unpacked folder {root / files.folder}{some}. "
        f"Put one of them there, or the images themselves in folders train/CLASS and test/CLASS, point data.root to where "
        f"it is, or add --download to fetch it."
    )


def _read_folder(folder: Path, files: CifarFiles) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in files.members}
    except OSError as err:
        raise DataError(f"cannot read {err.filename} ({err.strerror}). Make it readable.") from err


def _read_archive(archive: Path, files: CifarFiles) -> dict[str, bytes]:
    """The members in memory, in one pass: nothing is unpacked onto the disk."""
    wanted = {f"{files.folder}/{name}": name for name in files.members}
    content: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                # A link in place of a file could lead anywhere, or in a circle.
                file = tar.extractfile(member) if member.name in wanted and member.isreg() else None
                if file is not None:
                    content[wanted[member.name]] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as err:
        raise _corrupt(archive, str(err)) from err
    for name in files.members:
        if name not in content:
            raise _corrupt(archive, f"{name} is not in it")
    return content


def _corrupt(path: Path, why: str) -> DataError:
    return DataError(f"corrupt archive {path} ({why}): delete it and download again with --download.")


def _download(url: str, target: Path, md5: str) -> Path:
    """Fetch, check, and only then give the file its name."""

    def fetch(partial: Path) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        with urllib.request.urlopen(url, timeout=60) as response, partial.open("wb") as out:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != md5:
            raise DataError(f"the download of {url} arrived damaged (wrong checksum). Try again.")

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(target, fetch)
    except (OSError, http.client.HTTPException) as err:  # URLError is an OSError, and so is a full disk
        raise DataError(
            f"cannot download {url} to {target} ({err}). Fetch it by hand on a machine with a network and put it there."
        ) from err


# A pickle can run any code. These names are all that a plain NumPy array needs; the module that holds _reconstruct
# moved between NumPy 1 and 2, so it is taken from an array itself.
_PLAIN = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN:
            raise DataError(f"it asks for {module}.{name}, which plain arrays do not need")
        return _PLAIN[module, name]


def unpickle_plain(content: bytes, where: str) -> Any:
    """Unpickle dictionaries, lists, text and NumPy arrays; anything else is refused before it runs."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as err:  # a damaged pickle can raise nearly anything
        raise DataError(f"refused to load {where}: {err}. Delete it and download the official files again.") from err


def _cifar_info(
    name: str, title: str, num_classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> DatasetInfo:
    files = CIFAR_FILES[name]
    needs = f"{files.archive}, its unpacked folder {files.folder}, or train/CLASS and test/CLASS; --download fetches it"
    return DatasetInfo(name, title, num_classes, 50_000, 10_000, 32, 3, needs, mean, std)


# Mean and standard deviation of the training pixels, per channel, as customary for these sets.
CIFAR10 = _cifar_info("cifar10", "CIFAR-10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = _cifar_info("cifar100", "CIFAR-100", 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
DATASETS.add("cifar10", DatasetEntry(CIFAR10, _inspect_cifar, _load_cifar))
DATASETS.add("cifar100", DatasetEntry(CIFAR100, _inspect_cifar, _load_cifar))


# --- your own files ---------------------------------------------------------------------------------------------------

IMAGE_SIZE = 224  # the side that ImageNet encoders are trained with
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _inspect_files(config: DataConfig, info: DatasetInfo, download: bool) -> DatasetInfo:
    train, test = list_files(config)
    given = None
    if train.given is not None:
        num_known = sum(c >= 0 for c in train.classes) - sum(train.given)
        given = Given(train.num_given, sum(train.given), num_known)
    return replace(
        info,
        num_classes=len(train.class_names),
        num_train=len(train.paths),
        num_test=len(test.paths) if test is not None else 0,
        image_size=config.image_size if config.image_size is not None else info.image_size,
        class_names=train.class_names,
        given=given,
    )


def _load_files(config: DataConfig, info: DatasetInfo, download: bool) -> Dataset:
    listed, listed_test = list_files(config)
    train = load_listing(listed, info.image_size, config.memory_gb, config.decode)
    test = load_listing(listed_test, info.image_size, 0, config.decode) if listed_test is not None else None
    return Dataset(replace(info, num_train=len(train), num_test=len(test) if test is not None else 0), train, test)


def _files_info(name: str, title: str, needs: str) -> DatasetInfo:
    return DatasetInfo(name, title, 0, 0, 0, IMAGE_SIZE, 3, needs, IMAGENET_MEAN, IMAGENET_STD)


FOLDER = _files_info(
    "folder",
    "Your own folder",
    "data.root: a folder with one sub-folder of images per class; data.unlabeled: one of images without a label",
)
LIST = _files_info("list", "Your own list", "data.root: a text or CSV file with one image path and its class a line")
DATASETS.add("folder", DatasetEntry(FOLDER, _inspect_files, _load_files, is_resized=True))
DATASETS.add("list", DatasetEntry(LIST, _inspect_files, _load_files, is_resized=True))
