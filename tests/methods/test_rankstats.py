"""RankStats' step against the definitions."""

import math

import pytest
import torch

from opencon.errors import ConfigError
from opencon.methods import FeatureBank, RankStats, RankStatsConfig
from opencon.methods.base import Epoch
from opencon.runtime import seeded
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch
from tests.naive.rankstats import naive_step

BLOBS = Blobs(epochs=60, seen=0.4, all=0.5, nmi=0.45)  # the five largest features seldom coincide


def build(seed=0, weight=3.0, **settings):
    with seeded(seed):
        method = RankStats(RankStatsConfig(**settings), TASK, ExactEmbedder()).double()
    method.consistency.fill_(weight)
    return method


def naive(method, batch, *, one_head=False):
    """The terms, from the features of both views and the heads' logits."""
    with torch.no_grad():
        features = [method.embed(view) for view in batch.views]
        logits = [method.logits(view) for view in features]
    seen, every = ([view[head].tolist() for view in logits] for head in range(2))
    return naive_step(features[0].tolist(), seen, every, batch.labels.tolist(), method.config.top_k, one_head=one_head)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("top_k", [2, 3])
def test_step_equals_the_definitions(top_k, seed):
    method, batch = build(seed, top_k=top_k), toy_batch(seed)
    out = method.step(batch)
    terms = naive(method, batch)
    for name, value in terms.items():
        assert out.logs[name].item() == pytest.approx(value, rel=1e-9), name
    assert out.loss.item() == pytest.approx(terms["loss_ce"] + terms["loss_bce"] + 3.0 * terms["loss_mse"], rel=1e-9)
    assert 1 / 16 < out.logs["share_same"] < 1  # some pairs besides each with itself


def test_the_labeled_head_learns_from_labels_and_the_other_one_from_pairs():
    method, batch = build(weight=0.0), toy_batch()
    for which, learns in (("labeled", "loss_ce"), ("unlabeled", "loss_bce")):
        head = method.heads[which]
        before, logs = head.weight.detach().clone(), method.step(batch).logs
        with torch.no_grad():
            head.weight += 0.3 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
        changed = {name for name, value in method.step(batch).logs.items() if value != logs[name]}
        assert changed == {learns, "loss_mse"}
        with torch.no_grad():
            head.weight.copy_(before)


def test_ranks_send_no_gradient():
    """The features learn through the heads: with both at zero, nothing."""
    method = build()
    with torch.no_grad():
        for head in method.heads.values():
            head.weight.zero_()
    method.step(toy_batch()).loss.backward()
    assert method.embedder.linear.weight.grad.abs().max() == 0


def test_the_weight_of_consistency_ramps_up():
    method = build(weight_consistency=50.0, ramp_epochs=10)
    weights = []
    for epoch in (0, 5, 10, 99):
        method.before_epoch(Epoch(epoch, 100, features=lambda: None))
        weights.append(float(method.consistency))
    assert weights == pytest.approx([50 * math.exp(-5), 50 * math.exp(-1.25), 50, 50])
    batch = toy_batch()
    late = method.step(batch)
    method.before_epoch(Epoch(5, 100, features=lambda: None))
    early = method.step(batch)
    more = 50 * (1 - math.exp(-1.25)) * late.logs["loss_mse"].item()
    assert (late.loss - early.loss).item() == pytest.approx(more)


def one_hot_bank(method, outputs, labels):
    """Features of which the unlabeled head makes the given outputs."""
    with torch.no_grad():
        method.heads["unlabeled"].weight.copy_(torch.eye(5, 6))
        method.heads["unlabeled"].bias.zero_()
    z = torch.eye(5, 6, dtype=torch.float64)[torch.tensor(outputs)] * 3
    return FeatureBank(z, torch.tensor(labels))


def test_outputs_are_named_by_the_labeled_rows():
    """Output 4 is what images of class 0 choose, output 0 those of class 1: the others are 2, 3, 4 in order."""
    method = build()
    bank = one_hot_bank(method, [4, 4, 4, 0, 0, 1, 2, 3, 4], [0, 0, 1, 1, -1, -1, -1, -1, -1])
    got = method.assign(bank)
    assert got.classes.tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 0]
    assert torch.equal(got.p.argmax(dim=1), got.classes)  # probabilities go by the same names
    torch.testing.assert_close(got.p.sum(dim=1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(got.seen_logits, method.heads["labeled"](bank.z).detach())


def test_assign_without_labels_and_with_outputs_that_nobody_chooses():
    method = build()
    classes = method.assign(one_hot_bank(method, [3, 3, 1], [-1, -1, -1])).classes
    assert classes[0] == classes[1] != classes[2]


def test_embeds_features_with_their_length():
    method, batch = build(), toy_batch()
    torch.testing.assert_close(method.embed(batch.views[0]), method.embedder.features(batch.views[0]))


def test_the_released_schedules():
    cifar, large = RankStats.schedule("cifar"), RankStats.schedule("imagenet")
    t = cifar.train
    assert (t.epochs, t.milestones, t.lr, t.weight_decay, t.batch_size) == (200, (170,), 0.1, 1e-4, 128)
    assert cifar.method == RankStatsConfig(top_k=5, weight_consistency=50.0, ramp_epochs=150)
    t = large.train
    assert (t.epochs, t.milestones, t.lr, t.weight_decay, t.batch_size) == (90, (30, 60), 0.1, 1e-4, 512)
    assert large.method == RankStatsConfig(top_k=5, weight_consistency=10.0, ramp_epochs=50)


def test_bad_top_k():
    with pytest.raises(ConfigError, match=r"method.top_k = 0 must be at least 1"):
        RankStatsConfig(top_k=0)
    with pytest.raises(ConfigError, match=r"method.top_k = 6 must be below the encoder's 6 features"):
        build(top_k=6)


@pytest.mark.parametrize("key", ["weight_consistency", "ramp_epochs"])
def test_negative_settings(key):
    with pytest.raises(ConfigError, match=rf"method.{key} = -1 must not be negative"):
        RankStatsConfig(**{key: -1})
