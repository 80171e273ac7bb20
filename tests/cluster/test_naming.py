"""Clusters get the names of seen classes."""

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from opencon.cluster.naming import cluster_and_name, name_clusters
from tests.naive.cluster import naive_best_naming


@pytest.mark.parametrize("seed", range(20))
def test_naming_is_the_best_of_all(seed):
    g = torch.Generator().manual_seed(seed)
    num_clusters, num_seen = 5, 1 + seed % 4
    clusters = torch.randint(0, num_clusters, (60,), generator=g)
    labels = torch.randint(-1, num_seen, (60,), generator=g)
    named = name_clusters(clusters, labels, num_clusters=num_clusters, num_seen=num_seen)
    right = int(((named == labels) & (labels >= 0)).sum())
    assert right == naive_best_naming(clusters.tolist(), labels.tolist(), num_clusters, num_seen)
    names = {(int(c), int(n)) for c, n in zip(clusters, named, strict=True)}
    assert sorted(n for _, n in names) == list(range(num_clusters))  # one name per cluster, and all used


def test_blobs_get_the_names_of_their_labels():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(6).repeat(40)[torch.randperm(240, generator=g)]
    x = 10 * torch.randn(6, 5, generator=g)[y] + 0.3 * torch.randn(240, 5, generator=g)
    labels = torch.where((y < 3) & (torch.arange(240) % 2 == 0), y, -1)
    named = cluster_and_name(x, labels, num_clusters=6, num_seen=3, seed=0)
    assert torch.equal(named[y < 3], y[y < 3])
    assert adjusted_rand_score(y, named) == 1.0
    assert set(named[y >= 3].tolist()) == {3, 4, 5}
