"""Concord's step, start and averages against their definitions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from opencon.config import ViewConfig
from opencon.data.loader import Batch
from opencon.errors import ConfigError
from opencon.methods import METHODS, Concord, ConcordConfig, Epoch, FeatureBank, concord
from opencon.methods.correction import NOT_TRIED
from opencon.methods.parts import WeightAverage
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.concord import naive_losses, naive_targets
from tests.naive.gcd import naive_all, naive_labeled
from tests.naive.simgcd import naive_cosines


def build(seed=0, *, started=True, **settings):
    settings = {"queue": 12, **settings}
    with seeded(seed):
        method = Concord(ConcordConfig(**settings), TASK, ExactEmbedder(dim=4, num_features=7)).double()
        method.queue.uniform_(-1, 1)
    method.is_started.fill_(started)
    return method.train()


def two_lumps(seed=0):
    """A bank of 40 rows around five directions, in order; of the first two classes every other one is labeled."""
    g = torch.Generator().manual_seed(seed)
    classes = torch.arange(5).repeat_interleave(8)
    z = F.normalize(torch.eye(7)[classes] + 0.05 * torch.randn(40, 7, generator=g), dim=1).double()
    labels = torch.where((classes < 2) & (torch.arange(40) % 2 == 0), classes, -1)
    return FeatureBank(z, labels), classes


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("views", [2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3, "epsilon": 0.2, "rounds": 1, "queue": 0},
        {"epsilon": 0.2, "rounds": 0},
        {"weight_labels": 0.7, "weight_crops": 0.4, "weight_contrast": 0.3, "weight_labeled": 0.9},
        {"temperature_contrast": 0.8, "temperature_labeled": 0.5},
    ],
)
def test_step_equals_the_formulas(seed, views, settings):
    method, batch = build(seed, **settings), toy_batch(seed, views=views)
    c, labels, B = method.config, batch.labels.tolist(), len(batch.labels)
    with torch.no_grad():
        features = method.embedder.features(torch.cat(batch.views))
        z = method.embedder.project(features[: 2 * B])
    rows = naive_cosines(features, method.classifier.weight.detach())
    cosines = [rows[v * B : (v + 1) * B] for v in range(views)]
    targets = [
        naive_targets(cosines[v], method.queue.tolist(), labels, TASK.labeled_ratio, 2, c.epsilon, c.rounds)
        for v in range(2)
    ]
    swapped, crops, given = naive_losses(cosines, targets, labels, c.temperature, c.weight_crops)
    want = {
        "loss_swapped": swapped,
        "loss_crops": crops,
        "loss_labels": given,
        "loss_contrast": naive_all(z, B, c.temperature_contrast),
        "loss_labeled": naive_labeled(z, labels, c.temperature_labeled),
    }
    total = swapped + c.weight_crops * crops + c.weight_labels * given
    total += c.weight_contrast * want["loss_contrast"] + c.weight_labeled * want["loss_labeled"]
    if views == 2:
        del want["loss_crops"]
    out = method.step(batch)
    assert {name: value.item() for name, value in out.logs.items()} == pytest.approx(want, rel=1e-6)
    assert out.loss.item() == pytest.approx(total, rel=1e-6)


def test_targets_get_no_gradient():
    """The gradient of a prediction's logits is (p - q) over the number of terms, as if q were given."""
    method, batch = build(weight_contrast=0.0, weight_labeled=0.0, weight_labels=0.0), toy_batch()
    features = method.embedder.features_of_views(batch.views).detach()
    cosines = method.classifier(features).detach().view(2, 24, 5).requires_grad_()
    method.embedder.features_of_views = lambda views: features
    method.classifier.forward = lambda rows: cosines.flatten(0, 1)
    method.step(batch).loss.backward()
    q = method.targets(cosines.detach(), batch.labels[:8]).flip(0)[:, 8:]
    p = (cosines.detach() / 0.1).softmax(dim=2)[:, 8:]
    torch.testing.assert_close(cosines.grad[:, 8:], (p - q) / 0.1 / 32)
    assert (cosines.grad[:, :8] == 0).all()


