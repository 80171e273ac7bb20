"""What is kept of a run while it trains: a line an epoch, and a checkpoint that is never far behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor

from opencon.config import RunConfig, to_dict
from opencon.errors import MissingExtraError
from opencon.runs import RunFolder


class Keeper:
    """Writes metrics.jsonl and checkpoint.pt.

    State is copied in memory at every epoch and written to disk every `train.save_seconds`: leaving the `with` block by an
    exception (Ctrl-C, a full disk, a loss that is not finite) writes the copy, and a kill -9 falls back on the file.

    Args:
        folder: where to.
        config: of the run; a checkpoint of another one is refused.
        parts: everything that has a state: method, optimizer, gradient scaler.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, parts: dict[str, Any]) -> None:
        self.folder, self.config, self.parts = folder, config, parts
        self.plain_config = to_dict(config)
        self.snapshot: dict[str, Any] = {}
        self.saved_at = self.epoch_start = time.perf_counter()

    def resume(self) -> int:
        """Load the checkpoint if there is one; returns how many epochs are done."""
        done = 0
        if self.folder.checkpoint.exists():
            state = self.folder.load_checkpoint(self.plain_config)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            done = int(state["epochs_done"])
        self.folder.forget_metrics_from(done)
        return done

    def epoch_done(self, epoch: int, means: dict[str, float], score: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Score if it is time, write the record of an epoch, remember the state, save it if it is time.

        Returns the record; its seconds are those of training alone.
        """
        seconds, last = time.perf_counter() - self.epoch_start, epoch + 1 == self.config.train.epochs
        scores = score() if last or (epoch + 1) % self.config.eval.every == 0 else {}
        record = {"epoch": epoch, "seconds": seconds, **means, **scores}
        self.folder.append_metrics(record)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        self.snapshot = _copied({"config": self.plain_config, "epochs_done": epoch + 1, **state})
        if last or time.perf_counter() - self.saved_at > self.config.train.save_seconds:
            self.save()
        self.epoch_start = time.perf_counter()
        return record

    def save(self) -> None:
        """Write the remembered state."""
        self.folder.save_checkpoint(self.snapshot)
        self.saved_at = time.perf_counter()

    def __enter__(self) -> Keeper:
        self.epoch_start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.snapshot:
            self.save()


def _copied(value: Any) -> Any:
    """A copy of nested state whose tensors no later step changes."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def tensorboard_writer() -> Any:
    """TensorBoard's SummaryWriter, which is an extra."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception as err:
        raise MissingExtraError("tensorboard", "tensorboard", "--tensorboard", err) from err
    return SummaryWriter
