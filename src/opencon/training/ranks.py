"""Several processes, one run: what `torchrun` starts, each a rank with its own share of every batch.

Batches are drawn from seed and epoch alone, so they are the same for any number of ranks (`data.shares`). The first rank
alone reads and writes the run folder. Before every epoch all ranks take over the state of the first, so that rounding on
different devices never adds up.

Letters: R ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from opencon.encoders.synchronized import has_synchronized
from opencon.errors import ConfigError, OpenConError, RunError
from opencon.training.run_folder import RunFolder

T = TypeVar("T")
# How long a rank waits for the others. Ours: the first rank may load a data set and measure for a while.
PATIENCE = datetime.timedelta(minutes=60)


def num_ranks() -> int:
    """R; 1 where nothing was started."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among the ranks, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[torch.device]:
    """Within the block this process is one of the ranks that `torchrun` has started, if it has. Yields its own device.

    NCCL connects them where every rank of this machine has a GPU of its own, else gloo.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or dist.is_initialized():
        yield device
        return
    local, beside = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus:
        device = torch.device("cuda", local % gpus)
        torch.cuda.set_device(device)
    store, number, size = next(rendezvous("env://", timeout=PATIENCE))
    # A new place for every restart: in the old one are the addresses of ranks that are dead.
    store = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "nccl" if gpus >= beside else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=PATIENCE)
    try:
        yield device
    except RuntimeError as err:
        if not _is_alone(err):
            raise
        raise RunError(
            f"rank {number} has lost the others: one of them has ended, and what it said stands above or in its own log. "
            f"torchrun begins again with all of them, from the last checkpoint, as often as --max-restarts says."
        ) from err
    finally:
        dist.destroy_process_group()


def _is_alone(err: RuntimeError) -> bool:
    """Whether this is how torch reports that another rank has gone: NCCL by its kind of error, gloo by its source code."""
    return isinstance(err, dist.DistError) or "/gloo/" in str(err)


@contextlib.contextmanager
def one_before_others(needed: bool) -> Iterator[None]:
    """Where needed, the first rank of each machine does the block before its others: what it downloads, they find."""
    needed = needed and num_ranks() > 1
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if needed and not is_first:
        dist.barrier()
    yield
    if needed and is_first:
        dist.barrier()


def is_recordable() -> bool:
    """Whether what ranks say to each other can be part of a CUDA graph: NCCL's can."""
    return not dist.is_initialized() or dist.get_backend() == "nccl"


def from_first(compute: Callable[[], T]) -> T:
    """What the first rank computes, on every rank; an error that a user can fix is raised on all of them."""
    if num_ranks() == 1:
        return compute()
    answer: list[Any] = [None, None]
    if rank() == 0:
        try:
            answer[0] = compute()
        except OpenConError as err:
            answer[1] = (type(err), str(err))
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        kind, message = answer[1]
        raise kind(message) if issubclass(kind, (ConfigError, OpenConError)) else OpenConError(message)
    result: T = answer[0]
    return result


def _done(_: object) -> None:
    """Nothing to send to the other ranks."""


class SharedFolder(RunFolder):
    """A run folder of several ranks: the first one reads, and all get what it read; the first one writes."""

    @classmethod
    def open_for_training(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """Create the folder, or check that it holds a run of the same configuration."""
        from_first(lambda: _done(RunFolder.open_for_training(path, config)))  # a plain folder: it asks no other rank
        return cls(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from training into this folder meanwhile."""
        with super().held() if rank() == 0 else contextlib.nullcontext():
            yield

    def has(self, name: str) -> bool:
        """Whether the run has written this file."""
        ask = super().has
        return from_first(lambda: ask(name))

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from."""
        return from_first(lambda: self.checkpoint.exists() or self.checkpoint_before.exists())

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one JSON file of the run."""
        read = super().read_json
        return from_first(lambda: read(name))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The record of every epoch in metrics.jsonl."""
        return from_first(super().read_metrics)

    def load_checkpoint(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The last checkpoint that is whole, on the CPU."""
        load = super().load_checkpoint
        return from_first(lambda: load(config))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        if rank() == 0:
            super().append_metrics(record)

    def write_file(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write one file, whole or not at all."""
        return super().write_file(name, write) if rank() == 0 else self.path / name

    def forget_older_checkpoint(self) -> None:
        """Remove the checkpoint before the last one."""
        if rank() == 0:
            super().forget_older_checkpoint()


@torch.no_grad()
def take_over(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of the first one; statistics of each rank's own batches are averaged."""
    if num_ranks() == 1:
        return
    encoder = getattr(getattr(module, "embedder", None), "encoder", None)
    if encoder is not None and not has_synchronized(encoder):
        for buffer in encoder.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= num_ranks()
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor, src=0)


@torch.no_grad()
def add_gradients(module: nn.Module, *, is_shared: bool) -> None:
    """Make the gradients on every rank those of the whole batch.

    A rank's own rows reach the encoder alone, so the encoder's gradients are added. What works on gathered features has the
    whole gradient on every rank already; the mean over ranks leaves it, and makes rounding alike.

    Args:
        module: has an `embedder` with an `encoder`.
        is_shared: whether each rank has encoded its own share; otherwise all have done all the work.
    """
    if not dist.is_initialized():
        return
    of_encoder = {id(p) for p in module.embedder.encoder.parameters()} if is_shared else set()  # type: ignore[union-attr]
    for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        learning = [p for p in module.parameters() if p.requires_grad and p.dtype == kind]
        if not learning:
            continue
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in learning]
        alike = [id(p) not in of_encoder for p in learning]
        flat = torch.cat([part / num_ranks() if same else part for part, same in zip(parts, alike, strict=True)])
        dist.all_reduce(flat)
        for p, summed in zip(learning, torch.split(flat, [p.numel() for p in learning]), strict=True):
            if p.grad is not None:
                p.grad.copy_(summed.view_as(p))


def my_piece(num_rows: int) -> range:
    """The rows that this rank embeds of a whole set, in order."""
    return range(rank() * num_rows // num_ranks(), (rank() + 1) * num_rows // num_ranks())


def gather_pieces(own: Tensor, num_rows: int) -> Tensor:
    """Each rank's piece of the rows of a set -> all of them, in order, without gradient."""
    R = num_ranks()
    if R == 1:
        return own
    sizes = [(r + 1) * num_rows // R - r * num_rows // R for r in range(R)]
    padded = torch.cat([own, own.new_zeros(max(sizes) - len(own), *own.shape[1:])])
    everyone = [torch.empty_like(padded) for _ in range(R)]
    dist.all_gather(everyone, padded.contiguous())
    return torch.cat([rows[:size] for rows, size in zip(everyone, sizes, strict=True)])
