"""The command for the paper's tables and figures: paper."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opencon.cli.base import Device, DryRun, app, console, errors
from opencon.cli.research import Download, check_limits, run_sweep
from opencon.errors import ConfigError

if TYPE_CHECKING:
    from opencon.experiments.paper import Means, Plan


@app.command(short_help="The paper's tables and figures, with the published numbers beside.")
def paper(
    what: Annotated[list[str], typer.Argument(help="Tables and figures by name, or all; --dry-run lists them.")],
    data: Annotated[str | None, typer.Option("--data", help="Folder with the data sets' files.")] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weights", metavar="[NAME=]FILE", help="Start of CIFAR-100, or of a data set or encoder; repeatable."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the sweep that all tables share.")] = Path("runs/paper"),
    seeds: Annotated[str | None, typer.Option("--seeds", help="Seeds instead of the manifests': 0-2, or 0.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Digits stand for every data set, two epochs, one seed.")
    ] = False,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Choose settings on the seen classes: the grid of every method named here."),
    ] = False,
    form: Annotated[str, typer.Option("--format", help="markdown or latex.")] = "markdown",
    at_once: Annotated[int, typer.Option("--at-once", help="Processes that share the work.")] = 1,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Begin no run that would not end within this time.")
    ] = None,
    device: Device = "auto",
    download: Download = False,
    dry_run: DryRun = False,
) -> None:
    """Train what a table or figure needs, and show it with the published numbers. The same command goes on."""
    from opencon.experiments.paper import Means, Plan, chosen, manifest_names
    from opencon.experiments.paper_drawings import draw_figures
    from opencon.experiments.sweep import Sweep, read_seeds

    check_limits(at_once, minutes)
    if form not in ("markdown", "latex"):
        raise ConfigError(f"--format {form!r} must be markdown or latex.")
    means = Means.of(data, weights or [], quick=quick, download=download)
    wanted = None if seeds is None else read_seeds(seeds)
    if validate:
        run_validation(what, means, out, wanted, device, at_once, minutes, dry_run)
        return
    if dry_run:
        console.print(f"Tables and figures: {', '.join(manifest_names())}", soft_wrap=True)
    plan = Plan.made(chosen(what), means, seeds=wanted)
    say_missing(plan)
    if dry_run:
        for cell in plan.cells:
            console.print(cell.name, soft_wrap=True)
        console.print(f"{len(plan.cells)} runs.")
        return
    sweep = Sweep.made(out, plan.cells, download=download) if plan.cells else Sweep(out, ())
    if plan.cells:
        run_sweep(sweep, device, at_once=at_once, minutes=minutes, keep=False, download=download)
    show_tables(plan, sweep, form)
    for path in draw_figures(plan, sweep, out / "figures"):
        errors.print(f"Wrote {path}")
    known, failed = sweep.results(), dict[str, list[str]]()
    for cell in (left := sweep.left()):
        if "error" in known.get(cell.name, {}):
            failed.setdefault(known[cell.name]["error"], []).append(cell.title)
    for error, (first, *others) in failed.items():
        errors.print(f"failed: {first}{f' and {len(others)} more' if others else ''}: {error}", soft_wrap=True)
    if left:
        errors.print(f"{len(left)} of {len(plan.cells)} runs are left; the same command goes on with them.")


def say_missing(plan: Plan) -> None:
    """What cannot be had, and the tables that it is missing for."""
    lacks: dict[str, Counter[str]] = {}
    for table, _, lack in plan.missing:
        lacks.setdefault(lack, Counter())[table] += 1
    rows = {manifest.name: len(manifest.rows) for manifest in plan.manifests}
    for lack, tables in lacks.items():
        where = ", ".join(f"{table} ({number} of {rows[table]} rows)" for table, number in tables.items())
        errors.print(f"missing for {where}: {lack}", soft_wrap=True)


def show_tables(plan: Plan, sweep: object, form: str) -> None:
    """Every table, to the screen and into files."""
    from opencon.experiments.paper import far_cells, render_table, write_tables
    from opencon.experiments.sweep import Sweep

    assert isinstance(sweep, Sweep)
    for manifest in plan.manifests:
        rows = plan.measured(sweep, manifest)
        title = plan.title(manifest)
        sys.stdout.write(f"\n{title} ({manifest.place})\n\n{render_table(manifest, rows, form)}\n")
        for label, column, ours, published in [] if plan.means.quick else far_cells(manifest, rows):
            errors.print(f"{manifest.name}, {label}: {column} {ours:.1f}, published {published:.1f}")
    write_tables(plan, sweep, sweep.folder / "tables")


def run_validation(
    what: list[str],
    means: Means,
    out: Path,
    seeds: list[int] | None,
    device: str,
    at_once: int,
    minutes: float | None,
    dry_run: bool,
) -> None:
    """Train the grids of the methods that the tables have, and say which setting each would choose."""
    from opencon.experiments.paper import QUICK, chosen
    from opencon.experiments.sweep import Sweep
    from opencon.experiments.validation import grids, outcomes, trial_cells
    from opencon.report.grid import markdown, shown

    rows = [row for manifest in chosen(what) for row in manifest.rows if means.quick or means.missing(row) is None]
    pairs = dict.fromkeys(
        (row.recipe.partition("/")[0], row.data) for row in rows if row.recipe.partition("/")[0] in grids()
    )
    if not pairs:
        raise ConfigError(f"no method with a grid is left: data or weights are missing. Grids: {', '.join(grids())}.")
    first = next(iter(pairs))[1]  # one data set at a time
    methods = [method for method, data in pairs if data == first]
    row = next(row for row in rows if row.data == first)
    name = "digits" if means.quick else first
    # A quarter of the digits is there, of which a fifth is labeled: smaller batches, so that the labeled ones fill them.
    places = [*QUICK, "train.batch_size=64"] if means.quick else means.settings(row)
    trials = trial_cells(methods, name, places, seeds=seeds or [0])
    cells = [cell for some in trials.values() for cell in some]
    if dry_run:
        for cell in cells:
            console.print(cell.name, soft_wrap=True)
        console.print(f"{len(cells)} runs.")
        return
    sweep = Sweep.made(out, cells, download=means.download)
    run_sweep(sweep, device, at_once=at_once, minutes=minutes, keep=False, download=means.download)
    lines = [
        [trial.method, trial.label, *(shown(*row.score(key)) for key in ("all", "novel", "seen")), row.seeds, mark]
        for trial, row, is_best in outcomes(sweep, trials)
        for mark in ["chosen" if is_best else ""]
    ]
    heads = ["method", "trial", "all", "novel", "seen", "seeds", ""]
    sys.stdout.write(markdown(heads, lines, text_columns=2) + "\n")
