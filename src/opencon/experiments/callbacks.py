"""What a run tells the outside: `Callback`, which sees the live objects, and loggers for three services, each an extra.

class Norm(opencon.Callback):
    def epoch_done(self, training, record):
        print(record["epoch"], sum(p.norm() for p in training.method.parameters()))

opencon.train("digits", out="runs/a", callbacks=[Norm(), opencon.WandbLogger(project="open-world")])
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opencon.config import RunConfig, to_dict
from opencon.errors import MissingExtraError
from opencon.methods import Method


@dataclass(eq=False)
class Training:
    """A run while it trains. What is in it is alive: reading is safe, changing it changes the run."""

    config: RunConfig
    folder: Path
    method: Method[Any]
    optimizer: torch.optim.Optimizer | None  # None where nothing is trained
    num_steps: int = 0  # of an epoch
    first_epoch: int = 0  # above 0 where the run was resumed
    record: dict[str, Any] = field(default_factory=dict)  # of the last finished epoch


class Callback:
    """Told of a run; override what you need. An exception stops the run, which can be resumed."""

    def prepare(self) -> None:
        """Before anything is loaded or written: the moment to say that a package is missing."""

    def started(self, training: Training) -> None:
        """Before the first step."""

    def stepped(self, training: Training, epoch: int, steps: int) -> None:
        """Every `train.log_every` steps: this many steps of the epoch are done."""

    def epoch_done(self, training: Training, record: Mapping[str, Any]) -> None:
        """After an epoch; `record` is its line in metrics.jsonl."""

    def finished(self, training: Training, result: Mapping[str, Any]) -> None:
        """Once the result is written."""

    def closed(self) -> None:
        """At the end, whether the run finished, was interrupted or failed."""


@dataclass(frozen=True)
class Callbacks:
    """Plain functions for the command line: a line of text, progress in steps, the record of an epoch."""

    say: Callable[[str], None] = lambda text: None
    started: Callable[[int, int, int], None] = lambda first_epoch, num_epochs, steps: None
    stepped: Callable[[int, int], None] = lambda epoch, steps: None
    epoch_done: Callable[[dict[str, Any]], None] = lambda record: None


@contextmanager
def prepared(watchers: Sequence[Callback]) -> Iterator[None]:
    """Prepare all of them; close all of them at the end."""
    for watcher in watchers:
        watcher.prepare()
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.closed()


# --- loggers ----------------------------------------------------------------------------------------------------------


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record, but for its epoch."""
    plain = {key: value for key, value in record.items() if key != "epoch" and type(value) in (int, float)}
    return {key: float(value) for key, value in plain.items() if math.isfinite(value)}


def settings(config: RunConfig) -> dict[str, Any]:
    """Every setting by its dotted name."""
    out: dict[str, Any] = {}

    def walk(at: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{at}.{key}" if at else key, inner)
        else:
            out[at] = value

    walk("", to_dict(config))
    return out


class TensorBoardLogger(Callback):
    """Curves for TensorBoard (extra `tensorboard`), in the folder `tensorboard` of the run or in `folder`."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.writer: Any = None

    def prepare(self) -> None:
        """Import it."""
        self._module = _extra("torch.utils.tensorboard", "tensorboard", "tensorboard", "--tensorboard")

    def started(self, training: Training) -> None:
        """Open the log."""
        self.writer = self._module.SummaryWriter(str(self.folder or training.folder / "tensorboard"))

    def epoch_done(self, training: Training, record: Mapping[str, Any]) -> None:
        """A point on each curve."""
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, record["epoch"])

    def closed(self) -> None:
        """Close the log."""
        if self.writer is not None:
            self.writer.close()


class WandbLogger(Callback):
    """Settings, curves and result for Weights & Biases (extra `wandb`); options are those of `wandb.init`."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.run: Any = None

    def prepare(self) -> None:
        """Import it."""
        self._module = _extra("wandb", "wandb", "wandb", "--log wandb")

    def started(self, training: Training) -> None:
        """Begin a run of this folder's name. Options `id` and `resume` let a training that goes on go on with its log."""
        given = {"project": "opencon", "name": training.folder.name, "dir": str(training.folder)} | self.options
        self.run = self._module.init(**given, config=settings(training.config))

    def epoch_done(self, training: Training, record: Mapping[str, Any]) -> None:
        """A point on each curve."""
        self.run.log(numbers(record), step=int(record["epoch"]))

    def finished(self, training: Training, result: Mapping[str, Any]) -> None:
        """The result, beside the curves."""
        self.run.summary.update(numbers(result))

    def closed(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()


class MLflowLogger(Callback):
    """Settings, curves and result for MLflow (extra `mlflow`); options are those of `mlflow.start_run`."""

    def __init__(self, *, experiment: str | None = None, tracking_uri: str | None = None, **options: Any) -> None:
        self.experiment, self.tracking_uri, self.options = experiment, tracking_uri, options
        self.is_open = False

    def prepare(self) -> None:
        """Import it."""
        self._module = _extra("mlflow", "mlflow", "mlflow", "--log mlflow")

    def started(self, training: Training) -> None:
        """Begin the run."""
        if self.tracking_uri is not None:
            self._module.set_tracking_uri(self.tracking_uri)
        if self.experiment is not None:
            self._module.set_experiment(self.experiment)
        self._module.start_run(**({"run_name": training.folder.name} | self.options))
        self.is_open = True
        self._module.log_params({key: str(value) for key, value in settings(training.config).items()})

    def epoch_done(self, training: Training, record: Mapping[str, Any]) -> None:
        """A point on each curve."""
        self._module.log_metrics(numbers(record), step=int(record["epoch"]))

    def finished(self, training: Training, result: Mapping[str, Any]) -> None:
        """The result, as metrics of their own."""
        self._module.log_metrics({f"result_{key}": value for key, value in numbers(result).items()})

    def closed(self) -> None:
        """End the run."""
        if self.is_open:
            self._module.end_run()


LOGGERS: dict[str, type[Callback]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
}


def _extra(module: str, package: str, extra: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as err:  # a version that does not fit fails in many ways
        raise MissingExtraError(package, extra, what, err) from err
