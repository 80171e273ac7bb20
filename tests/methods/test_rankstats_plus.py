"""RankStats+: what one head changes."""

import pytest
import torch

from opencon.methods import FeatureBank, RankStats, RankStatsPlus, RankStatsPlusConfig
from opencon.runtime import seeded
from tests.methods.test_rankstats import naive
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch

BLOBS = Blobs(epochs=30, all=0.55, nmi=0.55)  # as for rankstats


def build(seed=0, weight=3.0, **settings):
    with seeded(seed):
        method = RankStatsPlus(RankStatsPlusConfig(**settings), TASK, ExactEmbedder()).double()
    method.consistency.fill_(weight)
    return method


@pytest.mark.parametrize("seed", range(3))
def test_step_equals_the_definitions(seed):
    method, batch = build(seed, top_k=2), toy_batch(seed)
    out = method.step(batch)
    terms = naive(method, batch, one_head=True)
    for name, value in terms.items():
        assert out.logs[name].item() == pytest.approx(value, rel=1e-9), name
    assert out.loss.item() == pytest.approx(terms["loss_ce"] + terms["loss_bce"] + 3.0 * terms["loss_mse"], rel=1e-9)


def test_labels_train_the_first_outputs_and_pairs_train_all():
    method, batch = build(weight=0.0), toy_batch()
    logs = method.step(batch).logs
    for output, changes in ((0, {"loss_ce", "loss_bce", "loss_mse"}), (4, {"loss_bce", "loss_mse"})):
        with torch.no_grad():
            method.heads["all"].weight[output] += 0.5
        new = method.step(batch).logs
        assert {name for name in logs if logs[name] != new[name]} == changes
        logs = new


def test_an_output_is_a_class():
    method = build()
    with torch.no_grad():
        method.heads["all"].weight.copy_(torch.eye(5, 6))
        method.heads["all"].bias.zero_()
    z = torch.eye(5, 6, dtype=torch.float64)[[4, 0, 1]] * 3
    got = method.assign(FeatureBank(z, torch.tensor([0, 1, -1])))  # labels do not rename
    assert got.classes.tolist() == [4, 0, 1]
    torch.testing.assert_close(got.p, z[:, :5].softmax(dim=1))
    torch.testing.assert_close(got.seen_logits, z[:, :2])


def test_the_schedule_is_that_of_rankstats_with_its_own_settings():
    for kind in ("cifar", "imagenet"):
        ours, theirs = RankStatsPlus.schedule(kind), RankStats.schedule(kind)
        assert ours.train == theirs.train
        assert type(ours.method) is RankStatsPlusConfig
        assert vars(ours.method) == vars(theirs.method)
