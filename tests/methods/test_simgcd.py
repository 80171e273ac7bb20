"""SimGCD's step against the formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from opencon.errors import ConfigError
from opencon.methods import METHODS, Epoch, FeatureBank, SimGCD, SimGCDConfig
from opencon.methods.simgcd import missing_entropy, swapped_cross_entropy
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.gcd import naive_all, naive_labeled
from tests.naive.simgcd import naive_class, naive_cluster, naive_cosines, naive_missing_entropy


def build(seed=0, epoch=None, **settings):
    with seeded(seed):
        method = SimGCD(SimGCDConfig(**settings), TASK, ExactEmbedder(dim=4, num_features=7)).double()
    if epoch is not None:
        begin(method, epoch)
    return method


def begin(method, epoch):
    method.before_epoch(Epoch(epoch, 200, lambda: pytest.fail("embedded")))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_entropy": 4.0, "weight_labeled": 0.6},
        {"temperature": 0.3, "temperature_labeled": 0.5, "temperature_student": 0.4, "temperature_teacher_start": 0.2},
    ],
)
def test_step_equals_the_formulas(seed, settings):
    method, batch = build(seed, epoch=0, **settings), toy_batch(seed)
    c, labels = method.config, batch.labels.tolist()
    with torch.no_grad():
        images = torch.cat(batch.views)
        z, features = method.embedder(images), method.embedder.features(images)
    cosines = naive_cosines(features, method.classifier.weight.detach())
    want = {
        "loss_all": naive_all(z, len(labels), c.temperature),
        "loss_l": naive_labeled(z, labels, c.temperature_labeled),
        "loss_class": naive_class(cosines, labels, c.temperature_student),
        "loss_cluster": naive_cluster(cosines, len(labels), c.temperature_student, c.temperature_teacher_start),
        "loss_entropy": naive_missing_entropy(cosines, c.temperature_student),
    }
    out = method.step(batch)
    assert {name: value.item() for name, value in out.logs.items()} == pytest.approx(want, rel=1e-9)
    unsupervised = want["loss_all"] + want["loss_cluster"] + c.weight_entropy * want["loss_entropy"]
    supervised = want["loss_l"] + want["loss_class"]
    total = (1 - c.weight_labeled) * unsupervised + c.weight_labeled * supervised
    assert out.loss.item() == pytest.approx(total, rel=1e-9)


def test_the_numbers_of_the_paper():
    c = SimGCDConfig()
    assert (c.temperature, c.temperature_labeled, c.temperature_student) == (1.0, 0.07, 0.1)
    assert (c.temperature_teacher_start, c.temperature_teacher) == (0.07, 0.04)
    assert (c.weight_labeled, c.weight_entropy) == (0.35, 1.0)
    assert METHODS["simgcd"].protocol == "gcd"


# --- the teacher ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "temperature"), [(0, 0.07), (10, 0.06), (29, 0.041), (30, 0.04), (31, 0.04), (199, 0.04)]
)
def test_the_teacher_sharpens_over_its_epochs(epoch, temperature):
    """The last of its epochs, here the 31st, has the final temperature already."""
    method = build(epoch=epoch, teacher_epochs=31)
    assert method.teacher_temperature.item() == pytest.approx(temperature)


@pytest.mark.parametrize("teacher_epochs", [0, 1])
def test_a_teacher_may_be_sharp_from_the_start(teacher_epochs):
    assert build(epoch=0, teacher_epochs=teacher_epochs).teacher_temperature.item() == pytest.approx(0.04)


def test_the_temperature_reaches_the_loss():
    method, batch = build(epoch=0), toy_batch()
    before = method.step(batch)
    begin(method, 100)
    after = method.step(batch)
    assert after.logs["loss_cluster"] != before.logs["loss_cluster"]
    assert all(torch.equal(after.logs[k], before.logs[k]) for k in before.logs if k != "loss_cluster")


def test_the_teacher_gets_no_gradient():
    """Gradient of a row's cross-entropy to a fixed target q: (p - q) / N."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=g, dtype=torch.float64, requires_grad=True)
    swapped_cross_entropy(logits, 3 * logits).backward()
    q = (3 * logits.detach()).softmax(dim=1)
    torch.testing.assert_close(logits.grad, (logits.detach().softmax(dim=1) - q.roll(3, dims=0)) / 6)


