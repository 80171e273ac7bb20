"""The command line, as typed: what it prints where, and with which exit code."""

import io
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
from rich.console import Console

from opencon import cli
from opencon.cli import base, research
from opencon.cli.base import Lines
from opencon.data.benchmarks import DATASETS
from opencon.encoders import ENCODERS
from opencon.experiments.recipes import SETTINGS
from opencon.methods import METHODS
from opencon.version import __version__

SMALL = ("--set", "train.epochs=2", "--set", "train.batch_size=256", "--device", "cpu")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def opencon(capsys, *args):
    """Type `opencon ARGS`; fails unless the program ends as programs do."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in args])
    ran = Ran(int(stop.value.code or 0), *capsys.readouterr())
    assert "Traceback" not in ran.err
    return ran


def works(capsys, *args):
    ran = opencon(capsys, *args)
    assert ran.code == 0, ran.err
    return ran


def refused(capsys, *args):
    """The sentence on stderr of a command that cannot work, which prints nothing else."""
    ran = opencon(capsys, *args)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("opencon: ")
    return ran.err


def cells(table):
    """The rows of a printed table, as {first column: second column}."""
    rows = [line.strip("│ ").split("│") for line in table.splitlines() if line.startswith("│")]
    return {row[0].strip(): row[1].strip() for row in rows}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Nothing is written outside tmp_path, whatever the default folder is."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small run that other tests only read."""
    out = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "digits", "--out", str(out), *SMALL])
    assert not stop.value.code
    return out


# --- looking around ---------------------------------------------------------------------------------------------------


def test_version(capsys):
    assert works(capsys, "--version").out == f"opencon {__version__}\n"


def test_help_names_every_command(capsys):
    out = works(capsys, "--help").out
    for command in ("demo", "train", "pretrain", "evaluate", "list"):
        assert f"\n  {command} " in out
        assert works(capsys, command, "-h").out == works(capsys, command, "--help").out
    assert "..." not in out.replace("[ARGS]...", "")  # no sentence cut off
    assert "Commands:" in "".join(opencon(capsys)[1:])  # without arguments, too


def test_list_shows_everything_there_is(capsys):
    out = works(capsys, "list").out
    for registry in (SETTINGS, METHODS, ENCODERS, DATASETS):
        for name in registry.names():
            assert name in out


@pytest.mark.parametrize("args", [["traim"], ["train", "digits", "--epochs", "3"], ["evaluate"], ["train", "a", "b"]])
def test_words_it_does_not_know(capsys, args):
    ran = opencon(capsys, *args)
    assert (ran.code, ran.out) == (2, "")
    assert "Error" in ran.err


# --- dry runs ---------------------------------------------------------------------------------------------------------


def plan_and_settings(out):
    plan, brace, settings = out.partition("{")
    return dict(line.strip().split("  ", 1) for line in plan.splitlines()), json.loads(brace + settings)


def test_dry_run_prints_the_plan_and_the_settings_and_writes_nothing(capsys, tmp_path):
    out = works(capsys, "train", "digits", "--dry-run", "--device", "cpu", "--set", "train.epochs=7").out
    plan, settings = plan_and_settings(out)
    assert list(plan) == ["data", "method", "encoder", "training", "split", "evaluation", "device", "folder"]
    assert "1,797 training images of 10 classes" in plan["data"]
    assert "OpenCon (arXiv:2208.02764)" in plan["method"]
    assert "convnet" in plan["encoder"]
    assert "7 epochs" in plan["training"]
    assert "5 seen classes" in plan["split"]
    assert "5 novel classes" in plan["split"]
    assert plan["evaluation"].strip() == "protocol orca, on the unlabeled training images"
    assert settings["train"]["epochs"] == 7
    assert settings["method"]["name"] == "opencon"
    assert list(tmp_path.iterdir()) == []


def test_options_end_in_the_settings(capsys, tmp_path):
    weights = tmp_path / "w.safetensors"
    weights.touch()
    args = ["--seed", "3", "--variant", "paper", "--weights", weights, "--set", "eval.protocol=gcd"]
    plan, settings = plan_and_settings(works(capsys, "train", "digits", "--dry-run", *args).out)
    assert settings["train"]["seed"] == 3
    assert settings["split"]["seed"] == 0  # the split has its own
    assert settings["method"]["seen_score"] == "cosine"
    assert settings["encoder"]["weights"] == str(weights)
    assert "seed 3" in plan["training"]
    assert "protocol gcd" in plan["evaluation"]
    _, settings = plan_and_settings(works(capsys, "train", "cifar100", "--dry-run", "--data", "7", "--download").out)
    assert settings["data"]["root"] == "7"  # text, though it looks like a number


