"""Sweeps: the cross product, going on, finished cells that are not repeated, tables of a part."""

import csv
import io
import json

import pytest
import torch
from typer.testing import CliRunner

from opencon.cli import app
from opencon.errors import ConfigError, DataError, DivergedError, RunError
from opencon.experiments import sweep as module
from opencon.experiments.measures import check_columns
from opencon.experiments.sweep import Cell, Sweep, claimed, cross, expected_seconds, read_seeds
from opencon.experiments.sweep_table import plot, render, rows_of
from opencon.experiments.train import Callbacks

CPU = torch.device("cpu")
SHORT = ["train.epochs=1", "train.batch_size=128"]


def record(**result):
    full = {"all": 0.5, "novel": 0.4, "seen": 0.6, "classes_in_use": 9, "total_seconds": 10.0, "epoch": 0} | result
    return {"state": "done", "result": full, "seconds_per_epoch": 0.5, "curve": []}


@pytest.fixture
def fake(monkeypatch):
    """Cells that take no time: their accuracy is the seed in percent. Returns the names of the cells that ran."""
    ran = []

    def run_cell(cell, out, device, **options):
        ran.append(cell.name)
        return record(all=cell.seed / 100)

    monkeypatch.setattr(module, "run_cell", run_cell)
    return ran


def test_the_cross_product_has_short_labels_and_comes_seed_by_seed():
    cells = cross(
        ["opencon/digits", "orca/digits"], ["method.weight=1,2", "train.momentum=0,0.9"], [0, 1], settings=["a.b=3"]
    )
    assert len(cells) == 16
    assert [cell.seed for cell in cells] == [0] * 8 + [1] * 8
    assert cells[0].labels == {"method": "opencon", "weight": "1", "momentum": "0"}
    assert cells[5].settings == ("a.b=3", "method.weight=1", "train.momentum=0.9")
    assert cells[5].name == "orca-digits-b=3-weight=1-momentum=0.9-seed0"


def test_labels_name_only_what_varies():
    assert cross(["digits"], ["method.percentile=50,70"])[0].labels == {"percentile": "50"}
    assert cross(["digits"])[0].labels == {"method": "opencon"}
    assert cross(["digits", "cifar10"])[1].labels == {"data": "cifar10", "method": "opencon"}
    two = cross(["digits"], ["split.seed=0,1", "train.seed=0,1"])[0]
    assert two.labels == {"split.seed": "0", "train.seed": "0"}  # the last word alone would be the same


def test_commas_in_brackets_belong_to_a_value():
    cells = cross(["digits"], ["train.milestones=[10,20],[30]"])
    assert [cell.config.train.milestones for cell in cells] == [(10, 20), (30,)]


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-2", [0, 1, 2]), ("4", [4]), ("0,3,7", [0, 3, 7]), ("0-1,5", [0, 1, 5])]
)
def test_seeds_as_typed(text, seeds):
    assert read_seeds(text) == seeds


@pytest.mark.parametrize(
    "bad", [lambda: read_seeds("a-b"), lambda: read_seeds("1,1"), lambda: cross(["digits"], ["epochs=1,2"])]
)
def test_what_is_typed_wrong_is_refused(bad):
    with pytest.raises(ConfigError):
        bad()


def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, fake):
    with pytest.raises(ConfigError, match="num_seen"):
        Sweep.made(tmp_path, cross(["digits"], ["split.num_seen=5,12"]))
    with pytest.raises(ConfigError, match="same folder"):
        Sweep.made(tmp_path, [Cell("digits", 0), Cell("digits", 0, ("eval.every=5",))])
    assert not fake


def test_data_that_can_be_fetched_need_not_be_there(tmp_path, monkeypatch):
    cells = cross(["opencon/cifar100"], settings=[f"data.root={tmp_path}"])
    with pytest.raises(DataError, match="cifar100 is not there"):
        Sweep.made(tmp_path / "s", cells)
    sweep, fetched = Sweep.made(tmp_path / "s", cells, download=True), []

    def load(config, *, download):
        fetched.append((config.name, download))
        raise DataError("no network")

    monkeypatch.setattr(module, "load_dataset", load)
    with pytest.raises(DataError, match="no network"):  # before a process begins
        sweep.run_at_once(2, "cpu", seconds=None, keep=False, download=True)
    assert fetched == [("cifar100", True)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sweep.json", "{}"),
        ("sweep.json", '{"cells": ["digits"]}'),
        ("sweep.json", '{"cells": [{"recipe": "digits", "seed": 0, "labels": ["a"], "settings": [], "also": []}]}'),
        ("sweep.json", '{"cells": [{"recipe": "digits", "seed": "x", "settings": [], "also": []}]}'),
        ("results.json", "{}"),
        ("results.json", '{"cells": {"digits-seed0": 3}}'),
        ("results.json", '{"cells": {"digits-seed0": {"state": "done", "recipe": "digits", "result": {}}}}'),
    ],
)
def test_a_damaged_sweep_is_said(tmp_path, fake, name, content):
    Sweep.made(tmp_path, cross(["digits"])).run(CPU)
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=f"{name} is damaged"):
        Sweep.opened(tmp_path).left()


