"""Many runs as one thing that can be stopped and goes on: every recipe with every value and every seed.

A sweep is a folder:

    sweep.json     its cells: recipe, settings, what sets each apart, seed
    results.json   what has been measured so far, all that a table needs; it grows with every finished cell
    cells/NAME/    the run of a cell, without weights once it is finished, unless they are to be kept
    locks/NAME     held by the process that works on a cell

The cells of one process are trained one after another, so that packages are imported, data loaded and kernels compiled
once. Several processes share a sweep by its locks. A cell that results.json has is finished, whether or not its folder
is there: the file alone can be carried to another machine.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opencon.config import RunConfig, to_dict, with_settings
from opencon.data.benchmarks import Dataset, dataset_info, load_dataset
from opencon.errors import ConfigError, OpenConError, RunError, require, shown
from opencon.experiments.callbacks import Callbacks
from opencon.experiments.compare import INCIDENTAL, WEIGHTS, experiment
from opencon.experiments.evaluate import check_measures, further_measures
from opencon.experiments.measures import measures_of, value_of
from opencon.experiments.plan import check_fits
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import train
from opencon.runtime import environment
from opencon.training.run_folder import RunFolder

UNTOLD = {*INCIDENTAL, WEIGHTS}  # settings that a cell's name leaves out: where files lie, how a run is watched
LONGEST_NAME = 150  # letters; file systems take 255 (ours)
MOST_DIGITS, MOST_SEEDS = 19, 10_000  # of a seed, which is below 2^63; of a range of seeds, ours: nobody waits for more
SPARE = 1.1  # ours: a cell is expected to take a tenth longer than those before it
CURVE = ("all", "novel", "seen")  # of every evaluation on the way
HEAVY = ("checkpoint.pt", "encoder.safetensors")  # of a run folder


@dataclass(frozen=True)
class Cell:
    """One run: a recipe, the settings that change it, and a seed."""

    recipe: str
    seed: int
    settings: tuple[str, ...] = ()  # as for --set
    labels: Mapping[str, str] = field(default_factory=dict)  # what sets it apart: name to value
    variant: str = "released"
    also: tuple[str, ...] = ()  # further measures of the trained run

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Cell:
        """What `asdict` gave; a KeyError, TypeError or ValueError where it is something else."""
        tuples = {key: tuple(plain[key]) for key in ("settings", "also")}
        cell = cls(**plain | tuples | {"labels": dict(plain["labels"])})
        texts = (cell.recipe, cell.variant, *cell.settings, *cell.also, *cell.labels, *cell.labels.values())
        if type(cell.seed) is not int or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"no cell: {plain}")
        return cell

    @property
    def config(self) -> RunConfig:
        """Its configuration."""
        base = get_recipe(self.recipe, variant=self.variant)
        return with_settings(base, [*self.settings, f"train.seed={self.seed}"])

    @property
    def name(self) -> str:
        """Of its folder: the recipe and every setting that decides its numbers."""
        changes = [setting.partition("=") for setting in self.settings]
        told = {key.strip(): value for key, _, value in changes if key.strip() not in UNTOLD}
        told = dict(sorted(told.items()))  # the order in which they were said decides nothing
        words = [self.recipe, *([self.variant] if self.variant != "released" else [])]
        words += [f"{key}={value}" for key, value in zip(short_names(list(told)), told.values(), strict=True)]
        name = re.sub(r"[^\w.=+-]+", "-", "-".join([*words, f"seed{self.seed}"]))
        if len(name) <= LONGEST_NAME:
            return name
        return f"{name[: LONGEST_NAME // 2]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}-seed{self.seed}"

    @property
    def title(self) -> str:
        """In a line of text; where nothing is said of what sets it apart, by its settings of method, split and encoder."""
        settings = [setting.partition("=") for setting in self.settings]
        own = {
            key.strip(): value
            for key, _, value in settings
            if key.strip().startswith(("method.", "split.", "encoder."))
        }
        own = {key: value for key, value in own.items() if key not in UNTOLD or key == "split.num_classes"}
        said = self.labels or dict(zip(short_names(list(own)), own.values(), strict=True))
        return ", ".join([self.recipe, *(f"{k} {v}" for k, v in said.items()), f"seed {self.seed}"])

    @property
    def fingerprint(self) -> str:
        """Of all that decides its numbers."""
        facts = {**experiment(self.config), "train.seed": self.seed}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=list).encode()).hexdigest()[:16]


def cross(
    recipes: Sequence[str],
    vary: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    *,
    settings: Sequence[str] = (),
    variant: str = "released",
    also: Sequence[str] = (),
) -> list[Cell]:
    """Every recipe with every value of every KEY=a,b,c and every seed; seed by seed, so that a part is a whole table."""
    check_measures(also)
    axes = [_axis(text) for text in vary]
    keys = [key for key, _ in axes]
    require(len(set(keys)) == len(keys), f"--vary names a setting twice: {', '.join(keys)}.")
    require(len(set(recipes)) == len(recipes), f"a recipe is given twice: {', '.join(recipes)}.")
    short = short_names(keys)
    configs = {name: get_recipe(name, variant=variant) for name in recipes}
    methods = {config.method.name for config in configs.values()}
    sets = {name.partition("/")[2] or name for name in recipes}
    cells = []
    combinations = list(itertools.product(*(choices for _, choices in axes)))
    for seed, recipe, values in itertools.product(seeds, recipes, combinations):
        labels = {"data": recipe.partition("/")[2] or recipe} if len(sets) > 1 else {}
        labels |= {"method": configs[recipe].method.name} if len(methods) > 1 or not axes else {}
        labels |= dict(zip(short, values, strict=True))
        changes = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        cells.append(Cell(recipe, seed, (*settings, *changes), labels, variant, tuple(also)))
    return cells


def short_names(keys: Sequence[str]) -> list[str]:
    """The last word of each setting, where that tells them apart."""
    last = [key.rpartition(".")[2] for key in keys]
    return [word if last.count(word) == 1 else key for word, key in zip(last, keys, strict=True)]


def read_seeds(text: str) -> list[int]:
    """Seeds as typed: "0-4", "0,3,7" or "5"."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        is_range = (
            first.isdecimal() and (not dash or last.isdecimal()) and len(max(first, last, key=len)) <= MOST_DIGITS
        )
        require(is_range, f"--seeds {shown(text)} must look like 0-4, 0,3,7 or 5.")
        its = range(int(first), int(last or first) + 1)
        require(len(its) <= MOST_SEEDS, f"--seeds {shown(text)} names {len(its):,} seeds. Give at most {MOST_SEEDS:,}.")
        seeds += its
    require(bool(seeds) and len(set(seeds)) == len(seeds), f"--seeds {shown(text)} must name each seed once.")
    return seeds


