import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.metrics import silhouette_score

from opencon.errors import ConfigError, DataError
from opencon.metrics import open_world_accuracy
from opencon.openworld import engine
from opencon.openworld.engine import COUNTERS, explain, likelihood


def clouds(sizes, *, num_seen=0, num_labeled=5, dim=20, distance=8.0, seed=0):
    """Clouds around the axes: x, labels and the truth."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = distance * torch.eye(len(sizes), dim)[truth] + torch.randn(len(truth), dim, generator=g)
    labels = torch.full_like(truth, -1)
    for c in range(num_seen):
        labels[(truth == c).nonzero()[:num_labeled, 0]] = c
    return x, labels, truth


def right(classes, labels, truth, num_seen):
    rows = labels < 0
    return open_world_accuracy(classes[rows], truth[rows], num_seen=num_seen, protocol="gcd").all


@pytest.mark.parametrize("num_seen", [0, 1, 3, 6])
@pytest.mark.parametrize("sizes", [(40,) * 6, (120, 60, 30, 20, 12, 8)])
def test_the_number_and_the_classes_are_found(sizes, num_seen):
    x, labels, truth = clouds(sizes, num_seen=num_seen, num_labeled=4)
    classes, count = explain(x, labels, num_seen=num_seen)
    assert count.num_classes == 6
    assert count.low <= 6 <= count.high
    assert right(classes, labels, truth, num_seen) > 0.98


def test_seen_classes_keep_their_numbers_and_labeled_rows_their_class():
    x, labels, truth = clouds((30,) * 5, num_seen=3)
    classes, _ = explain(x, labels, num_seen=3)
    assert torch.equal(classes[labels >= 0], labels[labels >= 0])
    assert (classes[truth < 3] == truth[truth < 3]).float().mean() > 0.98
    assert int(classes.max()) == 4


def test_the_seed_decides_and_nothing_else():
    x, labels, _ = clouds((40,) * 8, num_seen=4, distance=3.0)
    first, count = explain(x, labels, num_seen=4, seed=1)
    torch.manual_seed(9)
    again, same = explain(x, labels, num_seen=4, seed=1)
    assert torch.equal(first, again)
    assert count == same


def test_more_rows_than_are_looked_at(monkeypatch):
    monkeypatch.setattr(engine, "MOST_ROWS", 150)
    x, labels, truth = clouds((100,) * 6, num_seen=3)
    classes, count = explain(x, labels, num_seen=3)
    assert count.num_classes == 6
    assert right(classes, labels, truth, 3) > 0.98
    assert torch.equal(classes[labels >= 0], labels[labels >= 0])


def test_a_sample_has_a_label_of_every_seen_class(monkeypatch):
    monkeypatch.setattr(engine, "MOST_ROWS", 100)
    x, labels, truth = clouds((60,) * 12, num_seen=12, num_labeled=1)
    classes, _ = explain(x, labels, num_seen=12)
    assert right(classes, labels, truth, 12) > 0.9


def test_copies_are_no_classes_of_their_own():
    x, labels, truth = clouds((20,) * 5, num_seen=2)
    x = torch.cat([x] * 6) + 1e-4 * torch.randn(600, 20, generator=torch.Generator().manual_seed(1))
    labels, truth = torch.cat([labels, *[torch.full_like(labels, -1)] * 5]), truth.repeat(6)
    classes, count = explain(x, labels, num_seen=2)
    assert count.num_classes == 5
    assert right(classes, labels, truth, 2) > 0.98


def test_a_named_class_is_not_cut():
    """Two clouds of one name stay one class."""
    x, labels, truth = clouds((40,) * 5)
    truth = torch.where(truth == 1, 0, truth)
    labels[(truth == 0).nonzero()[::4, 0]] = 0
    classes, count = explain(x, labels, num_seen=1)
    assert (classes[truth == 0] == 0).float().mean() > 0.98
    assert count.num_classes == 4


def test_a_named_class_is_not_swallowed():
    """Two names that lie together, far from all others, stay two."""
    x, labels, truth = clouds((40,) * 5)
    x[truth == 1] = x[truth == 0] + torch.nn.functional.one_hot(torch.tensor(15), 20) * 4.0
    for c in (0, 1):
        labels[(truth == c).nonzero()[::4, 0]] = c
    classes, _ = explain(x, labels, num_seen=2)
    assert (classes[truth < 2] == truth[truth < 2]).float().mean() > 0.9


def test_the_most_classes_that_may_be_found():
    x, labels, _ = clouds((30,) * 8, num_seen=2)
    classes, count = explain(x, labels, num_seen=2, max_classes=5)
    assert count.num_classes == int(classes.max()) + 1 <= 5
    assert count.num_classes < 5 or "look further with max_classes above 5" in count.why


@pytest.mark.parametrize("num_rows", [2, 3, 5])
@pytest.mark.parametrize("num_seen", [0, 1])
def test_few_rows(num_rows, num_seen):
    x = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.full((num_rows,), -1)
    labels[:num_seen] = 0
    classes, count = explain(x, labels, num_seen=num_seen)
    assert classes.shape == (num_rows,)
    assert 1 <= count.low <= count.num_classes <= count.high


def test_rows_that_are_all_the_same():
    classes, count = explain(torch.ones(30, 4), torch.full((30,), -1), num_seen=0)
    assert count.num_classes == 1
    assert (classes == 0).all()


def test_every_row_labeled():
    x, _, truth = clouds((10, 10, 10))
    classes, count = explain(x, truth, num_seen=3)
    assert torch.equal(classes, truth)
    assert count.num_classes == count.low == count.high == 3


@pytest.mark.parametrize("num_seen", [0, 1])
@pytest.mark.parametrize("num_rows", [12, 80, 400])
def test_a_single_class_is_not_cut(num_rows, num_seen):
    x, labels, _ = clouds((num_rows,), num_seen=num_seen)
    classes, count = explain(x, labels, num_seen=num_seen)
    assert count.num_classes == count.low == 1
    assert (classes == 0).all()


def test_two_classes_are_two():
    x, labels, truth = clouds((60, 60))
    classes, count = explain(x, labels, num_seen=0)
    assert count.num_classes == 2
    assert right(classes, labels, truth, 0) > 0.98


def test_nothing_in_the_pile_is_of_a_named_class():
    x, labels, truth = clouds((5, 5, 40, 40, 40), num_seen=2)
    classes, count = explain(x, labels, num_seen=2)
    assert count.num_classes == 5
    assert (classes[labels < 0] >= 2).all()
    assert right(classes, labels, truth, 2) > 0.98


def test_everything_in_the_pile_is_of_a_named_class():
    x, labels, truth = clouds((40,) * 4, num_seen=4)
    classes, count = explain(x, labels, num_seen=4)
    assert count.num_classes == 4
    assert torch.equal(classes, truth)


def test_the_count_alone_is_the_same():
    x, labels, _ = clouds((30,) * 5, num_seen=2)
    done = []
    found = COUNTERS["engine"](x, labels, num_seen=2, seed=3, progress=lambda *at: done.append(at))
    assert found == explain(x, labels, num_seen=2, seed=3)[1]
    assert done[-1] == (1, 1)


def test_silhouette_is_that_of_squared_distances():
    x, _, truth = clouds((30, 20, 10), distance=2.0)
    want = silhouette_score(x.numpy(), truth.numpy(), metric="sqeuclidean")
    assert engine._silhouette(x, truth, 3) == pytest.approx(want, abs=1e-5)


def test_likelihood_is_that_of_the_rows_of_each_group_together():
    """Naive: the rows of a group are one long Gaussian vector, in which two rows share their group's mean."""
    x, _, group = clouds((7, 5, 4), dim=3, distance=3.0)
    z = (x - x.mean(dim=0)).double().numpy()
    means = np.stack([z[group == k].mean(axis=0) for k in range(3)])
    away, sizes = z - means[group], np.bincount(group)
    within = away.T @ away / (len(z) - 3)
    within = 0.9 * within + 0.1 * np.trace(within) / 3 * np.eye(3)
    root = np.linalg.cholesky(within)
    flat = np.linalg.solve(root, means.T).T
    values, axes = np.linalg.eigh((flat * sizes[:, None]).T @ flat / len(z))
    between = root @ axes @ np.diag(np.maximum(values - 3 / len(z), 1e-3)) @ axes.T @ root.T
    want = 0.0
    for k, n in enumerate(sizes):
        cov = np.kron(np.eye(n), within) + np.kron(np.ones((n, n)), between)
        want += multivariate_normal.logpdf(z[group == k].ravel(), np.zeros(3 * n), cov) + 3 * n * np.log(2 * np.pi) / 2
    assert likelihood(x, group, 3) == pytest.approx(want / len(z), rel=1e-4)


