"""The paper's tables: manifests that can be made, what is missing is said, shared runs, validation on seen classes alone."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from opencon.cli import app
from opencon.config import with_settings
from opencon.errors import ConfigError, DivergedError
from opencon.experiments import sweep as sweep_module
from opencon.experiments.paper import (
    QUICK,
    Means,
    Plan,
    chosen,
    far_cells,
    in_order,
    manifest_names,
    quick_row,
    read_manifest,
    render_table,
    row_of,
)
from opencon.experiments.paper_drawings import draw_figures
from opencon.experiments.recipes import get_recipe
from opencon.experiments.sweep import Sweep
from opencon.experiments.validation import grids, outcomes, trial_cells
from opencon.experiments.workbench import prepare

CPU = torch.device("cpu")
TABLES = [name for name in manifest_names() if read_manifest(name).kind == "table"]


def record(**result):
    full = {"all": 0.5, "novel": 0.4, "seen": 0.6, "total_seconds": 1.0, "epoch": 1} | result
    return {"state": "done", "result": full, "seconds_per_epoch": 0.5, "curve": []}


def test_there_is_a_manifest_for_every_table_and_figure():
    assert manifest_names()[:2] == ["main", "vit"]
    assert {"losses", "unknown", "labels", "modified", "cifar10", "novelty", "converged", "imagenet1k", "pcl"} < {
        *TABLES
    }
    figures = {"umap10", "umap20", "percentile", "distributions", "sensitivity"}
    assert {name for name in manifest_names() if name not in TABLES} == figures
    with pytest.raises(ConfigError, match="Did you mean 'losses'"):
        chosen(["loses"])


@pytest.mark.parametrize("name", manifest_names())
def test_every_row_is_a_recipe_whose_settings_exist(name):
    manifest = read_manifest(name)
    labels = [tuple(row.labels.items()) for row in manifest.rows]
    assert len(set(labels)) == len(labels)
    for row in manifest.rows:
        with_settings(get_recipe(row.recipe), row.settings)
        with_settings(get_recipe(quick_row(row).recipe), quick_row(row).settings)
        assert len(row.published) <= len(row.columns or manifest.columns)


def test_what_is_missing_is_said_for_every_row(tmp_path):
    plan = Plan.made(chosen(["main"]), Means.of(str(tmp_path), []))
    assert not plan.cells
    assert len(plan.missing) == len(read_manifest("main").rows)
    assert "cifar-100" in plan.missing[0][2].lower()


def test_what_is_missing_is_said_once_with_the_tables_that_lack_it(tmp_path):
    words = ["paper", "losses", "modified", "--dry-run", "--data", str(tmp_path)]
    said = [line for line in CliRunner().invoke(app, words).output.splitlines() if line.startswith("missing")]
    assert len(said) == 2
    assert said[0].startswith("missing for losses (4 of 8 rows), modified (2 of 2 rows): data of cifar100 (")
    assert said[1].startswith("missing for losses (4 of 8 rows): data of imagenet100 (")


def test_data_that_can_be_fetched_is_not_missing(tmp_path):
    fetched = Plan.made(chosen(["modified"]), Means.of(str(tmp_path), ["w.pt"], download=True))
    assert (len(fetched.cells), fetched.missing) == (6, ())
    words = ["paper", "modified", "--download", "--dry-run", "--weights", "w.pt", "--data", str(tmp_path)]
    assert "6 runs." in CliRunner().invoke(app, words).output


def test_rows_are_trained_in_their_order_and_shown_in_that_of_the_axis(tmp_path):
    manifest, means = read_manifest("converged"), Means.of(None, [])
    assert [row.labels["start"] for row in manifest.rows][:3] == ["100", "200", "150"]  # most telling first
    rows = [row_of(Sweep(tmp_path, ()), row, means) for row in manifest.rows]
    shown = [line.split(" | ")[0] for line in render_table(manifest, rows, "markdown").splitlines()[2:]]
    assert shown == ["| 100", "| 110", "| 120", "| 130", "| 150", "| 200"]
    figure = read_manifest("sensitivity")
    assert [row.label for row, _ in in_order(figure, list(figure.rows))][:4] == [
        "lambda_n, 0.05",
        "lambda_n, 0.1",
        "lambda_n, 0.2",
        "tau_n, 0.5",
    ]


def test_a_run_of_several_tables_is_named_by_its_settings():
    plan = Plan.made(chosen(["losses", "sensitivity"]), Means.of(None, [], quick=True))
    assert [cell.title for cell in plan.cells][:2] == [
        "opencon/digits, weight_labeled 0, seed 0",
        "opencon/digits, weight_unlabeled 0, seed 0",
    ]


def test_a_figure_of_runs_without_embeddings_is_left_out(tmp_path):
    plan = Plan.made(chosen(["umap10", "distributions", "percentile"]), Means.of("d", ["w.pt"], download=True))
    (tmp_path / "locks").mkdir()
    sweep = Sweep(tmp_path, plan.cells)
    for cell in plan.cells:
        sweep.add(cell, record(), CPU)
    assert [path.stem for path in draw_figures(plan, sweep, tmp_path / "figures")] == ["percentile"]


def test_a_run_that_two_tables_share_is_trained_once_with_all_they_ask_for():
    plan = Plan.made(chosen(["losses", "novelty", "distributions"]), Means.of(None, [], quick=True))
    names = [cell.name for cell in plan.cells]
    assert len(set(names)) == len(names) == 4
    (shared,) = [cell for cell in plan.cells if not any(s.startswith("method.") for s in cell.settings)]
    assert shared.also == ("embedding", "novelty")


def test_weights_belong_to_a_data_set_or_an_encoder():
    main, vit = read_manifest("main").rows[0], read_manifest("vit").rows[0]
    means = Means.of("d", ["a.pt", "vit_b16=b.pt"])
    assert means.settings(main) == ["data.root=d", "encoder.weights=a.pt"]
    assert means.settings(vit) == ["data.root=d", "encoder.weights=b.pt"]
    imagenet = next(row for row in read_manifest("main").rows if row.data == "imagenet100")
    assert Means.of("d", ["a.pt"]).settings(imagenet) == ["data.root=d"]  # those of CIFAR-100 are not for ImageNet


def test_ours_and_the_published_numbers_stand_side_by_side(tmp_path):
    manifest, means = read_manifest("modified"), Means.of(None, [])
    cells = [cell for row in manifest.rows for cell in means.cells(row)]
    sweep = Sweep(tmp_path, tuple(cells))
    (tmp_path / "locks").mkdir()
    for cell, all_ in zip(cells[:3], (0.52, 0.53, 0.54), strict=True):
        sweep.add(cell, record(all=all_, novel=0.487, seen=0.69), CPU)
    rows = [row_of(sweep, row, means) for row in manifest.rows]
    assert render_table(manifest, rows, "markdown").splitlines()[2:] == [
        "| L_OpenCon | 53.0 ± 1.0 | 48.7 ± 0.0 | 69.0 ± 0.0 | 53.7 / 48.7 / 69.0 | 3 |",
        "| L_Modified |  |  |  | 47.7 / 46.4 / 62.4 | 0 of 3 |",
    ]
    assert far_cells(manifest, rows) == []
    sweep.add(cells[3], record(all=0.5, novel=0.464, seen=0.624), CPU)
    rows = [row_of(sweep, row, means) for row in manifest.rows]
    assert [(label, column) for label, column, _, _ in far_cells(manifest, rows)] == [("L_Modified", "all")]


def test_validation_looks_at_labeled_images_alone():
    config = with_settings(get_recipe("digits"), ["split.validation=true", "train.batch_size=128"])
    bench, full = prepare(config, CPU), prepare(get_recipe("digits"), CPU)
    assert len(bench.dataset.train) == len(full.split.labeled)
    torch.testing.assert_close(bench.dataset.train.images, full.dataset.train.images[full.split.labeled])
    assert (bench.split.num_seen, bench.split.num_classes) == (2, 5)
    assert bench.dataset.train.classes.max() == 4


def test_every_method_has_as_many_trials_and_the_recipe_is_one():
    assert {len(trials) for trials in grids().values()} == {6}
    in_table = {row.recipe.partition("/")[0] for row in read_manifest("main").rows if row.data == "cifar100"}
    assert {*grids()} == in_table - {"kmeans"}
    for method, trials in grids().items():
        assert trials[0].settings == ()
        for trial in trials:
            with_settings(get_recipe(f"{method}/cifar100"), trial.settings)


def test_the_best_trial_of_each_method_is_chosen(tmp_path):
    trials = trial_cells(["gcd", "uno"], "digits", [])
    sweep = Sweep(tmp_path, tuple(cell for cells in trials.values() for cell in cells))
    (tmp_path / "locks").mkdir()
    for i, cell in enumerate(sweep.cells):
        sweep.add(cell, record(all=(0.5, 0.7, 0.6, 0.1, 0.2, 0.3)[i % 6]), CPU)
    found = [trial.label for trial, _, is_best in outcomes(sweep, trials) if is_best]
    assert found == [trials_of[1].label for trials_of in (grids()["gcd"], grids()["uno"])]


def test_a_quick_trial_is_quick_whatever_it_changes():
    (cell,) = trial_cells(["simgcd"], "digits", QUICK)[grids()["simgcd"][4]]  # 200 epochs
    assert with_settings(get_recipe("simgcd/digits"), cell.settings).train.epochs == 2


def test_a_dry_run_needs_neither_data_nor_weights(tmp_path):
    result = CliRunner().invoke(app, ["paper", "modified", "--dry-run", "--data", str(tmp_path)])
    assert result.exit_code == 0
    assert "0 runs." in result.output


def test_a_table_of_two_methods_and_two_seeds_on_the_digits(tmp_path):
    words = ["paper", "pcl", "--quick", "--seeds", "0-1", "--out", str(tmp_path / "p"), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "p" / "tables" / "pcl.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in text[2:]] == ["| PCL", "| OpenCon"]
    assert all("±" in line and line.endswith("| 2 |") for line in text[2:])


def test_why_a_run_failed_is_said(tmp_path, monkeypatch):
    def train(*args, **options):
        raise DivergedError("the loss was not finite")

    monkeypatch.setattr(sweep_module, "train", train)
    words = ["paper", "modified", "--quick", "--out", str(tmp_path / "p"), "--device", "cpu"]
    said = CliRunner().invoke(app, words).output
    assert "failed: opencon/digits, seed 0 and 1 more: DivergedError: the loss was not finite" in said
    assert "2 of 2 runs are left; the same command goes on with them." in said


@pytest.mark.slow
def test_the_whole_paper_on_the_digits(tmp_path):
    result = CliRunner().invoke(app, ["paper", "all", "--quick", "--out", str(tmp_path / "p"), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    cells = json.loads((tmp_path / "p" / "results.json").read_text())["cells"]
    assert {cell["state"] for cell in cells.values()} == {"done"}
    assert len(list((tmp_path / "p" / "tables").glob("*.md"))) == len(manifest_names())
    assert {path.stem for path in (tmp_path / "p" / "figures").glob("*.png")} == {*manifest_names()} - {*TABLES}


@pytest.mark.slow
def test_validation_on_the_digits(tmp_path):
    words = ["paper", "main", "--quick", "--validate", "--out", str(tmp_path / "v"), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("chosen") == len(grids())


def test_the_page_is_made_from_the_record(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import paper

    assert paper.PAGE.read_text(encoding="utf-8") == paper.page()
    for name, file in paper.record().items():
        assert name in paper.page()
        assert not file["environment"]["commit"].endswith("-dirty"), f"{name}: say with `state` what was measured"
    text = paper.page({"opencon-cifar100-seed0": record(all=0.6, novel=0.478, seen=0.691)})
    assert "| CIFAR-100 | OpenCon | 60.0 | 47.8 | 69.1 | 52.7 / 47.8 / 69.1 | 1 of 5 |" in text
    assert "- **CIFAR-100, OpenCon** (all +7.3): Not explained yet." in text
    assert "Not measured: CIFAR-100, ORCA;" in text
    novelty = text[text.index("## Novelty scores, CIFAR-100") :].split("\n\n")[1]
    assert novelty.endswith("Nothing of it is measured yet.")  # that run has none of its columns


def test_a_session_begins_with_the_record_and_ends_in_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import paper

    kept, sweep = tmp_path / "record", tmp_path / "runs"
    kept.mkdir()
    plan = Plan.made(chosen(["modified"]), Means.of("d", ["w.pt"], download=True))
    (sweep / "locks").mkdir(parents=True)
    first = Sweep(sweep, plan.cells)
    first.add(plan.cells[0], record(embedding=[1.0]), CPU)
    first.add(plan.cells[1], {"state": "failed", "error": "no memory"}, CPU)
    paper.take(sweep / "results.json", "monday", "A trial.", kept)
    file = json.loads((kept / "monday.json").read_text())
    assert [*file["cells"]] == [plan.cells[0].name]  # a failed run is no result
    assert "embedding" not in file["cells"][plan.cells[0].name]["result"]
    assert file["environment"]["state"] == "A trial."

    again = Sweep(tmp_path / "elsewhere", plan.cells)
    paper.give(again.folder, kept)
    assert again.left() == list(plan.cells[1:])
    (again.folder / "locks").mkdir()
    again.add(plan.cells[1], record(all=0.6), CPU)
    paper.take(again.folder / "results.json", "tuesday", None, kept)
    assert [*json.loads((kept / "tuesday.json").read_text())["cells"]] == [plan.cells[1].name]
    assert {*paper.measured(kept)} == {cell.name for cell in plan.cells[:2]}
    file["environment"]["commit"] = "another"
    (kept / "monday.json").write_text(json.dumps(file))
    with pytest.raises(SystemExit, match="at another commit"):
        paper.take(again.folder / "results.json", "monday", None, kept)
