"""Small pictures of the photos, made when they are first looked at and kept beside the run. The photos are only read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from PIL import Image

from opencon.report.embed import jpeg
from opencon.review.run import Run

SMALL, LARGE = 256, 1600  # pixels of the longer side, ours: a tile on a sharp screen, and a whole laptop screen
SMALL_QUALITY, LARGE_QUALITY = 75, 85  # of JPEG, ours
PER_FOLDER = 1000  # ours: a folder that any file system lists quickly


class Thumbs:
    """Pictures by the number of the photo. Any number of threads may ask at once."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder / run.identity

    def small(self, photo: int) -> bytes:
        """A JPEG for a tile, from the cache or made now; empty where the photo cannot be read any more."""
        path = self.folder / str(photo // PER_FOLDER) / f"{photo}.jpg"
        with contextlib.suppress(OSError):
            if data := path.read_bytes():
                return data
        data = self._made(photo, SMALL, SMALL_QUALITY)
        if data:
            with contextlib.suppress(OSError):  # a full disk: the picture is made again next time
                _put(path, data)
        return data

    def large(self, photo: int) -> bytes:
        """A JPEG for the whole screen, made now."""
        return self._made(photo, LARGE, LARGE_QUALITY)

    def _made(self, photo: int, side: int, quality: int) -> bytes:
        path = self.run.path(photo)

        def load() -> Image.Image | None:
            return Image.open(path) if path.is_file() else None  # a pipe in its place would wait forever

        return jpeg(load, side, quality)


def _put(path: Path, data: bytes) -> None:
    """Write under a name that nobody else uses, then rename: two threads may make the same picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
