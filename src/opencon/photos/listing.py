"""List photos and their labels: from one or two folders, a folder and a table, or a table alone.

Nothing is decoded here, so that a plan and most error messages come before anything slow. A label for a missing file is set
aside and reported; it is an error only where nothing is left.

Letters: M photos, S seen classes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from opencon.data.listings import HEIC_SUFFIXES, IMAGE_SUFFIXES, find_images, list_folder, printable
from opencon.data.sources import can_read_heic
from opencon.data.tables import LABEL_COLUMNS, PATH_COLUMNS, read_table
from opencon.errors import ConfigError, DataError

FEWEST = 4  # photos, ours: two classes of two
SIZES_LOOKED_AT = 64  # photos whose sizes stand for all


@dataclass(frozen=True)
class Photos:
    """Photos, some with a class."""

    paths: tuple[Path, ...]  # M
    labels: tuple[int, ...]  # M: class in [0, S), or -1
    class_names: tuple[str, ...]  # S
    root: Path  # the names of photos are relative to it
    notes: tuple[str, ...] = ()  # what was set aside while listing, in plain words

    @property
    def num_labeled(self) -> int:
        """How many carry a label."""
        return sum(label >= 0 for label in self.labels)

    @property
    def title(self) -> str:
        """The name of the folder of the unlabeled photos, or of all photos."""
        unlabeled = [path for path, label in zip(self.paths, self.labels, strict=True) if label < 0]
        folder = common_root(*{path.parent for path in unlabeled or self.paths})
        return folder.name or str(folder)

    def labels_of(self, rows: Sequence[int]) -> list[int]:
        """The labels of some photos, by number."""
        return [self.labels[i] for i in rows]

    def names(self) -> list[str]:
        """The name of each photo: its path below the root, as text that may hold undecodable bytes."""
        return [shown_name(path, self.root) for path in self.paths]


def new_names(taken: Iterable[str]) -> Iterator[str]:
    """new-1, new-2, ... without end, without names that are taken."""
    names = (f"new-{number}" for number in itertools.count(1))
    return (name for name in names if name not in set(taken))


def shown_name(path: Path, root: Path) -> str:
    """The path relative to the root; unchanged where it lies elsewhere, or where the root is that of the file system."""
    whole, above = Path(os.path.abspath(path)), Path(os.path.abspath(root))  # whether typed as relative or absolute
    is_below = above != above.parent and whole.is_relative_to(above)
    return whole.relative_to(above).as_posix() if is_below else str(path)


def find_photos(
    folder: Path | None = None,
    *,
    labeled: Path | None = None,
    unlabeled: Path | None = None,
    labels: Path | None = None,
    manifest: Path | None = None,
) -> Photos:
    """The photos, in one of the ways to name them.

    Args:
        folder: with labeled/ and unlabeled/ in it; or any folder, with `labels`.
        labeled: a folder with one sub-folder per class, beside `unlabeled`.
        unlabeled: a folder with the other photos; alone, no photo has a label.
        labels: a table path,label for the photos in `folder`.
        manifest: a table path,label of all photos, paths relative to it.
    """
    if folder is not None and labeled is unlabeled is labels is manifest is None:
        return from_one_folder(folder)
    if unlabeled is not None and labeled is folder is labels is manifest is None:
        images = folder_images(unlabeled)
        return Photos(tuple(images), (-1,) * len(images), (), common_root(unlabeled))
    ways = {
        "--labeled DIR --unlabeled DIR, or --unlabeled DIR where you know no class": (labeled, unlabeled),
        "PHOTOS --labels TABLE": (folder, labels),
        "--manifest TABLE": (manifest,),
    }
    used = {way: paths for way, paths in ways.items() if any(path is not None for path in paths)}
    if len(used) != 1 or any(path is None for path in next(iter(used.values()))):
        raise ConfigError(f"say where the photos are in one of these ways: {'; or '.join(ways)}.")
    if labeled is not None and unlabeled is not None:
        return from_two_folders(labeled, unlabeled)
    if folder is not None and labels is not None:
        return from_table(labels, folder)
    assert manifest is not None
    return from_table(manifest)


def from_two_folders(labeled: Path, unlabeled: Path) -> Photos:
    """One folder with a sub-folder per class, and one with the rest. A photo in both counts once, with its label."""
    listing = list_folder(labeled)
    images = folder_images(unlabeled)
    labeled_paths = {os.path.realpath(path) for path in listing.paths}
    rest = [path for path in images if os.path.realpath(path) not in labeled_paths]
    paths = (*listing.paths, *rest)
    labels = (*listing.classes, *(-1 for _ in rest))
    return Photos(paths, labels, listing.class_names, common_root(labeled, unlabeled), listing.problems)


def from_one_folder(folder: Path) -> Photos:
    """Photos in a folder whose parts are called labeled (one sub-folder per class) and unlabeled."""
    folder = folder.expanduser()
    folder_images(folder)  # refuses a folder without photos
    labeled, unlabeled = folder / "labeled", folder / "unlabeled"
    if not (labeled.is_dir() and unlabeled.is_dir()):
        raise DataError(
            f"{printable(folder)} alone does not say which classes you know. Put a few photos of each into a folder of its "
            f"own (known/cat/, known/dog/) and say --labeled known/ --unlabeled {printable(folder)}, or give --labels "
            f"TABLE. If you know none, say --unlabeled {printable(folder)} alone."
        )
    return from_two_folders(labeled, unlabeled)


def from_table(table: Path, folder: Path | None = None) -> Photos:
    """A table of `path,label` (CSV, TSV or JSON lines); an empty label means unlabeled.

    Paths are relative to `folder`, or else to the folder of the table. With `folder`, its other images are unlabeled.
    """
    base = (folder or table.parent).expanduser()
    images = folder_images(base) if folder is not None else []
    labels: dict[str, tuple[int, Path, str]] = {}  # real path to the line that named it, its path and its label
    notes: list[str] = []
    missing: list[tuple[int, Path]] = []
    for line, name, label in _labeled_rows(table):
        path = Path(os.path.normpath(base / name))
        if not os.path.isfile(path):  # Path.is_file would raise for a name that is too long
            missing.append((line, path))
            continue
        earlier, _, before = labels.setdefault(os.path.realpath(path), (line, path, label))
        if before != label:
            raise DataError(
                f"{printable(table)} says that {name} is {before or 'unlabeled'!r} in line {earlier} and "
                f"{label or 'unlabeled'!r} in line {line}. Keep one of the two."
            )
    if missing:
        line, path = missing[0]
        start = f"relative paths start at {printable(base)}"
        if not labels:
            raise DataError(
                f"{printable(table)} names no file that is there: line {line} says {printable(path)} ({start}). "
                f"Correct the paths, or give the folder they start from."
            )
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        notes.append(f"{printable(table)}, line {line}{more}: there is no file {printable(path)} ({start})")
    paths = {real: path for real, (_, path, _) in labels.items()}
    paths |= {real: path for path in images if (real := os.path.realpath(path)) not in labels}
    names = tuple(sorted({label for _, _, label in labels.values() if label}))
    number = {name: c for c, name in enumerate(names)}
    classes = (number.get(labels[real][2], -1) if real in labels else -1 for real in paths)
    return Photos(tuple(paths.values()), tuple(classes), names, base, tuple(notes))


def check(photos: Photos) -> None:
    """Refuse photos from which nothing can be learned."""
    if photos.num_labeled == len(photos.paths) > 0:
        raise DataError(
            f"all {len(photos.paths)} photos carry a label ({some_names(photos.class_names)}): nothing is left to discover. "
            f"Give the others too, as --unlabeled, or without a label in the table."
        )
    if len(photos.paths) < FEWEST:
        raise DataError(f"{len(photos.paths)} photos are too few to find groups in. Give at least {FEWEST}.")


def some_names(names: tuple[str, ...], limit: int = 4) -> str:
    """The first few names."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def folder_images(folder: Path) -> list[Path]:
    """Every image below a folder; refuses a folder without any."""
    folder = folder.expanduser()
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{printable(folder)} {what}. Give the folder that holds the photos.")
    images = find_images(folder)
    if not images:
        others = sorted({path.suffix for path in folder.rglob("*") if path.is_file()})
        held = f"only {', '.join(others)} files" if any(others) else "it is empty"
        raise DataError(f"no photo in {printable(folder)} ({held}). Readable: {', '.join(sorted(IMAGE_SUFFIXES))}.")
    return images


