"""FixMatch's step against the formula, its weight average, and who is rejected."""

import math
from dataclasses import replace

import pytest
import torch

from opencon.errors import ConfigError
from opencon.methods import FeatureBank, FixMatch, FixMatchConfig
from opencon.runtime import seeded
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch
from tests.naive.fixmatch import naive_losses

BLOBS = Blobs(seen=0.7)  # a seen image is easily rejected for a novel one that it is more sure of


def build(seed=0, sharpness=20.0, **settings):
    """Sharp enough that some images are sure and others are not."""
    with seeded(seed):
        method = FixMatch(FixMatchConfig(**settings), TASK, ExactEmbedder()).double()
    with torch.no_grad():
        method.classifier.weight *= sharpness
    return method


def logits(method, images):
    return method.classifier(method.embedder.features(images)).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight_unlabeled", [1.0, 3.0])
def test_step_equals_the_formula(seed, weight_unlabeled):
    method, batch = build(seed, weight_unlabeled=weight_unlabeled), toy_batch(seed)
    weak, strong = (logits(method, view) for view in batch.views)
    confidence = torch.tensor(weak).softmax(dim=1).amax(dim=1)[batch.num_labeled :]
    method.config = replace(method.config, threshold=float(confidence.median()) - 1e-6)  # about a half are sure
    out = method.step(batch)
    loss_l, loss_u, share = naive_losses(weak, strong, batch.labels.tolist(), method.config.threshold)
    assert 0 < share < 1
    assert out.logs["loss_l"].item() == pytest.approx(loss_l)
    assert out.logs["loss_u"].item() == pytest.approx(loss_u)
    assert out.logs["share_sure"].item() == pytest.approx(share)
    assert out.loss.item() == pytest.approx(loss_l + method.config.weight_unlabeled * loss_u)


def test_flat_predictions():
    """Equal logits: everything is log S, and nobody is sure until a half is enough."""
    method, batch = build(sharpness=0.0, threshold=0.5), toy_batch()
    with torch.no_grad():
        method.classifier.bias.zero_()
    out = method.step(batch)
    assert out.loss.item() == pytest.approx(2 * math.log(2))
    assert out.logs["share_sure"] == 1
    method.config = replace(method.config, threshold=0.51)
    assert method.step(batch).loss.item() == pytest.approx(math.log(2))


def test_only_the_labeled_are_asked_for_gradient_in_the_weak_view():
    method, batch = build(), toy_batch()
    weak, strong = (view.clone().requires_grad_() for view in batch.views)
    method.step(replace(batch, views=(weak, strong))).loss.backward()
    L = batch.num_labeled
    assert (weak.grad[:L].abs().sum(dim=(1, 2, 3)) > 0).all()
    assert (weak.grad[L:] == 0).all()
    assert (strong.grad[:L] == 0).all()
    sure = torch.tensor(logits(method, weak)).softmax(dim=1).amax(dim=1)[L:] >= method.config.threshold
    assert torch.equal(strong.grad[L:].abs().sum(dim=(1, 2, 3)) > 0, sure)


def test_average_is_embedded_and_assigned():
    """After steps, `embed` and `assign` go by averages of embedder and classifier, made by hand here."""
    method, images = build(momentum=0.5), toy_batch().views[0]
    averages = {name: value.clone() for name, value in method.state_dict().items()}
    averages = {name: averages[name] for name, _ in method.named_parameters()}
    with torch.no_grad():
        averages["classifier.weight"] /= 20  # as it was when the average was built
    for n in (1, 2, 3):
        for p in method.parameters():
            p.data += 0.1 * n
        method.after_step()
        m = min(0.5, (1 + n) / (10 + n))
        for name, p in method.named_parameters():
            averages[name] = m * averages[name] + (1 - m) * p.detach()
    other = build()
    other.load_state_dict(averages, strict=False)
    want = other.embedder.features(images)
    torch.testing.assert_close(method.embed(images), want)
    got = method.assign(FeatureBank(want.detach(), torch.full((len(want),), -1)))
    torch.testing.assert_close(got.seen_logits, other.classifier(want).detach())


def test_the_unsure_are_novel():
    method = build()
    z = method.embed(toy_batch().views[0])
    labels = toy_batch().labels
    p = method.average_classifier(z).softmax(dim=1)
    got = method.assign(FeatureBank(z, labels))
    is_novel = got.classes >= TASK.num_seen
    assert is_novel.sum() == round(24 * 3 / 5)  # three of five classes are novel
    assert not is_novel[labels >= 0].any()
    kept = ~is_novel & (labels < 0)
    assert got.novelty[kept].max() <= got.novelty[is_novel].min()
    assert torch.equal(got.classes[~is_novel], p.argmax(dim=1)[~is_novel])
    method.config = replace(method.config, reject_threshold=0.0)
    assert (method.assign(FeatureBank(z, labels)).classes < TASK.num_seen).all()
    method.config = replace(method.config, reject_threshold=None, reject_share=0.25)
    assert (method.assign(FeatureBank(z, labels)).classes >= TASK.num_seen).sum() == 4


def test_cifar_batches_are_the_papers():
    train = FixMatch.schedule("cifar").train
    assert train.batch_size * train.labeled_share == 64
    assert train.lr_end / train.lr == pytest.approx(math.cos(7 * math.pi / 16), abs=0.01)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("threshold", 1.5, "between 0 and 1"),
        ("threshold", -0.1, "between 0 and 1"),
        ("momentum", 1.0, r"\[0, 1\)"),
        ("weight_unlabeled", -1.0, "not be negative"),
        ("reject_share", 2.0, "between 0 and 1"),
        ("reject_threshold", -1.0, "between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"method.{key} = .*{message}"):
        FixMatchConfig(**{key: value})
