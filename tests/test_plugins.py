"""Plugins: imported, remembered by a run, found again or asked for in a sentence."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from opencon import plugins
from opencon.config import with_settings
from opencon.data.augment import AUGMENTATIONS
from opencon.errors import ConfigError, MissingPluginError
from opencon.experiments.compare import compare_runs
from opencon.experiments.evaluate import evaluate_run
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import Callbacks, train
from opencon.methods import METHODS
from opencon.plugins import import_file, import_installed
from opencon.registry import Origin, Registry
from tests.test_cli import refused, works

pytestmark = pytest.mark.usefixtures("own_plugins")
CPU = torch.device("cpu")
METHOD = """
from dataclasses import dataclass, replace
from typing import ClassVar

from opencon.methods import METHODS, MethodEntry, SimGCD, SimGCDConfig


@dataclass(frozen=True, kw_only=True)
class MineConfig(SimGCDConfig):
    name: ClassVar[str] = "mine"


class Mine(SimGCD):
    settings = MineConfig

    @classmethod
    def schedule(cls, kind, variant="released"):
        return replace(super().schedule(kind, variant), method=MineConfig())


METHODS.add("mine", MethodEntry(Mine, "Mine", "ours", 2026, "labels, count"))
"""
EVERYTHING = """
import torch

from opencon.config import DataConfig
from opencon.data.augment import AUGMENTATIONS, AugmentationEntry
from opencon.data.benchmarks import DATASETS
from opencon.encoders import ENCODERS
from opencon.experiments.recipes import SETTINGS, Setting
from opencon.training.optimizer import OPTIMIZERS, SCHEDULES, OptimizerEntry, ScheduleEntry


class Noise:
    def __init__(self, config, *, image_size, channels):
        self.shape = (channels, image_size, image_size)

    def draw(self, num_images, source_size, generator):
        return (torch.rand(num_images, *self.shape, generator=generator, device=generator.device),)

    def apply(self, images, params):
        return (0.9 * images.float() / 255 + 0.1 * params[0]).clamp(0, 1)


