"""A budget of pixels for all threads that decode: a few huge images at once would take all memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

# Pixels that are decoded at the same time. Ours: five of 24 megapixels, or one that is larger alone; Pillow and the
# conversions take up to 16 bytes for each, so about 2 GB, or 3 GB for the largest image that is read at all.
MOST_AT_ONCE = 120_000_000


class PixelBudget:
    """Lets threads decode images together as long as their pixels fit; an image larger than the budget comes alone."""

    def __init__(self, most: int = MOST_AT_ONCE) -> None:
        self.most, self.taken = most, 0
        self._change = threading.Condition()

    @contextlib.contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for this many pixels, and hold them inside."""
        pixels = min(pixels, self.most)
        with self._change:
            self._change.wait_for(lambda: self.taken + pixels <= self.most)
            self.taken += pixels
        try:
            yield
        finally:
            with self._change:
                self.taken -= pixels
                self._change.notify_all()


BUDGET = PixelBudget()  # of this process
