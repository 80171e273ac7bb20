"""Commands for experiments: demo, train, pretrain, compare, sweep."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from opencon.cli.base import (
    Device,
    DryRun,
    Imports,
    Lines,
    app,
    console,
    errors,
    import_plugins,
    resumable,
    show_plan,
)
from opencon.config import RunConfig, to_dict
from opencon.errors import ConfigError, require

if TYPE_CHECKING:
    from opencon.experiments.callbacks import Callback
    from opencon.experiments.sweep import Sweep

Out = Annotated[Path | None, typer.Option("--out", help="Folder for the run; default: runs/ and the recipe's name.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change one setting; repeatable. --dry-run shows all of them."),
]
DataRoot = Annotated[str | None, typer.Option("--data", help="Where the data set's files lie.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Training seed (the split has its own: split.seed).")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the data set's archive if it is missing.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard logs.")]
Log = Annotated[
    list[str] | None, typer.Option("--log", help="Also log to tensorboard, wandb or mlflow (extras); repeatable.")
]
Labeled = Annotated[
    str | None, typer.Option("--labeled", help="Your own images: a folder with one sub-folder per class.")
]
Unlabeled = Annotated[str | None, typer.Option("--unlabeled", help="A folder with images that carry no label.")]
Truth = Annotated[
    str | None, typer.Option("--truth", help="Their classes, to measure with: folders (its sub-folders), or a table.")
]
Test = Annotated[str | None, typer.Option("--test", help="Held-out images with classes: a folder, or a list.")]

Columns = Annotated[
    str | None, typer.Option("--columns", help="Measures to show, separated by commas; a wrong one lists all.")
]

MOST_AT_ONCE = 1000  # processes of a sweep, ours: each holds a data set and a network
WIDE = 150  # columns of a terminal in which the whole training bar fits
FIRST = (
    "protocol",
    "on",
    "num_images",
    "seed",
    "all",
    "novel",
    "seen",
    "knn20",
    "held_out",
    "num_held_out",
    "stability",
)
SHARES = {"held_out", "stability", "all", "novel", "seen", "knn20", "auroc", "aupr", "fpr95", "share_novel"}


@app.command(short_help="Learn five digits, discover five others, in a minute on a CPU.")
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the run and the picture.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option("--seed", help="Training seed.")] = 0,
    device: Device = "cpu",
) -> None:
    """Learn five handwritten digits from labels, discover the five others, in a minute on a CPU."""
    from opencon.experiments.demo import run_demo
    from opencon.runtime import pick_device

    console.print("Handwritten digits. 0-4 are named: half of their images carry a label. 5-9 are not named.")
    with resumable(), progress_bar() as callbacks:
        outcome = run_demo(out, pick_device(device), seed=seed, callbacks=callbacks)
    console.print(accuracy_table(outcome.rows, outcome.result))
    groups = Table("new group", "images", "mostly the digit", "share of the group", title="What was discovered")
    for group in outcome.groups:
        groups.add_row(group.name, str(group.size), group.mostly, f"{group.purity:.1%}")
    console.print(groups)
    picture = outcome.picture or "none, because matplotlib is missing: pip install 'opencon[plots]'"
    console.print(
        f"\n{outcome.result['total_seconds']:.0f} s. Look at {outcome.page}\nPicture: {picture}", soft_wrap=True
    )


@app.command(short_help="Train a method on a data set, or resume a run.")
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe (see `opencon list`), such as cifar100.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="A file of settings, TOML or JSON, instead of a recipe; a run's config.json is one."
        ),
    ] = None,
    out: Out = None,
    settings: Settings = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="released (as the published code, the default) or paper.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="File with encoder weights to start from, or installed.")
    ] = None,
    data: DataRoot = None,
    labeled: Labeled = None,
    unlabeled: Unlabeled = None,
    truth: Truth = None,
    test: Test = None,
    seed: Seed = None,
    device: Device = "auto",
    download: Download = False,
    tensorboard: TensorBoard = False,
    log: Log = None,
    imports: Imports = None,
    dry_run: DryRun = False,
) -> None:
    """Train a method on a data set or on images of your own, or resume a run that was interrupted."""
    from opencon.api import configure
    from opencon.plugins import recall

    if (recipe is None) == (config is None):
        raise ConfigError("give a recipe (`opencon list` shows them) or --config FILE, one of the two.")
    if config is not None and variant is not None:
        raise ConfigError('--variant belongs to a recipe. In a configuration file, write: variant = "paper"')
    name = (recipe or (config.stem if config else "")).replace("/", "-")
    out = out or Path("runs") / name
    import_plugins(imports)
    recall(out)  # a run that goes on may need what it was started with
    files = {"labeled": labeled, "unlabeled": unlabeled, "truth": truth, "test": test}
    chosen = configure(
        recipe or config or "", settings, variant=variant, data=data, weights=weights, seed=seed, **files
    )
    run(chosen, out, device, download, loggers(log, tensorboard), dry_run)


@app.command(short_help="Train an encoder without labels.")
def pretrain(
    recipe: Annotated[str, typer.Argument(help="A data set, such as cifar100.")],
    method: Annotated[
        str | None, typer.Option("--method", help="A method that needs no labels; default: simclr.")
    ] = None,
    out: Out = None,
    settings: Settings = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="File with encoder weights to go on from, or installed.")
    ] = None,
    data: DataRoot = None,
    unlabeled: Unlabeled = None,
    seed: Seed = None,
    device: Device = "auto",
    download: Download = False,
    tensorboard: TensorBoard = False,
    log: Log = None,
    imports: Imports = None,
    dry_run: DryRun = False,
) -> None:
    """Train an encoder without labels. `train --weights` takes the encoder.safetensors that it writes."""
    from opencon.api import configure
    from opencon.experiments.recipes import get_recipe
    from opencon.methods import METHODS

    import_plugins(imports)
    before, _, name = recipe.rpartition("/")
    free = [known for known in METHODS.names() if not METHODS[known].config.uses_labels]
    if before and (before not in free or method not in (None, before)):
        raise ConfigError(f"pretrain takes a data set, not the recipe {recipe!r}. Use: pretrain {name}")
    chosen = method or before or "simclr"
    if METHODS[chosen].config.uses_labels:  # an unknown name raises with a hint
        raise ConfigError(f"--method {chosen} learns from labels. Pre-training uses none: {', '.join(free)}.")
    config = configure(
        get_recipe(name, method=chosen), settings, data=data, weights=weights, unlabeled=unlabeled, seed=seed
    )
    folder = out or Path("runs") / f"{chosen}-{name}"
    run(config, folder, device, download, loggers(log, tensorboard), dry_run)
    if not dry_run:
        console.print(f"Encoder: {folder / 'encoder.safetensors'}", soft_wrap=True)


@app.command(short_help="Runs side by side: mean and spread over seeds.")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.")],
    form: Annotated[
        str | None, typer.Option("--format", help="table, markdown, csv, latex or json; default: by --out.")
    ] = None,
    columns: Columns = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write it to this file instead.")] = None,
    imports: Imports = None,
) -> None:
    """Runs side by side: mean and standard deviation over seeds, seconds per epoch, and the published numbers.

    Where nobody knows the classes, the labels kept back, the stability and the classes in use stand in for the accuracy.
    The best of each column is bold. With three seeds or more in common, p is that of a paired t-test of the first column
    against the first row.
    """
    from opencon.api import compare as compare_runs
    from opencon.experiments.compare import FORMATS, SUFFIXES, check_sections, render

    form = form or (SUFFIXES.get(out.suffix, "markdown") if out is not None else "table")
    if form not in FORMATS:
        raise ConfigError(f"--format {form!r} must be one of {', '.join(FORMATS)}.")
    import_plugins(imports)
    comparison = compare_runs(runs)
    sections = comparison.sections
    wanted = columns_named(columns)
    for line in comparison.left_out:
        errors.print(f"opencon: {line}")
    if form != "table" or out is not None:
        text = render(sections, "markdown" if form == "table" else form, wanted)
        if out is None:
            sys.stdout.write(text)
            return
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as err:
            raise ConfigError(f"cannot write --out {out} ({err.strerror}).") from err
        console.print(f"Wrote {out}", soft_wrap=True)
        return
    check_sections(sections, wanted)
    for section in sections:
        heads, rows, best = section.cells(wanted)
        table = Table(title=section.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for head in heads:
            table.add_column(head, no_wrap=head != "method", overflow="fold")
        for i, row in enumerate(rows):
            table.add_row(*(Text(cell, "bold" if (i, j) in best else "") for j, cell in enumerate(row)))
        console.print(table)


@app.command(short_help="Recipes with many values and seeds, as one table.")
def sweep(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Recipes, such as opencon/cifar100; none: go on with the sweep in --out.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the sweep.")] = Path("runs/sweep"),
    vary: Annotated[
        list[str] | None, typer.Option("--vary", metavar="A.B=X,Y,Z", help="Values of one setting; repeatable.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Training seeds: 0-4, or 0,3,7.")] = "0",
    settings: Settings = None,
    variant: Annotated[str, typer.Option("--variant", help="released or paper.")] = "released",
    weights: Annotated[str | None, typer.Option("--weights", help="File with encoder weights to start from.")] = None,
    data: DataRoot = None,
    also: Annotated[
        str, typer.Option("--also", help="Further measures, separated by commas: novelty, count:tree, ...")
    ] = "",
    columns: Columns = None,
    form: Annotated[str, typer.Option("--format", help="table, markdown, csv, latex or json.")] = "table",
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw lines or bars to this PNG.")] = None,
    at_once: Annotated[int, typer.Option("--at-once", help="Processes that share the work.")] = 1,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Begin no cell that would not end within this time.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoint and weights of every cell.")] = False,
    device: Device = "auto",
    download: Download = False,
    imports: Imports = None,
    dry_run: DryRun = False,
) -> None:
    """Train every recipe with every value and every seed, and show mean and spread. The same command goes on."""
    from opencon.experiments.sweep import Sweep, cross, read_seeds
    from opencon.experiments.sweep_table import FORMATS
    from opencon.plugins import recall, write_record

    if form not in FORMATS:
        raise ConfigError(f"--format {form!r} must be one of {', '.join(FORMATS)}.")
    check_limits(at_once, minutes)
    import_plugins(imports)
    recall(out)
    if recipes:
        places = {"data.root": data, "encoder.weights": weights}
        fixed = [*(f"{key}={value}" for key, value in places.items() if value is not None), *(settings or [])]
        wanted = [word.strip() for word in also.split(",") if word.strip()]
        cells = cross(recipes, vary or [], read_seeds(seeds), settings=fixed, variant=variant, also=wanted)
        one = Sweep(out, tuple(cells)) if dry_run else Sweep.made(out, cells, download=download)
        if imports and not dry_run:
            write_record(out)  # for the processes that share the work, and to go on
    else:
        one = Sweep.opened(out)
    if not dry_run:
        run_sweep(one, device, at_once=at_once, minutes=minutes, keep=keep, download=download)
    show_sweep(one, columns, form, plot)


@app.command("sweep-part", hidden=True)
def sweep_part(folder: Path, device: Device = "auto", minutes: float | None = None, keep: bool = False) -> None:
    """One of several processes that share a sweep."""
    from opencon.experiments.sweep import Sweep
    from opencon.plugins import recall

    recall(folder)
    run_sweep(Sweep.opened(folder), device, at_once=1, minutes=minutes, keep=keep, download=False)


def check_limits(at_once: int, minutes: float | None) -> None:
    """Refuse a number of processes, or of minutes, that nobody means."""
    require(1 <= at_once <= MOST_AT_ONCE, f"--at-once {at_once} must lie between 1 and {MOST_AT_ONCE}.")
    is_time = minutes is None or 0 <= minutes < math.inf
    require(is_time, f"--minutes {minutes} must be a number of minutes, 0 or more.")


def run_sweep(one: Sweep, device: str, *, at_once: int, minutes: float | None, keep: bool, download: bool) -> None:
    """Train what is left of a sweep, in one process or several."""
    from opencon.runtime import pick_device

    seconds = None if minutes is None else 60 * minutes
    with resumable("The same command goes on with the sweep."):
        if at_once > 1:
            one.run_at_once(at_once, device, seconds=seconds, keep=keep, download=download)
            return
        with progress_bar() as callbacks:
            one.run(pick_device(device), seconds=seconds, keep=keep, download=download, callbacks=callbacks)


def show_sweep(one: Sweep, columns: str | None, form: str, plot: Path | None) -> None:
    """The table of a sweep, its picture, and what is left of it."""
    from opencon.experiments.measures import check_columns
    from opencon.experiments.sweep_table import cells_of, default_columns, render, rows_of
    from opencon.experiments.sweep_table import plot as draw

    rows = rows_of(one)
    named = columns_named(columns)
    wanted = named or default_columns(rows)
    check_columns((record for row in rows for record in row.done), named or [])
    if form == "table":
        heads, lines, _ = cells_of(rows, wanted)
        title = f"{one.folder}: mean ± standard deviation over seeds"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for head in heads:
            table.add_column(head, no_wrap=True)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    else:
        sys.stdout.write(render(rows, wanted, form))
    if plot is not None:
        errors.print(f"Wrote {draw(rows, wanted, plot, title=one.folder.name)}")
    known = one.results()
    for cell in (left := one.left()):
        error = known.get(cell.name, {}).get("error")  # one that lacks a measure is left without any
        errors.print(f"left: {cell.title}{'' if error is None else f' failed: {error}'}")
    if left:
        errors.print(f"{len(left)} of {len(one.cells)} cells are left; the same command goes on with them.")


def columns_named(text: str | None) -> list[str] | None:
    """The measures that --columns names; None where it names none."""
    return [word.strip() for word in (text or "").split(",") if word.strip()] or None


def loggers(names: list[str] | None, tensorboard: bool) -> list[Callback]:
    """The loggers of these names."""
    from opencon.experiments.callbacks import LOGGERS

    wanted = dict.fromkeys([*(names or []), *(["tensorboard"] if tensorboard else [])])
    unknown = [name for name in wanted if name not in LOGGERS]
    if unknown:
        raise ConfigError(f"--log {unknown[0]!r} must be one of {', '.join(LOGGERS)}.")
    return [LOGGERS[name]() for name in wanted]


def run(config: RunConfig, out: Path, device: str, download: bool, watchers: list[Callback], dry_run: bool) -> None:
    """Show the plan; train unless it is a dry run; show the result."""
    from opencon.experiments.plan import plan
    from opencon.experiments.train import train as train_run
    from opencon.runtime import pick_device
    from opencon.training.ranks import joined, num_ranks, rank

    with joined(pick_device(device)) as where:  # several processes, if torchrun has started them
        console.quiet = rank() > 0
        shown = {"device": str(where), "folder": str(out)}
        if num_ranks() > 1:
            shown["ranks"] = f"{num_ranks()} processes, each with its share of every batch of {config.train.batch_size}"
        show_plan({**plan(config, download=download), **shown})
        if dry_run:
            console.print_json(json.dumps(to_dict(config)))
            return
        own = watchers if rank() == 0 else ()
        with resumable(), progress_bar() as callbacks:
            result = train_run(config, out, where, callbacks=callbacks, watchers=own, download=download)
        console.print(result_table(result, title=str(out)))
        console.print(f"Measure it again, or in another way: opencon evaluate {out}", soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A bar with losses, accuracy and time left, fed by the callbacks of a run."""
    from opencon.experiments.callbacks import Callbacks

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=None, epoch=0, epochs="?", note="")
        shape = {"first": 0, "steps": 1, "epochs": 0}
        lines = Lines(lambda line: errors.print(line))
        latest: dict[str, str] = {}

        def started(first: int, epochs: int, steps: int) -> None:
            shape.update(first=first, steps=steps, epochs=epochs)
            progress.update(task, total=(epochs - first) * steps, epoch=first, epochs=epochs)

        def stepped(epoch: int, steps: int) -> None:
            progress.update(task, completed=(epoch - shape["first"]) * shape["steps"] + steps)

        def epoch_done(record: dict[str, Any]) -> None:
            is_wide = console.width >= WIDE  # otherwise the terms of the loss would displace epoch and time
            terms = [f"{key[5:]} {value:.2f}" for key, value in record.items() if key.startswith("loss_") and is_wide]
            latest["loss"] = f"loss {record['loss']:.2f}" + (f" ({', '.join(terms)})" if terms else "")
            if "all" in record:
                shown = ("all", "novel", "seen") if is_wide else ("all",)
                latest["acc"] = " ".join(f"{key} {record[key]:.1%}" for key in shown)
            if "held_out" in record and "all" not in record:
                latest["acc"] = f"held out {record['held_out']:.1%}"
            if "knn20" in record:
                latest["acc"] = f"20-NN {record['knn20']:.1%}"
            epoch = record["epoch"] + 1
            done = (epoch - shape["first"]) * shape["steps"]
            progress.update(task, completed=done, epoch=epoch, note="  ".join(latest.values()))
            if not console.is_terminal:
                lines.update(
                    "epochs", epoch - shape["first"], shape["epochs"] - shape["first"], "  ".join(latest.values())
                )

        def say(text: str) -> None:
            console.print(text, soft_wrap=True)

        yield Callbacks(say, started, stepped, epoch_done)


def accuracy_table(rows: Sequence[tuple[str, Mapping[str, Any]]], how: Mapping[str, Any]) -> Table:
    """All / novel / seen for several methods, with protocol and images in the title."""
    images = {"unlabeled": "unlabeled training images", "test": "held-out test images"}[how["on"]]
    table = Table(
        "", "all", "novel", "seen", title=f"Accuracy, protocol {how['protocol']}, on {how['num_images']:,} {images}"
    )
    for name, record in rows:
        table.add_row(name, *(f"{record[key]:.1%}" for key in ("all", "novel", "seen")))
    return table


def result_table(record: Mapping[str, Any], title: str) -> Table:
    """One record as two columns, the protocol and the images first."""
    table = Table("measure", "value", title=title)
    first = [key for key in FIRST if key in record]
    for key in [*first, *(key for key in record if key not in FIRST)]:
        value = math.nan if record[key] is None else record[key]  # JSON has no NaN
        share = isinstance(value, float) and key in SHARES
        shown = f"{value:.1%}" if share else f"{value:.4g}" if isinstance(value, float) else str(value)
        table.add_row(key, shown)
    return table
