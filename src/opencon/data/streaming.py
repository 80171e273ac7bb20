"""Images that do not fit in memory: decoded from their files by threads or processes, a few batches ahead of their use.

    files --workers--> slots (host, K of them, in turn) --copy--> one buffer (device) --> the step

The step may be a recorded CUDA graph, which reads the same addresses at every replay: hence the one buffer. Nothing is
overwritten while it is read, for two reasons:

1. The copy into the buffer is queued on the very stream that the steps run on. A stream keeps its order, so copy t waits
   for step t - 1 (which reads the buffer) and step t for copy t. From page-locked memory the copy is asynchronous: the
   host goes on at once.
2. The workers get a slot again only after the event recorded behind its copy has happened. The host waits for copy t - 1
   when it asks for batch t, that is, after it has queued step t - 1: the device then still has a whole step to do.
   (Without a GPU, or from memory that processes share, the copy has happened when it returns.)

Workers touch host memory only, never CUDA, so they may run on while a graph is recorded. A second buffer with a stream of
its own could hide the copy behind the step. It does not pay: for 512 images of 256 pixels it is 100 MB, about 4 ms at
25 GB/s, against two seconds of a core for decoding them. benchmarks/worker_path.py measures both.

Letters: M images, B images in a batch, T batches, K slots, S side of an image.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from opencon.data.decoders import DecodeIn, Pixels, Slot, in_processes
from opencon.data.listings import printable
from opencon.errors import DataError
from opencon.processes import Processes, usable_cores

SLOTS = 4  # K, ours: one being copied, three being decoded, so that a slow file delays nothing
MOST_IN_A_ROW = 256  # files that may fail one after the other, ours: more mean a disk that is gone, not damaged files


class StreamedImages:
    """Image files with the shape of one uint8 tensor (M, 3, S, S), read batch by batch.

    A gray image replaces a file that fails, and one warning names the file. Only if `MOST_IN_A_ROW` files fail one after the
    other is it a DataError.

    Args:
        files: one per image; their headers have been checked before.
        image_size: S.
        decode: a file and S to (3, S, S); called by several threads or processes at once.
        device: where batches are wanted.
        threads: how many threads or processes decode; None: one for every core this process may use.
        decode_in: which of the two; see `decoders.in_processes`.
    """

    dtype = torch.uint8

    def __init__(
        self,
        files: Sequence[Path],
        image_size: int,
        decode: Callable[[Path, int], Pixels],
        *,
        device: torch.device | str = "cpu",
        threads: int | None = None,
        decode_in: DecodeIn = "auto",
    ) -> None:
        self.files = files
        self.decode_in = decode_in
        self._processes: Processes | None = None  # they stay for the next epoch
        self.decode = decode
        self.device = torch.device(device)
        self.threads = threads or usable_cores()
        self.shape = torch.Size((len(files), 3, image_size, image_size))
        self.failed: set[int] = set()  # rows that a warning has named
        self.in_a_row = 0

    def __len__(self) -> int:
        return len(self.files)

    def to(self, device: torch.device) -> StreamedImages:
        """The same files, for another device."""
        return StreamedImages(
            self.files, self.shape[-1], self.decode, device=device, threads=self.threads, decode_in=self.decode_in
        )

    def workers(self) -> Executor:
        """New threads that decode, or the processes."""
        if not in_processes(self.decode_in, len(self), self.device):
            return ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        if self._processes is None:
            self._processes = Processes(self.threads)
        return self._processes

    def buffer(self, num_images: int) -> Tensor:
        """An empty buffer for batches on the device: (num_images, 3, S, S)."""
        return torch.empty(num_images, *self.shape[1:], dtype=self.dtype, device=self.device)

    def in_order(self, num_images: int, piece: range | None = None) -> Generator[Tensor, None, None]:
        """Every image, or those of a piece, `num_images` at a time; each chunk is overwritten by the next."""
        piece = range(len(self)) if piece is None else piece
        rows = torch.split(torch.arange(piece.start, piece.stop), num_images)
        return self.batches(rows, self.buffer(len(rows[0])))

    def batches(self, rows: Sequence[Tensor], buffer: Tensor) -> Generator[Tensor, None, None]:
        """Copy the images of each of T row lists (on the CPU) into `buffer`, in turn, and yield the part that is filled.

        Whatever reads a batch must have run, or be queued on the current stream, before the next batch is requested.
        Close the generator to release the workers; it waits for none of them.
        """
        is_cuda = buffer.device.type == "cuda"
        num_slots = min(SLOTS, len(rows))
        workers = self.workers()
        slots = [Slot.new(buffer.shape, workers, pinned=is_cuda) for _ in range(num_slots)]
        copied = torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call, unused-ignore]
        decoding: deque[list[Future[list[str | None]]]] = deque()

        def start(t: int) -> None:
            files = [self.files[row] for row in rows[t].tolist()]
            decoding.append(slots[t % num_slots].fill(workers, self.decode, files))

        try:
            for t in range(num_slots):
                start(t)
            for t, chosen in enumerate(rows):
                if 0 < t <= len(rows) - num_slots:
                    if copied is not None:
                        copied.synchronize()  # host sync: the slot of batch t - 1 is free
                    start(t - 1 + num_slots)
                reasons = [reason for piece in decoding.popleft() for reason in piece.result()]
                self._report(chosen, reasons)
                filled = buffer[: len(chosen)]
                filled.copy_(slots[t % num_slots].pixels[: len(chosen)], non_blocking=True)
                if copied is not None:
                    copied.record(torch.cuda.current_stream(buffer.device))
                yield filled
        finally:
            for piece in itertools.chain.from_iterable(decoding):
                piece.cancel()
            if workers is not self._processes:
                workers.shutdown(wait=False, cancel_futures=True)

    def _report(self, rows: Tensor, reasons: list[str | None]) -> None:
        if not any(reasons):
            self.in_a_row = 0
            return
        for row, reason in zip(rows.tolist(), reasons, strict=True):
            self.in_a_row = self.in_a_row + 1 if reason else 0
            name = printable(self.files[row])
            if self.in_a_row == MOST_IN_A_ROW:
                raise DataError(
                    f"{MOST_IN_A_ROW} files in a row cannot be decoded, the last of them {name} ({reason}). Is the disk "
                    f"still there? Once it is, the same command goes on from the last checkpoint."
                )
            if reason and row not in self.failed:
                self.failed.add(row)
                warnings.warn(f"{name} cannot be decoded ({reason}). A gray image takes its place.", stacklevel=3)


Images = Tensor | StreamedImages  # a set of images in memory, or in files