def common_root(*folders: Path) -> Path:
    """The deepest folder above all of these; the photos are named from there."""
    return Path(os.path.commonpath([os.path.abspath(folder.expanduser()) for folder in folders]))


def typical_side(paths: tuple[Path, ...]) -> int | None:
    """The median short side of some of the photos, from their headers; None where none can be read."""
    sides = []
    for path in paths[:: max(1, len(paths) // SIZES_LOOKED_AT)]:
        if path.suffix.lower() in HEIC_SUFFIXES:
            can_read_heic()  # for thumbnails as well, where all features are cached
        # A damaged file is reported when it is decoded.
        with contextlib.suppress(Exception):
            if path.is_file():  # opening a pipe would wait forever
                with Image.open(path) as image:
                    sides.append(min(image.size))
    return int(statistics.median(sides)) if sides else None


def read_truth(table: Path) -> dict[str, str]:
    """File name to true class, for measuring: rows `file,class`."""
    return {name: label for _, name, label in _labeled_rows(table) if label}


def _labeled_rows(table: Path) -> list[tuple[int, str, str]]:
    """(line, path, label) of every row; the label is empty where there is none."""
    rows = []
    for line, row in read_table(table, {"path": PATH_COLUMNS, "label": LABEL_COLUMNS}):
        if not row["path"]:
            raise DataError(f"{printable(table)}, line {line} names no file. Give a path in every row.")
        rows.append((line, row["path"], row["label"]))
    return rows