def test_targets_of_unlabeled_rows_have_the_expected_shares():
    method = build(rounds=200, epsilon=0.5)
    cosines = torch.rand(2, 24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    method.queue = torch.zeros(0, 5, dtype=torch.float64)
    free = method.targets(cosines, torch.zeros(4, dtype=torch.long))[:, 4:]
    want = torch.tensor([0.6, 0.6, 1.0, 1.0, 1.0], dtype=torch.float64)  # TASK: 0.4 of the seen images are labeled
    torch.testing.assert_close(free.mean(dim=1), (want / want.sum()).expand(2, 5), atol=1e-6, rtol=0)


def test_small_views_have_a_pass_of_their_own_and_no_contrast():
    class Recording(ExactEmbedder):
        def features_of_views(self, views):
            sizes.extend(view.shape[-1] for view in views)
            return self.features(torch.cat([F.interpolate(view, (3, 3)) for view in views]))

        def project(self, features):
            projected.append(len(features))
            return super().project(features)

    sizes, projected = [], []
    method = Concord(ConcordConfig(queue=4), TASK, Recording(num_features=7)).double()
    batch = toy_batch(views=4)
    views = (*batch.views[:2], *(F.interpolate(view, (2, 2)) for view in batch.views[2:]))
    assert method.step(Batch(views, batch.labels, batch.num_labeled, batch.rows)).loss.isfinite()
    assert (sizes, projected) == ([3, 3, 2, 2], [48])


# --- the start --------------------------------------------------------------------------------------------------------


def test_the_classifier_starts_at_semi_supervised_k_means():
    method, (bank, classes) = build(started=False), two_lumps()
    method.before_epoch(Epoch(0, 10, lambda: bank))
    found = method.assign(bank).classes
    assert found[:16].tolist() == classes[:16].tolist()  # labeled classes have their own numbers
    assert len({(int(a), int(b)) for a, b in zip(found, classes, strict=True)}) == 5
    for c in range(5):
        torch.testing.assert_close(method.classifier.weight[c], F.normalize(bank.z[found == c].sum(dim=0), dim=0))
    before = method.classifier.weight.clone()
    method.before_epoch(Epoch(1, 10, lambda: pytest.fail("embedded again")))
    assert torch.equal(method.classifier.weight, before)


def test_the_classifier_starts_anew_before_the_epochs_that_say_so():
    method, (bank, _) = build(started=True, restarts=(3,)), two_lumps()
    before = method.classifier.weight.detach().clone()
    method.before_epoch(Epoch(2, 9, lambda: bank))
    assert torch.equal(method.classifier.weight, before)
    method.before_epoch(Epoch(3, 9, lambda: bank))
    cosines = method.classifier(bank.z)
    assert bool((cosines.amax(dim=1) > 0.9).all()), "every row has a class around its lump"


# --- a number that nobody knows ---------------------------------------------------------------------------------------


def unsure(**settings):
    """Told of nine classes, where there are five."""
    task = replace(TASK, num_classes=9, num_images=80, is_counted=True)
    with seeded(0):
        method = Concord(ConcordConfig(queue=20, **settings), task, ExactEmbedder(dim=4, num_features=7)).double()
    return method.train()


def five_lumps():
    bank, classes = two_lumps()
    g = torch.Generator().manual_seed(1)
    z = F.normalize(bank.z.repeat(5, 1) + 0.02 * torch.randn(200, 7, generator=g), dim=1)
    return FeatureBank(z, bank.labels.repeat(5)), classes.repeat(5)


def test_classes_are_counted_anew_at_the_last_start_alone():
    method, (bank, classes) = unsure(restarts=(3, 6)), five_lumps()
    used = []
    for index in range(8):
        method.before_epoch(Epoch(index, 9, lambda: bank))
        used.append(int(method.is_used.sum()))
    assert used == [9, 9, 9, 9, 9, 9, 5, 5]
    found = method.assign(bank).classes
    assert found.max() == 4
    assert len({*zip(found.tolist(), classes.tolist(), strict=True)}) == 5, "each lump is a class"


def test_without_new_starts_they_are_counted_at_the_first():
    method, (bank, _) = unsure(contrast_epochs=2), five_lumps()
    for index, number in ((0, 9), (2, 5)):
        method.before_epoch(Epoch(index, 9, lambda: bank))
        assert int(method.is_used.sum()) == number


@pytest.mark.parametrize("shares", ["equal", "start"])
def test_a_class_that_is_not_looked_for_has_no_part_in_anything(shares):
    method, (bank, _) = unsure(shares=shares), five_lumps()
    method.before_epoch(Epoch(0, 9, lambda: bank))
    expected = torch.tensor([1 - TASK.labeled_ratio] * 2 + [1.0] * 3).double() / (5 - 2 * TASK.labeled_ratio)
    if shares == "start":
        expected = torch.tensor([21, 21, 41, 41, 41]).double() / 165
    torch.testing.assert_close(method.shares[:5].double(), expected, rtol=1e-6, atol=1e-6)
    assert method.shares[5:].max() < 1e-9
    batch = toy_batch(0, views=3)
    out = method.step(batch)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert method.classifier.weight.grad[5:].abs().max() == 0
    with torch.no_grad():
        cosines = method._cosines(method.embedder.features(torch.cat(batch.views[:2]))).view(2, len(batch.labels), -1)
        targets = method.targets(cosines, batch.labels[: batch.num_labeled])
    assert targets[..., 5:].max() < 1e-6
    assert method.queue[:, 5:].max() == method.row_logits(bank.z)[:, 5:].max() * method.config.temperature == -2
    assert out.logs["prototypes"] == 5


def test_three_epochs_are_looked_at_before_the_last_start():
    method, (bank, _) = unsure(contrast_epochs=12), five_lumps()
    looked = []
    for index in range(13):
        method.before_epoch(Epoch(index, 24, lambda: bank))
        looked.append(int((method.signs > NOT_TRIED).any(dim=2).all(dim=1).sum()))
    assert looked == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]