def test_default_folder_is_named_after_the_recipe(capsys, tmp_path):
    def folder(*args):
        return plan_and_settings(works(capsys, *args, "--dry-run").out)[0]["folder"].strip()

    assert folder("train", "digits") == "runs/digits"
    assert folder("train", "opencon/digits") == "runs/opencon-digits"
    assert folder("pretrain", "digits") == folder("pretrain", "simclr/digits") == "runs/simclr-digits"
    assert folder("pretrain", "digits", "--method", "moco") == folder("pretrain", "moco/digits") == "runs/moco-digits"
    (tmp_path / "mine.toml").write_text('recipe = "digits"')
    assert folder("train", "--config", tmp_path / "mine.toml") == "runs/mine"


@pytest.mark.parametrize("name", ["[bold]a", "b[/c]", "a:x:b"])
def test_a_folder_name_is_printed_as_it_is(capsys, name):
    out = works(capsys, "train", "digits", "--dry-run", "--out", name).out
    assert plan_and_settings(out)[0]["folder"].strip() == name


# --- training, once and again -----------------------------------------------------------------------------------------


def test_train_then_the_same_command_again(capsys, tmp_path):
    args = ("train", "digits", "--out", tmp_path / "run", *SMALL, "--set", "train.epochs=1")
    first = works(capsys, *args).out
    assert "finished already" not in first
    assert (tmp_path / "run/encoder.safetensors").is_file()
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    second = works(capsys, *args).out
    assert "is finished already; this is its result" in second
    assert cells(second) == cells(first)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_protocol_and_images_stand_before_the_numbers(capsys, finished):
    for args in (("train", "digits", "--out", finished, *SMALL), ("evaluate", finished)):
        rows = list(cells(works(capsys, *args).out))
        assert rows[:7] == ["protocol", "on", "num_images", "seed", "all", "novel", "seen"]


def test_evaluate_under_both_protocols(capsys, finished):
    records = {}
    for protocol in ("orca", "gcd"):
        table = cells(works(capsys, "evaluate", finished, "--protocol", protocol).out)
        out = works(capsys, "evaluate", finished, "--protocol", protocol, "--json").out
        records[protocol] = record = json.loads(out)
        assert out.count("\n") == 1
        assert (record["protocol"], record["on"], record["num_images"]) == (protocol, "unlabeled", 1332)
        assert (table["protocol"], table["on"], table["num_images"]) == (protocol, "unlabeled", "1332")
        assert table["all"] == f"{record['all']:.1%}"
        assert table["novel"] == f"{record['novel']:.1%}"
    assert records["orca"]["all"] == records["gcd"]["all"]
    assert json.loads(works(capsys, "evaluate", finished, "--json").out) == records["orca"]  # as the run


def test_json_stays_json_where_a_measure_is_no_number(capsys, finished, monkeypatch):
    record = {"protocol": "orca", "auroc": float("nan"), "all": 0.5}
    monkeypatch.setattr("opencon.api.evaluate_run", lambda *a, **k: record)

    def no_nan(text):
        raise AssertionError(text)

    out = works(capsys, "evaluate", finished, "--json").out
    assert json.loads(out, parse_constant=no_nan) == {"protocol": "orca", "auroc": None, "all": 0.5}


def test_evaluate_draws(capsys, finished, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("opencon.experiments.evaluate.MOST_DRAWN", 20)
    works(capsys, "evaluate", finished, "--picture", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--protocol", "acc"], "eval.protocol = 'acc' must be one of 'orca', 'gcd'."),
        (["--on", "train"], "eval.on = 'train' must be one of 'unlabeled', 'test'."),
        (["--on", "test"], "digits has no held-out test images. Use eval.on=unlabeled (--on unlabeled)."),
        (["--picture", "no/such/p.png"], "--picture no/such/p.png: there is no folder no/such. Make it first."),
    ],
)
def test_evaluate_refuses(capsys, finished, args, message):
    assert message in refused(capsys, "evaluate", finished, *args)


