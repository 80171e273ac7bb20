"""GCD's step against the formulas, and what its k-means does with labels."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from opencon.errors import ConfigError
from opencon.methods import GCD, FeatureBank, GCDConfig, Task
from opencon.methods.gcd import CROP_FLIP
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.gcd import naive_all, naive_labeled


def build(task=TASK, seed=0, **settings):
    with seeded(seed):
        return GCD(GCDConfig(**settings), task, ExactEmbedder(dim=4, num_features=7))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.3, "temperature_labeled": 0.5}, {"weight_labeled": 0.0}, {"weight_labeled": 1.0}],
)
def test_step_equals_the_formulas(seed, settings):
    method, batch = build(seed=seed, **settings), toy_batch(seed)
    c = method.config
    with torch.no_grad():
        z = method.embedder(torch.cat(batch.views))
    labels = batch.labels.tolist()
    loss_all = naive_all(z, len(labels), c.temperature)
    loss_l = naive_labeled(z, labels, c.temperature_labeled)
    out = method.step(batch)
    assert out.logs["loss_all"].item() == pytest.approx(loss_all, rel=1e-9)
    assert out.logs["loss_l"].item() == pytest.approx(loss_l, rel=1e-9)
    want = (1 - c.weight_labeled) * loss_all + c.weight_labeled * loss_l
    assert out.loss.item() == pytest.approx(want, rel=1e-9)


def test_the_numbers_of_the_paper():
    c = GCDConfig()
    assert (c.temperature, c.temperature_labeled, c.weight_labeled) == (1.0, 0.07, 0.35)


def test_labels_move_the_labeled_loss_alone():
    method, batch = build(), toy_batch()
    other = batch.labels.clone()
    other[0] = 1 - other[0]
    one, two = method.step(batch), method.step(replace(batch, labels=other))
    assert torch.equal(one.logs["loss_all"], two.logs["loss_all"])
    assert not torch.equal(one.logs["loss_l"], two.logs["loss_l"])


def test_unlabeled_images_do_not_enter_the_labeled_loss():
    method, batch = build(), toy_batch()
    L = batch.num_labeled
    views = tuple(torch.cat([view[:L], 1 - view[L:]]) for view in batch.views)
    assert torch.equal(method.step(batch).logs["loss_l"], method.step(replace(batch, views=views)).logs["loss_l"])


def test_losses_see_projections_and_classes_see_features():
    method, batch = build(), toy_batch()
    features = method.embedder.features(batch.views[0])
    torch.testing.assert_close(method.embed(batch.views[0]), F.normalize(features, dim=1))
    before = method.step(batch).loss.detach()
    z = method.embed(batch.views[0]).detach()
    with torch.no_grad():
        method.embedder.head.weight.mul_(torch.rand_like(method.embedder.head.weight))
    assert not torch.equal(method.step(batch).loss, before)
    assert torch.equal(method.embed(batch.views[0]), z)


# --- classes ----------------------------------------------------------------------------------------------------------


def groups(num_groups=4, size=10, noise=0.05):
    rng = torch.Generator().manual_seed(0)
    group = torch.arange(num_groups).repeat_interleave(size)
    z = torch.eye(num_groups)[group] + noise * torch.randn(len(group), num_groups, generator=rng)
    return F.normalize(z, dim=1), group


FOUR = Task(num_seen=2, num_classes=4, labeled_ratio=0.3, num_images=40)


def test_seen_classes_keep_their_number_and_the_rest_is_found():
    z, _ = groups()
    labels = torch.full((40,), -1)
    labels[30:33] = 0  # the last group is seen class 0
    labels[10:13] = 1
    classes = build(FOUR).assign(FeatureBank(z, labels)).classes
    assert (classes[30:] == 0).all()
    assert (classes[10:20] == 1).all()
    assert {tuple(classes[:10].unique().tolist()), tuple(classes[20:30].unique().tolist())} == {(2,), (3,)}


def test_a_labeled_image_stays_in_its_class_wherever_it_lies():
    z, _ = groups()
    labels = torch.full((40,), -1)
    labels[30:35] = 0
    labels[10:15] = 1
    labels[0] = 1  # in the middle of a group without a name
    classes = build(FOUR).assign(FeatureBank(z, labels)).classes
    assert classes[0] == 1
    assert (classes[1:10] == classes[1]).all()
    assert classes[1] >= 2


def test_without_labels_it_is_plain_k_means():
    z, group = groups()
    classes = build(FOUR).assign(FeatureBank(z, torch.full((40,), -1))).classes
    assert len({(int(c), int(g)) for c, g in zip(classes, group, strict=True)}) == 4


def test_more_starts_are_handed_on(monkeypatch):
    asked = []
    plain = GCD.assign.__globals__["kmeans"]

    def kmeans(*args, **kwargs):
        asked.append(kwargs["num_starts"])
        return plain(*args, **kwargs)

    monkeypatch.setitem(GCD.assign.__globals__, "kmeans", kmeans)
    z, _ = groups()
    build(FOUR, num_starts=3).assign(FeatureBank(z, torch.full((40,), -1)))
    assert asked == [3]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["digits", "cifar", "imagenet", "fine_grained"])
def test_a_resnet_has_opencons_batches_and_rate_and_a_transformer_the_released_ones(kind):
    schedule, is_resnet = GCD.schedule(kind), kind in ("cifar", "imagenet")
    train = schedule.train
    assert (train.batch_size, train.labeled_share) == ((512, None) if is_resnet else (128, 0.5))
    assert schedule.method.temperature == (0.4 if is_resnet else 1.0)
    if kind != "digits":
        assert train.lr == (0.02 if is_resnet else 0.1)
        assert (train.lr_end, train.weight_decay, train.schedule, train.milestones) == (1e-4, 5e-5, "cosine", ())
    assert (GCD.schedule(kind).augment == CROP_FLIP) == (kind == "fine_grained")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"method.temperature = 0.0 must be above zero"),
        ({"temperature_labeled": -1.0}, r"method.temperature_labeled = -1.0 must be above zero"),
        ({"num_starts": 0}, r"method.num_starts = 0 must be above zero"),
        ({"weight_labeled": 1.1}, r"method.weight_labeled = 1.1 must lie between 0 and 1"),
        ({"weight_labeled": -0.1}, r"method.weight_labeled = -0.1 must lie between 0 and 1"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        GCDConfig(**settings)