def test_once_groups_have_come_back_every_number_is_tried(monkeypatch):
    method, (bank, _) = unsure(contrast_epochs=12), five_lumps()
    z = torch.randn(bank.z.shape, generator=torch.Generator().manual_seed(0))
    noise = FeatureBank(F.normalize(z, dim=1), bank.labels)
    whole, asked = concord.signs_of, []

    def seen(*args, where_clear):
        asked.append(where_clear)
        return whole(*args, where_clear=where_clear)

    monkeypatch.setattr(concord, "signs_of", seen)
    for index in range(13):
        method.before_epoch(Epoch(index, 24, lambda at=index: noise if at == 2 else bank))
    assert asked == [True, True, False]
    assert (method.signs > NOT_TRIED).all(dim=1).sum(dim=1).tolist() == [7, 7, 1]  # the last look first
    assert int(method.is_used.sum()) == 5  # the noise of the first look is no veto


def test_a_number_that_is_given_is_kept():
    task = replace(TASK, num_classes=9, num_images=80)
    method, (bank, _) = Concord(ConcordConfig(), task, ExactEmbedder(dim=4, num_features=7)).double(), five_lumps()
    method.before_epoch(Epoch(0, 9, lambda: bank))
    assert bool(method.is_used.all())
    assert "prototypes" not in method.step(toy_batch(0)).logs


def test_checkpoints_from_before_it_could_count_are_read():
    method = build()
    state = method.state_dict()
    del state["is_used"], state["signs"]
    method.is_used.fill_(False)
    method.load_state_dict(state)
    assert bool(method.is_used.all())