def test_finished_cells_are_not_repeated_even_without_their_folders(tmp_path, fake):
    Sweep.made(tmp_path, cross(["digits"], seeds=[0, 1])).run(CPU)
    assert len(fake) == 2
    wider = Sweep.made(tmp_path, cross(["digits"], seeds=[0, 1, 2]))
    wider.run(CPU)
    assert fake == ["digits-seed0", "digits-seed1", "digits-seed2"]
    assert Sweep.opened(tmp_path).left() == []


def test_a_cell_that_lacks_a_measure_is_trained_again_and_no_other_is(tmp_path, monkeypatch):
    found = []

    def run_cell(cell, out, device, **options):
        found.append((cell.name, (out / "result.json").is_file()))  # with a result, nothing would be measured
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text("{}")
        return record()

    monkeypatch.setattr(module, "run_cell", run_cell)
    Sweep.made(tmp_path, cross(["digits"], seeds=[0, 1])).run(CPU)
    more = Sweep.made(tmp_path, cross(["digits"], seeds=[0], also=["novelty"]))
    assert [cell.seed for cell in more.left()] == [0]
    more.run(CPU)
    assert found == [("digits-seed0", False), ("digits-seed1", False), ("digits-seed0", False)]
    lacking = Sweep.made(tmp_path, cross(["digits"], seeds=[0], also=["novelty", "count:tree"]))
    shown = CliRunner().invoke(app, ["sweep", "--out", str(tmp_path), "--minutes", "0", "--device", "cpu"])
    assert "1 of 1 cells are left" in shown.output
    assert lacking.left() == list(lacking.cells)
    assert more.left() == []
    assert set(more.results()) == {"digits-seed0", "digits-seed1"}


def test_seeds_are_told_apart_by_their_fingerprint():
    first, second = cross(["digits"], seeds=[0, 1])
    assert first.fingerprint != second.fingerprint


