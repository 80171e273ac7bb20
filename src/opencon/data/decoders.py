"""Who decodes image files: threads of this process, or processes beside it.

Threads stop scaling at about eight, because much of decoding holds Python's lock. Processes go on, but take seconds to
start. They write their pixels into memory that is shared, so none is sent.

Letters: n images, S side of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opencon.errors import ConfigError
from opencon.processes import FEWEST_CORES, Address, Processes, SharedBytes, can_share, shared_array, usable_cores

Pixels = npt.NDArray[np.uint8]
Item = TypeVar("Item")  # a path, or what else an image is decoded from
DecodeIn = Literal["auto", "threads", "processes"]

PIECE = 8  # images a worker takes at once, ours: handing them out one by one would keep the main thread busy
GRAY = 128  # in place of an image that fails
MANY = 10_000  # images for which processes are started, ours: they save more than the seconds they take to start


def in_processes(how: DecodeIn, num_images: int, device: torch.device) -> bool:
    """Whether processes decode. Unless somebody says so, only for many images, on many cores, and for a GPU: on a CPU the
    network itself takes the cores.
    """
    if how == "auto":
        return device.type == "cuda" and num_images >= MANY and usable_cores() >= FEWEST_CORES and can_share()
    if how == "processes" and not can_share():
        raise ConfigError("this system cannot decode in processes, which takes Linux. Decode in threads.")
    return how == "processes"


@dataclass(frozen=True, eq=False)
class Slot:
    """Memory for n images (n, 3, S, S)."""

    pixels: Tensor
    shared: SharedBytes | None = None  # where processes write into it

    @classmethod
    def new(cls, shape: Sequence[int], executor: Executor, *, pinned: bool = False) -> Slot:
        """An empty one that the workers of an executor can fill."""
        if not isinstance(executor, Processes):
            return cls(torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=pinned))
        shared = SharedBytes(tuple(shape))
        return cls(torch.from_numpy(shared.array), shared)

    def fill(
        self, executor: Executor, decode: Callable[[Item, int], Pixels | str], items: Sequence[Item]
    ) -> list[Future[list[str | None]]]:
        """Decode into the slot, from its first image on. For every piece: for each image None, or why it is gray.

        Args:
            executor: whose workers decode.
            decode: an item and S to (3, S, S), or to the reason why it cannot be; it may raise, too.
            items: at most n.
        """
        parts = [(at, items[at : at + PIECE]) for at in range(0, len(items), PIECE)]
        if self.shared is None:
            array = self.pixels.numpy()
            return [executor.submit(_fill, array[at : at + PIECE], decode, part) for at, part in parts]
        return [executor.submit(_fill_shared, self.shared.address, at, decode, part) for at, part in parts]


def _fill_shared(address: Address, at: int, decode: Callable[[Any, int], Pixels | str], items: Sequence[Any]) -> Any:
    return _fill(shared_array(address)[at : at + len(items)], decode, items)


def _fill(place: Pixels, decode: Callable[[Any, int], Pixels | str], items: Sequence[Any]) -> list[str | None]:
    reasons: list[str | None] = []
    for image, item in zip(place, items, strict=False):  # the place may reach beyond the last item
        reason = None
        try:
            # NumPy, not torch, which would start threads of its own below each of ours.
            found = decode(item, place.shape[-1])
            if isinstance(found, str):
                reason = found
            else:
                image[...] = found
        except Exception as err:  # a damaged file can raise nearly anything inside Pillow's decoders
            reason = f"{type(err).__name__}: {err}"
        if reason is not None:
            image[...] = GRAY
        reasons.append(reason)
    return reasons
