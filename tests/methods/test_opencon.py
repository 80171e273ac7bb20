"""OpenCon's step against the definitions, setting by setting."""

import dataclasses

import numpy as np
import pytest
import torch

from opencon.errors import ConfigError
from opencon.methods import FeatureBank, OpenCon, OpenConConfig, Task
from opencon.methods.base import Epoch
from opencon.methods.opencon import class_prior
from opencon.prototypes import novelty_threshold, seen_score
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.opencon import naive_step

EPOCH_THRESHOLD = 0.35

# One entry for each difference between the paper and the released code, and the option of appendix E.
OTHER = {
    "seen_score": "cosine",
    "threshold_from": "labeled_set",
    "decide_on": "each_view",
    "novel_reduction": "sum",
    "prototype_members": "novel_set",
    "update_views": "all",
    "prior": "uniform",
    "prior_over": "batch",
    "labeled_loss": "known",
    "percentile": 20.0,
    "momentum": 0.5,
}


def build(config, task=TASK, seed=0):
    with seeded(seed):
        method = OpenCon(config, task, ExactEmbedder()).double()
    method.novel_weight.fill_(config.weight_novel)
    method.epoch_threshold.fill_(EPOCH_THRESHOLD)
    return method


def step(method, batch):
    before = method.prototypes.clone()
    out = method.step(batch)
    method.after_step(*out.carry)
    after = method.prototypes.clone()
    method.prototypes.copy_(before)
    return out, after


def naive(method, batch):
    with torch.no_grad():
        views = [method.embed(v).numpy() for v in batch.views]
    return naive_step(
        views,
        batch.labels.tolist(),
        method.prototypes.numpy(),
        method.config,
        method.task,
        novel_weight=float(method.novel_weight),
        epoch_threshold=EPOCH_THRESHOLD,
    )


def configs():
    base = OpenConConfig()
    yield pytest.param(base, id="released")
    yield pytest.param(OpenConConfig.paper(), id="paper")
    yield pytest.param(dataclasses.replace(base, prior=(1.0, 2.0, 3.0, 4.0, 5.0)), id="prior=given")
    for key, value in OTHER.items():
        yield pytest.param(dataclasses.replace(base, **{key: value}), id=f"{key}={value}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", list(configs()))
def test_step_equals_the_definitions(config, seed):
    method, batch = build(config, seed=seed), toy_batch(seed)
    out, moved = step(method, batch)
    total, terms, want_moved = naive(method, batch)
    for name, value in terms.items():
        assert out.logs[name].item() == pytest.approx(value, rel=1e-6), name
    assert out.loss.item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(moved.numpy(), want_moved, atol=1e-7)


@pytest.mark.parametrize("key", OTHER)
def test_every_setting_matters(key):
    """Each difference between the variants changes the loss or the prototypes on some small batch."""
    changed = []
    for seed in range(3):
        batch = toy_batch(seed)
        a, moved_a = step(build(OpenConConfig(), seed=seed), batch)
        b, moved_b = step(build(dataclasses.replace(OpenConConfig(), **{key: OTHER[key]}), seed=seed), batch)
        changed.append(not torch.allclose(a.loss, b.loss) or not torch.allclose(moved_a, moved_b))
    assert any(changed)


def test_the_variants_differ_where_the_table_says():
    released, paper = OpenConConfig(), OpenConConfig.paper()
    different = {f.name for f in dataclasses.fields(released) if getattr(released, f.name) != getattr(paper, f.name)}
    assert different == (set(OTHER) - {"labeled_loss", "percentile", "momentum", "threshold_from"}) | {"ramp_epochs"}