def test_other_settings_under_the_same_name_are_refused(tmp_path, fake):
    """A recipe that has changed since, say."""
    sweep = Sweep.made(tmp_path, cross(["digits"]))
    sweep.run(CPU)
    stored = json.loads((tmp_path / "results.json").read_text())
    stored["cells"]["digits-seed0"]["fingerprint"] = "of another recipe"
    (tmp_path / "results.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="other settings"):
        sweep.left()
    Sweep.made(tmp_path, cross(["digits"], settings=["train.epochs=3"])).run(CPU)  # has a name of its own
    assert fake == ["digits-seed0", "digits-epochs=3-seed0"]


def test_a_cell_that_another_process_has_is_left_to_it(tmp_path, fake):
    sweep = Sweep.made(tmp_path, cross(["digits"], seeds=[0, 1]))
    with claimed(tmp_path / "locks" / "digits-seed0"):
        sweep.run(CPU)
    assert fake == ["digits-seed1"]
    assert [cell.seed for cell in sweep.left()] == [0]


def test_no_cell_begins_that_would_not_fit(tmp_path, fake):
    sweep = Sweep.made(tmp_path, cross(["digits"], seeds=[0, 1]))
    sweep.add(sweep.cells[0], record(total_seconds=100.0, epoch=99), CPU)
    sweep.run(CPU, seconds=105.0)  # 100 s and a tenth do not fit
    assert not fake
    sweep.run(CPU, seconds=115.0)
    assert fake == ["digits-seed1"]


def test_what_a_cell_will_take_is_known_from_its_method_or_the_slowest():
    cell = cross(["digits"], settings=["train.epochs=100"])[0]
    assert expected_seconds(cell, {}) == 0
    known = {"a": {"recipe": "orca/digits", **record(total_seconds=50.0, epoch=99)}}
    assert expected_seconds(cell, known) == pytest.approx(55.0)
    known["b"] = {"recipe": "digits", **record(total_seconds=10.0, epoch=49)}
    assert expected_seconds(cell, known) == pytest.approx(22.0)


def test_a_failed_cell_leaves_the_others_and_is_tried_again(tmp_path, monkeypatch):
    def train(config, *args, **options):
        raise DivergedError("the loss was not finite")

    monkeypatch.setattr(module, "train", train)
    sweep = Sweep.made(tmp_path, cross(["digits"], seeds=[0, 1]))
    said = []
    sweep.run(CPU, callbacks=Callbacks(say=said.append))
    assert len(said) == 2
    assert "not finite" in said[0]
    assert len(sweep.left()) == 2
    assert rows_of(sweep)[0].seeds == "0 of 2, 2 failed"


def test_a_part_is_shown_as_a_part(tmp_path, fake):
    sweep = Sweep.made(tmp_path, cross(["digits"], ["method.percentile=50,70"], [1, 2, 3]))
    for cell in sweep.cells[:3]:
        sweep.add(cell, record(all=0.5 + cell.seed / 100), CPU)
    rows = rows_of(sweep)
    assert render(rows, ["all", "classes"], "markdown").splitlines() == [
        "| percentile | all | classes | seeds |",
        "| --- | ---: | ---: | ---: |",
        "| 50 | 51.5 ± 0.7 | 9.0 ± 0.0 | 2 of 3 |",
        "| 70 | 51.0 | 9.0 | 1 of 3 |",
    ]
    (first, second) = csv.DictReader(io.StringIO(render(rows, ["all"], "csv")))
    assert (first["percentile"], float(first["all_mean"]), second["all_std"]) == ("50", pytest.approx(51.5), "")
    assert json.loads(render(rows, ["all"], "json"))[0]["wanted"] == 3
    assert r"50 & 51.5 $\pm$ 0.7 & 2 of 3 \\" in render(rows, ["all"], "latex")
    with pytest.raises(ConfigError, match="Did you mean 'novel'"):
        check_columns((record for row in rows for record in row.done), ["nvoel"])


def test_a_setting_that_is_a_number_is_a_line_and_names_are_bars(tmp_path, fake, monkeypatch):
    from opencon.report import sweep_chart

    drawn = []
    for kind in ("_lines", "_bars"):
        real = getattr(sweep_chart, kind)
        monkeypatch.setattr(sweep_chart, kind, lambda *args, kind=kind, real=real: (drawn.append(kind), real(*args)))
    for name, vary in (("a", ["method.percentile=50,70"]), ("b", ["method.prior=uniform,unlabeled"])):
        sweep = Sweep.made(tmp_path / name, cross(["digits"], vary))
        sweep.run(CPU)
        path = plot(rows_of(sweep), ["all", "novel"], tmp_path / f"{name}.png", title="t")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert drawn == ["_lines", "_bars"]


def test_out_of_time_within_a_cell_keeps_what_was_trained(tmp_path):
    sweep = Sweep.made(tmp_path, cross(["digits"], settings=["train.epochs=3", "train.batch_size=128"]))
    clock = iter([0.0, 0.0])  # the start of the sweep and of the cell; from then on it is too late

    def late(*args):
        return next(clock, 1e9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "monotonic", late)
        said = []
        sweep.run(CPU, seconds=5.0, callbacks=Callbacks(say=said.append))
    assert said == ["[1/1] digits, method opencon, seed 0: out of time, goes on the next time"]
    epochs = []
    sweep.run(CPU, callbacks=Callbacks(started=lambda first, every, steps: epochs.append(first)))
    assert epochs == [1]
    assert sweep.left() == []


def test_two_methods_and_two_seeds_from_the_command_line(tmp_path):
    """A whole table: two processes, one measure more, and a folder that holds no weights."""
    words = ["sweep", "opencon/digits", "kmeans/digits", "--seeds", "0-1", "--out", str(tmp_path / "s")]
    words += ["--set", "train.epochs=0", "--also", "novelty", "--format", "csv", "--at-once", "2", "--device", "cpu"]
    words += ["--columns", "all,nmi,novelty.own.fpr95"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout[result.stdout.index("method,") :])))
    assert [(row["method"], row["seeds"]) for row in rows] == [("OpenCon", "2"), ("k-means", "2")]
    assert float(rows[1]["all_mean"]) > float(rows[0]["all_mean"])  # one is untrained
    assert not list((tmp_path / "s").rglob("*.pt"))
    again = CliRunner().invoke(app, ["sweep", "--out", str(tmp_path / "s"), "--columns", "al"])
    assert isinstance(again.exception, ConfigError)
    missing = CliRunner().invoke(app, ["sweep", "--out", str(tmp_path / "none")])
    assert isinstance(missing.exception, RunError)