def test_two_views_that_agree_cost_their_entropy():
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64).repeat(2, 1)  # p = (1/4, 3/4)
    want = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert swapped_cross_entropy(logits, logits).item() == pytest.approx(want)


# --- balance ----------------------------------------------------------------------------------------------------------


def test_entropy_is_that_of_the_mean_not_the_mean_of_entropies():
    sure = 50 * torch.eye(4, dtype=torch.float64)
    assert missing_entropy(sure).item() == pytest.approx(0.0, abs=1e-12)  # each row sure, together uniform
    assert missing_entropy(sure[:1].repeat(4, 1)).item() == pytest.approx(math.log(4))
    assert missing_entropy(torch.zeros(3, 4)).item() == pytest.approx(0.0, abs=1e-6)


def test_a_class_that_nobody_chooses_is_pulled_up_with_a_finite_gradient():
    logits = torch.zeros(5, 3)
    logits[:, 2] = -200.0  # exp underflows in float32
    logits.requires_grad_()
    missing_entropy(logits).backward()
    assert logits.grad.isfinite().all()
    logits = torch.zeros(5, 3, dtype=torch.float64)
    logits[:, 2] = -9.0
    logits.requires_grad_()
    missing_entropy(logits).backward()
    assert (logits.grad[:, 2] < 0).all()


def test_gradients_are_derivatives():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 3, generator=g, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(missing_entropy, logits)


# --- classes ----------------------------------------------------------------------------------------------------------


def test_the_class_is_the_nearest_direction_of_features():
    method, batch = build(), toy_batch()
    z = method.embed(batch.views[0])
    torch.testing.assert_close(z, F.normalize(method.embedder.features(batch.views[0]), dim=1))
    got = method.assign(FeatureBank(z.detach(), batch.labels))
    cosines = naive_cosines(z.detach(), method.classifier.weight.detach())
    assert got.classes.tolist() == [max(range(5), key=row.__getitem__) for row in cosines]
    torch.testing.assert_close(got.seen_logits, torch.tensor(cosines, dtype=torch.float64)[:, :2] / 0.1)
    torch.testing.assert_close(got.p, (torch.tensor(cosines, dtype=torch.float64) / 0.1).softmax(dim=1))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "weight"), [("digits", 1.0), ("cifar", 4.0), ("imagenet", 1.0), ("fine_grained", 2.0)]
)
def test_the_weight_of_the_entropy_goes_by_the_images(kind, weight):
    schedule = SimGCD.schedule(kind)
    assert schedule.method.weight_entropy == weight
    is_resnet = kind in ("cifar", "imagenet")
    assert (schedule.train.batch_size, schedule.train.labeled_share) == ((512, None) if is_resnet else (128, 0.5))
    assert schedule.method.teacher_epochs < schedule.train.epochs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"method.temperature = 0.0 must be above zero"),
        ({"temperature_labeled": 0.0}, r"method.temperature_labeled = 0.0 must be above zero"),
        ({"temperature_student": 0.0}, r"method.temperature_student = 0.0 must be above zero"),
        ({"temperature_teacher": -0.1}, r"method.temperature_teacher = -0.1 must be above zero"),
        ({"temperature_teacher_start": 0.0}, r"method.temperature_teacher_start = 0.0 must be above zero"),
        ({"teacher_epochs": -1}, r"method.teacher_epochs = -1 must not be negative"),
        ({"weight_entropy": -1.0}, r"method.weight_entropy = -1.0 must not be negative"),
        ({"weight_labeled": 2.0}, r"method.weight_labeled = 2.0 must lie between 0 and 1"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        SimGCDConfig(**settings)
