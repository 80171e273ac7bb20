"""Commands for a folder of photos: discover, predict, name, count, export."""

from __future__ import annotations

import json
import math
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
    Lines,
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
    from opencon.photos.names import GuessedNames

CACHE = Path("~/.cache/opencon/features")
MOST_PROBLEMS = 10  # unreadable photos that are named one by one
BARS = {
    "looking": "looking at photos",
    "learning": "learning",
    "fine-tuning": "fine-tuning",
    "writing": "writing",
    "assigning": "assigning",
}

Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PHOTOS]", help="A folder of photos, with --labels; or one that has labeled/ and unlabeled/ in it."
    ),
]
Labeled = Annotated[Path | None, typer.Option("--labeled", help="A folder with one sub-folder per class.")]
Unlabeled = Annotated[
    Path | None, typer.Option("--unlabeled", help="A folder with the other photos; alone: no photo is labeled.")
]
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
MaxClasses = Annotated[
    int | None,
    typer.Option("--max-classes", help="The most classes and groups; default: 100, or twice those you named."),
]
Features = Annotated[
    Path | None,
    typer.Option(
        "--features", help="A folder of `opencon embed`, in place of photos; with --labels NAME,LABEL or its own."
    ),
]
Sample = Annotated[int, typer.Option("--sample", help="With --features: photos that are fitted and shown, at most.")]
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
    features: Features = None,
    sample: Sample = 50_000,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("runs/discover"),
    novel: Annotated[
        str, typer.Option("--novel", help="How many new groups: auto, a number, or a range, 3-8.")
    ] = "auto",
    max_classes: MaxClasses = None,
    encoder: Encoder = "efficientnet_lite0",
    size: Size = None,
    steps: Annotated[int, typer.Option("--steps", help="Train a head on the features first; gains little.")] = 0,
    views: Views = None,
    finetune: Annotated[bool, typer.Option("--finetune", help="Train the encoder's last stages too (GPU).")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    cache: Cache = CACHE,
    no_cache: NoCache = False,
    truth: Annotated[Path | None, typer.Option("--truth", help="A table file,class, to measure accuracy with.")] = None,
    imports: Imports = None,
    dry_run: DryRun = False,
) -> None:
    """Sort photos into the classes you named, and discover new groups among the rest.

    Label a few photos (one folder per class, or a table), give the rest, and look at report.html. Without any label
    (--unlabeled alone), it says what groups there are. Of very many photos (--features), a sample is fitted and shown,
    and then all are sorted and counted.
    """
    from opencon.api import discover_config
    from opencon.photos.discover_embedded import discover_prepared, prepare_source
    from opencon.photos.listing import read_truth
    from opencon.runtime import pick_device

    import_plugins(imports)
    asked: dict[str, Any] = {"encoder": encoder, "size": size, "steps": steps, "views": views, "finetune": finetune}
    config = discover_config(novel=novel, max_classes=max_classes, seed=seed, **asked)
    true_classes = read_truth(truth) if truth is not None else None
    where = pick_device(device)
    places = {"folder": folder, "labeled": labeled, "unlabeled": unlabeled, "manifest": manifest}
    prepared = prepare_source(
        config, out, where, **places, labels=labels, features=features, sample=sample, dry_run=dry_run
    )
    for note in prepared.photos.notes:
        errors.print(f"set aside: {note}")
    cache_folder = None if no_cache else cache.expanduser()
    with resumable(on_return(no_cache)), quiet_warnings():
        plan = prepared.plan(None if dry_run else cache_folder)  # what is looked at for the plan is kept
    show_plan({**plan, "device": str(where), "folder": str(out)})
    if dry_run:
        return
    with resumable(on_return(no_cache)), quiet_warnings(), bars() as progress:
        result = discover_prepared(prepared, out, cache=cache_folder, truth=true_classes, progress=progress)
    show_discovery(result, config.fit.num_novel)
    if result.everything is not None:
        fitted = f"The page, the review and the table above are of a sample of {len(result.table):,}."
        show_everything(result.everything, out / "everything", fitted)
    console.print(
        f"{result.record['seconds']['everything']:.0f} s. Look at {result.report}\n"
        f"New photos: opencon predict {out} MORE_PHOTOS/",
        soft_wrap=True,
    )


