"""A budget of pixels for all threads that decode: a few huge images at once would take all memory.

Processes that decode side by side have a part of it each. An image larger than such a part locks a file that they share, so
only one of them holds one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from opencon.processes import beside

# Pixels that are decoded at the same time. Ours: five of 24 megapixels, or one that is larger alone; Pillow and the
# conversions take up to 16 bytes for each, so about 2 GB, or 3 GB for the largest image that is read at all.
MOST_AT_ONCE = 120_000_000


class PixelBudget:
    """Lets threads decode images together as long as their pixels fit; an image larger than the budget comes alone."""

    def __init__(self, most: int = MOST_AT_ONCE, lock_file: str = "") -> None:
        self.most, self.taken, self.lock_file = most, 0, lock_file
        self._change = threading.Condition()

    @contextlib.contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for this many pixels, and hold them inside."""
        is_large, pixels = pixels > self.most, min(pixels, self.most)
        with self._locked() if is_large and self.lock_file else contextlib.nullcontext(), self._held(pixels):
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock ends with its process, however that ends."""
        import fcntl  # there are no such processes where there is no such module

        with open(self.lock_file, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _held(self, pixels: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: self.taken + pixels <= self.most)
            self.taken += pixels
        try:
            yield
        finally:
            with self._change:
                self.taken -= pixels
                self._change.notify_all()


_NUMBER, _LOCK = beside()
BUDGET = PixelBudget(MOST_AT_ONCE // _NUMBER, _LOCK)  # of this process