def test_a_start_at_random_keeps_the_directions_and_fills_the_queue():
    method, (bank, _) = build(started=False, num_starts=0, restarts=(1,), queue=20), two_lumps()
    before = method.classifier.weight.detach().clone()
    method.before_epoch(Epoch(0, 9, lambda: bank))
    assert bool(method.is_started)
    assert torch.equal(method.classifier.weight, before)
    every = method.classifier(bank.z[bank.labels < 0]).detach()
    assert (torch.cdist(method.queue, every).min(dim=1).values < 1e-6).all()
    method.before_epoch(Epoch(1, 9, lambda: pytest.fail("embedded again")))
    assert not ConcordConfig(num_starts=0).corrects(is_counted=True), "nothing is counted where nothing is clustered"


def test_a_start_that_is_given_is_kept():
    method, (bank, classes) = build(started=False), two_lumps()
    turned = (classes + 1) % 5
    method.start_from(bank, turned)
    method.before_epoch(Epoch(0, 10, lambda: pytest.fail("embedded")))
    assert torch.equal(method.assign(bank).classes, turned)


def test_the_queue_starts_with_cosines_of_unlabeled_rows():
    method, (bank, classes) = build(started=False, queue=20), two_lumps()
    method.start_from(bank, classes)
    every = method.classifier(bank.z[bank.labels < 0]).detach()
    assert len(method.queue) == 20
    assert len(method.queue.unique(dim=0)) == 20
    assert (torch.cdist(method.queue, every).min(dim=1).values < 1e-6).all()


def test_a_class_without_rows_keeps_its_direction():
    method, (bank, _) = build(started=False), two_lumps()
    before = method.classifier.weight.detach().clone()
    method.start_from(bank, torch.zeros(40, dtype=torch.long))
    assert torch.equal(method.classifier.weight[1:], before[1:])
    assert not torch.equal(method.classifier.weight[0], before[0])


def test_contrast_may_have_its_epochs_alone():
    method, (bank, _), batch = build(started=False, contrast_epochs=2), two_lumps(), toy_batch()
    method.before_epoch(Epoch(1, 10, lambda: pytest.fail("embedded")))
    out = method.step(batch)
    assert out.loss.item() == pytest.approx((out.logs["loss_contrast"] + 0.3 * out.logs["loss_labeled"]).item())
    method.before_epoch(Epoch(2, 10, lambda: bank))
    out = method.step(batch)
    assert out.loss.item() == pytest.approx(
        (
            out.logs["loss_swapped"]
            + 0.5 * out.logs["loss_labels"]
            + out.logs["loss_contrast"]
            + 0.3 * out.logs["loss_labeled"]
        ).item()
    )


# --- after the step ---------------------------------------------------------------------------------------------------


def test_a_short_run_leaves_half_of_its_epochs_to_the_classifier():
    method, (bank, _) = build(started=False, contrast_epochs=50, restarts=(60, 90), counts=True), two_lumps()
    for index in range(20):
        assert bool(method.is_started) == (index > 10)
        method.before_epoch(Epoch(index, 20, lambda: bank))
    assert (method.signs > NOT_TRIED).any(dim=2).all()  # it has counted, too
    method = build(started=False, contrast_epochs=3, restarts=(5, 12), counts=True)
    for index in range(9):
        method.before_epoch(Epoch(index, 9, lambda: bank))
    assert (method.signs[0] > NOT_TRIED).any(), "the last new start that the run reaches counts"


def test_the_queue_takes_the_newest_first():
    method, batch = build(queue=20), toy_batch(num_labeled=20, num_unlabeled=4)
    before = method.queue.clone()
    out = method.step(batch)
    method.after_step(*out.carry)
    cosines = method.classifier(method.embedder.features_of_views(batch.views)).view(2, 24, 5)
    assert torch.equal(method.queue[:8], cosines[:, 20:].flatten(0, 1))
    assert torch.equal(method.queue[8:], before[:12])


def test_classes_come_from_the_features_in_front_of_the_head():
    method, images = build(), toy_batch().views[0]
    z = method.embed(images)
    torch.testing.assert_close(z, F.normalize(method.embedder.features(images), dim=1))
    got = method.assign(FeatureBank(z, torch.full((24,), -1)))
    cosines = torch.tensor(naive_cosines(z.detach(), method.classifier.weight.detach()))
    assert torch.equal(got.classes, cosines.argmax(dim=1))
    torch.testing.assert_close(got.p.float(), (cosines / 0.1).softmax(dim=1).float())


