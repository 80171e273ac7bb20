"""A short run on images in memory: what is in a batch, how many epochs, what is told."""

import pytest
import torch

from opencon.methods import FeatureBank, Method, StepOutput
from opencon.training import short_run as module
from opencon.training.run_folder import RunFolder
from opencon.training.short_run import short_run
from tests.methods.toys import TASK, ExactEmbedder


class Watcher(Method):
    """Writes down what it is shown; its loss is the mean of a linear map."""

    def __init__(self):
        super().__init__(None, TASK, ExactEmbedder())
        self.batches, self.banks = [], []

    def before_epoch(self, epoch):
        self.banks.append(epoch.features())

    def step(self, batch):
        self.batches.append(batch)
        loss = self.embed(batch.views[0]).square().mean() + self.embed(batch.views[1]).mean()
        return StepOutput(loss, {"part": loss.detach()})

    def assign(self, bank):
        raise AssertionError


class Times:
    """A view: the image, times a number that is drawn."""

    def draw(self, num_images, source_size, generator):
        return (torch.rand(num_images, generator=generator),)

    def apply(self, images, params):
        return images * params[0].view(-1, 1, 1, 1)


def ran(num_labeled, num_images, *, steps=1, batch_size=64, seed=0, lr=0.1, **how):
    images = torch.arange(1.0, num_images + 1).view(-1, 1, 1, 1).expand(-1, 1, 3, 3).contiguous()
    labels = torch.where(torch.arange(num_images) < num_labeled, torch.arange(num_images) % 2, -1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        method = Watcher()
    history = short_run(
        method,
        images,
        labels,
        augments=(Times(), Times()),
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        features=lambda: FeatureBank(images.flatten(1), labels),
        **how,
    )
    return method, history


@pytest.mark.parametrize(
    ("num_labeled", "num_images", "batch_size", "want"),
    [
        (100, 200, 64, (32, 32)),  # in proportion
        (90, 300, 64, (19, 45)),  # rounded down
        (20, 1000, 64, (8, 56)),  # in proportion it would be one: an eighth
        (3, 1000, 64, (3, 61)),  # no more than there are
        (1, 1000, 4, (1, 3)),  # an eighth of few is none: one
        (40, 50, 512, (40, 10)),  # fewer images than a batch: all of them
        (99, 100, 64, (63, 1)),  # an unlabeled one is there
    ],
)
def test_the_labeled_share_of_a_batch(num_labeled, num_images, batch_size, want):
    method, _ = ran(num_labeled, num_images, batch_size=batch_size)
    for batch in method.batches:
        assert (batch.num_labeled, len(batch.labels) - batch.num_labeled) == want
        assert (batch.labels[: batch.num_labeled] >= 0).all()
        assert (batch.labels[batch.num_labeled :] == -1).all()


@pytest.mark.parametrize(("steps", "epochs"), [(0, 1), (1, 1), (4, 1), (5, 2), (6, 2), (30, 10)])
def test_about_so_many_steps_in_whole_epochs(steps, epochs):
    """100 labeled images in batches of 32 are three steps an epoch."""
    told = []
    method, history = ran(100, 200, steps=steps, progress=lambda done, total: told.append((done, total)))
    assert len(method.batches) == 3 * epochs
    assert len(history) == len(method.banks) == epochs
    assert told == [(3 * (epoch + 1), 3 * epochs) for epoch in range(epochs)]


def test_history_is_the_mean_of_each_term_by_epoch():
    method, history = ran(100, 200, steps=6, lr=1e-12)  # so small that the weights stay
    for epoch, means in enumerate(history):
        parts = [method.step(batch).loss.item() for batch in method.batches[3 * epoch : 3 * epoch + 3]]
        assert means == pytest.approx({"loss": sum(parts) / 3, "part": sum(parts) / 3}, rel=1e-6)


def test_it_learns_along_a_cosine_and_sees_all_rows_before_an_epoch(monkeypatch):
    rates = []
    build = module.build_optimizer

    def watched(method, config):
        optimizer = build(method, config)
        step = optimizer.step
        optimizer.step = lambda *a, **k: rates.append(float(optimizer.param_groups[0]["lr"])) or step(*a, **k)
        return optimizer

    monkeypatch.setattr(module, "build_optimizer", watched)
    method, history = ran(100, 200, steps=30, lr=0.2)
    assert history[-1]["loss"] < history[0]["loss"]
    assert rates[0] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.02
    assert [len(bank.z) for bank in method.banks] == [200] * 10


def test_the_seed_decides_images_and_views():
    (a, _), (b, _), (c, _) = (ran(50, 100, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(a.batches[0].views[0], b.batches[0].views[0])
    assert not torch.equal(a.batches[0].rows, c.batches[0].rows)
    assert not torch.equal(a.batches[0].views[0], a.batches[0].views[1])


def test_a_stopped_run_goes_on_with_its_history_and_one_of_another_kind_starts_over(tmp_path):
    def stop(done, total):
        if done == 6:
            raise KeyboardInterrupt

    def stopped(name):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        with pytest.raises(KeyboardInterrupt):
            ran(100, 200, steps=9, kept=folder, identity="mine", progress=stop)
        return folder

    _, whole = ran(100, 200, steps=9)
    again, history = ran(100, 200, steps=9, kept=stopped("same"), identity="mine")
    assert len(again.batches) == 3
    assert history == whole
    other, _ = ran(100, 200, steps=9, kept=stopped("other"), identity="another")
    assert len(other.batches) == 9
