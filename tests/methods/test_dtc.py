"""DTC: its losses against the definitions, its timeline, and its clusters."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from opencon.errors import ConfigError
from opencon.methods import DTC, DTCConfig, FeatureBank, Task
from opencon.methods.base import Epoch
from opencon.methods.dtc import sharpened, soft_assignment
from opencon.runtime import seeded
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch
from tests.naive.dtc import (
    naive_cross_entropy,
    naive_kl,
    naive_soft_assignment,
    naive_squared_distance,
    naive_targets,
)

BLOBS = Blobs(epochs=30, seen=0.6)  # clusters come in the eleventh epoch, without labels: one may hold two classes

FEATURES = 6
EARLY = DTCConfig(labeled_epochs=2)


def build(config=EARLY, task=TASK, seed=0, num_features=FEATURES):
    with seeded(seed):
        return DTC(config, task, ExactEmbedder(dim=num_features)).double()


def toy_bank(seed=0, num_images=TASK.num_images, num_groups=TASK.num_classes):
    """Groups around far corners; the first rows of the first two groups are labeled."""
    g = torch.Generator().manual_seed(seed)
    group = torch.arange(num_images) % num_groups
    z = 4.0 * torch.eye(FEATURES, dtype=torch.float64)[group]
    z = z + 0.3 * torch.randn(num_images, FEATURES, generator=g, dtype=torch.float64) + 1.0
    labels = torch.where((group < 2) & (torch.arange(num_images) < num_images // 2), group, -1)
    return FeatureBank(z, labels), group


def at(method, index, bank):
    method.before_epoch(Epoch(index, 1000, features=lambda: bank))
    return method


def terms(method, batch):
    with torch.no_grad():
        x = [method.embed(view) for view in batch.views]
        h = [method.bottleneck(rows) for rows in x]
        logits = method.classifier(x[0][: batch.num_labeled])
    L = batch.num_labeled
    q, other = (naive_soft_assignment(rows[L:], method.centers.detach()) for rows in h)
    p = method.targets[batch.rows[L:]].tolist()
    return {
        "loss_kl": naive_kl(p, q),
        "loss_consistency": naive_squared_distance(q, other),
        "loss_l": naive_cross_entropy(logits, batch.labels[:L]),
        "confidence": sum(max(row) for row in q) / len(q),
    }


@pytest.mark.parametrize("seed", range(3))
def test_step_equals_the_definitions(seed):
    method, batch = build(DTCConfig(weight_labeled=0.7), seed=seed), toy_batch(seed)
    at(method, 100, toy_bank(seed)[0])
    method.targets.copy_(torch.rand(method.targets.shape, generator=torch.Generator().manual_seed(seed)).softmax(dim=1))
    out, want = method.step(batch), terms(method, batch)
    assert out.logs.keys() == want.keys()
    for name, value in want.items():
        assert out.logs[name].item() == pytest.approx(value, rel=1e-9), name
    total = want["loss_kl"] + 10.0 * want["loss_consistency"] + 0.7 * want["loss_l"]
    assert out.loss.item() == pytest.approx(total, rel=1e-6)  # the weights are float32 numbers


def test_before_the_clusters_only_cross_entropy_counts():
    method, batch = build(DTCConfig(weight_labeled=0.0)), toy_batch()
    at(method, 0, None)
    out = method.step(batch)
    assert out.loss.item() == pytest.approx(terms(method, batch)["loss_l"], rel=1e-9)


def test_hard_targets_give_a_finite_loss():
    """0 log 0 counts as 0."""
    method, batch = at(build(), 100, toy_bank()[0]), toy_batch()
    method.targets.zero_()[:, 0] = 1.0
    out = method.step(batch)
    q = naive_soft_assignment(method.bottleneck(method.embed(batch.views[0]))[8:].detach(), method.centers.detach())
    assert out.logs["loss_kl"].item() == pytest.approx(-np.mean([np.log(row[0]) for row in q]))
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in method.parameters())


def test_soft_assignment_in_closed_form():
    """At a center: 1 for it, 1 / (1 + 3) for one at distance sqrt(3)."""
    h = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    centers = torch.tensor([[0.0, 0.0], [3.0**0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(soft_assignment(h, centers), torch.tensor([[0.8, 0.2]], dtype=torch.float64))


def test_sharpened_in_closed_form():
    """Columns sum to 1.4 and 0.6: rows (0.64 / 1.4, 0.04 / 0.6) and (0.36 / 1.4, 0.16 / 0.6), normalized."""
    q = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64)
    raw = torch.tensor([[0.64 / 1.4, 0.04 / 0.6], [0.36 / 1.4, 0.16 / 0.6]], dtype=torch.float64)
    torch.testing.assert_close(sharpened(q), raw / raw.sum(dim=1, keepdim=True))
    assert sharpened(q)[0, 0] > 0.8  # surer
    assert sharpened(q)[1, 1] > 0.4  # and the small cluster is not swallowed


def test_gradient_is_the_derivative():
    g = torch.Generator().manual_seed(0)
    h, centers = (torch.randn(n, 3, generator=g, dtype=torch.float64, requires_grad=True) for n in (4, 3))
    assert torch.autograd.gradcheck(soft_assignment, (h, centers))


def test_bottleneck_is_the_pca_of_the_unlabeled_rows():
    method, (bank, _) = build(), toy_bank()
    at(method, 2, bank)
    free = bank.z[bank.labels < 0]
    want = PCA(n_components=5).fit(free.numpy()).transform(bank.z.numpy())
    got = method.bottleneck(bank.z).detach().numpy()
    signs = np.sign((got * want).sum(axis=0))
    np.testing.assert_allclose(got, want * signs, atol=1e-8)


def test_there_are_no_more_components_than_features():
    method = build(num_features=4)
    assert method.bottleneck.weight.shape == (4, 4)
    assert method.centers.shape == (5, 4)


def test_centers_are_the_means_of_the_groups():
    method, (bank, group) = build(), toy_bank()
    at(method, 2, bank)
    free = bank.labels < 0
    h = method.bottleneck(bank.z).detach()
    want = torch.stack([h[free & (group == k)].mean(dim=0) for k in range(5)])
    distance = torch.cdist(want, method.centers.detach())
    assert distance.amin(dim=1).max() < 1e-5
    assert sorted(distance.argmin(dim=1).tolist()) == list(range(5))


def test_targets_are_those_of_the_unlabeled_rows():
    method, (bank, _) = build(), toy_bank()
    at(method, 2, bank)
    free = bank.labels < 0
    h = method.bottleneck(bank.z[free]).detach()
    want = torch.tensor(naive_targets(naive_soft_assignment(h, method.centers.detach())))
    torch.testing.assert_close(method.targets[free], want.double())
    torch.testing.assert_close(method.targets[~free], torch.full_like(method.targets[~free], 0.2))  # as they were


def test_labeled_rows_do_not_shape_the_clusters():
    bank, _ = toy_bank()
    moved = dataclasses.replace(bank, z=torch.where(bank.labels[:, None] >= 0, 100.0, bank.z))
    one, other = at(build(), 2, bank), at(build(), 2, moved)
    assert torch.equal(one.centers, other.centers)
    assert torch.equal(one.targets, other.targets)


def test_timeline():
    """Two epochs of labels, ten on the first targets, then new ones every five and a consistency that grows."""
    method, asked, weights, kl = build(dataclasses.replace(EARLY, weight_labeled=0.5)), [], {}, {}
    bank, _ = toy_bank()
    for index in range(25):

        def features(index=index):
            asked.append(index)
            return bank

        method.before_epoch(Epoch(index, 1000, features))
        kl[index], weights[index] = float(method.clustered), float(method.consistency_weight)
        assert float(method.labeled_weight) == (1.0 if index < 2 else 0.5)
    assert asked == [2, 13, 18, 23]
    assert kl == {index: float(index >= 2) for index in range(25)}
    assert [weights[index] for index in (0, 2, 11)] == [0.0, 0.0, 0.0]
    assert weights[12] == pytest.approx(10 * np.exp(-5.0))
    assert weights[14] == pytest.approx(10 * np.exp(-5.0 * 0.6**2))
    assert weights[17] == weights[24] == 10.0


def test_clusters_are_made_once_even_after_a_restart():
    method, (bank, _) = at(build(), 2, toy_bank()[0]), toy_bank(seed=1)
    again = build(seed=1)
    again.load_state_dict(method.state_dict())
    at(again, 3, bank)
    assert torch.equal(again.centers, method.centers)
    late = at(build(), 500, bank)  # never made so far: now
    assert late.clustered == 1.0


def test_assign_names_clusters_by_labeled_rows():
    method, (bank, group) = build(), toy_bank()
    at(method, 2, bank)
    got = method.assign(bank)
    assert (got.classes[group == 0] == 0).all()
    assert (got.classes[group == 1] == 1).all()
    names = [set(got.classes[group == k].tolist()) for k in (2, 3, 4)]
    assert sorted(names, key=min) == [{2}, {3}, {4}]
    assert torch.equal(got.p.argmax(dim=1), got.classes)
    torch.testing.assert_close(got.p.sum(dim=1), torch.ones(40, dtype=torch.float64))
    assert torch.equal(got.novelty > got.novelty_threshold, got.classes >= 2)
    torch.testing.assert_close(got.seen_logits, method.classifier(bank.z).detach())


def test_embed_gives_the_features():
    method, batch = build(), toy_batch()
    torch.testing.assert_close(method.embed(batch.views[0]), method.embedder.features(batch.views[0]))


def test_seen_and_novel_counts_may_be_anything():
    task = Task(num_seen=4, num_classes=5, labeled_ratio=0.5, num_images=40)
    method = at(build(task=task), 2, toy_bank()[0])
    assert method.step(toy_batch(num_seen=4)).loss.isfinite()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("labeled_epochs", -1, "not be negative"),
        ("warmup_epochs", -1, "not be negative"),
        ("weight_consistency", -0.1, "not be negative"),
        ("ramp_epochs", -1, "not be negative"),
        ("weight_labeled", -1.0, "not be negative"),
        ("num_starts", 0, "above zero"),
        ("update_every", 0, "at least 1"),
    ],
)
def test_bad_settings_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"method.{key} = .*{message}"):
        DTCConfig(**{key: value})