AUGMENTATIONS.add("noise", AugmentationEntry(Noise, "a tenth of noise"))
ENCODERS.add("tiny", ENCODERS["convnet"])
DATASETS.add("my_digits", DATASETS["digits"])
SETTINGS.add("my_digits", Setting("My digits", "digits", DataConfig(name="my_digits"), 5, "tiny"))
OPTIMIZERS.add("bare", OptimizerEntry(lambda groups, config: torch.optim.SGD(groups), "ours", captures=False))
SCHEDULES.add("line", ScheduleEntry(lambda config, epoch: config.lr * (1 - epoch / config.epochs), "straight to zero"))
"""


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def mine(tmp_path):
    return written(tmp_path / "mine.py", METHOD)


def short(recipe="mine/digits", *settings):
    return with_settings(get_recipe(recipe), ["train.epochs=1", "train.batch_size=256", *settings])


def forget_all():
    """As in another process, which has imported nothing yet."""
    for origin in plugins._known():
        Registry.forget(origin)
    assert "mine" not in METHODS


@pytest.fixture
def trained(mine, tmp_path):
    """A run of a method in a file, as another process finds it."""
    import_file(mine)
    result = train(short(), tmp_path / "run", CPU)
    forget_all()
    return tmp_path / "run", result


# --- remembered, and found again --------------------------------------------------------------------------------------


def test_a_run_remembers_the_file_and_finds_it_again(trained, mine):
    folder, result = trained
    (record,) = json.loads((folder / "plugins.json").read_text())["plugins"]
    assert (record["kind"], record["place"]) == ("file", str(mine.resolve()))
    assert record["brings"] == ["method mine"]
    again = evaluate_run(folder, CPU)
    assert {key: again[key] for key in ("all", "novel", "seen")} == {
        key: result[key] for key in ("all", "novel", "seen")
    }
    forget_all()
    (section,) = compare_runs([folder])
    assert section.rows[0].label == "Mine"


def test_a_run_of_our_own_methods_remembers_nothing(tmp_path):
    train(short("simgcd/digits"), tmp_path / "run", CPU)
    assert not (tmp_path / "run/plugins.json").exists()


def test_every_kind_of_thing_can_come_from_a_file(tmp_path, capsys):
    file = written(tmp_path / "everything.py", EVERYTHING)
    parts = ["train.optimizer=bare", "train.schedule=line", "augment.name=noise", "train.epochs=2"]
    arguments = [argument for part in parts for argument in ("--set", part)]
    run = tmp_path / "run"
    works(capsys, "train", "simgcd/my_digits", "--import", file, "--out", run, *arguments, "--device", "cpu")
    (record,) = json.loads((run / "plugins.json").read_text())["plugins"]
    names = ["encoder tiny", "data set my_digits", "augmentation noise", "optimizer bare", "schedule line"]
    assert record["brings"] == names
    forget_all()
    assert "noise" not in AUGMENTATIONS
    shown = works(capsys, "evaluate", run, "--json").out
    assert json.loads(shown)["all"] == json.loads((run / "result.json").read_text())["all"]
    forget_all()
    listed = works(capsys, "list", "--import", file).out
    for name in ("tiny", "My digits", "noise (a tenth of noise)", "bare (ours)", "line (straight to zero)"):
        assert name in listed
    assert "The schedule line comes from everything.py." in listed
    assert "noise" in works(capsys, "list", "views").out
    assert "noise" not in works(capsys, "list", "optimizers").out


def test_a_stopped_run_goes_on_without_the_option(mine, tmp_path, capsys):
    import_file(mine)
    run = tmp_path / "run"

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(short("mine/digits", "train.epochs=2"), run, CPU, callbacks=Callbacks(epoch_done=stop))
    forget_all()
    settings = ["--set", "train.epochs=2", "--set", "train.batch_size=256", "--device", "cpu"]
    works(capsys, "train", "mine/digits", "--out", run, *settings)
    assert (run / "result.json").is_file()


def test_a_method_from_a_changed_file_does_not_go_on(mine, tmp_path):
    import_file(mine)
    train(short(), tmp_path / "run", CPU)
    import_file(written(mine, METHOD + "# another line\n"))
    with pytest.raises(
        ConfigError, match=r"mine\.py, which .*run needs for its method mine, has changed since the run"
    ):
        train(short(), tmp_path / "run", CPU)


def test_a_method_that_a_script_registers_is_remembered_and_asked_for(mine, tmp_path):
    """The script may do anything when it is imported, so nobody imports it unasked."""
    names = {"__name__": "__main__", "__file__": str(mine)}
    module = type(sys)("__main__")
    module.__dict__.update(names)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        exec(compile(METHOD, str(mine), "exec"), module.__dict__)
    finally:
        sys.modules["__main__"] = before
    train(short(), tmp_path / "run", CPU)
    forget_all()
    with pytest.raises(
        MissingPluginError, match=r"You have never imported that file: to trust it, give it with --import"
    ):
        evaluate_run(tmp_path / "run", CPU)
    import_file(mine)
    evaluate_run(tmp_path / "run", CPU)


# --- what is missing --------------------------------------------------------------------------------------------------


def test_a_file_that_is_gone_or_changed_is_asked_for(trained, mine, tmp_path):
    folder, _ = trained
    written(mine, METHOD + "# changed\n")
    with pytest.raises(
        MissingPluginError, match=r"needs the method mine, .* has changed since\. To use it as it is now"
    ):
        evaluate_run(folder, CPU)
    mine.rename(tmp_path / "elsewhere.py")
    with pytest.raises(MissingPluginError, match=r"that file is gone\. Give it with --import FILE"):
        evaluate_run(folder, CPU)
    import_file(tmp_path / "elsewhere.py")
    with pytest.warns(UserWarning, match="as it was then"):
        evaluate_run(folder, CPU)


def test_a_stranger_s_run_executes_nothing(trained, tmp_path, monkeypatch):
    """The same file, but another user, who has never imported it."""
    folder, _ = trained
    monkeypatch.setenv("HOME", str(tmp_path / "stranger"))
    with pytest.raises(MissingPluginError, match="You have never imported that file"):
        evaluate_run(folder, CPU)
    assert "mine" not in METHODS


def test_the_rest_of_a_comparison_is_shown(trained, mine, tmp_path, capsys):
    folder, _ = trained
    train(short("simgcd/digits"), tmp_path / "gcd", CPU)
    mine.unlink()
    ran = works(capsys, "compare", folder, tmp_path / "gcd", "--format", "csv")
    assert "GCD" in ran.out
    assert "Mine" not in ran.out
    assert "Left out:" in ran.err
    assert "that file is gone" in ran.err
    assert "that file is gone" in refused(capsys, "compare", folder)


def test_a_method_of_a_session_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    record = {"kind": "file", "place": "", "checksum": "", "brings": ["method typed"]}
    (tmp_path / "plugins.json").write_text(json.dumps({"plugins": [record]}))
    with pytest.raises(MissingPluginError, match=r"from an interactive session\. Put it into a file"):
        plugins.recall(tmp_path)


def test_a_damaged_record_is_a_sentence(tmp_path):
    (tmp_path / "plugins.json").write_text("{")
    with pytest.raises(MissingPluginError, match="The run folder is damaged"):
        plugins.recall(tmp_path)


def test_every_command_that_opens_a_run_can_be_given_the_file(trained, mine, tmp_path, capsys):
    folder, _ = trained
    moved = mine.rename(tmp_path / "elsewhere.py")
    names = written(tmp_path / "names.csv", "group,name\nnew-1,seven\n")
    out = tmp_path / "out"
    (tmp_path / "images").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "images/0.png")
    commands = [
        ("evaluate", folder, "--json"),
        ("name", folder, names),
        ("predict", folder, tmp_path / "images"),
        ("export", folder, "--out", out / "model", "--no-onnx"),
        ("embed", tmp_path / "images", "--encoder", folder, "--out", out / "shards"),
    ]
    for words in commands:
        forget_all()
        assert "that file is gone" in refused(capsys, *words)
        works(capsys, *words, "--import", moved)


# --- files that cannot be imported ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", r"cannot be imported, line 1 \(SyntaxError"),
        ("x = 1\ny = x / 0\n", r"cannot be imported, line 2 \(ZeroDivisionError: division by zero\)"),
        ("import nothing_of_this_name\n", r"line 1 \(ModuleNotFoundError"),
        ("x = 1\n", "registers nothing"),
        (METHOD.replace('"mine"', '"gcd"'), r"method 'gcd' is registered twice"),
        (METHOD + "raise ValueError('late')\n", r"ValueError: late"),
    ],
)
def test_a_bad_file_is_one_sentence_and_leaves_nothing_behind(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        import_file(written(tmp_path / "bad.py", text))
    assert plugins._known() == set()


def test_a_file_that_is_not_there_is_a_sentence(tmp_path, capsys):
    assert "no.py: the file cannot be read" in refused(capsys, "list", "--import", tmp_path / "no.py")
    with pytest.raises(ConfigError, match=r"its name must end in \.py"):
        import_file(written(tmp_path / "mine.txt", METHOD))


def test_a_file_is_imported_once_and_takes_its_own_place(mine):
    import_file(mine)
    first = METHODS["mine"]
    import_file(mine)
    assert METHODS["mine"] is first
    import_file(written(mine, METHOD.replace('"Mine"', '"Mine again"')))
    assert METHODS["mine"].title == "Mine again"


def test_a_file_that_python_imports_too_takes_its_own_place(mine, monkeypatch):
    import_file(mine)
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    importlib.import_module("mine")  # its folder is on the path now
    assert METHODS["mine"].build.__module__ == "mine"


def test_a_sweep_has_plugins_too(mine, tmp_path, capsys):
    small = ["--set", "train.epochs=1", "--set", "train.batch_size=256", "--device", "cpu"]
    works(capsys, "sweep", "mine/digits", "--import", mine, "--out", tmp_path / "sweep", *small)
    forget_all()
    assert "Mine" in works(capsys, "sweep", "--out", tmp_path / "sweep", "--format", "csv").out


def test_a_file_may_import_what_lies_beside_it(mine, tmp_path):
    written(tmp_path / "helpers_of_mine.py", "TITLE = 'Helped'\n")
    import_file(written(mine, "from helpers_of_mine import TITLE\n" + METHOD.replace('"Mine"', "TITLE")))
    assert METHODS["mine"].title == "Helped"


# --- installed packages -----------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with an entry point, installed."""
    monkeypatch.setattr(plugins, "_installed", set())
    site = tmp_path / "site"
    info = site / "my_package-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[opencon.plugins]\nmine = my_module_of_methods\n")
    written(site / "my_module_of_methods.py", METHOD)
    monkeypatch.syspath_prepend(site)
    yield site
    sys.modules.pop("my_module_of_methods", None)


