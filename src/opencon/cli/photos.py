"""Commands for a folder of photos: discover, predict, name, count, export."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from opencon.cli.base import (
    Device,
    DryRun,
    Imports,
    app,
    console,
    errors,
    import_plugins,
    quiet_warnings,
    resumable,
    show_count,
    show_plan,
)
from opencon.errors import ConfigError, DataError

if TYPE_CHECKING:
    from opencon.photos.discover import Discovery

CACHE = Path("~/.cache/opencon/features")
MOST_PROBLEMS = 10  # unreadable photos that are named one by one
BARS = {"looking": "looking at photos", "learning": "learning", "fine-tuning": "fine-tuning", "writing": "writing"}

Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PHOTOS]", help="A folder of photos, with --labels; or one that has labeled/ and unlabeled/ in it."
    ),
]
Labeled = Annotated[Path | None, typer.Option("--labeled", help="A folder with one sub-folder per class.")]
Unlabeled = Annotated[Path | None, typer.Option("--unlabeled", help="A folder with the other photos.")]
Labels = Annotated[
    Path | None,
    typer.Option("--labels", help="A table path,label (CSV, TSV, JSON lines) for PHOTOS; an empty label is none."),
]
Manifest = Annotated[
    Path | None, typer.Option("--manifest", help="A table path,label of all photos, paths relative to it.")
]
Encoder = Annotated[
    str, typer.Option("--encoder", help="efficientnet_lite0, timm:NAME, or the folder of a run of `opencon train`.")
]
Size = Annotated[
    int | None, typer.Option("--size", help="Side in pixels at which the encoder sees a photo; default: 224, or 128.")
]
Views = Annotated[int | None, typer.Option("--views", help="Random views of each photo for the steps; default: 4.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
Cache = Annotated[Path, typer.Option("--cache", help="Where features are kept for the next time.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Neither keep features nor use kept ones.")]


@app.command(short_help="Sort photos into the classes you named, and discover new groups.")
def discover(
    folder: Folder = None,
    labeled: Labeled = None,
    unlabeled: Unlabeled = None,
    labels: Labels = None,
    manifest: Manifest = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("runs/discover"),
    novel: Annotated[str, typer.Option("--novel", help="How many new groups: auto, or a number.")] = "auto",
    encoder: Encoder = "efficientnet_lite0",
    size: Size = None,
    steps: Annotated[int, typer.Option("--steps", help="Train a head on the features first; gains little.")] = 0,
    views: Views = None,
    finetune: Annotated[bool, typer.Option("--finetune", help="Train the encoder's last stage too (GPU).")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    cache: Cache = CACHE,
    no_cache: NoCache = False,
    truth: Annotated[Path | None, typer.Option("--truth", help="A table file,class, to measure accuracy with.")] = None,
    imports: Imports = None,
    dry_run: DryRun = False,
) -> None:
    """Sort photos into the classes you named, and discover new groups among the rest.

    Label a few photos (one folder per class, or a table), give the rest, and look at report.html.
    """
    from opencon.api import discover_config
    from opencon.photos.discover import discover_photos, prepare
    from opencon.photos.listing import find_photos, read_truth
    from opencon.runtime import pick_device

    import_plugins(imports)
    photos = find_photos(folder, labeled=labeled, unlabeled=unlabeled, labels=labels, manifest=manifest)
    config = discover_config(
        novel=novel,
        encoder=encoder,
        size=size,
        steps=steps,
        views=views,
        finetune=finetune,
        seed=seed,
    )
    for note in photos.notes:
        errors.print(f"set aside: {note}")
    true_classes = read_truth(truth) if truth is not None else None
    where = pick_device(device)
    prepared = prepare(photos, config, where)
    show_plan({**prepared.plan(), "device": str(where), "folder": str(out)})
    if dry_run:
        return
    cache_folder = None if no_cache else cache.expanduser()
    with resumable(on_return(no_cache)), quiet_warnings(), bars() as progress:
        result = discover_photos(prepared, out, cache=cache_folder, truth=true_classes, progress=progress)
    show_discovery(result, config.fit.num_novel)
    console.print(
        f"{result.record['seconds']['everything']:.0f} s. Look at {result.report}\n"
        f"New photos: opencon predict {out} MORE_PHOTOS/",
        soft_wrap=True,
    )


def show_discovery(result: Discovery, num_asked: int | None) -> None:
    """Where the photos went, how many classes there are, and what went wrong."""
    table = Table("", "photos", "", title="Where the unlabeled photos went", title_justify="left")
    for group in result.groups:
        table.add_row(group.name, f"{group.size:,}", "new group" if group.kind == "new" else "you named it")
    console.print(table)
    console.print(f"{result.headline}.", soft_wrap=True)
    if result.count is not None:
        show_count(result.count)
    new = sum(group.kind == "new" for group in result.groups)
    if num_asked is not None and new < num_asked:
        console.print(f"{num_asked} new groups were asked for; {new} stood apart.")
    if result.table.num_unlike_everything:
        console.print("The column unlike_everything in assignments.csv marks photos that resemble nothing else.")
    if "all" in result.record:
        r = result.record
        scores = ", ".join(f"{key} {r[key]:.1%}" for key in ("all", "novel", "seen"))
        on = f"protocol {r['protocol']}, {r['num_images']:,} unlabeled photos"
        console.print(f"Accuracy ({on}): {scores}", soft_wrap=True)
    unread = result.table.unreadable
    for row in unread[:MOST_PROBLEMS]:
        errors.print(f"set aside: {printable_text(row.file)} {row.error}")
    if len(unread) > MOST_PROBLEMS:
        errors.print(f"... and {len(unread) - MOST_PROBLEMS} more; all are in assignments.csv.")
    if result.replaced:
        errors.print(
            f"note: groups have new numbers. The names you gave in this folder before ({', '.join(result.replaced)}) are "
            f"gone, and a names.csv from before does not fit.",
            soft_wrap=True,
        )


@app.command(short_help="Class or group of new photos, by a discovery.")
def predict(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a discovery, or an exported one.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES...", help="Photos, or folders of photos.")],
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a CSV file instead of JSON lines.")] = None,
    device: Device = "auto",
    imports: Imports = None,
) -> None:
    """Class or group of new photos, one JSON object a line; "predicted": null means unlike all of them.

    A photo that cannot be read is a line with its error.
    """
    from opencon.data.listings import printable
    from opencon.photos.model import OpenConModel
    from opencon.runtime import pick_device
    from opencon.training.run_folder import RunFolder

    if not any(path.expanduser().exists() for path in images):  # a single missing path becomes a line with its error
        raise DataError(f"{printable(images[0])} does not exist. Give photos, or folders of photos.")
    if csv_file is not None and not csv_file.parent.is_dir():
        raise ConfigError(f"--csv {csv_file}: there is no folder {csv_file.parent}. Make it first.")
    import_plugins(imports)
    model = OpenConModel.from_pretrained(run_folder, device=pick_device(device))
    with resumable("Run it again."), quiet_warnings(), bars() as progress:
        rows = []
        for row in model.predict_each(images, progress=lambda done, total: progress("looking", done, total)):
            rows.append(row)
            if csv_file is None:
                sys.stdout.write(json.dumps(row.record()) + "\n")
    table = model.table(tuple(rows))
    if csv_file is not None:
        RunFolder(csv_file.parent).write_text(csv_file.name, table.to_csv())
        unlike, failed = table.num_unlike_everything, len(table.unreadable)
        console.print(f"{len(table):,} photos in {csv_file}: {unlike} unlike everything, {failed} unreadable.")
    if not table.readable:
        raise typer.Exit(1)  # no photo could be read; each line says why


@app.command(short_help="Give new groups the names you chose.")
def name(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a discovery.")],
    names: Annotated[Path, typer.Argument(metavar="NAMES", help="A table group,name, as the report writes it.")],
) -> None:
    """Give new groups the names you chose: `predict` and `export` use them from now on."""
    from opencon.photos.names import rename_from_table

    changed, together = rename_from_table(run_folder, names)
    for old, new in changed.items():
        console.print(f"{old} is now {new}", soft_wrap=True)
    if not changed:
        console.print("Every group has its name already; nothing was changed.")
        return
    for name_of_several in together:
        console.print(f"{name_of_several}: several groups of this name, which count as one", soft_wrap=True)
    console.print("The names hold for assignments.csv, predict and export; the page keeps its old names.")


@app.command(short_help="How many classes are in there?")
def count(
    folder: Folder = None,
    labeled: Labeled = None,
    unlabeled: Unlabeled = None,
    labels: Labels = None,
    manifest: Manifest = None,
    encoder: Encoder = "efficientnet_lite0",
    size: Size = None,
    seed: Seed = 0,
    device: Device = "auto",
    cache: Cache = CACHE,
    no_cache: NoCache = False,
    by: Annotated[str, typer.Option("--by", help="How: tree (ours), or as in the papers: gcd, dtc.")] = "tree",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    imports: Imports = None,
) -> None:
    """Estimate how many classes the photos show, seen and new, with its uncertainty."""
    from opencon.api import count as count_photos

    import_plugins(imports)
    with resumable(on_return(no_cache)), quiet_warnings(), bars() as progress:
        estimate = count_photos(
            folder,
            labeled=labeled,
            unlabeled=unlabeled,
            labels=labels,
            manifest=manifest,
            by=by,
            encoder=encoder,
            size=size,
            seed=seed,
            device=device,
            cache=None if no_cache else cache,
            progress=progress,
        )
    if as_json:
        sys.stdout.write(json.dumps(asdict(estimate)) + "\n")
        return
    table = Table("classes", "score", title="larger is better", title_justify="left")
    for k, score in estimate.curve:
        table.add_row(f"{k}{' <' if k == estimate.num_classes else ''}", f"{score:.4f}")
    console.print(table)
    show_count(estimate)


@app.command(short_help="A model for elsewhere: ONNX and a folder of its own.")
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a discovery.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the model.")] = Path("model"),
    onnx: Annotated[
        bool | None,
        typer.Option(
            "--onnx/--no-onnx",
            help="Also write model.onnx, checked against torch [default: if the extra onnx is installed].",
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Write a model that needs nothing else: weights and a card in a folder, and one ONNX file."""
    from opencon.photos.export import export_folder

    import_plugins(imports)
    with quiet_warnings():
        for line in export_folder(run_folder, out, onnx=onnx):
            console.print(line, soft_wrap=True)


# --- what they share ---------------------------------------------------------------------------------------------------


def printable_text(text: str) -> str:
    """A file name that any terminal can print."""
    return text.encode("utf-8", "replace").decode()


def on_return(no_cache: bool) -> str:
    """What an interrupted command leaves behind, for the user."""
    if no_cache:
        return "Nothing was kept (--no-cache): the same command starts over."
    return "Features are kept: the same command goes on from there."


@contextmanager
def bars() -> Iterator[Any]:
    """A progress bar for each stage, in turn."""
    columns = (
        TextColumn("{task.description:>18}"),
        BarColumn(bar_width=28),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=errors, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(BARS.get(stage, stage), total=max(total, 1))
            progress.update(tasks[stage], completed=done, total=max(total, 1))

        yield update
