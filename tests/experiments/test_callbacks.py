"""What watches a run: the moments it is told of, and the loggers, with stand-ins for the services."""

import sys
import types

import pytest
import torch

from opencon.errors import MissingExtraError
from opencon.experiments.callbacks import Callback, MLflowLogger, WandbLogger, numbers, settings
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import train
from tests.experiments.test_run import small

CPU = torch.device("cpu")


class Diary(Callback):
    def __init__(self):
        self.lines = []

    def prepare(self):
        self.lines.append("prepare")

    def started(self, training):
        self.lines.append(f"started at {training.first_epoch} with {training.num_steps} steps")

    def stepped(self, training, epoch, steps):
        self.lines.append("step")

    def epoch_done(self, training, record):
        assert training.record is record
        self.lines.append(f"epoch {record['epoch']}")
        if record["epoch"] == 0 and len(self.lines) < 6:
            raise KeyboardInterrupt

    def finished(self, training, result):
        self.lines.append(f"finished {result['num_images']}")

    def closed(self):
        self.lines.append("closed")


def test_the_moments_of_a_run_that_is_interrupted_and_resumed(tmp_path):
    first, then = Diary(), Diary()
    with pytest.raises(KeyboardInterrupt):
        train(small("train.epochs=2"), tmp_path, CPU, watchers=[first])
    assert first.lines == ["prepare", "started at 0 with 7 steps", "epoch 0", "closed"]
    train(small("train.epochs=2"), tmp_path, CPU, watchers=[then])
    assert then.lines == ["prepare", "started at 1 with 7 steps", "epoch 1", "finished 1332", "closed"]


class Service(types.ModuleType):
    """Writes down how it is called; stands in for wandb and for mlflow."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []
        self.summary = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **options):
            self.calls.append((name, args, options))
            return self

        return call

    def of(self, name):
        return [(args, options) for called, args, options in self.calls if called == name]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_gets_settings_curves_and_result(tmp_path, monkeypatch, name):
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    logger = WandbLogger(project="mine") if name == "wandb" else MLflowLogger(experiment="mine", tracking_uri="file:x")
    result = train(small("train.epochs=2"), tmp_path / "run", CPU, watchers=[logger])
    if name == "wandb":
        ((_, start),) = service.of("init")
        assert (start["project"], start["name"]) == ("mine", "run")
        assert start["config"]["train.epochs"] == 2
        curves = [("all" in args[0], options["step"]) for args, options in service.of("log")]
        assert curves == [
            (False, 0),
            (True, 1),
        ]
        ((update, _),) = service.of("update")
        assert update[0]["all"] == result["all"]
        assert service.calls[-1][0] == "finish"
    else:
        assert service.of("set_tracking_uri") == [(("file:x",), {})]
        assert service.of("set_experiment") == [(("mine",), {})]
        assert service.of("start_run") == [((), {"run_name": "run"})]
        assert service.of("log_params")[0][0][0]["train.epochs"] == "2"
        curves = service.of("log_metrics")
        assert [options.get("step") for _, options in curves] == [0, 1, None]
        assert curves[-1][0][0]["result_all"] == result["all"]
        assert service.calls[-1][0] == "end_run"


@pytest.mark.parametrize(("name", "logger"), [("wandb", WandbLogger), ("mlflow", MLflowLogger)])
def test_a_service_that_is_not_installed_is_said_before_anything_is_written(tmp_path, monkeypatch, name, logger):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"--log {name} needs {name}.*pip install 'opencon\[{name}\]'"):
        train(small(), tmp_path / "run", CPU, watchers=[logger()])
    assert not (tmp_path / "run").exists()


def test_only_numbers_become_curves():
    record = {"epoch": 3, "loss": 1.5, "on": "unlabeled", "novel": float("nan"), "num_images": 7, "flag": True}
    assert numbers(record) == {"loss": 1.5, "num_images": 7.0}


def test_settings_go_by_their_dotted_names():
    flat = settings(get_recipe("digits"))
    assert flat["method.name"] == "opencon"
    assert flat["split.num_seen"] == 5
