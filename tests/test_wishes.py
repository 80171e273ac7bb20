"""What a researcher wants without a fork, each wish as a short example: views, optimizers, rates, plugins."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import opencon
from opencon import plugins
from opencon.errors import ConfigError
from opencon.experiments.recipes import get_recipe
from opencon.methods import METHODS
from opencon.plugins import import_file
from opencon.registry import Registry
from opencon.training.run_folder import RunFolder
from tests.test_cli import refused, works

pytestmark = pytest.mark.usefixtures("own_plugins")
SWAP = Path(__file__).parents[1] / "examples/swap.py"
QUICK = ["--device", "cpu", "--set", "train.epochs=1", "--set", "train.batch_size=256"]


def settings(*values):
    return [word for value in values for word in ("--set", value)]


def config(run):
    return json.loads((run / "config.json").read_text())


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- views ------------------------------------------------------------------------------------------------------------


def test_i_want_six_views_of_several_sizes_each_made_in_its_own_way(tmp_path, capsys):
    views = [
        {"size": 10, "crop_scale": [0.4, 0.8], "flip_p": 0, "jitter_p": 0, "gray_p": 0, "count": 3},
        {"crop_scale": None, "flip_p": 0, "rand_ops": 2, "rand_magnitude": 5},
    ]
    run = tmp_path / "run"
    ran = works(capsys, "train", "concord/digits", "--out", run, *QUICK, *settings(f"views={json.dumps(views)}"))
    assert "2 of 8 px, 3 of 10 px, 1 of 8 px" in ran.out
    assert config(run)["views"][1]["rand_ops"] == 2
    assert "loss_crops" in lines(run)[0]


@pytest.mark.parametrize(
    ("recipe", "setting", "sentence"),
    [
        ("opencon/digits", 'views=[{"count": 2}]', "opencon uses two views of an image and can do nothing with more."),
        ("opencon/digits", "augment.mixup=0.2", "opencon cannot learn from images that are mixed with each other."),
        (
            "concord/digits",
            'views=[{"cutmix": 1.0}]',
            "concord cannot learn from images that are mixed with each other.",
        ),
        ("opencon/digits", "augment.mixup=0.01", "augment.mixup = 0.01 must be 0 (off) or at least 0.05."),
        ("opencon/digits", "augment.rand_magnitude=31", "augment.rand_magnitude = 31.0 must lie between 0 and 30."),
        ("opencon/digits", "augment.name=nose", "unknown augmentation 'nose'."),
    ],
)
def test_what_a_method_cannot_use_is_refused_in_a_sentence(recipe, setting, sentence, tmp_path, capsys):
    assert sentence in refused(capsys, "train", recipe, "--out", tmp_path / "run", *settings(setting))
    assert not (tmp_path / "run").exists()


MIXED = '''
"""Mixed: ours, 2026. A classifier of seen classes that learns from mixed images."""
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from opencon.config import MethodConfig, ViewConfig, Views
from opencon.methods import LABELS, METHODS, Assignment, Method, MethodEntry, StepOutput
from opencon.methods.schedule import usual


@dataclass(frozen=True, kw_only=True)
class MixedConfig(MethodConfig):
    name: ClassVar[str] = "mixed"
    views: ClassVar[Views] = Views(least=3, most=3, mixed=True)


class Mixed(Method):
    settings = MixedConfig

    def __init__(self, config, task, embedder):
        super().__init__(config, task, embedder)
        self.classifier = torch.nn.Linear(embedder.dim, task.num_classes)

    @classmethod
    def schedule(cls, kind, variant="released"):
        own = usual(MixedConfig(), kind)
        mixing = ViewConfig(crop_scale=None, flip_p=0, jitter_p=0, gray_p=0, mixup=0.4, cutmix=1.0, mix_p=0.8)
        return replace(own, views=(mixing,))

    def step(self, batch):
        L, mix = batch.num_labeled, batch.mixes[2]
        known = F.one_hot(batch.labels.clamp(min=0), self.task.num_classes).float()
        logits = self.classifier(self.embedder(batch.views[2]))
        return StepOutput(F.cross_entropy(logits[:L], mix.of(known)[:L]))  # a labeled image's partner is labeled

    def assign(self, bank):
        return Assignment.from_logits(self.classifier(bank.z), self.task.num_seen)


METHODS.add("mixed", MethodEntry(Mixed, "Mixed", "ours", 2026, LABELS))
'''


def test_i_want_to_learn_from_mixed_images(tmp_path, capsys):
    file = tmp_path / "mixed.py"
    file.write_text(MIXED)
    run = tmp_path / "run"
    works(capsys, "train", "mixed/digits", "--import", file, "--out", run, *QUICK, *settings("train.epochs=4"))
    losses = [line["loss"] for line in lines(run)]
    assert losses[-1] < losses[0]
    few = refused(capsys, "train", "mixed/digits", "--out", tmp_path / "two", *settings("views=[]"))
    assert "mixed needs at least three views of an image, and there are 2. Add some to views." in few
    other = refused(capsys, "train", "mixed/digits", "--out", tmp_path / "two", *settings("views.0.size=10"))
    assert "mixed takes views of one size" in other


# --- the optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_i_want_another_optimizer_and_groups_of_my_own(name, tmp_path, capsys):
    rules = [{"match": ["head"], "lr": 0.003}, {"match": ["norms", "biases"], "weight_decay": 0}]
    wish = settings(f"train.optimizer={name}", "train.lr=0.001", f"train.groups={json.dumps(rules)}")
    run = tmp_path / "run"
    assert name in works(capsys, "train", "simgcd/digits", "--out", run, *QUICK, *wish).out
    idle = works(capsys, "train", "simgcd/digits", "--dry-run", *settings("train.trust=0.5", *wish[1::2])).out
    assert ("note  train.trust has no effect" in idle) == (name != "lars")
    train = config(run)["train"]
    assert (train["optimizer"], train["groups"][0]) == (name, {"match": ["head"], "lr": 0.003, "weight_decay": None})
    groups = RunFolder(run).load_checkpoint()["optimizer"]["param_groups"]
    rates = {(round(float(g["lr"]), 6), g["weight_decay"]) for g in groups}
    decay = train["weight_decay"]
    assert rates == {(0.001, decay), (0.001, 0.0), (0.003, decay), (0.003, 0.0)}


def test_a_rule_that_fits_nothing_is_refused_before_anything_is_written(tmp_path, capsys):
    wish = settings('train.groups=[{"match": ["layer5.*"], "lr": 1}]')
    sentence = refused_after_the_plan(capsys, "train", "opencon/digits", "--out", tmp_path / "run", *QUICK, *wish)
    assert "train.groups: 'layer5.*' fits no parameter that learns." in sentence
    assert list((tmp_path / "run").iterdir()) == []


def refused_after_the_plan(capsys, *args):
    from tests.test_cli import opencon

    ran = opencon(capsys, *args)
    assert ran.code == 2
    return ran.err


def test_a_stopped_run_goes_on_with_any_optimizer(tmp_path, capsys):
    """Bit for bit: moments, counts and rates by step among what is kept."""
    from opencon.config import with_settings
    from opencon.experiments.train import Callbacks, train

    wish = [
        "train.optimizer=adamw",
        "train.lr=0.001",
        "train.clip=0.5",
        "train.per_step=true",
        "train.warmup_epochs=1.5",
    ]
    quick = with_settings(get_recipe("simgcd/digits"), ["train.epochs=3", "train.batch_size=256", *wish])

    def stop(record):
        if record["epoch"] == 0:
            raise KeyboardInterrupt

    cpu = torch.device("cpu")
    with pytest.raises(KeyboardInterrupt):
        train(quick, tmp_path / "run", cpu, callbacks=Callbacks(epoch_done=stop))
    train(quick, tmp_path / "run", cpu)
    train(quick, tmp_path / "whole", cpu)
    stopped, whole = (RunFolder(tmp_path / name).load_checkpoint()["method"] for name in ("run", "whole"))
    assert all(torch.equal(stopped[key], whole[key]) for key in whole)


# --- the rate ---------------------------------------------------------------------------------------------------------


def test_i_want_clipping_a_warm_up_by_step_and_a_schedule_of_my_own(tmp_path, capsys):
    file = tmp_path / "line.py"
    file.write_text(
        "from opencon.training.optimizer import SCHEDULES, ScheduleEntry\n"
        "SCHEDULES.add('line', ScheduleEntry(lambda c, epoch: c.lr * (1 - epoch / c.epochs), 'straight to zero'))\n"
    )
    wish = settings("train.schedule=line", "train.clip=1.0", "train.per_step=true", "train.warmup_epochs=0.5")
    run = tmp_path / "run"
    ran = works(capsys, "train", "simgcd/digits", "--import", file, "--out", run, *QUICK, *wish)
    assert "(line)" in ran.out
    (group,) = RunFolder(run).load_checkpoint()["optimizer"]["param_groups"]
    train = config(run)["train"]
    steps = len(json.loads((run / "split.json").read_text())["labeled"]) // 128  # half of a batch is labeled
    assert float(group["lr"]) == pytest.approx(train["lr"] / steps)  # of the last step


# --- plugins ----------------------------------------------------------------------------------------------------------


def test_i_want_my_method_in_a_file_of_my_own(tmp_path, capsys):
    """Swapped prediction with four small crops, AdamW, clipping and a warm-up by step, in fewer than 100 lines."""
    assert len(SWAP.read_text().splitlines()) < 100
    run, other = tmp_path / "swap", tmp_path / "simgcd"
    few = ["--device", "cpu", *settings("train.epochs=6")]
    works(capsys, "train", "swap/digits", "--import", SWAP, "--out", run, *few)
    works(capsys, "train", "simgcd/digits", "--out", other, *few)
    assert config(run)["views"][0]["count"] == 4
    train = config(run)["train"]
    assert (train["optimizer"], train["clip"], train["per_step"], train["warmup_epochs"]) == ("adamw", 1.0, True, 2)
    result = json.loads((run / "result.json").read_text())
    assert result["all"] > 0.4  # ten classes
    assert json.loads(works(capsys, "evaluate", run, "--json").out)["all"] == result["all"]
    table = works(capsys, "compare", run, other, "--format", "csv").out
    assert "Swap" in table
    assert "SimGCD" in table
    opencon.export(run, tmp_path / "model", onnx=False)
    assert "| needs | method swap of swap.py, to be given" in (tmp_path / "model/README.md").read_text("utf-8")
    forget_plugins()  # as in another process: both folders find the file again
    said = [works(capsys, "predict", where, digits_as_files(tmp_path)).out for where in (run, tmp_path / "model")]
    assert said[0] == said[1]
    predicted = [json.loads(line)["predicted"] for line in said[0].splitlines()]
    assert predicted.count("0") > 5  # of ten zeros
    forget_plugins()
    (tmp_path / "home/.cache/opencon/imported.json").unlink()  # a stranger
    assert "You have never imported that file" in refused(capsys, "predict", tmp_path / "model", SWAP.parent)


def forget_plugins():
    for origin in plugins._known():
        Registry.forget(origin)


def digits_as_files(folder):
    """Ten zeros."""
    digits = load_digits()
    (folder / "zeros").mkdir(exist_ok=True)
    for i in np.nonzero(digits.target == 0)[0][:10]:
        pixels = np.rint(digits.images[i] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"zeros/{i:04}.png")
    return folder / "zeros"


def test_i_want_the_common_checks_to_run_over_my_method():
    from tests.methods import test_every_method as checks

    import_file(SWAP)
    assert "swap" in METHODS
    common = checks.TestEveryMethod()
    common.test_has_one_name_everywhere("swap")
    common.test_docstring_names_the_paper("swap")
    common.test_every_kind_of_images_has_a_schedule("swap")
    checks.TestEveryMethodThatTrains().test_step_changes_no_state("swap")


def test_a_method_without_its_file_is_unknown():
    with pytest.raises(ConfigError, match="unknown method 'swap'"):
        get_recipe("swap/digits")
