"""Commands for trained runs: evaluate, draw."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from opencon.cli.base import Device, Imports, app, console, import_plugins, quiet_warnings, show_count
from opencon.cli.research import DataRoot, Test, Truth, result_table
from opencon.errors import ConfigError

if TYPE_CHECKING:
    from opencon.api import Run


@app.command(short_help="Measure a trained run again, under either protocol.")
def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    protocol: Annotated[
        str | None, typer.Option("--protocol", help="orca (tables of ORCA and OpenCon) or gcd (tables of GCD).")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", help="unlabeled (training images) or test (held-out images).")
    ] = None,
    data: DataRoot = None,
    truth: Truth = None,
    test: Test = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw the embedding to this PNG.")] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also draw look-alikes of the paper's figures to this folder.")
    ] = None,
    classes: Annotated[int, typer.Option("--classes", help="How many classes a figure shows: 10 or 20.")] = 10,
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="Also write the class of every judged image to this CSV file.")
    ] = None,
    novelty: Annotated[bool, typer.Option("--novelty", help="Also compare every novelty score.")] = False,
    count: Annotated[
        str | None, typer.Option("--count", help="Also estimate the number of classes: by tree, gcd or dtc.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Measure a trained run again, under either protocol, on either set of images; by default as it was trained."""
    from opencon.api import evaluate as evaluate_run
    from opencon.api import open_run
    from opencon.counting.base import CountEstimate

    for option, path in (("--picture", picture), ("--predictions", predictions)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}. Make it first.")
    import_plugins(imports)
    with quiet_warnings():
        record = evaluate_run(
            run_folder,
            protocol=protocol,
            on=on,
            data=data,
            truth=truth,
            test=test,
            device=device,
            picture=picture,
            figures=figures,
            classes=classes,
            novelty=novelty,
            count=count,
        )
    if predictions is not None:
        opened = open_run(run_folder, data=data, truth=truth, test=test, device=device)
        write_predictions(opened, record["on"], predictions)
    if as_json:
        sys.stdout.write(json.dumps(without_nan(record)) + "\n")
        return
    if not (run_folder / "result.json").is_file():
        console.print("note: this run is not finished; its last checkpoint was measured.")
    scores, counted = record.pop("novelty", None), record.pop("count", None)
    console.print(result_table(record, title=str(run_folder)))
    if scores is not None:
        console.print(novelty_scores_table(scores))
    if counted is not None:
        show_count(CountEstimate(**counted))


def write_predictions(opened: Run, on: str, path: Path) -> None:
    """What a run says of its images, as a CSV file."""
    from opencon.training.run_folder import RunFolder

    found = opened.predictions("test" if on == "test" else "unlabeled")
    columns = found.columns()
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*columns.values(), strict=True))
    RunFolder(path.parent).write_text(path.name, text.getvalue())


@app.command(short_help="Draw runs side by side: embeddings and confusion.")
def draw(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders on the same data.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures.")] = Path("figures"),
    classes: Annotated[int, typer.Option("--classes", help="How many classes are shown: 10 or 20.")] = 10,
    data: DataRoot = None,
    device: Device = "auto",
    imports: Imports = None,
) -> None:
    """Draw the embeddings and the confusion matrices of runs side by side, each as one PNG."""
    from opencon.api import draw as draw_runs

    import_plugins(imports)
    for path in draw_runs(runs, out, classes=classes, data=data, device=device):
        console.print(f"Wrote {path}", soft_wrap=True)


def novelty_scores_table(scores: Mapping[str, Mapping[str, float]]) -> Table:
    """How well each score tells novel images from seen ones."""
    table = Table("score", "FPR95", "AUROC", "AUPR", title="Novelty scores (smaller FPR95, larger others are better)")
    for name, values in scores.items():
        table.add_row(name, *(f"{values[key]:.1%}" for key in ("fpr95", "auroc", "aupr")))
    return table


def without_nan(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON lacks; a measure over no images is NaN."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