def test_an_installed_package_is_found_by_itself(package, tmp_path, capsys):
    assert "The method mine comes from my-package 1.2." in works(capsys, "list", "methods").out
    train(short(), tmp_path / "run", CPU)
    (record,) = json.loads((tmp_path / "run/plugins.json").read_text())["plugins"]
    assert (record["kind"], record["place"], record["checksum"]) == (
        "entry point",
        "my_module_of_methods",
        "my-package 1.2",
    )
    assert plugins.needs(tmp_path / "run") == ["method mine of the package my-package 1.2"]
    Registry.forget(Origin("entry point", "my_module_of_methods", "my-package 1.2"))
    with pytest.raises(MissingPluginError, match=r"came with the package my-package 1\.2\. Install it again"):
        evaluate_run(tmp_path / "run", CPU)


def test_an_installed_package_is_imported_when_a_run_needs_it(package, tmp_path):
    record = {
        "kind": "entry point",
        "place": "my_module_of_methods",
        "checksum": "my-package 1.1",
        "brings": ["method mine"],
    }
    (tmp_path / "plugins.json").write_text(json.dumps({"plugins": [record]}))
    plugins.recall(tmp_path)
    assert METHODS["mine"].title == "Mine"


def test_a_broken_package_spoils_nothing_else(package, capsys):
    written(package / "my_module_of_methods.py", "raise OSError('broken')\n")
    (problem,) = import_installed()
    assert problem == "the plugin mine of my-package 1.2 cannot be imported (OSError: broken)."
    assert import_installed() == []  # said once
    plugins._installed.clear()
    ran = works(capsys, "list", "methods")
    assert "broken" in ran.err
    assert "opencon" in ran.out


def test_the_same_checksum_is_remembered_where_it_can_be_written(mine, tmp_path, monkeypatch):
    import_file(mine)
    assert len(json.loads((tmp_path / "home/.cache/opencon/imported.json").read_text())) == 1
    forget_all()
    monkeypatch.setenv("HOME", str(Path("/proc/nowhere")))
    import_file(mine)  # cannot be noted, and works all the same
    assert "mine" in METHODS
