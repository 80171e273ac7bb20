"""List image files and their classes, from a folder with one sub-folder per class.

Nothing is decoded here, so that a plan and most error messages come before anything slow.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from opencon.errors import DataError

HEIC_SUFFIXES = frozenset({".heic", ".heif"})  # of phones; decoding them is an extra
IMAGE_SUFFIXES = HEIC_SUFFIXES | {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
# Photos in other formats: they are listed, so that we report them as unreadable instead of skipping them silently.
OTHER_SUFFIXES = frozenset({".arw", ".avif", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2"})
PART_NAMES = frozenset({"test", "train", "training", "val", "valid", "validation"})  # folders that are never classes


@dataclass(frozen=True)
class Listing:
    """Image files with their classes, not yet opened."""

    paths: tuple[Path, ...]
    classes: tuple[int, ...]  # -1: nobody says which
    class_names: tuple[str, ...]
    problems: tuple[str, ...] = ()
    # Which images carry a label, where the files say so; their classes come first. None: the split draws them.
    given: tuple[bool, ...] | None = None

    @property
    def num_given(self) -> int:
        """Classes of which the files give labels."""
        given = self.given or ()
        return len({c for c, is_given in zip(self.classes, given, strict=False) if is_given})


def printable(path: Path) -> str:
    """A path that any terminal can print, even where its bytes are no text."""
    return os.fsencode(path).decode("utf-8", "replace")


def find_images(folder: Path) -> list[Path]:
    """Every image file below a folder, by its suffix, sorted; hidden files and folders are skipped."""
    return [path for path in _files(folder) if path.suffix.lower() in IMAGE_SUFFIXES | OTHER_SUFFIXES]


def images_at(path: Path) -> list[Path]:
    """The path itself, or the images below a folder."""
    if not path.is_dir():
        return [path]
    if images := find_images(path):
        return images
    readable = ", ".join(sorted(IMAGE_SUFFIXES))
    raise DataError(f"there is no image in the folder {printable(path)}. Readable: {readable}.")


def list_folder(root: str | Path) -> Listing:
    """The images of a folder with one sub-folder per class."""
    root = Path(root).expanduser()
    if not root.exists():
        raise DataError(f"there is no folder {printable(root)}. Give the folder that holds one sub-folder per class.")
    if not root.is_dir():
        raise DataError(f"{printable(root)} is not a folder. Give the folder that holds one sub-folder per class.")
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    stray = sorted(p for p in root.iterdir() if p.is_file() and p.suffix.lower() in IMAGE_SUFFIXES)
    if not folders and stray:
        raise DataError(
            f"{len(stray)} images lie directly in {printable(root)}, but there is no class folder. Make one sub-folder "
            f"per class and move the images there."
        )
    if not folders:
        raise DataError(f"{printable(root)} holds no class folder ({_content(root)}). Make one sub-folder per class.")
    if {folder.name.lower() for folder in folders} <= PART_NAMES:
        parts = ", ".join(folder.name for folder in folders)
        raise DataError(f"{printable(root)} holds parts of a data set ({parts}), not classes. Give one of the parts.")
    by_class = [find_images(folder) for folder in folders]
    for folder, paths in zip(folders, by_class, strict=True):
        if not any(path.suffix.lower() in IMAGE_SUFFIXES for path in paths):
            raise DataError(
                f"class folder {printable(folder)} holds no image ({_content(folder)}). Remove it, or add images: "
                f"{', '.join(sorted(IMAGE_SUFFIXES))}."
            )
    return Listing(
        paths=tuple(path for paths in by_class for path in paths),
        classes=tuple(c for c, paths in enumerate(by_class) for _ in paths),
        class_names=tuple(folder.name for folder in folders),
        problems=tuple(f"{printable(path)} lies outside the class folders" for path in stray),
    )


def _files(folder: Path) -> list[Path]:
    def refuse(err: OSError) -> None:
        raise DataError(f"cannot look into {err.filename} ({err.strerror}). Make it readable, or remove it.") from err

    out: list[Path] = []
    visited: set[str] = set()  # linked folders are followed, but not in circles
    for here, inner, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(here)
        if real in visited:
            inner.clear()
            continue
        visited.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        out += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(out)


def _content(folder: Path) -> str:
    """What a folder holds instead of images, in words."""
    kinds = Counter(path.suffix.lower() or "no suffix" for path in _files(folder))
    if not kinds:
        return "it is empty"
    return "found only " + ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