def show_everything(counts: dict[str, Any], tables: Path, note: str = "") -> None:
    """Where all of very many photos went."""
    table = Table("", "photos", "", title="Where all photos went", title_justify="left")
    for row in counts["groups"]:
        table.add_row(row["name"], f"{row['size']:,}", "new group" if row["kind"] == "new" else "you named it")
    console.print(table)
    console.print(
        f"{counts['photos']:,} photos, {counts['unlike_everything']:,} are unlike everything; {counts['unreadable']:,} "
        f"cannot be read. Their tables: {tables}. {note}".rstrip(),
        soft_wrap=True,
    )


def show_discovery(result: Discovery, num_asked: int | None) -> None:
    """Where the photos went, how many classes there are, and what went wrong."""
    table = Table("", "photos", "", title="Where the unlabeled photos went", title_justify="left")
    for group in result.groups:
        guess = f", looks like: {group.looks_like} (a guess)" if group.looks_like else ""
        table.add_row(group.name, f"{group.size:,}", f"new group{guess}" if group.kind == "new" else "you named it")
    console.print(table)
    console.print(f"{result.headline}.", soft_wrap=True)
    if result.count is not None:
        show_count(result.count)
    new = sum(group.kind == "new" for group in result.groups)
    if num_asked is not None and new < num_asked:
        console.print(f"{num_asked} new groups were asked for; {new} stood apart.")
    if result.table.num_unlike_everything:
        console.print("The column unlike_everything in assignments.csv marks photos that resemble nothing else.")
    if twins := result.table.num_twins:
        are = "photo is" if twins == 1 else "photos are"
        console.print(f"{twins:,} {are} nearly the same as another, and counted once: column twin_of.")
    if "all" in result.record:
        r = result.record
        scores = ", ".join(f"{key} {r[key]:.1%}" for key in ("all", "novel", "seen") if not math.isnan(r[key]))
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


