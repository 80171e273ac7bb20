"""A run into its folder: prepare, train, keep the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opencon.config import RunConfig, to_dict
from opencon.data.augment import AUGMENTATIONS
from opencon.data.benchmarks import DATASETS, Dataset
from opencon.data.split import Split
from opencon.encoders import ENCODERS
from opencon.experiments.callbacks import Callback, Training, prepared
from opencon.experiments.callbacks import Callbacks as Callbacks  # the command line and the tests take it from here
from opencon.experiments.classes import write_classes
from opencon.experiments.keeper import Keeper
from opencon.experiments.workbench import Workbench, build_loader, prepare, without_weights
from opencon.methods import METHODS, Assignment, FeatureBank
from opencon.plugins import RECORD, check_unchanged, recorded
from opencon.registry import Registry
from opencon.runtime import environment
from opencon.training.optimizer import OPTIMIZERS, SCHEDULES, build_optimizer
from opencon.training.ranks import SharedFolder, num_ranks, one_before_others
from opencon.training.run_folder import RunFolder
from opencon.training.trainer import fit

Scored = tuple[dict[str, Any], FeatureBank, Assignment]  # what `Workbench.score` gives
Measure = Callable[[Workbench, FeatureBank, Assignment], Mapping[str, Any]]
MOST_PROBLEMS = 10  # files set aside that are named one by one
MEASURED_STEPS = 50  # ours: of two views each, so that statistics scatter ten times less than a batch's


def train(
    config: RunConfig,
    out: Path,
    device: torch.device,
    *,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 (frozen)
    watchers: Sequence[Callback] = (),
    download: bool = False,
    dataset: Callable[[], Dataset] | None = None,
    measure: Measure = lambda bench, bank, assignment: {},
) -> dict[str, Any]:
    """Train into the folder `out`, or resume the run in it. Returns the final record, which is also in result.json.

    `dataset` gives images that are loaded already. What `measure` finds out about the trained run joins the record.
    """
    start = time.perf_counter()
    with prepared(watchers):  # before anything is written: an extra may be missing
        folder = (SharedFolder if num_ranks() > 1 else RunFolder).open_for_training(out, to_dict(config))
        plugins = recorded(names_used(config))
        check_unchanged(out, plugins)
        if folder.has("result.json"):
            callbacks.say(f"{out} is finished already; this is its result.")
            return folder.read_json("result.json")
        # A run that was killed before it had its split gets it again; one that has trained must have it.
        has_split = folder.has("split.json") or folder.has_checkpoint
        split = Split.from_json(folder.read_json("split.json")) if has_split else None
        # A checkpoint holds all weights: the file they started from is no longer needed.
        base = without_weights(config) if folder.has_checkpoint else config
        with one_before_others(download):
            bench = prepare(base, device, split=split, download=download, dataset=dataset)
        announce(bench, callbacks.say)
        # Before anything is written: a rule for groups may fit no parameter.
        optimizer = build_optimizer(bench.method, config.train) if config.train.epochs else None
        if not folder.has("config.json"):  # first of all: it makes the folder a run
            folder.write_json("config.json", to_dict(config))
        if plugins and not folder.has(RECORD):
            folder.write_json(RECORD, plugins)
        if not has_split:
            folder.write_json("split.json", bench.split.to_json())
        if not folder.has("environment.json"):
            folder.write_json("environment.json", environment(device))
        training = Training(config, out, bench.method, optimizer)
        if optimizer is None:
            record, bank, assignment = score_start(folder, config, bench)
        else:
            last = train_epochs(folder, config, bench, optimizer, callbacks, watchers, training)
            scored, bank, assignment = last or bench.score(config.eval.on, config.eval.protocol)
            record = last_record(folder, config, scored)
        result = finish(folder, bench, {**record, **measure(bench, bank, assignment)}, bank, assignment, start=start)
        for watcher in watchers:
            watcher.finished(training, result)
        return result


def announce(bench: Workbench, say: Callable[[str], None]) -> None:
    """Say where the weights come from, that images are streamed, and which files were set aside."""
    if bench.method.embedder.load_report is not None:
        say(str(bench.method.embedder.load_report))
    if not isinstance(bench.images, Tensor):
        gb = math.prod(bench.images.shape) / 1e9
        say(f"The images would take {gb:.3g} GB: they are read from their files while training.")
    problems = bench.dataset.train.problems
    for problem in problems[:MOST_PROBLEMS]:
        say(f"set aside: {problem}")
    if len(problems) > MOST_PROBLEMS:
        say(f"... and {len(problems) - MOST_PROBLEMS} more files were set aside.")


def score_start(folder: RunFolder, config: RunConfig, bench: Workbench) -> Scored:
    """The score of a run without epochs."""
    if folder.has_checkpoint:
        state = folder.load_checkpoint(to_dict(config))
        with folder.restoring():
            bench.method.load_state_dict(state["method"])
    bench.method.embedder.fold_frozen()  # as in training
    return bench.score(config.eval.on, config.eval.protocol)


def names_used(config: RunConfig) -> list[tuple[Registry[Any], str]]:
    """Every name in the configuration behind which code stands."""
    views = [kind.name for kind in (config.augment, config.strong, *config.views) if kind is not None]
    return [
        (METHODS, config.method.name),
        (ENCODERS, config.encoder.name),
        (DATASETS, config.data.name),
        *((AUGMENTATIONS, name) for name in dict.fromkeys(views)),
        (OPTIMIZERS, config.train.optimizer),
        (SCHEDULES, config.train.schedule),
    ]


def train_epochs(
    folder: RunFolder,
    config: RunConfig,
    bench: Workbench,
    optimizer: torch.optim.Optimizer,
    callbacks: Callbacks,
    watchers: Sequence[Callback],
    training: Training,
) -> Scored | None:
    """Train from the checkpoint, or from the start, to the last epoch. Returns its score; None if it was done already.

    `config` is that of the run; that of the bench may lack the weights file.
    """
    loader = build_loader(bench)
    scaler = torch.amp.GradScaler(bench.device.type, enabled=config.train.precision == "fp16")
    keeper = Keeper(folder, config, bench.method, optimizer, scaler)
    training.num_steps = len(loader)
    last: list[Scored] = []

    def score() -> dict[str, Any]:
        last[:] = [bench.score(config.eval.on, config.eval.protocol)]
        return last[0][0]

    def on_step(epoch: int, steps: int) -> None:
        callbacks.stepped(epoch, steps)
        for watcher in watchers:
            watcher.stepped(training, epoch, steps)

    def on_epoch(epoch: int, means: dict[str, float]) -> None:
        if news := changed_number(training.record, means):
            callbacks.say(f"Epoch {epoch}: {news}")
        training.record = keeper.epoch_done(epoch, means, score)
        for watcher in watchers:
            watcher.epoch_done(training, training.record)
        callbacks.epoch_done(training.record)
        if epoch + 1 < config.train.epochs:
            last.clear()  # its rows would only take memory

    with keeper:
        first_epoch = keeper.resume()
        if first_epoch:
            callbacks.say(f"Resuming {folder.path} after {first_epoch} of {config.train.epochs} epochs.")
            if keeper.note:
                callbacks.say(keeper.note)
        else:
            bench.method.embedder.measure_frozen(loader.first_views(MEASURED_STEPS))
        bench.method.embedder.fold_frozen()
        torch.backends.cudnn.benchmark = True  # shapes never change, so trying out convolution algorithms once pays
        training.first_epoch = first_epoch
        callbacks.started(first_epoch, config.train.epochs, len(loader))
        for watcher in watchers:
            watcher.started(training)
        fit(
            bench.method,
            optimizer,
            loader,
            config.train,
            features=bench.bank,
            scaler=scaler,
            first_epoch=first_epoch,
            on_step=on_step,
            on_epoch=on_epoch,
        )
    return last[0] if last else None


def changed_number(before: Mapping[str, Any], means: Mapping[str, float]) -> str:
    """A sentence where the number of prototypes was decided since the epoch before; else nothing."""
    had, has = before.get("prototypes"), means.get("prototypes")
    if had is None or has is None or had == has:
        return ""
    if "prototypes_gone" not in means:  # the method counts, and does not say what became of each
        return f"the classes were counted anew: {had:.0f} became {has:.0f}."
    gone, merged, split = (int(means[f"prototypes_{name}"]) for name in ("gone", "merged", "split"))
    return (
        f"{had:.0f} prototypes became {has:.0f}: {gone} were hardly chosen and went; then {merged} fewer (halves of a "
        f"class) and {split} more (two classes in one)."
    )


def last_record(folder: RunFolder, config: RunConfig, scored: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the last epoch; where metrics.jsonl has lost it, what was just measured."""
    records = folder.read_metrics()
    if records and records[-1]["epoch"] == config.train.epochs - 1:
        return records[-1]
    return {"epoch": config.train.epochs - 1, **scored}


def finish(
    folder: RunFolder,
    bench: Workbench,
    record: Mapping[str, Any],
    bank: FeatureBank,
    assignment: Assignment,
    *,
    start: float,
) -> dict[str, Any]:
    """Write the encoder, the classes and the result, which makes the run a finished one."""
    config, result = bench.config, dict(record) | {"total_seconds": time.perf_counter() - start}
    if config.train.epochs == 0:
        folder.save_checkpoint({"config": to_dict(config), "epochs_done": 0, "method": bench.method.state_dict()})
    metadata = {"encoder": config.encoder.name, "method": config.method.name, "data": config.data.name}
    with bench.judged_weights():
        folder.save_tensors("encoder.safetensors", bench.method.embedder.encoder.state_dict(), metadata)
        write_classes(folder, bench, bank, assignment)
    folder.write_json("result.json", result)
    folder.forget_older_checkpoint()
    return result
