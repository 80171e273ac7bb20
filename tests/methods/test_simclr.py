"""SimCLR's step against the formula."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from opencon.errors import ConfigError
from opencon.methods import FeatureBank, SimCLR, SimCLRConfig, Task
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.losses import naive_contrast, naive_info_nce


def build(temperature=0.2, task=TASK, seed=0):
    with seeded(seed):
        return SimCLR(SimCLRConfig(temperature=temperature), task, ExactEmbedder())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_loss_is_nt_xent(seed, temperature):
    method, batch = build(temperature, seed=seed), toy_batch(seed)
    with torch.no_grad():
        z = method.embed(torch.cat(batch.views))
    B = len(batch.labels)
    others = [[i != j for j in range(2 * B)] for i in range(2 * B)]
    same_image = [[others[i][j] and i % B == j % B for j in range(2 * B)] for i in range(2 * B)]
    want = naive_info_nce(z, same_image, others, temperature)
    assert method.step(batch).loss.item() == pytest.approx(want, rel=1e-9)


def test_three_views_are_positives_of_each_other():
    method, batch = build(), toy_batch(views=3)
    with torch.no_grad():
        z = method.embed(torch.cat(batch.views))
    image = list(range(len(batch.labels))) * 3
    want = naive_contrast(z, [True] * len(image), image, 0.2)
    assert method.step(batch).loss.item() == pytest.approx(want, rel=1e-9)


def test_labels_are_not_looked_at():
    method, batch = build(), toy_batch()
    assert not SimCLRConfig.uses_labels
    nobody = replace(batch, labels=torch.full_like(batch.labels, -1), num_labeled=0)
    assert torch.equal(method.step(batch).loss, method.step(nobody).loss)


def test_assign_finds_the_groups_and_names_the_seen_ones():
    """Four far groups; two of them are named by a few labeled rows, in an order that k-means cannot know."""
    rng = torch.Generator().manual_seed(0)
    group = torch.arange(4).repeat_interleave(10)
    z = F.normalize(torch.eye(4)[group] + 0.05 * torch.randn(40, 4, generator=rng), dim=1)
    labels = torch.full((40,), -1)
    labels[30:33] = 0  # the last group is seen class 0
    labels[10:13] = 1
    classes = (
        build(task=Task(num_seen=2, num_classes=4, labeled_ratio=0.3, num_images=40))
        .assign(FeatureBank(z, labels))
        .classes
    )
    assert (classes[30:] == 0).all()
    assert (classes[10:20] == 1).all()
    assert {tuple(classes[:10].unique().tolist()), tuple(classes[20:30].unique().tolist())} == {(2,), (3,)}


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_bad_temperature(temperature):
    with pytest.raises(ConfigError, match=r"method.temperature = .* must be above zero"):
        SimCLRConfig(temperature=temperature)