def test_classes_may_keep_the_shares_of_the_start():
    """Of 30 unlabeled rows, 4 and 4 are of the seen classes and 8 of each other one; a row more for each."""
    method, (bank, classes) = build(started=False, shares="start"), two_lumps()
    method.start_from(bank, torch.where(classes == 4, 3, classes))
    torch.testing.assert_close(method.shares, torch.tensor([5.0, 5.0, 9.0, 17.0, 1.0]).double() / 37)


def test_a_batch_without_labels_has_a_loss():
    method, batch = build(), toy_batch(num_labeled=0, views=4)
    out = method.step(batch)
    assert bool(out.loss.isfinite())
    assert out.logs["loss_labels"] == 0


def test_a_new_start_is_the_start_of_the_averages_too():
    method, (bank, classes) = build(started=False), two_lumps()
    method.twin = WeightAverage(method, 0.999)
    method.start_from(bank, classes)
    method.twin.exchange()
    means = F.normalize(torch.stack([bank.z[classes == c].mean(dim=0) for c in range(5)]), dim=1)
    torch.testing.assert_close(method.classifier.weight.detach(), means)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_recipe():
    """As docs/past-the-paper.md says; the learning rate was chosen on a development set."""
    c, own = ConcordConfig(), Concord.schedule("cifar")
    assert (c.temperature, c.epsilon, c.rounds, c.queue) == (0.1, 0.05, 3, 4096)
    assert own.eval == {"average": 0.999, "fresh_norms": True, "mirror": True}
    assert (c.weight_labels, c.weight_crops, c.weight_contrast, c.weight_labeled) == (0.5, 1.0, 1.0, 0.3)
    assert (own.train.lr, own.train.nesterov, own.train.epochs, own.train.batch_size) == (0.1, True, 110, 512)
    assert own.views == (ViewConfig(size=20, crop_scale=(0.2, 0.6), count=4),)
    assert own.encoder["train_from"] == "all"
    assert METHODS["concord"].paper == "ours"


def test_digits_are_neither_cut_nor_mirrored():
    own = Concord.schedule("digits")
    assert own.views == ()
    assert "mirror" not in own.eval
    assert 0 < own.method.contrast_epochs < own.train.epochs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"method\.temperature = 0\.0 must be above zero"),
        ({"epsilon": 0.0}, r"method\.epsilon = 0\.0 must be above zero"),
        ({"temperature_contrast": 0.0}, r"method\.temperature_contrast = 0\.0 must be above zero"),
        ({"temperature_labeled": 0.0}, r"method\.temperature_labeled = 0\.0 must be above zero"),
        ({"rounds": -1}, r"method\.rounds = -1 must not be negative"),
        ({"num_starts": -1}, r"method\.num_starts = -1 must not be negative"),
        ({"restarts": (0,)}, r"method\.restarts = \(0,\) must all be above method\.contrast_epochs = 0"),
        ({"restarts": (5, 9), "contrast_epochs": 5}, r"\(5, 9\) must all be above method\.contrast_epochs = 5"),
        ({"num_starts": 0, "counts": True}, r"method\.num_starts = 0 leaves out k-means"),
        ({"queue": -1}, r"method\.queue = -1 must not be negative"),
        ({"contrast_epochs": -1}, r"method\.contrast_epochs = -1 must not be negative"),
        ({"weight_labels": -1.0}, r"method\.weight_labels = -1\.0 must not be negative"),
        ({"weight_crops": -1.0}, r"method\.weight_crops = -1\.0 must not be negative"),
        ({"weight_contrast": -1.0}, r"method\.weight_contrast = -1\.0 must not be negative"),
        ({"weight_labeled": -1.0}, r"method\.weight_labeled = -1\.0 must not be negative"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        ConcordConfig(**settings)
