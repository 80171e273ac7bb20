"""On a GPU: optimizers, groups, clipping, rates by step and mixed views inside a recorded step equal the plain one."""

import json
from pathlib import Path

import pytest
import torch

from opencon.config import with_settings
from opencon.experiments import train as train_module
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import Callbacks, train
from opencon.experiments.workbench import build_loader, prepare
from opencon.plugins import import_file
from opencon.training import trainer
from opencon.training.optimizer import OPTIMIZERS, build_optimizer, learning_rate
from opencon.training.run_folder import RunFolder
from opencon.training.trainer import fit

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SWAP = Path(__file__).parents[2] / "examples/swap.py"
RULES = json.dumps([{"match": ["head"], "lr": 0.0005}, {"match": ["norms", "biases"], "weight_decay": 0}])
# Slow, so that rounding does not grow.
BY_STEP = (
    "train.per_step=true",
    "train.warmup_epochs=0.5",
    "train.clip=0.1",
    f"train.groups={RULES}",
    "train.lr=0.0002",
)


@pytest.fixture
def watched(monkeypatch):
    """Every recording that is made."""
    made = []

    class Watched(trainer.Captured):
        def __init__(self, step):
            super().__init__(step)
            made.append(self)

    monkeypatch.setattr(trainer, "Captured", Watched)
    return made


def trained(recipe, *settings):
    """Mean loss of each epoch, how far the weights have moved, and the rates at the end."""
    config = with_settings(get_recipe(recipe), ["train.epochs=2", "train.batch_size=128", *settings])
    bench = prepare(config, CUDA)
    learning = [p for p in bench.method.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in learning]
    optimizer, means = build_optimizer(bench.method, config.train), []
    loader = build_loader(bench)
    fit(
        bench.method,
        optimizer,
        loader,
        config.train,
        features=bench.bank,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        on_epoch=lambda epoch, m: means.append(m["loss"]),
    )
    moved = torch.cat([(p.detach() - s).flatten() for p, s in zip(learning, start, strict=True)])
    return (
        means,
        moved,
        [float(g["lr"]) for g in optimizer.param_groups],
        learning_rate(config.train, 1, len(loader) - 1, len(loader)),
    )


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_a_recorded_step_with_any_optimizer_equals_the_plain_one(name, watched):
    settings = [*BY_STEP, f"train.optimizer={name}", "train.trust=0.1"]
    plain, plain_move, rates, last = trained("simgcd/digits", "train.capture=false", *settings)
    assert watched == []
    recorded, move, same_rates, _ = trained("simgcd/digits", *settings)
    (one,) = watched
    assert one.graph is not None
    assert recorded == pytest.approx(plain, rel=1e-3)
    assert (move - plain_move).norm() < 0.05 * plain_move.norm()
    assert rates == pytest.approx(same_rates)
    assert min(rates) == pytest.approx(last)  # of the last step
    assert max(rates) == pytest.approx(2.5 * last)  # the head's


def test_an_optimizer_that_reads_back_is_not_recorded(watched, own_plugins):
    from opencon.training.optimizer import OptimizerEntry

    OPTIMIZERS.add("bare", OptimizerEntry(lambda groups, config: torch.optim.SGD(groups), "ours", captures=False))
    means, *_ = trained("simgcd/digits", "train.optimizer=bare")
    assert watched == []
    assert means[1] < means[0]


def test_a_run_with_adamw_is_resumed_in_its_graph(tmp_path, monkeypatch):
    """Counters on the device are restored to the device, whatever machine wrote the checkpoint."""
    made = []
    monkeypatch.setattr(train_module, "build_optimizer", lambda *args: made.append(build_optimizer(*args)) or made[-1])
    config = with_settings(get_recipe("simgcd/digits"), ["train.epochs=4", "train.optimizer=adamw", *BY_STEP])

    def stop(record):
        if record["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", CUDA, callbacks=Callbacks(epoch_done=stop))
    train(config, tmp_path / "run", CUDA)
    assert all(state["step"].is_cuda for state in made[-1].state.values())
    whole = train(config, tmp_path / "whole", CUDA)
    resumed = RunFolder.open_for_reading(tmp_path / "run").read_metrics()[-1]
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=3e-2)


def test_a_plugin_is_recorded_like_a_method_of_ours(watched, own_plugins):
    """Six views of its own, AdamW, clipping and a warm-up by step in one graph."""
    import_file(SWAP)
    slow = ["train.lr=0.0001", "train.warmup_epochs=1"]
    plain, plain_move, *_ = trained("swap/digits", "train.capture=false", "train.kernels=false", *slow)
    recorded, move, *_ = trained("swap/digits", *slow)
    (one,) = watched
    assert one.graph is not None
    assert recorded == pytest.approx(plain, rel=1e-3)
    assert (move - plain_move).norm() < 0.05 * plain_move.norm()


def test_randaugment_is_recorded(watched):
    views = json.dumps([{"crop_scale": None, "flip_p": 0, "jitter_p": 0, "gray_p": 0, "rand_ops": 2, "count": 2}])
    settings = [f"views={views}", "train.lr=0.001", "method.contrast_epochs=0"]
    plain, *_ = trained("concord/digits", "train.capture=false", "train.kernels=false", *settings)
    recorded, *_ = trained("concord/digits", *settings)
    (one,) = watched
    assert one.graph is not None
    assert recorded == pytest.approx(plain, rel=1e-2)


def test_clipping_and_fp16_go_together():
    config = with_settings(get_recipe("simgcd/digits"), ["train.epochs=2", "train.precision=fp16", "train.clip=1.0"])
    bench, means = prepare(config, CUDA), []
    fit(
        bench.method,
        build_optimizer(bench.method, config.train),
        build_loader(bench),
        config.train,
        features=bench.bank,
        scaler=torch.amp.GradScaler("cuda"),
        on_epoch=lambda epoch, m: means.append(m["loss"]),
    )
    assert means[1] < means[0]