def test_seventy_percent_of_the_labeled_views_lie_above_the_threshold_of_the_paper():
    method, batch = build(OpenConConfig.paper()), toy_batch()
    views = method.embedder.embed_views(batch.views).view(len(batch.views), len(batch.labels), -1)
    labeled = views[:, : batch.num_labeled]
    score = seen_score((labeled @ method.prototypes.T).flatten(0, 1), num_seen=method.task.num_seen, form="cosine")
    threshold = novelty_threshold(score, percentile=70.0)
    _, novel = method._decide(views.detach(), batch)
    unlabeled = (views[:, batch.num_labeled :] @ method.prototypes.T).flatten(0, 1)
    want = seen_score(unlabeled, num_seen=method.task.num_seen, form="cosine") < threshold
    assert torch.equal(novel.flatten(), want)


def test_novel_weight_ramps_to_its_full_value():
    method = build(OpenConConfig(ramp_epochs=10, weight_novel=0.1))
    weights = []
    for epoch in (0, 5, 10, 50):
        method.before_epoch(Epoch(epoch, 100, features=lambda: None))
        weights.append(float(method.novel_weight))
    assert weights == pytest.approx([0.0, 0.05, 0.1, 0.1])
    method = build(OpenConConfig(ramp_epochs=0, weight_novel=0.1))
    method.before_epoch(Epoch(0, 100, features=lambda: None))
    assert float(method.novel_weight) == pytest.approx(0.1)


def test_the_ramp_reaches_the_loss():
    method, batch = build(OpenConConfig(ramp_epochs=10)), toy_batch()
    method.before_epoch(Epoch(0, 100, features=lambda: None))
    early = method.step(batch)
    method.before_epoch(Epoch(10, 100, features=lambda: None))
    late = method.step(batch)
    assert (late.loss - early.loss).item() == pytest.approx(0.1 * late.logs["loss_n"].item())


def started(config):
    """A method that starts from ten rows in five classes: 2, 3, 3, 1 and 1; class 0 has both its labels, class 1 one."""
    method = build(config, seed=4)
    classes = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3, 4])
    z = torch.nn.functional.normalize(torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).double(), dim=1)
    method.start_from(FeatureBank(z, torch.tensor([0, 0, 1, -1, -1, -1, -1, -1, -1, -1])), classes)
    return method, z, classes


def test_it_starts_from_the_classes_that_are_given():
    method, z, classes = started(OpenConConfig())
    for c in range(5):
        mean = torch.stack([row for row, own in zip(z, classes.tolist(), strict=True) if own == c]).mean(dim=0)
        torch.testing.assert_close(method.prototypes[c], mean / mean.norm())
    # Unlabeled rows of each class: 0, 2, 3, 1, 1; one is added to each.
    torch.testing.assert_close(method.prior, torch.tensor([1.0, 3, 4, 2, 2]).double() / 12)


def test_the_novel_weight_does_not_ramp_from_a_start_with_classes():
    config = OpenConConfig(ramp_epochs=10, weight_novel=0.1)
    method, _, _ = started(config)
    method.before_epoch(Epoch(0, 100, features=lambda: None))
    assert float(method.novel_weight) == pytest.approx(0.1)


def test_the_start_survives_being_saved_and_loaded():
    method, _, _ = started(OpenConConfig(ramp_epochs=10, weight_novel=0.1))
    again = build(OpenConConfig(ramp_epochs=10, weight_novel=0.1), seed=9)
    again.load_state_dict(method.state_dict())
    assert torch.equal(again.prototypes, method.prototypes)
    assert torch.equal(again.prior, method.prior)
    again.before_epoch(Epoch(0, 100, features=lambda: None))
    assert float(again.novel_weight) == pytest.approx(0.1)


def test_threshold_from_the_labeled_set_is_refreshed_every_epoch():
    method = build(OpenConConfig(threshold_from="labeled_set", seen_score="cosine"))
    batch = toy_batch()
    with torch.no_grad():
        bank = FeatureBank(method.embed(batch.views[0]), batch.labels)
    method.before_epoch(Epoch(0, 10, features=lambda: bank))
    labeled = (bank.z[:8] @ method.prototypes[:2].T).amax(dim=1)
    assert float(method.epoch_threshold) == pytest.approx(np.percentile(labeled.numpy(), 30))


