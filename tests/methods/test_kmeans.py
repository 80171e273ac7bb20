"""k-means on frozen features."""

import pytest
import torch
import torch.nn.functional as F

from opencon.cluster.kmeans import kmeans
from opencon.cluster.naming import name_clusters
from opencon.methods import FeatureBank, KMeans, KMeansConfig, Task
from opencon.runtime import generator, seeded
from tests.methods.toys import Blobs, ExactEmbedder, toy_batch

BLOBS = Blobs(seen=0.3, all=0.4, nmi=0.3, neighbors=0.9)  # it learns nothing: these are random features

FOUR = Task(num_seen=2, num_classes=4, labeled_ratio=0.3, num_images=40)


def build(seed=0, task=FOUR):
    with seeded(seed):
        return KMeans(KMeansConfig(), task, ExactEmbedder())


def groups():
    rng = torch.Generator().manual_seed(0)
    group = torch.arange(4).repeat_interleave(10)
    z = F.normalize(torch.eye(4)[group] + 0.05 * torch.randn(40, 4, generator=rng), dim=1)
    labels = torch.full((40,), -1)
    labels[30:33] = 0  # the last group is seen class 0
    labels[10:13] = 1
    return z, labels


def test_it_finds_the_groups_and_names_the_seen_ones():
    z, labels = groups()
    classes = build().assign(FeatureBank(z, labels)).classes
    assert (classes[30:] == 0).all()
    assert (classes[10:20] == 1).all()
    assert {tuple(classes[:10].unique().tolist()), tuple(classes[20:30].unique().tolist())} == {(2,), (3,)}


def test_labels_name_clusters_and_do_not_make_them():
    """A labeled image in another group goes with that group."""
    z, labels = groups()
    labels[0] = 1
    classes = build().assign(FeatureBank(z, labels)).classes
    assert (classes[:10] == classes[1]).all()
    assert classes[0] >= 2


def test_it_is_the_k_means_of_its_seed():
    z = torch.randn(60, 3, generator=torch.Generator().manual_seed(2))  # no groups: the start decides
    labels = torch.cat([torch.tensor([0, 1]), torch.full((58,), -1)])
    task = Task(num_seen=2, num_classes=9, labeled_ratio=0.3, num_images=60)
    method, other = build(0, task), build(1, task)
    found = kmeans(z, 9, generator=generator(torch.device("cpu"), int(method.seed)))
    want = name_clusters(found.assignment, labels, num_clusters=9, num_seen=2)
    assert torch.equal(method.assign(FeatureBank(z, labels)).classes, want)
    assert torch.equal(method.assign(FeatureBank(z, labels)).classes, want)  # again the same
    assert not torch.equal(other.assign(FeatureBank(z, labels)).classes, want)


def test_the_embedding_is_the_features():
    method, batch = build(), toy_batch()
    want = F.normalize(method.embedder.features(batch.views[0]), dim=1)
    torch.testing.assert_close(method.embed(batch.views[0]), want)
    assert not KMeansConfig.projects


def test_it_has_no_step_and_no_epoch():
    assert not KMeansConfig.trains
    assert KMeansConfig.uses_labels  # for the names
    assert KMeans.schedule("cifar").train.epochs == 0
    with pytest.raises(AssertionError, match="k-means has no step"):
        build().step(toy_batch())
