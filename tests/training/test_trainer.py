from itertools import pairwise

import pytest
import torch
from torch import nn

from opencon.config import TrainConfig
from opencon.data.loader import TwoStreamLoader
from opencon.errors import DivergedError
from opencon.methods import Method, StepOutput
from opencon.methods.base import Batch
from opencon.training.optimizer import build_optimizer, learning_rate
from opencon.training.trainer import fit
from tests.methods.toys import TASK, ExactEmbedder


class Recorder(Method):
    """Writes down the order in which its verbs are called."""

    def __init__(self, bad_at=None):
        super().__init__(None, TASK, ExactEmbedder())
        self.calls, self.bad_at, self.steps = [], bad_at, 0

    def before_epoch(self, epoch):
        self.calls.append(f"before {epoch.index}")

    def step(self, batch: Batch) -> StepOutput:
        self.calls.append("step")
        part = self.embed(batch.views[0]).sum()
        other = part * (float("nan") if self.steps == self.bad_at else 1.0)
        self.steps += 1
        return StepOutput(part + other, {"part": part.detach(), "other": other.detach()}, carry=(torch.tensor(7),))

    def after_step(self, *carry):
        self.calls.append(f"after {int(carry[0])}")

    def assign(self, bank):
        raise AssertionError


class PlusOne:
    def draw(self, num_images, source_size, generator):
        return ()

    def apply(self, images, params):
        return images.float() + 1


def loader():
    images = torch.zeros(12, 1, 3, 3, dtype=torch.uint8)
    labels = torch.tensor([0, 1] * 3 + [-1] * 6)
    return TwoStreamLoader(images, labels, batch_shares=(3, 3), augments=(PlusOne(), PlusOne()), seed=0)


def run(method, config, **kwargs):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    fit(method, build_optimizer(method, config), loader(), config, features=lambda: None, scaler=scaler, **kwargs)


def test_the_order_of_the_verbs():
    method = Recorder()
    run(method, TrainConfig(epochs=2))
    assert method.calls == ["before 0", *["step", "after 7"] * 2, "before 1", *["step", "after 7"] * 2]


def test_learning_rate_follows_the_epoch_also_when_resumed():
    seen = []
    config = TrainConfig(epochs=4, lr=1.0, milestones=(2,))
    method = Recorder()
    optimizer = build_optimizer(method, config)
    fit(
        method,
        optimizer,
        loader(),
        config,
        features=lambda: None,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        first_epoch=1,
        on_epoch=lambda epoch, means: seen.append((epoch, float(optimizer.param_groups[0]["lr"]))),
    )
    assert seen == [(1, 1.0), (2, pytest.approx(0.1)), (3, pytest.approx(0.1))]


def test_a_nan_stops_the_run_and_names_the_term_and_the_step():
    with pytest.raises(DivergedError, match="other was not a finite number at epoch 1, step 1"):
        run(Recorder(bad_at=3), TrainConfig(epochs=5))


def test_means_are_over_the_steps_of_the_epoch():
    method, means = Recorder(), []
    run(method, TrainConfig(epochs=2, lr=1e-12), on_epoch=lambda epoch, m: means.append(m))
    with torch.no_grad():
        part = method.embed(torch.ones(6, 1, 3, 3)).sum().item()
    for m in means:
        assert m == pytest.approx({"loss": 2 * part, "part": part, "other": part})


# --- the rate and the gradient within a step --------------------------------------------------------------------------


class Pull(Recorder):
    """Its loss is 10 w, and it remembers the weight before each step."""

    def __init__(self):
        super().__init__()
        self.embedder.requires_grad_(False)
        self.w, self.seen = nn.Parameter(torch.zeros(())), []

    def step(self, batch):
        self.seen.append(self.w.item())
        return StepOutput(10.0 * self.w)

    def after_step(self, *carry):
        pass


def moves(config, **kwargs):
    method = Pull()
    run(method, config, **kwargs)
    at = [*method.seen, method.w.item()]
    return [a - b for a, b in pairwise(at)]


def test_the_rate_of_every_step_is_its_own():
    plain = {"momentum": 0.0, "weight_decay": 0.0, "lr": 1.0, "schedule": "cosine"}
    config = TrainConfig(epochs=2, warmup_epochs=0.5, per_step=True, **plain)
    want = [10 * learning_rate(config, e, i, 2) for e in range(2) for i in range(2)]
    assert moves(config) == pytest.approx(want, rel=1e-5)
    assert want[0] > want[1] > want[2] > want[3]  # half an epoch of warm-up is one step of the two
    assert moves(config, first_epoch=1) == pytest.approx(want[2:], rel=1e-5)  # resumed: no state
    by_epoch = TrainConfig(epochs=2, **plain)
    assert moves(by_epoch) == pytest.approx([10.0, 10.0, 5.0, 5.0], rel=1e-5)


def test_a_long_gradient_is_clipped_and_a_short_one_is_not():
    plain = {"epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1}
    assert moves(TrainConfig(clip=2.0, **plain)) == pytest.approx([0.2, 0.2], rel=1e-4)
    assert moves(TrainConfig(clip=20.0, **plain)) == pytest.approx([1.0, 1.0], rel=1e-4)


def test_an_optimizer_from_elsewhere_keeps_its_ratios():
    """The schedule moves every group from the rate that somebody gave it."""
    method = Recorder()
    linear = method.embedder.linear
    rates = [{"params": [linear.weight], "lr": 0.5}, {"params": [linear.bias], "lr": 2.0}]
    optimizer, seen = torch.optim.SGD(rates), []
    config = TrainConfig(epochs=2, lr=1.0, milestones=(1,))
    fit(
        method,
        optimizer,
        loader(),
        config,
        features=lambda: None,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        on_epoch=lambda epoch, means: seen.append([float(g["lr"]) for g in optimizer.param_groups]),
    )
    assert seen == [pytest.approx([0.5, 2.0]), pytest.approx([0.05, 0.2])]
