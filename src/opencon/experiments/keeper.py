"""What is kept of a run while it trains: a line for each epoch, and a checkpoint that is never far behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from opencon.config import RunConfig, to_dict
from opencon.training.optimizer import restore
from opencon.training.ranks import num_ranks
from opencon.training.run_folder import RunFolder


class Keeper:
    """Writes metrics.jsonl and checkpoint.pt; within its `with` block no other process may train into the folder.

    The state is copied in memory at every epoch and written to disk every `train.save_seconds`. An exception in the `with`
    block (Ctrl-C, a full disk, a loss that is not finite) writes the copy. After a kill -9 there is the last file.

    Args:
        folder: of the run.
        config: of the run; a checkpoint with another one is refused.
        method, optimizer, scaler: all that has a state.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        method: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.folder, self.config = folder, config
        self.method, self.optimizer, self.scaler = method, optimizer, scaler
        self.plain_config = to_dict(config)
        self.snapshot: dict[str, Any] = {}
        self.saved_at = self.epoch_start = time.perf_counter()
        self.lock = contextlib.ExitStack()
        self.note = ""  # what has changed since the checkpoint

    def resume(self) -> int:
        """Load the checkpoint if there is one. Returns the number of finished epochs."""
        done = 0
        if self.folder.has_checkpoint:
            state = self.folder.load_checkpoint(self.plain_config)
            with self.folder.restoring():
                self.method.load_state_dict(state["method"])
                self.scaler.load_state_dict(state["scaler"])
                restore(self.optimizer, state["optimizer"])
            done = int(state["epochs_done"])
            before, now = state.get("ranks", 1), num_ranks()
            if before != now:
                norms = "" if self.config.train.sync_norms else ", and because batch norms see another share of a batch"
                self.note = (
                    f"The number of ranks was {before} and is now {now}. Batches stay the same; results differ by rounding"
                    f"{norms}."
                )
        self.folder.forget_metrics_from(done)
        self.epoch_start = time.perf_counter()
        return done

    def epoch_done(self, epoch: int, means: dict[str, float], score: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Write the record of an epoch and copy the state; score, and save the copy, when it is time.

        Returns the record. Its seconds are those of training alone.
        """
        seconds, last = time.perf_counter() - self.epoch_start, epoch + 1 == self.config.train.epochs
        scores = score() if last or (epoch + 1) % self.config.eval.every == 0 else {}
        record = {"epoch": epoch, "seconds": seconds, **means, **scores}
        self.folder.append_metrics(record)
        state = {
            "config": self.plain_config,
            "epochs_done": epoch + 1,
            "ranks": num_ranks(),
            "method": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        self.snapshot = _copied(state)
        if last or time.perf_counter() - self.saved_at > self.config.train.save_seconds:
            self.save()
        self.epoch_start = time.perf_counter()
        return record

    def save(self) -> None:
        """Write the copied state."""
        self.folder.save_checkpoint(self.snapshot)
        self.saved_at = time.perf_counter()

    def __enter__(self) -> Keeper:
        self.lock.enter_context(self.folder.held())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            if error is not None and self.snapshot:
                self.save()


def _copied(value: Any) -> Any:
    """A copy of nested state whose tensors no later step changes."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value