def _axis(text: str) -> tuple[str, list[str]]:
    """KEY=a,b,c; a comma inside brackets belongs to a value."""
    key, equals, values = text.partition("=")
    choices = [value.strip() for value in re.split(r",(?![^\[(]*[\])])", values)]
    good = bool(equals) and "." in key and all(choices)
    require(good, f"--vary {text!r} is not of the form section.key=value,value,...")
    require(len(set(choices)) == len(choices), f"--vary {text!r} names a value twice.")
    return key.strip(), choices


@dataclass(frozen=True)
class Sweep:
    """A folder of cells."""

    folder: Path
    cells: tuple[Cell, ...]

    @classmethod
    def made(cls, folder: Path, cells: Iterable[Cell], *, download: bool = False) -> Sweep:
        """Check that every cell can work, and write them down. Cells that the folder had before may differ.

        With `download`, what can be fetched need not be there yet.
        """
        sweep = cls(folder, tuple(cells))
        names = [cell.name for cell in sweep.cells]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"two cells of the sweep would have the same folder: {', '.join(twice[:3])}.")
        checked: set[str] = set()
        for cell in sweep.cells:
            config = cell.config
            one = json.dumps(to_dict(replace(config, train=replace(config.train, seed=0))), sort_keys=True)
            if one not in checked and not sweep.is_finished(cell):
                check_fits(config, dataset_info(config.data, download=download))
            checked.add(one)
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        (folder / "locks").mkdir(exist_ok=True)
        RunFolder(folder).write_json("sweep.json", {"cells": [asdict(cell) for cell in sweep.cells]})
        return sweep

    @classmethod
    def opened(cls, folder: Path) -> Sweep:
        """The sweep of a folder."""
        if not (folder / "sweep.json").is_file():
            raise RunError(f"{folder} holds no sweep (no sweep.json). Name recipes to begin one.")
        try:
            plain = RunFolder(folder).read_json("sweep.json")["cells"]
            return cls(folder, tuple(Cell.of(cell) for cell in plain))
        except (KeyError, TypeError, ValueError) as err:
            raise RunError(
                f"{folder / 'sweep.json'} is damaged ({type(err).__name__}: {err}). Name the recipes again: what is done "
                f"is in results.json."
            ) from err

    def results(self) -> dict[str, dict[str, Any]]:
        """What has been measured, by the name of the cell, other sweeps of this folder included."""
        if not (self.folder / "results.json").is_file():
            return {}
        cells = RunFolder(self.folder).read_json("results.json").get("cells")
        if not isinstance(cells, dict) or not all(map(_is_record, cells.values())):
            raise RunError(
                f"{self.folder / 'results.json'} is damaged: it holds something else than results. Take it out of the "
                f"folder to train its cells again."
            )
        return cells

    def is_finished(self, cell: Cell, known: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
        """Whether results.json has this very cell; other settings under its name are refused."""
        found = (self.results() if known is None else known).get(cell.name)
        if found is None or found["state"] != "done":
            return False
        if not set(cell.also) <= set(found.get("also", ())):
            return False  # it is trained again, for a measure that it lacks
        if found.get("fingerprint") != cell.fingerprint:
            raise ConfigError(
                f"{self.folder / 'results.json'} has {cell.name} with other settings. Give another --out, or put the "
                f"settings back."
            )
        return True

    def left(self) -> list[Cell]:
        """Cells without a result, in order."""
        known = self.results()
        return [cell for cell in self.cells if not self.is_finished(cell, known)]

    def run(
        self,
        device: torch.device,
        *,
        seconds: float | None = None,
        keep: bool = False,
        download: bool = False,
        callbacks: Callbacks = Callbacks(),  # noqa: B008 (frozen)
    ) -> None:
        """Train what is left and no other process works on. With `seconds`, no cell begins that would not fit.

        A cell that is still running then is stopped after an epoch, and goes on the next time.
        """
        deadline = time.monotonic() + (seconds if seconds is not None else 1e12)
        shelf = Shelf(download)
        if any(cell.config.train.compile for cell in self.cells):
            _compile_for_all()
        for number, cell in enumerate(self.cells, start=1):
            known = self.results()
            if self.is_finished(cell, known) or time.monotonic() + expected_seconds(cell, known) > deadline:
                continue
            with claimed(self.folder / "locks" / cell.name) as is_ours:
                if not is_ours or self.is_finished(cell):
                    continue
                out = self.folder / "cells" / cell.name
                if cell.name in known and (out / "result.json").is_file():
                    (out / "result.json").unlink()  # it lacks a measure
                try:
                    record = run_cell(
                        cell,
                        out,
                        device,
                        shelf=shelf,
                        deadline=deadline,
                        keep=keep,
                        callbacks=callbacks,
                    )
                except OutOfTimeError:
                    callbacks.say(f"[{number}/{len(self.cells)}] {cell.title}: out of time, goes on the next time")
                    return
                self.add(cell, record, device)
                callbacks.say(f"[{number}/{len(self.cells)}] {cell.title}: {summary(record)}")

    def add(self, cell: Cell, record: Mapping[str, Any], device: torch.device) -> None:
        """Put the record of a cell into results.json, beside those of other processes."""
        with claimed(self.folder / "locks" / ".results", wait=True):
            cells = self.results()
            cells[cell.name] = {
                "recipe": cell.recipe,
                "variant": cell.variant,
                "labels": dict(cell.labels),
                "seed": cell.seed,
                "settings": [s for s in cell.settings if s.partition("=")[0].strip() not in UNTOLD],
                "fingerprint": cell.fingerprint,
                "also": list(cell.also),
                "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
                **record,
            }
            about = {key: value for key, value in environment(device).items() if key != "command"}
            RunFolder(self.folder).write_json("results.json", {"environment": about, "cells": cells})

    def run_at_once(
        self, number: int, device: str, *, seconds: float | None, keep: bool, download: bool = False
    ) -> None:
        """The same in `number` processes, which say what they finish. What is to be fetched is there before they begin."""
        for config in {cell.config.data for cell in self.left()} if download else ():
            load_dataset(config, download=True)
        words = [sys.executable, "-m", "opencon", "sweep-part", str(self.folder), "--device", device]
        words += [] if seconds is None else ["--minutes", str(seconds / 60)]
        words += ["--keep"] if keep else []
        env = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // number))}
        processes = [subprocess.Popen(words, env=env) for _ in range(number)]
        try:
            codes = [process.wait() for process in processes]
        except BaseException:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
            raise
        if any(codes):
            raise RunError(f"{sum(map(bool, codes))} of {number} processes of the sweep ended with an error.")


def _is_record(record: object) -> bool:
    """Whether this is what `Sweep.add` writes of a cell."""
    if not isinstance(record, dict) or not isinstance(record.get("recipe"), str):
        return False
    if record.get("state") == "failed":
        return isinstance(record.get("error"), str)
    result = record.get("result")
    if record.get("state") != "done" or not isinstance(result, dict) or not isinstance(record.get("also", []), list):
        return False
    numbers = [result.get("total_seconds"), result.get("epoch", 0)]
    numbers += [result[key] for key in (*CURVE, "knn20") if result.get(key) is not None]
    return all(isinstance(number, (int, float)) for number in numbers)


class OutOfTimeError(Exception):
    """The time given to a sweep is over."""


class Shelf:
    """The data set that was loaded last."""

    def __init__(self, download: bool = False) -> None:
        self.download = download
        self.key: object = None
        self.dataset: Dataset | None = None

    def get(self, config: RunConfig) -> Dataset:
        """The data set of a run, loaded unless it is there."""
        if self.dataset is None or self.key != config.data:
            self.dataset = None  # first, so that two never share the memory
            self.key, self.dataset = config.data, load_dataset(config.data, download=self.download)
        return self.dataset


def run_cell(
    cell: Cell, out: Path, device: torch.device, *, shelf: Shelf, deadline: float, keep: bool, callbacks: Callbacks
) -> dict[str, Any]:
    """Train one cell, or go on with it. Its record: a result, or why there is none."""
    config = cell.config

    def epoch_done(record: dict[str, Any]) -> None:
        callbacks.epoch_done(record)
        if time.monotonic() > deadline and record["epoch"] + 1 < config.train.epochs:
            raise OutOfTimeError

    watched = replace(callbacks, say=lambda text: None, epoch_done=epoch_done)
    try:
        result = train(
            config,
            out,
            device,
            callbacks=watched,
            dataset=lambda: shelf.get(config),
            measure=partial(further_measures, cell.also),
        )
    except (
        OpenConError,
        RuntimeError,
        ValueError,
    ) as err:  # the other cells can still be had; torch raises RuntimeError
        return {"state": "failed", "error": f"{type(err).__name__}: {err}"[:2000]}
    finally:
        _clean_up(device)
    metrics = RunFolder(out).read_metrics()
    steady = [record["seconds"] for record in metrics][2:]  # kernels are compiled in the first two
    if not keep:
        for name in HEAVY:
            (out / name).unlink(missing_ok=True)
    return {
        "state": "done",
        "result": result,
        "seconds_per_epoch": statistics.median(steady) if steady else None,
        "curve": [[record["epoch"] + 1, *(record[key] for key in CURVE)] for record in metrics if "all" in record],
    }


def _compile_for_all() -> None:
    """Let one process compile a step for every setting of a sweep; by default torch gives up after eight."""
    from torch._dynamo import config as dynamo

    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"  # its name before torch 2.6
    setattr(dynamo, limit, 1000)
    dynamo.accumulated_cache_size_limit = 1000


def _clean_up(device: torch.device) -> None:
    """Give back what a run held, so that the next has all of the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def expected_seconds(cell: Cell, known: Mapping[str, Mapping[str, Any]]) -> float:
    """What a cell will take, by those that are finished: of its method if there are some, else the slowest; 0 if none is.

    Cells with other numbers of epochs count in proportion.
    """
    epochs = cell.config.train.epochs
    taken: dict[str, list[float]] = {}
    for found in known.values():
        if found["state"] == "done":
            its = max(1, int(found["result"].get("epoch", 0)) + 1)
            seconds = float(found["result"]["total_seconds"]) * max(1.0, epochs / its)
            taken.setdefault(found["recipe"], []).append(seconds)
    if not taken:
        return 0.0
    return SPARE * (statistics.median(taken[cell.recipe]) if cell.recipe in taken else max(map(max, taken.values())))


def summary(record: Mapping[str, Any]) -> str:
    """A finished cell in a few words."""
    if record["state"] != "done":
        return str(record["error"])
    result = record["result"]
    values = {name: value_of(record, name) for name in measures_of(result)}
    scores = [f"{name} {value:.1f}" for name, value in values.items() if value is not None]
    return f"{', '.join(scores)}; {result['total_seconds']:.0f} s"


@contextlib.contextmanager
def claimed(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process has the lock `path` to itself, for the block. A lock ends with its process."""
    try:
        import fcntl
    except ImportError:  # Windows has none: one process at a time
        yield True
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
