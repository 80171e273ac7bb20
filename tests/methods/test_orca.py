"""ORCA's step against the definitions."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from opencon.errors import ConfigError
from opencon.methods import ORCA, FeatureBank, ORCAConfig
from opencon.methods.base import Epoch
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.orca import naive_step, naive_uncertainty

BASE = ORCAConfig()
OTHER = {"scale": 4.0, "max_margin": 0.1, "weight_pairwise": 0.3, "weight_entropy": 2.5}


def build(config=BASE, seed=0, uncertainty=0.3):
    with seeded(seed):
        method = ORCA(config, TASK, ExactEmbedder()).double()
    method.uncertainty.fill_(uncertainty)
    return method


def raw(method, images):
    with torch.no_grad():
        return method.embedder.features(images).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("uncertainty", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("changed", [None, *OTHER])
def test_step_equals_the_definitions(changed, uncertainty, seed):
    config = replace(BASE, **{changed: OTHER[changed]}) if changed else BASE
    method, batch = build(config, seed, uncertainty), toy_batch(seed)
    out = method.step(batch)
    views = [raw(method, view) for view in batch.views]
    total, terms = naive_step(views, batch.labels.tolist(), method.classifier.weight.tolist(), config, uncertainty)
    for name, value in terms.items():
        assert out.logs[name].item() == pytest.approx(value, rel=1e-9), name
    assert out.loss.item() == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("key", OTHER)
def test_every_setting_matters(key):
    batch = toy_batch()
    assert not torch.allclose(build().step(batch).loss, build(replace(BASE, **{key: OTHER[key]})).step(batch).loss)


def test_the_margin_makes_labeled_images_content_sooner():
    """It raises the logit of the true class, so that the loss and its gradient shrink; beyond the maximum, no more."""
    batch, losses, pulls = toy_batch(), [], []
    for uncertainty in (0.0, 0.2, 0.5, 0.9):
        method = build(replace(BASE, weight_pairwise=0, weight_entropy=0), uncertainty=uncertainty)
        out = method.step(batch)
        out.loss.backward()
        losses.append(out.logs["loss_s"].item())
        pulls.append(method.classifier.weight.grad.norm().item())
    assert losses[0] > losses[1] > losses[2] == losses[3]
    assert pulls[0] > pulls[1] > pulls[2] == pulls[3]


def test_an_image_alone_in_its_class_pairs_with_its_other_view():
    method, batch = build(), toy_batch(num_labeled=2)
    batch = replace(batch, labels=torch.cat([torch.tensor([0, 1]), batch.labels[2:]]))
    with torch.no_grad():
        p, other = (method.logits(method.embed(view)).softmax(dim=1) for view in batch.views)
        nearest = (method.embed(batch.views[0]) @ method.embed(batch.views[0]).T).fill_diagonal_(-2).argmax(dim=1)
    partner = [0, 1, *nearest[2:].tolist()]
    assert method.step(batch).logs["loss_p"].item() == pytest.approx(-(p * other[partner]).sum(1).log().mean().item())


def test_an_unlabeled_image_may_pair_with_a_labeled_one():
    method, batch = build(), toy_batch(num_labeled=2, num_unlabeled=2)
    batch = replace(batch, labels=torch.tensor([0, 1, -1, -1]))
    twins = tuple(view[[0, 1, 0, 1]] for view in batch.views)  # the unlabeled images are copies of the labeled ones
    with torch.no_grad():
        p, other = (method.logits(method.embed(view)).softmax(dim=1) for view in twins)
    want = -(p * other).sum(dim=1).log().mean()
    assert method.step(replace(batch, views=twins)).logs["loss_p"].item() == pytest.approx(want.item())


def test_uniform_predictions_have_the_most_entropy():
    method, batch = build(), toy_batch()
    with torch.no_grad():
        method.classifier.weight.copy_(method.classifier.weight[:1].expand(5, -1))
    logs = method.step(batch).logs
    assert logs["loss_h"].item() == pytest.approx(-math.log(5))
    assert logs["loss_p"].item() == pytest.approx(math.log(5))


def test_uncertainty_is_measured_on_the_unlabeled_before_every_epoch_but_the_first():
    method = build(uncertainty=0.0)
    rows = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, -1, -1, -1, -1, -1, -1])
    bank = FeatureBank(F.normalize(rows, dim=1), labels)

    def refuse():
        raise AssertionError("costs a pass")

    method.before_epoch(Epoch(0, 10, refuse))
    assert float(method.uncertainty) == 0.0
    method.before_epoch(Epoch(1, 10, lambda: bank))
    want = naive_uncertainty(rows.tolist(), method.classifier.weight.tolist(), labels.tolist(), 10.0)
    assert float(method.uncertainty) == pytest.approx(want)
    other = replace(bank, labels=torch.full_like(labels, -1))
    method.before_epoch(Epoch(2, 10, lambda: other))
    assert float(method.uncertainty) != pytest.approx(want)
    assert "uncertainty" in method.state_dict()


def test_assign_takes_the_nearest_direction():
    method = build()
    with torch.no_grad():
        method.classifier.weight.copy_(torch.eye(5, 6) * torch.arange(1, 6)[:, None])  # lengths do not count
    z = F.normalize(torch.tensor([[0.9, 0, 0, 0, 0.8, 0], [0, 0.1, 0, 0.2, 0, 0.9]], dtype=torch.float64), dim=1)
    got = method.assign(FeatureBank(z, torch.tensor([-1, -1])))
    assert got.classes.tolist() == [0, 3]
    torch.testing.assert_close(got.p, (10 * z[:, :5]).softmax(dim=1))
    torch.testing.assert_close(got.seen_logits, 10 * z[:, :2])


def test_the_published_schedules():
    cifar, large = ORCA.schedule("cifar").train, ORCA.schedule("imagenet").train
    assert (cifar.epochs, cifar.milestones, cifar.lr, cifar.weight_decay) == (200, (140, 180), 0.1, 5e-4)
    assert (large.epochs, large.milestones, large.lr, large.weight_decay) == (90, (30, 60), 0.1, 1e-4)
    assert cifar.batch_size == large.batch_size == 512
    assert ORCA.schedule("cifar").method == ORCA.schedule("imagenet").method == ORCAConfig()


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_bad_scale(scale):
    with pytest.raises(ConfigError, match=r"method.scale = .* must be above zero"):
        ORCAConfig(scale=scale)


@pytest.mark.parametrize("key", ["max_margin", "weight_pairwise", "weight_entropy"])
def test_negative_settings(key):
    with pytest.raises(ConfigError, match=rf"method.{key} = -0.1 must not be negative"):
        ORCAConfig(**{key: -0.1})
