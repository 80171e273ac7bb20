"""CIFAR as image files, train/CLASS/NUMBER.png and test/CLASS/NUMBER.png, which are packed into one file when first read.

Sixty thousand small files take long to open. The pack lies beside the folders (`cifar10.safetensors`) and stands for them,
so it can be taken elsewhere alone. It is made anew when a file has come or gone. Where it cannot be written, the files are
read each time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from opencon.data.listings import Listing, list_folder
from opencon.data.sources import ImageSet, load_listing
from opencon.errors import DataError
from opencon.files import write_whole

PARTS = ("train", "test")


@dataclass(frozen=True)
class CifarImages:
    """Where the images of one CIFAR data set are, as files or packed."""

    pack: Path
    listings: tuple[Listing, ...]  # of PARTS; empty where the pack is used
    class_names: tuple[str, ...]
    sizes: tuple[int, ...]  # of PARTS

    @classmethod
    def find(cls, root: Path, name: str, num_classes: int) -> CifarImages | None:
        """What is in `root`; None where it holds neither a pack nor a folder for each class in train and in test."""
        pack, folders = root / f"{name}.safetensors", [root / part for part in PARTS]
        inner = [sorted(at for at in folder.glob("[!.]*") if at.is_dir()) for folder in folders]
        # A folder's own time changes when a file comes or goes.
        changed = max((at.stat().st_mtime_ns for ats in inner for at in ats), default=0)
        if pack.is_file() and pack.stat().st_mtime_ns >= changed:
            with _readable(pack), safe_open(pack, "pt") as file:
                sizes = tuple(file.get_slice(f"{part}.classes").get_shape()[0] for part in PARTS)
                return cls(pack, (), tuple(json.loads(file.metadata()["class_names"])), sizes)
        names = [[at.name for at in ats] for ats in inner]
        if names[0] != names[1] or len(names[0]) != num_classes:
            return None
        listings = tuple(_by_number(list_folder(folder)) for folder in folders)
        return cls(pack, listings, listings[0].class_names, tuple(len(listing.paths) for listing in listings))

    def load(self, image_size: int) -> tuple[ImageSet, ...]:
        """The images of PARTS, which are packed if they were not."""
        if not self.listings:
            with _readable(self.pack), safe_open(self.pack, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)
            return tuple(ImageSet(tensors[f"{p}.images"], tensors[f"{p}.classes"], self.class_names) for p in PARTS)
        sets = tuple(load_listing(listing, image_size) for listing in self.listings)
        if not any(part.problems for part in sets):
            tensors = {f"{p}.images": part.images for p, part in zip(PARTS, sets, strict=True)}
            tensors |= {f"{p}.classes": part.classes for p, part in zip(PARTS, sets, strict=True)}
            metadata = {"class_names": json.dumps(self.class_names)}
            with contextlib.suppress(OSError, SafetensorError):  # a read-only or full disk
                write_whole(self.pack, lambda partial: save_file(tensors, partial, metadata=metadata))
        return sets


@contextlib.contextmanager
def _readable(pack: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as err:
        raise DataError(f"cannot read {pack} ({err}). Delete it: it is made again from the image files.") from err


def _by_number(listing: Listing) -> Listing:
    """The same files in the order of the numbers that are their names, whatever folder they lie in.

    That is the official order, in which a split draws the same labels as from the official files. Classes are in
    alphabetical order, which is the official one, too.
    """

    def place(i: int) -> tuple[int, str, int]:
        path = listing.paths[i]
        return int(path.stem) if path.stem.isdecimal() else -1, path.name, listing.classes[i]

    order = sorted(range(len(listing.paths)), key=place)
    paths, classes = tuple(listing.paths[i] for i in order), tuple(listing.classes[i] for i in order)
    return replace(listing, paths=paths, classes=classes)
