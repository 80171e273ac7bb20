"""DS3L's two levels against differences, its weight net's Adam against torch's, and its settings."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from opencon.config import EncoderConfig
from opencon.encoders import build_embedder
from opencon.errors import ConfigError
from opencon.methods import DS3L, DS3LConfig, Epoch, FeatureBank
from opencon.methods.ds3l import WeightNet, terms, weighted_mean
from opencon.runtime import seeded
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch
from tests.naive.ds3l import (
    NaiveNetwork,
    naive_consistency,
    naive_cross_entropy,
    naive_look_ahead,
    naive_weight,
    slope,
)

BLOBS = Blobs(seen=0.65)  # as for fixmatch

HIDDEN, FEATURES, WEIGHT = 3, 3, 4.0


def build(seed=0, **settings):
    with seeded(seed):
        config = DS3LConfig(**{"hidden": HIDDEN, "weight_consistency": WEIGHT, "inner_lr": 0.7, **settings})
        method = DS3L(config, TASK, ExactEmbedder(dim=FEATURES)).double()
    with torch.no_grad():
        method.classifier.weight *= 4  # far enough from flat predictions that images differ
        method.weight_net.numbers *= 4
    return method


def small_batch(seed=0):
    return toy_batch(seed, num_labeled=4, num_unlabeled=5)


def plain(method, batch):
    """All that the loops need, as lists."""
    L = batch.num_labeled
    first, second = (view.flatten(1).tolist() for view in batch.views)
    parts = [
        method.embedder.linear.weight,
        method.embedder.linear.bias,
        method.classifier.weight,
        method.classifier.bias,
    ]
    return {
        "network": NaiveNetwork(9, FEATURES, TASK.num_seen),
        "theta": torch.cat([p.detach().flatten() for p in parts]).tolist(),
        "phi": method.weight_net.numbers.tolist(),
        "rows": first[:L],
        "labels": batch.labels[:L].tolist(),
        "pairs": list(zip(first[L:], second[L:], strict=True)),
    }


@pytest.mark.parametrize("seed", range(3))
def test_loss_equals_the_formula(seed):
    method, batch = build(seed), small_batch(seed)
    out, s = method.step(batch), plain(method, batch)
    loss_l = naive_cross_entropy(s["network"], s["theta"], s["rows"], s["labels"])
    loss_c = naive_consistency(s["network"], s["theta"], s["theta"], s["phi"], s["pairs"], HIDDEN)
    assert out.logs["loss_l"].item() == pytest.approx(loss_l)
    assert out.logs["loss_c"].item() == pytest.approx(loss_c)
    assert out.loss.item() == pytest.approx(loss_l + WEIGHT * loss_c)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("inner", ["all", "classifier"])
def test_weight_net_follows_the_loss_after_a_look_ahead(inner, seed):
    """The whole bilevel gradient: differences in phi of a labeled loss after a step whose gradient is differences, too."""
    method, batch = build(seed, inner=inner), small_batch(seed)
    s = plain(method, batch)
    num_classifier = TASK.num_seen * (FEATURES + 1)
    moves = [inner == "all"] * (len(s["theta"]) - num_classifier) + [True] * num_classifier

    def after(phi):
        return naive_look_ahead(
            **{**s, "phi": phi}, hidden=HIDDEN, weight=WEIGHT, inner_lr=method.config.inner_lr, moves=moves
        )

    out = method.step(batch)
    (gradient,) = out.carry
    assert out.logs["loss_ahead"].item() == pytest.approx(after(s["phi"]), rel=1e-6)
    want = torch.tensor(slope(after, s["phi"], 1e-3), dtype=torch.float64)
    assert want.abs().max() > 1e-4
    torch.testing.assert_close(gradient, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


def test_a_copy_looks_ahead_with_its_own_weights():
    method, batch = build(), small_batch()
    other = copy.deepcopy(method)
    with torch.no_grad():
        other.classifier.weight *= 2
    fresh = build()
    fresh.load_state_dict(other.state_dict())
    torch.testing.assert_close(other.step(batch).carry, fresh.step(batch).carry)
    assert not torch.allclose(other.step(batch).carry[0], method.step(batch).carry[0])


def test_a_step_down_the_gradient_lowers_the_loss_after_the_look_ahead():
    method, batch = build(), small_batch()
    out = method.step(batch)
    method.weight_net.numbers -= 0.1 * out.carry[0] / out.carry[0].norm()
    assert method.step(batch).logs["loss_ahead"] < out.logs["loss_ahead"]


def test_gradient_of_the_step_treats_weights_and_first_views_as_given():
    """The parameters' gradient against differences of L with the first view's probabilities and weights held."""
    method, batch = build(), small_batch()
    s = plain(method, batch)
    method.step(batch).loss.backward()
    linear, last = method.embedder.linear, method.classifier
    got = torch.cat([p.grad.flatten() for p in (linear.weight, linear.bias, last.weight, last.bias)])

    def loss(theta):
        labeled = naive_cross_entropy(s["network"], theta, s["rows"], s["labels"])
        return labeled + WEIGHT * naive_consistency(s["network"], theta, s["theta"], s["phi"], s["pairs"], HIDDEN)

    torch.testing.assert_close(
        got, torch.tensor(slope(loss, s["theta"], 1e-5), dtype=torch.float64), rtol=1e-5, atol=1e-8
    )


def test_terms_and_weighted_mean_by_hand():
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [math.log(3.0), 0.0]], dtype=torch.float64)
    loss, distance, p = terms(logits, torch.tensor([1]))
    assert loss.item() == pytest.approx(math.log(2))
    assert distance.item() == pytest.approx(0.25**2)  # 3/4, 1/4 against halves
    assert p.tolist() == [[0.5, 0.5]]
    assert weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])).item() == pytest.approx(1.5)
    assert weighted_mean(torch.tensor([1.0, 3.0]), torch.zeros(2)) == 0


def test_weight_net_by_hand():
    with seeded(0):
        net = WeightNet(4, 5).double()
    p = torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
    want = [naive_weight(net.numbers.tolist(), row, 5) for row in p.tolist()]
    assert net(p, net.numbers).tolist() == pytest.approx(want)


def test_weight_net_moves_by_adam():
    with seeded(0):
        net = WeightNet(4, 5)
        gradients = [torch.randn_like(net.numbers) for _ in range(4)]
    theirs = net.numbers.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.01)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        adam.step()
        net.update(gradient, 0.01)
        torch.testing.assert_close(net.numbers, theirs.detach())


def test_after_step_moves_the_weight_net_alone():
    method, batch = build(weight_lr=0.01), small_batch()
    before = {name: value.clone() for name, value in method.state_dict().items()}
    method.after_step(*method.step(batch).carry)
    changed = {name for name, value in method.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"weight_net.{name}" for name in ("numbers", "mean", "square", "count")}
    moved = (method.weight_net.numbers - before["weight_net.numbers"]).abs()
    assert moved.max().item() == pytest.approx(0.01, rel=1e-3)  # Adam's first step has the length of its rate


@pytest.mark.parametrize("views_together", [True, False])
def test_looks_do_not_count_in_running_statistics(views_together):
    """One pass of the step moves them, as without a look ahead."""
    with seeded(0):
        settings = EncoderConfig(name="convnet", views_together=views_together)
        embedder = build_embedder(settings, in_channels=1, image_size=8, projects=False)
        method = DS3L(DS3LConfig(), TASK, embedder).train()
    g = torch.Generator().manual_seed(0)
    views = tuple(torch.rand(9, 1, 8, 8, generator=g) for _ in range(2))
    method.step(replace(small_batch(), views=views)).loss.backward()
    assert embedder.encoder.conv1.bn.num_batches_tracked == (1 if views_together else 2)
    got = embedder.encoder.conv1.bn.running_mean.clone()
    embedder.encoder.conv1.bn.reset_running_stats()
    embedder.features_of_views((views[0], views[1][4:]))
    torch.testing.assert_close(got, embedder.encoder.conv1.bn.running_mean)


@pytest.mark.parametrize(("ramp_epochs", "full_at"), [(0, 40), (10, 10)])
def test_consistency_ramps_up(ramp_epochs, full_at):
    method, batch = build(ramp_epochs=ramp_epochs), small_batch()
    for t in (0.0, 0.5, 1.0):
        method.before_epoch(Epoch(int(t * full_at), 40, features=lambda: None))
        want = WEIGHT * math.exp(-5 * (1 - t) ** 2)
        out = method.step(batch)
        assert (out.loss.item() - out.logs["loss_l"].item()) / out.logs["loss_c"].item() == pytest.approx(
            want, rel=1e-6
        )


def test_the_unsure_are_novel():
    method, batch = build(), toy_batch()
    z = method.embed(batch.views[0]).detach()
    torch.testing.assert_close(z, method.embedder.features(batch.views[0]).detach())
    got = method.assign(FeatureBank(z, batch.labels))
    is_novel = got.classes >= TASK.num_seen
    assert is_novel.sum() == round(24 * 3 / 5)
    logits = method.classifier(z)
    assert torch.equal(got.classes[~is_novel], logits.argmax(dim=1)[~is_novel])
    assert got.novelty[~is_novel & (batch.labels < 0)].max() <= got.novelty[is_novel].min()
    method.config = replace(method.config, reject_share=0.25)
    assert (method.assign(FeatureBank(z, batch.labels)).classes >= TASK.num_seen).sum() == 4
    method.config = replace(method.config, reject_share=None, reject_threshold=0.0)
    assert (method.assign(FeatureBank(z, batch.labels)).classes < TASK.num_seen).all()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weight_consistency", -1.0, "not be negative"),
        ("ramp_epochs", -1, "not be negative"),
        ("inner_lr", 0.0, "above zero"),
        ("hidden", 0, "above zero"),
        ("weight_lr", 0.0, "above zero"),
        ("reject_share", 2.0, "between 0 and 1"),
        ("reject_threshold", -1.0, "between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"method.{key} = .*{message}"):
        DS3LConfig(**{key: value})