def test_evaluate_what_is_no_run(capsys, tmp_path):
    message = refused(capsys, "evaluate", tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'} holds no run (no config.json). Give the folder that `opencon train" in message


def test_seed_changes_the_training_not_the_split(capsys, finished, tmp_path):
    works(capsys, "train", "digits", "--out", tmp_path / "other", *SMALL, "--seed", "1")
    assert (tmp_path / "other/split.json").read_text() == (finished / "split.json").read_text()
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (finished, tmp_path / "other")
    ]
    assert losses[0] != losses[1]


def test_pretrain_says_where_the_encoder_is_and_train_takes_it(capsys, tmp_path):
    tiny = (*SMALL, "--set", "train.epochs=1")
    out = works(capsys, "pretrain", "digits", "--out", tmp_path / "pre", *tiny).out
    encoder = tmp_path / "pre/encoder.safetensors"
    assert f"Encoder: {encoder}\n" in out
    assert {"on": "train", "num_images": "1797"}.items() <= cells(out).items()
    assert "knn20" in cells(out)
    assert "protocol" not in out
    out = works(capsys, "train", "digits", "--out", tmp_path / "run", "--weights", encoder, *tiny).out
    assert "Loaded" in out
    assert f"weights from {encoder}" in out
    on = ("pretrain", "digits", "--method", "moco", "--weights", encoder)
    out = works(capsys, *on, "--out", tmp_path / "on", *tiny).out
    assert "MoCo v3" in out
    assert "Loaded" in out
    assert f"weights from {encoder}" in out


@pytest.mark.parametrize("command", ["train", "pretrain"])
def test_tensorboard(capsys, tmp_path, command):
    pytest.importorskip("tensorboard")
    works(capsys, command, "digits", "--out", tmp_path / "run", *SMALL, "--set", "train.epochs=1", "--tensorboard")
    assert list((tmp_path / "run/tensorboard").glob("events*"))


def test_figures_like_those_of_the_paper(capsys, finished, tmp_path):
    works(capsys, "evaluate", finished, "--figures", tmp_path / "figures")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"classes.png", "novelty.png", "confusion.png"}


