"""MoCo v3: its step and its teacher against their definitions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from opencon.errors import ConfigError
from opencon.methods import MoCo, MoCoConfig
from opencon.runtime import seeded
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch
from tests.naive.moco import naive_head, naive_over_views, naive_told_apart, naive_unit

BLOBS = Blobs(seen=0.7)  # k-means of features may join two classes


def build(config, seed=0):
    """A method of small heads, its network away from the teacher."""
    with seeded(seed):
        method = MoCo(config, TASK, ExactEmbedder(num_features=7)).double().train()
        with torch.no_grad():
            for p in method.parameters():
                p += 0.3 * torch.randn(p.shape)
    return method


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("views", [2, 4])
@pytest.mark.parametrize(
    "config",
    [MoCoConfig(hidden=24, dim=5), MoCoConfig(hidden=24, dim=5, temperature=0.7)],
)
def test_step_equals_the_formulas(config, seed, views):
    method, batch = build(config, seed), toy_batch(seed, views=views)
    B = len(batch.labels)
    with torch.no_grad():
        features = method.embedder.features(torch.cat(batch.views))
        taught = method.teacher(torch.cat(batch.views[:2]), call="features")
        projected = torch.tensor(naive_head(features, method.projector), dtype=torch.float64)
        q = naive_unit(naive_head(projected, method.predictor))
        with seeded(seed):  # the teacher is still what the network was at its start
            start = MoCo(config, TASK, ExactEmbedder(num_features=7)).double()
        k = naive_unit(naive_head(taught, start.projector))
    assert not torch.allclose(taught, features[: 2 * B])

    def apart(a, b):
        return naive_told_apart(a, b, config.temperature)

    full, crops, want = naive_over_views([q[v * B : (v + 1) * B] for v in range(views)], [k[:B], k[B:]], apart)
    out = method.step(batch)
    assert out.loss.item() == pytest.approx(want, rel=1e-6)
    terms = {"loss_full": full, "loss_crops": crops} if views > 2 else {"loss_full": full}
    assert {name: value.item() for name, value in out.logs.items()} == pytest.approx(terms, rel=1e-6)


def test_the_teacher_follows_and_gets_no_gradient():
    method, batch = build(MoCoConfig(momentum=0.8)), toy_batch()
    method.step(batch).loss.backward()
    method.zero_grad()
    now = method.embedder.linear.weight.detach().clone()
    was, head = method.teacher.linear__weight.clone(), method.teacher_projector.get_buffer("0__weight").clone()
    method.after_step()
    torch.testing.assert_close(method.teacher.linear__weight, 0.8 * was + 0.2 * now)
    of_head = 0.8 * head + 0.2 * method.projector[0].weight.detach()
    torch.testing.assert_close(method.teacher_projector.get_buffer("0__weight"), of_head)
    assert not any("teacher" in name for name, _ in method.named_parameters())


def test_labels_are_not_looked_at_and_features_are_judged():
    config = MoCoConfig()
    method, batch = build(config), toy_batch()
    nobody = replace(batch, labels=torch.full_like(batch.labels, -1), num_labeled=0)
    assert not config.uses_labels
    assert torch.equal(method.step(batch).loss, method.step(nobody).loss)
    assert not config.projects  # so that an embedding is the encoder's features, at unit length
    images = batch.views[0]
    method.embedder.head = torch.nn.Identity()
    torch.testing.assert_close(method.embed(images), F.normalize(method.embedder.features(images), dim=1))


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"hidden": 0}, {"dim": 0}]
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(settings))} = "):
        MoCoConfig(**settings)


def test_one_point_for_all_images_costs_the_logarithm_of_their_number():
    method = MoCo(MoCoConfig(), TASK, ExactEmbedder())
    same = torch.ones(3, 8, 4).double() / 2
    torch.testing.assert_close(method.apart(same, same[:2]), torch.full((3, 2), 8.0).double().log())