@app.command(short_help="Class or group of new photos, by a discovery or a trained run.")
def predict(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a discovery or a trained run, or an exported one.")
    ],
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGES]...", help="Photos, or folders of photos.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a CSV file instead of JSON lines.")] = None,
    features: Annotated[
        Path | None, typer.Option("--features", help="A folder of `opencon embed`, in place of photos; with --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="With --features: a folder for the tables.")] = None,
    false_alarms: Annotated[
        float, typer.Option("--false-alarms", help="Share of known things that may be called unlike everything.")
    ] = 0.05,
    device: Device = "auto",
    imports: Imports = None,
) -> None:
    """Class or group of new photos, one JSON object a line; "predicted": null means unlike all of them.

    A photo that cannot be read is a line with its error. With --features, tables are written shard by shard, and the same
    command goes on where it was stopped.
    """
    from opencon.data.listings import printable
    from opencon.photos.model import OpenConModel
    from opencon.runtime import pick_device
    from opencon.training.run_folder import RunFolder

    if (features is None) == (not images) or (features is None) != (out is None):
        raise ConfigError("give photos; or --features and --out, without photos.")
    if features is not None and out is not None:
        predict_embedded(run_folder, features, out, false_alarms, device)
        return
    assert images
    if not any(path.expanduser().exists() for path in images):  # a single missing path becomes a line with its error
        raise DataError(f"{printable(images[0])} does not exist. Give photos, or folders of photos.")
    if csv_file is not None and not csv_file.parent.is_dir():
        raise ConfigError(f"--csv {csv_file}: there is no folder {csv_file.parent}. Make it first.")
    import_plugins(imports)
    model = OpenConModel.from_pretrained(run_folder, device=pick_device(device))
    with resumable("Run it again."), quiet_warnings(), bars() as progress:
        rows = []

        def looking(done: int, total: int) -> None:
            progress("looking", done, total)

        for row in model.predict_each(images, false_alarms=false_alarms, progress=looking):
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


def predict_embedded(run_folder: Path, features: Path, out: Path, false_alarms: float, device: str) -> None:
    """The same for very many photos."""
    from opencon.photos.assign import assign
    from opencon.photos.embed import Embedded
    from opencon.photos.model import OpenConModel
    from opencon.runtime import pick_device

    embedded, model = Embedded.open(features), OpenConModel.from_pretrained(run_folder)
    with resumable("The same command goes on with the shards that are left."), bars() as progress:
        counts = assign(embedded, model, out, false_alarms=false_alarms, device=pick_device(device), progress=progress)
    show_everything(counts, out)


@app.command(short_help="Give new groups the names you chose.")
def name(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a discovery or a trained run.")],
    names: Annotated[
        Path | None, typer.Argument(metavar="[NAMES]", help="A table group,name, as the report writes it.")
    ] = None,
    guesses: Annotated[bool, typer.Option("--guesses", help="Take what each group looks like, with a '?'.")] = False,
    imports: Imports = None,
) -> None:
    """Give new groups the names you chose: `predict` and `export` use them from now on.

    Without a table, each group is asked for, with what it looks like as the default.
    """
    from opencon.photos.names import guessed_names, rename_from_table, rename_groups

    if guesses and names is not None:
        raise ConfigError("--guesses takes the names from the model. Leave out the table, or --guesses.")
    import_plugins(imports)
    if names is not None:
        changed, together = rename_from_table(run_folder, names)
    else:
        found = guessed_names(run_folder)
        changed, together = rename_groups(run_folder, found.marked if guesses else ask_names(found))
    for old, new in changed.items():
        console.print(f"{old} is now {new}", soft_wrap=True)
    if not changed:
        console.print("Every group has its name already; nothing was changed.")
        return
    for name_of_several in together:
        console.print(f"{name_of_several}: several groups of this name, which count as one", soft_wrap=True)
    if (run_folder / "assignments.csv").is_file():
        console.print("The names hold for assignments.csv, predict and export; the page keeps its old names.")
    else:
        console.print("The names hold for predict, export and the predictions of this run.")


def ask_names(found: GuessedNames) -> dict[str, str]:
    """Ask for a name for each new group; an empty answer takes the guess, or leaves the group as it is."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "give a table group,name, as the report writes it; or --guesses, which takes what groups look like."
        )
    chosen = {}
    for group, size, guess in found.groups:
        hint = f"looks like: {guess} (a guess)" if guess else "no guess"
        default = guess.name if guess else group
        answer = typer.prompt(f"{printable_text(group)}, {size:,} photos, {hint}. Name", default=default, err=True)
        if answer.strip() != group:
            chosen[group] = answer.strip()
    return chosen


@app.command(short_help="How many classes are in there?")
def count(
    folder: Folder = None,
    labeled: Labeled = None,
    unlabeled: Unlabeled = None,
    labels: Labels = None,
    manifest: Manifest = None,
    features: Features = None,
    sample: Sample = 50_000,
    encoder: Encoder = "efficientnet_lite0",
    size: Size = None,
    seed: Seed = 0,
    device: Device = "auto",
    cache: Cache = CACHE,
    no_cache: NoCache = False,
    by: Annotated[
        str, typer.Option("--by", help="How: engine (as discover does), tree, or as in the papers: gcd, dtc.")
    ] = "engine",
    max_classes: MaxClasses = None,
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
            features=features,
            sample=sample,
            by=by,
            max_classes=max_classes,
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
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a discovery or a trained run.")],
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
    """A progress bar for each stage, in turn; lines where there is no terminal."""
    if not errors.is_terminal:
        lines = Lines(lambda line: errors.print(line))

        def say(stage: str, done: int, total: int) -> None:
            lines.update(BARS.get(stage, stage), done, total)

        yield say
        return
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