def test_hidden_labels_have_no_place_in_the_batch():
    batch = toy_batch()
    assert {f.name for f in dataclasses.fields(batch)} == {"views", "labels", "num_labeled", "rows", "mixes"}
    assert (batch.labels[batch.num_labeled :] == -1).all()


def test_no_gradient_reaches_the_prototypes_and_step_leaves_them():
    method, batch = build(OpenConConfig()), toy_batch()
    before = {k: v.clone() for k, v in method.state_dict().items()}
    method.step(batch).loss.backward()
    for key, value in method.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert method.embedder.linear.weight.grad.abs().sum() > 0


def test_assign_takes_the_nearest_prototype():
    method = build(OpenConConfig())
    z = method.prototypes[[3, 0, 4]]
    got = method.assign(FeatureBank(z, torch.tensor([-1, 0, -1])))
    assert got.classes.tolist() == [3, 0, 4]
    torch.testing.assert_close(got.p, (10 * z @ method.prototypes.T).softmax(dim=1))
    torch.testing.assert_close(got.p.sum(dim=1), torch.ones(3, dtype=torch.float64))
    assert got.novelty[1] < got.novelty[0]  # the seen one is the least novel
    assert got.novelty[1] < got.novelty[2]
    assert float(got.novelty_threshold) == pytest.approx(float(got.novelty[1]))  # the only labeled one


def test_a_bank_without_labels_has_no_threshold():
    method = build(OpenConConfig())
    got = method.assign(FeatureBank(method.prototypes, torch.full((5,), -1)))
    assert torch.isnan(got.novelty_threshold)


def test_prior_counts_the_labeled_images_out():
    got = class_prior("unlabeled", Task(num_seen=2, num_classes=4, labeled_ratio=0.5, num_images=40))
    torch.testing.assert_close(got, torch.tensor([0.5, 0.5, 1.0, 1.0]) / 3.0)


def test_prior_of_the_wrong_length_is_refused():
    with pytest.raises(ConfigError, match=r"method.prior has 2 entries for 5 classes"):
        class_prior((0.5, 0.5), TASK)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature_novel", 0.0, "above zero"),
        ("weight_prior", -1.0, "not be negative"),
        ("momentum", 1.0, r"\[0, 1\)"),
        ("percentile", 101.0, "between 0 and 100"),
        ("prior", (1.0, 0.0), "positive numbers"),
    ],
)
def test_bad_settings_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"method.{key} = .*{message}"):
        OpenConConfig(**{key: value})


def test_the_guess_makes_the_bound_of_the_e_step_tight():
    """Section 4.1: log p(x) >= sum_c q(c) log(p(x, c) / q(c)), with equality where q is the posterior.

    Under von Mises-Fisher classes of equal shares, p(x, c) is proportional to exp(logit_c). The probabilities of `assign`
    reach the bound, other distributions do not; and of all one-hot ones its classes come nearest.
    """
    method = build(OpenConConfig())
    z = torch.nn.functional.normalize(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)).double(), dim=1)
    joint = method.row_logits(z)  # (M, C), log p(x, c) up to a constant
    given = method.assign(FeatureBank(z, torch.full((50,), -1)))

    def bound(q):
        return (torch.special.xlogy(q, q).neg() + q * joint).sum(dim=1)

    likelihood = joint.logsumexp(dim=1)
    torch.testing.assert_close(bound(given.p), likelihood)
    other = torch.rand(50, joint.shape[1], generator=torch.Generator().manual_seed(2)).double()
    assert (bound(other / other.sum(dim=1, keepdim=True)) < likelihood).all()
    one_hot = torch.eye(joint.shape[1]).double()
    each = torch.stack([bound(q.expand(50, -1)) for q in one_hot], dim=1)  # (M, C)
    assert torch.equal(each.argmax(dim=1), given.classes)