def test_tensorboard_that_is_not_installed(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    ran = opencon(capsys, "train", "digits", "--out", tmp_path / "run", "--tensorboard", "--device", "cpu")
    assert ran.code == 2
    assert "--tensorboard needs tensorboard" in ran.err
    assert "pip install 'opencon[tensorboard]'" in ran.err
    assert not (tmp_path / "run").exists()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_a_dry_run_refuses_a_stage_that_is_not_there(capsys, tmp_path):
    ran = opencon(
        capsys, "train", "digits", "--out", tmp_path / "run", "--set", "encoder.train_from=conv9", "--dry-run"
    )
    assert ran.code == 2
    assert "'conv9' is not a stage of this encoder. Did you mean 'conv3'?" in ran.err


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_then_the_same_command_resumes_and_finishes(capsys, finished, tmp_path, monkeypatch, by, code):
    plain_bar = cli.research.progress_bar

    @contextmanager
    def interrupted():
        with plain_bar() as callbacks:

            def epoch_done(record):
                callbacks.epoch_done(record)
                if record["epoch"] == 0:
                    signal.raise_signal(by)

            yield replace(callbacks, epoch_done=epoch_done)

    args = ("train", "digits", "--out", tmp_path / "run", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(cli.research, "progress_bar", interrupted)
        ran = opencon(capsys, *args)
    assert ran.code == code
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert ran.err == "opencon: interrupted. The same command resumes from the last finished epoch.\n"
    assert "note: this run is not finished" in works(capsys, "evaluate", tmp_path / "run").out
    assert not (tmp_path / "run/result.json").exists()
    out = works(capsys, *args).out
    assert "after 1 of 2 epochs" in out
    want = works(capsys, "evaluate", finished, "--json").out
    assert works(capsys, "evaluate", tmp_path / "run", "--json").out == want


# --- --config ---------------------------------------------------------------------------------------------------------


def test_config_starts_from_a_recipe(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'recipe = "digits"\nvariant = "paper"\n[train]\nepochs = 1\nbatch_size = 300\n[eval]\non = "unlabeled"'
    )
    plan, settings = plan_and_settings(works(capsys, "train", "--config", file, "--dry-run").out)
    recipe = plan_and_settings(works(capsys, "train", "digits", "--variant", "paper", "--dry-run").out)[1]
    assert settings == recipe | {"train": recipe["train"] | {"epochs": 1, "batch_size": 300}}
    assert "1 epochs, batches of 300" in plan["training"]
    assert "protocol" in works(capsys, "train", "--config", file, "--out", tmp_path / "run", "--device", "cpu").out


COMPLETE = """
[data]
name = "digits"
[split]
num_seen = 4
[encoder]
name = "convnet"
[method]
name = "opencon"
percentile = 60
[train]
epochs = 1
batch_size = 256
[augment]
crop_scale = [0.5, 1.0]
"""


def test_config_without_a_recipe(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(COMPLETE)
    plan, settings = plan_and_settings(works(capsys, "train", "--config", file, "--dry-run").out)
    assert "4 seen classes" in plan["split"]
    assert settings["method"]["percentile"] == 60.0
    assert settings["augment"]["crop_scale"] == [0.5, 1.0]
    works(capsys, "train", "--config", file, "--out", tmp_path / "run", "--device", "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe = digits", "is not valid TOML"),
        ("\xff", "is not valid TOML"),
        ('recipe = "digits"\n[train]\nepoch = 1', "unknown setting 'train.epoch'. Did you mean 'epochs'?"),
        ('recipe = "digits"\nepochs = 1', "unknown setting 'epochs'"),
        ('recipe = "digit"', "unknown recipe 'digit'. Did you mean 'digits'?"),
        ('recipe = "digits"\nvariant = "mine"', "--variant 'mine' must be 'released' or 'paper'"),
        ('recipe = "digits"\n[train]\nepochs = "many"', "train.epochs = 'many' must be a whole number"),
        (COMPLETE.replace('name = "opencon"', 'name = "openco"'), "unknown method 'openco'. Did you mean 'opencon'?"),
        (COMPLETE.replace("num_seen = 4", ""), "split.num_seen is missing: say how many classes are seen"),
    ],
)
def test_config_that_cannot_work(capsys, tmp_path, text, message):
    file = tmp_path / "mine.toml"
    file.write_bytes(text.encode("latin1"))
    assert message in refused(capsys, "train", "--config", file)


def test_config_that_is_not_there(capsys, tmp_path):
    message = refused(capsys, "train", "--config", tmp_path / "none.toml")
    assert message == f"opencon: cannot read the configuration {tmp_path / 'none.toml'} (No such file or directory).\n"


# --- options that cannot work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train"], "give a recipe (`opencon list` shows them) or --config FILE, one of the two"),
        (["train", "digits", "--config", "a.toml"], "one of the two"),
        (["train", "digitz"], "unknown recipe 'digitz'. Did you mean 'digits'? Data sets with recipes: cifar10"),
        (["train", "orca/digits", "--variant", "paper"], "orca has one variant, which follows its released code"),
        (["pretrain", "digitz"], "unknown recipe 'digitz'. Did you mean 'digits'?"),
        (["pretrain", "opencon/digits"], "not the recipe 'opencon/digits'. Use: pretrain digits"),
        (["pretrain", "moco/digits", "--method", "simclr"], "not the recipe 'moco/digits'. Use: pretrain digits"),
        (
            ["pretrain", "digits", "--method", "opencon"],
            "opencon learns from labels. Pre-training uses none: crops, moco",
        ),
        (["pretrain", "digits", "--method", "simcrl"], "unknown method 'simcrl'. Did you mean 'simclr'?"),
        (["train", "digits", "--variant", "nonsense"], "--variant 'nonsense' must be 'released' or 'paper'"),
        (["train", "digits", "--device", "nonsense"], "--device 'nonsense' is not a device. Use auto, cpu, cuda or"),
        (["train", "--config", "a.toml", "--variant", "paper"], "--variant belongs to a recipe. In a configuration"),
        (["train", "digits", "--device", "mps"], "--device 'mps' is not supported. Use auto, cpu, cuda or cuda:N"),
        (["train", "digits", "--device", "cuda:99"], "CUDA devices. Use cpu."),
        (["train", "digits", "--seed", "-1"], "train.seed = -1 must be a whole number from 0 to 2^63 - 1"),
        (["train", "digits", "--set", "train.epochs"], "--set 'train.epochs' is not of the form section.key=value"),
        (["train", "digits", "--set", "train.epochs=x"], "train.epochs = 'x' must be a whole number"),
        (["train", "digits", "--set", "trian.epochs=1"], "no section 'trian'. Did you mean 'train'?"),
        (["train", "digits", "--set", "train.epocs=1"], "unknown setting 'train.epocs'. Did you mean 'epochs'?"),
        (["train", "digits", "--set", "encoder.name=resnet8"], "unknown encoder 'resnet8'. Did you mean 'resnet18'?"),
        (["train", "cub200", "--data", "WRONG", "--dry-run"], "cub200 is not there: looked for images, images.txt, "),
        (["train", "cub200", "--data", "WRONG", "--dry-run"], "had from https://www.vision.caltech.edu/datasets/cub_2"),
    ],
)
def test_options_that_cannot_work(capsys, args, message, tmp_path):
    assert message in refused(capsys, *args)
    assert list(tmp_path.iterdir()) == []


