"""CGDL: its losses against the definitions, its noise, and what it rejects."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Normal, kl_divergence

from opencon.errors import ConfigError
from opencon.methods import CGDL, CGDLConfig, FeatureBank, Task
from opencon.methods.base import Epoch
from opencon.methods.cgdl import Gaussian, class_gaussians, kl_normal, product, squared_limit
from opencon.runtime import seeded
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch
from tests.naive.cgdl import naive_novelty, naive_step

BLOBS = Blobs(epochs=20, seen=0.85)  # it rejects a fixed share, and with it some seen ones

SMALL = CGDLConfig(latent_dims=(5, 4, 3), hidden=7, image_side=3)
FEATURES, LATENT = 6, 3


class Toy(ExactEmbedder):
    """With an encoder that knows its channels."""

    encoder = SimpleNamespace(in_channels=1)


def build(config=SMALL, task=TASK, seed=0):
    with seeded(seed):
        return CGDL(config, task, Toy(dim=FEATURES)).double()


def begin(method, index=25):
    method.train()
    method.before_epoch(Epoch(index, 100, features=lambda: None))
    return method


def naive(method, batch):
    L, c = batch.num_labeled, method.config
    with torch.no_grad():
        features = method.embedder.features(batch.views[0][:L]).numpy()
    places = np.cumsum(c.latent_dims)[:-1]
    return naive_step(
        {name: value.detach().numpy() for name, value in method.named_parameters()},
        features,
        batch.views[0][:L].double().numpy(),
        batch.labels[:L].tolist(),
        np.split(method.noise[batch.rows[:L]].numpy(), places, axis=1),
        dims=c.latent_dims,
        side=c.image_side,
        beta=float(method.beta),
        weight_ladder=c.weight_ladder,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "change", [{}, {"latent_dims": (4,)}, {"latent_dims": (5, 3)}, {"image_side": 1}, {"weight_ladder": 0.3}], ids=str
)
def test_step_equals_the_definitions(change, seed):
    method, batch = begin(build(dataclasses.replace(SMALL, **change), seed=seed)), toy_batch(seed)
    assert method.beta == 0.5
    out, (total, terms) = method.step(batch), naive(method, batch)
    assert out.logs.keys() == terms.keys()
    for name, value in terms.items():
        assert out.logs[name].item() == pytest.approx(value, rel=1e-6), name
    assert out.loss.item() == pytest.approx(total, rel=1e-6)


def test_unlabeled_images_and_other_views_take_no_part():
    batch = toy_batch()
    L, first = batch.num_labeled, batch.views[0].clone()
    first[L:] = 0.0
    other = dataclasses.replace(batch, views=(first, torch.zeros_like(first)))
    assert torch.equal(begin(build()).step(batch).loss, begin(build()).step(other).loss)


def test_beta_rises_over_its_epochs():
    method = build(dataclasses.replace(SMALL, beta_epochs=10))
    assert [float(begin(method, index).beta) for index in (0, 5, 10, 50)] == [0.0, 0.5, 1.0, 1.0]
    assert float(begin(build(dataclasses.replace(SMALL, beta_epochs=0)), 0).beta) == 1.0


class TestNoise:
    def test_is_standard_normal(self):
        method = begin(build(task=dataclasses.replace(TASK, num_images=4000)))
        assert method.noise.shape == (4000, 12)
        assert stats.kstest(method.noise.flatten().numpy(), "norm").pvalue > 0.01

    def test_is_new_every_epoch_and_the_same_again(self):
        one, two, again = (begin(build(), index).noise.clone() for index in (0, 1, 0))
        assert torch.equal(one, again)
        assert not torch.equal(one, two)

    def test_depends_on_the_seed_of_the_run_and_survives_a_restart(self):
        method, other = begin(build(seed=0)), begin(build(seed=1))
        assert not torch.equal(method.noise, other.noise)
        assert "noise" not in method.state_dict()
        other.load_state_dict(method.state_dict())
        assert torch.equal(begin(other).noise, method.noise)

    def test_each_image_has_its_own(self):
        method, batch = begin(build()), toy_batch()
        before = method.step(batch).loss
        method.noise[batch.rows[batch.num_labeled :]] = 9.0
        assert torch.equal(method.step(batch).loss, before)
        method.noise[batch.rows[0]] = 9.0
        assert not torch.equal(method.step(batch).loss, before)


def random_gaussian(seed, shape=(6, 4)):
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=g, dtype=torch.float64)
    return Gaussian(mean, torch.rand(shape, generator=g, dtype=torch.float64) + 0.1)


def test_kl_is_that_of_torch():
    q, p = random_gaussian(0), random_gaussian(1)
    want = kl_divergence(Normal(q.mean, q.variance.sqrt()), Normal(p.mean, p.variance.sqrt())).sum(dim=1)
    torch.testing.assert_close(kl_normal(q, p), want)
    torch.testing.assert_close(kl_normal(q, q), torch.zeros(6, dtype=torch.float64))


def test_product_is_proportional_to_the_product_of_densities():
    a, b = random_gaussian(0), random_gaussian(1)
    both = product(a, b)
    ratios = []
    for x in (-1.0, 0.3, 2.0):
        x = torch.full_like(a.mean, x)
        log = [Normal(g.mean, g.variance.sqrt()).log_prob(x) for g in (a, b, both)]
        ratios.append(log[0] + log[1] - log[2])
    torch.testing.assert_close(ratios[0], ratios[1])
    torch.testing.assert_close(ratios[0], ratios[2])


def test_gradient_is_the_derivative():
    mean, variance = random_gaussian(0, (2, 3))
    mean.requires_grad_()
    variance.requires_grad_()
    p = random_gaussian(1, (2, 3))
    assert torch.autograd.gradcheck(lambda m, v: kl_normal(product(Gaussian(m, v), p), p), (mean, variance))


@pytest.mark.parametrize(("mass", "dims"), [(0.5, 1), (0.5, 32), (0.9, 3)])
def test_limit_is_the_corner_of_the_central_box(mass, dims):
    side = (squared_limit(mass, dims) / dims) ** 0.5
    assert stats.norm.cdf(side) - stats.norm.cdf(-side) == pytest.approx(mass ** (1 / dims))


def test_class_gaussians_fall_back_on_what_was_learned():
    latent = torch.tensor([[0.0, 2.0], [2.0, 2.0], [7.0, 7.0], [9.0, 9.0]])
    means = torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    got = class_gaussians(latent, torch.tensor([0, 0, 1, -1]), means)
    torch.testing.assert_close(got.mean, torch.tensor([[1.0, 2.0], [5.0, 5.0]]))  # one row is not enough
    torch.testing.assert_close(got.variance, torch.tensor([[2.0, 1e-8], [1.0, 1.0]]))


def test_embed_gives_features_latent_and_error():
    method, batch = begin(build()), toy_batch()
    method.step(batch)  # moves the running statistics
    method.eval()
    images = batch.views[0]
    with torch.no_grad():
        z = method.embed(images)
        features = method.embedder.features(images)
        ladder = method.climb(features)
        decoded = method.decoder(ladder.latents[0])
    assert z.shape == (24, FEATURES + LATENT + 1)
    torch.testing.assert_close(z[:, :FEATURES], features / features.norm(dim=1, keepdim=True))
    torch.testing.assert_close(z[:, FEATURES:-1], ladder.posteriors[-1].mean)
    torch.testing.assert_close(z[:, -1], (images.flatten(1).double() - decoded).square().mean(dim=1))
    torch.testing.assert_close(method.embed(images[:1])[0], z[0])  # no noise, no dependence on other images


def toy_bank(method, seed=0):
    """Two seen classes and three novel ones: far apart as features, and as latents either on a seen class or far away."""
    rng = np.random.default_rng(seed)
    group = np.arange(60) % 5
    features = np.eye(FEATURES)[group] + 0.02 * rng.normal(size=(60, FEATURES))
    centers = np.array([[0, 0, 0], [6, 0, 0], [0, 30, 0], [0, 0, 30], [3, 30, 30]])
    labels = np.where((group < 2) & (np.arange(60) < 40), group, -1)
    spread = np.where(labels >= 0, 0.5, 0.1)[:, None]  # no unlabeled image at the edge of its class
    latent = centers[group] + spread * rng.normal(size=(60, LATENT))
    error = rng.uniform(0.9, 1.1, size=60)
    z = torch.from_numpy(np.concatenate([features, latent, error[:, None]], axis=1))
    with torch.no_grad():  # a classifier that knows the two centers
        method.classifier.weight.copy_(torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]))
        method.classifier.bias.copy_(torch.tensor([3.0, -3.0]))
    return FeatureBank(z, torch.from_numpy(labels)), torch.from_numpy(group)


@pytest.mark.parametrize("change", [{}, {"reject_threshold": 0.5}, {"reject_share": 36 / 44}], ids=str)
def test_assign_rejects_what_is_far_and_clusters_it(change):
    method = build(dataclasses.replace(SMALL, **change), task=Task(2, 5, 0.5, 60))
    bank, group = toy_bank(method)
    got = method.assign(bank)
    assert torch.equal(got.classes[group < 2], group[group < 2])
    names = [set(got.classes[group == k].tolist()) for k in (2, 3, 4)]
    assert sorted(names, key=min) == [{2}, {3}, {4}]
    free = bank.labels < 0
    assert torch.equal((got.novelty > got.novelty_threshold)[free], (got.classes >= 2)[free])
    torch.testing.assert_close(got.seen_logits[:, 1], bank.z[:, FEATURES] - 3.0)
    assert got.p is None


def test_a_bad_reconstruction_is_novel_too():
    """Only beyond the limit: there, the paper's rule rejects; within, the error does not matter."""
    method = build(dataclasses.replace(SMALL, reject_threshold=0.5), task=Task(2, 5, 0.5, 60))
    bank, group = toy_bank(method)
    seen = torch.nonzero((bank.labels < 0) & (group == 0))[0]
    plain = method.assign(bank)
    known = bank.z[bank.labels >= 0, -1]
    for sigmas, is_novel in ((1.9, False), (2.1, True)):
        z = bank.z.clone()
        z[seen, -1] = known.mean() + sigmas * known.std(correction=0)
        got = method.assign(dataclasses.replace(bank, z=z))
        assert (got.classes[seen] >= 2) == is_novel
        assert (got.novelty[seen] == plain.novelty[seen]) == (not is_novel)