def test_rows_of_a_second_island_are_not_whole():
    x, _, truth = clouds((30, 20, 10), distance=20.0)
    neighbors = torch.cdist(x, x).fill_diagonal_(torch.inf).topk(5, largest=False).indices

    def whole(group):
        return engine._whole(neighbors, group[neighbors] == group[:, None], group)

    assert whole(truth) == 1
    assert whole((truth > 0).long()) == pytest.approx(50 / 60)  # 30 + 20 of 60
    assert whole(torch.zeros_like(truth)) == pytest.approx(30 / 60)


def test_rows_move_toward_their_neighbors_and_classes_do_not_mix():
    x, _, truth = clouds((40,) * 5, distance=5.0)
    z = torch.nn.functional.normalize(x, dim=1)
    neighbors = engine._nearest(torch.cdist(z, z).fill_diagonal_(torch.inf))
    moved = engine.toward_neighbors(z, neighbors)
    assert torch.allclose(moved.norm(dim=1), torch.ones(200))
    assert engine._silhouette(moved, truth, 5) > engine._silhouette(z, truth, 5) + 0.2


def test_the_first_label_of_a_class_only_names_it():
    """With it the evidence is the same as without any label; a second one is held against the classes."""
    x, labels, truth = clouds((20,) * 4, num_seen=2, num_labeled=2, distance=3.0)
    single = labels.clone()
    single[1], single[21] = -1, -1

    def said(labels, num_seen):
        return engine.evidence(engine._look(x, x, labels, num_seen, 0)[1], truth)

    assert said(single, 2) == said(torch.full_like(labels, -1), 0) != said(labels, 2)


def test_a_tree_of_averages_leaves_no_row_alone():
    x, _, _ = clouds((30, 30, 4))
    x[0, 0] += 100
    (groups,) = engine._average_cuts(x, {4})
    assert sorted(torch.bincount(groups).tolist()) == [0, 4, 30, 30]  # the row far away is back in its class


def test_what_is_refused():
    x, labels, _ = clouds((10, 10), num_seen=1)
    with pytest.raises(ConfigError, match="max_classes = 0 must be at least 1"):
        explain(x, labels, num_seen=1, max_classes=0)
    with pytest.raises(DataError, match="NaN"):
        explain(x * torch.nan, labels, num_seen=1)