def test_one_problem_is_one_line(capsys):
    """A long sentence is not broken at the width of the terminal, so it can be searched for."""
    assert refused(capsys, "train", "digits", "--set", "train.epocs=1").count("\n") == 1


@pytest.mark.parametrize(("width", "terms"), [(80, False), (160, True)])
def test_a_training_bar_shows_epoch_time_and_accuracy_at_any_width(monkeypatch, width, terms):
    out = io.StringIO()
    monkeypatch.setattr(research, "console", Console(file=out, width=width, force_terminal=True, color_system=None))
    with research.progress_bar() as callbacks:
        callbacks.started(0, 100, 10)
        callbacks.epoch_done({"epoch": 98, "loss": 4.83, "loss_n": 5.07, "all": 0.868, "novel": 0.807, "seen": 0.99})
    line = next(line for line in reversed(out.getvalue().replace("\r", "\n").split("\n")) if "loss" in line)
    assert all(part in line for part in ("epoch 99/100", "left", "loss 4.83", "all 86.8%"))
    assert ("n 5.07" in line) == ("seen 99.0%" in line) == terms


# --- what is loaded ---------------------------------------------------------------------------------------------------


def test_a_command_that_computes_nothing_loads_nothing_heavy():
    """A second or more for each of these packages: help, lists and mistakes should not wait for them."""
    code = """
import contextlib, io, sys
from opencon.cli import main
for line in sys.argv[1:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(line.split())
    names = ("torch", "numpy", "PIL", "scipy", "sklearn", "matplotlib", "pandas")
    print(line, *(name for name in names if name in sys.modules), sep=",")
"""
    light = ["--help", "--version", "discover --help", "train --nope", "nonsense"]
    others = ["list", "list recipes", "train nope", "discover", "discover /none", "count /none", "compare /none"]
    others += ["predict /none /none", "evaluate /none", "export /none", "train digits --set a.b=c"]
    run = subprocess.run([sys.executable, "-c", code, *light, *others], check=True, capture_output=True, text=True)
    loaded = dict(line.split(",", 1) if "," in line else (line, "") for line in run.stdout.splitlines())
    assert loaded == dict.fromkeys(light, "") | dict.fromkeys(others, "torch,numpy,PIL")


# --- progress without a terminal --------------------------------------------------------------------------------------


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal():
    said, now = [], [0.0]
    lines = Lines(said.append, clock=lambda: now[0])
    for second in range(26):
        now[0] = float(second)
        lines.update("looking at photos", 40 * second, 1000)
    lines.update("writing", 0, 1)
    lines.update("writing", 1, 1)  # too quick to be said
    assert said == [
        "looking at photos: 400 of 1,000, 10 s, about 15 s left",
        "looking at photos: 800 of 1,000, 20 s, about 5 s left",
        "looking at photos: 1,000 of 1,000, 25 s",
    ]


def test_commands_say_how_far_they_are_where_there_is_no_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "EVERY", 0.0)
    err = works(capsys, "train", "digits", *SMALL, "--out", tmp_path / "run").err
    assert [line.split(",")[0] for line in err.splitlines()] == ["epochs: 1 of 2", "epochs: 2 of 2"]
    assert "loss" in err