@pytest.mark.parametrize("seed", range(3))
def test_novelty_equals_the_definition(seed):
    method = build(dataclasses.replace(SMALL, reject_sigmas=0.5, reject_mass=0.8), task=Task(2, 5, 0.5, 60))
    bank, _ = toy_bank(method, seed)
    z, labels = bank.z.numpy(), bank.labels.numpy()
    limit = squared_limit(0.8, LATENT)
    want = naive_novelty(z[:, FEATURES:-1], z[:, -1], labels, num_seen=2, sigmas=0.5, limit=limit)
    np.testing.assert_allclose(method.assign(bank).novelty.numpy(), want)


def test_a_share_is_rejected():
    method = build(dataclasses.replace(SMALL, reject_share=0.25), task=Task(2, 5, 0.5, 60))
    bank, _ = toy_bank(method)
    got = method.assign(bank)
    assert (got.classes >= 2).sum() == round(0.25 * (bank.labels < 0).sum().item())
    assert (got.classes[bank.labels >= 0] < 2).all()


def test_a_bank_without_labels_is_judged_by_what_was_learned():
    method = build(task=Task(2, 5, 0.5, 60))
    bank, group = toy_bank(method)
    with torch.no_grad():
        method.means.copy_(torch.tensor([[0.0, 0, 0], [6.0, 0, 0]]))
    got = method.assign(dataclasses.replace(bank, labels=torch.full_like(bank.labels, -1)))
    assert got.novelty.isfinite().all()
    assert got.novelty[group < 2].max() < got.novelty[group >= 2].min()


def test_equal_errors_are_no_sign_of_anything():
    method = build(task=Task(2, 5, 0.5, 60))
    bank, _ = toy_bank(method)
    bank.z[:, -1] = 1.0
    assert method.assign(bank).novelty.isfinite().all()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("latent_dims", (), "one size of at least 1 for each rung"),
        ("latent_dims", (8, 0), "one size of at least 1 for each rung"),
        ("hidden", 0, "above zero"),
        ("image_side", 0, "above zero"),
        ("weight_ladder", 0.0, "above zero"),
        ("beta_epochs", -1, "not be negative"),
        ("reject_sigmas", 0.0, "above zero"),
        ("reject_mass", 1.0, "strictly between 0 and 1"),
        ("reject_share", 1.5, "between 0 and 1"),
        ("reject_threshold", -0.5, "between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=rf"method.{key} = .*{message}"):
        CGDLConfig(**{key: value})
