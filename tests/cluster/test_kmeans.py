import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

from opencon.cluster import kmeans as kmeans_module
from opencon.cluster.kmeans import Rows, inertia, kmeans, lloyd, nearest, plus_plus
from opencon.cluster.naming import name_clusters
from opencon.errors import ConfigError, DataError
from tests.naive.cluster import naive_inertia, naive_lloyd

WAYS = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "dense"])


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(num=6, each=40, dim=5, spread=0.3, seed=0):
    """Rows around well separated centers, and their classes, shuffled."""
    g = rng(seed)
    centers = 10 * torch.randn(num, dim, generator=g)
    y = torch.arange(num).repeat(each)[torch.randperm(num * each, generator=g)]
    return centers[y] + spread * torch.randn(len(y), dim, generator=g), y


def digits():
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)


def one_lloyd(x, start, *, bounded, labels=None, max_iterations=100, tolerance=0.0):
    rows = Rows.of(x, len(start), labels)
    return lloyd(rows, start[None], max_iterations=max_iterations, tolerance=tolerance, bounded=bounded)


# --- Lloyd's iterations -----------------------------------------------------------------------------------------------


@WAYS
@given(st.integers(0, 10_000), st.integers(6, 60), st.integers(1, 4), st.integers(1, 12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_equals_one_row_at_a_time(bounded, seed, rows, clusters, iterations, labeled):
    g = rng(seed)
    x = torch.randn(rows, 3, generator=g)
    start = x[torch.randperm(rows, generator=g)[:clusters]]
    labels = torch.full((rows,), -1)
    if labeled:
        labels[: rows // 3] = torch.randint(0, clusters, (rows // 3,), generator=g)
    naive = naive_lloyd(x, start, iterations=iterations, labels=labels.tolist())
    assume(naive is not None)  # which row refills a cluster can be a tie: that is tested below, by hand
    want, assignment = naive
    ends = one_lloyd(x, start, bounded=bounded, labels=labels, max_iterations=iterations, tolerance=-1.0)
    np.testing.assert_allclose(ends.centers[0].numpy(), want, atol=2e-5)
    total = float(x.double().square().sum())
    assert total - float(ends.explained[0]) == pytest.approx(naive_inertia(x, want, assignment), rel=1e-4, abs=1e-4)


@WAYS
def test_by_hand(bounded):
    x = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0]])
    # From 0 and 1: {0}, {1, 2, 10, 11} -> 0, 6 -> {0, 1, 2}, {10, 11} -> 1, 10.5, and once more to see that all stay.
    ends = one_lloyd(x, torch.tensor([[0.0], [1.0]]), bounded=bounded)
    assert ends.centers[0].flatten().tolist() == [1.0, 10.5]
    assert ends.iterations == [3]
    assert float(ends.explained[0]) == pytest.approx(3 * 1.0**2 + 2 * 10.5**2)
    assert nearest(x, ends.centers[0]).tolist() == [0, 0, 0, 1, 1]


@WAYS
def test_same_start_as_scikit_learn_gives_the_same_end(bounded):
    x, _ = digits()
    for seed in range(4):
        start = x[torch.randperm(len(x), generator=rng(seed))[:10]]
        # In float64: with float32 sums, scikit-learn takes 19 instead of 16 iterations from the second start.
        theirs = KMeans(10, init=start.double().numpy(), n_init=1, tol=0.0, max_iter=300).fit(x.double().numpy())
        ends = one_lloyd(x, start, bounded=bounded, max_iterations=300)
        np.testing.assert_array_equal(nearest(x, ends.centers[0]).numpy(), theirs.labels_)
        np.testing.assert_allclose(ends.centers[0].numpy(), theirs.cluster_centers_, atol=1e-3)
        assert ends.iterations == [theirs.n_iter_]


@WAYS
def test_starts_at_once_equal_one_at_a_time(bounded):
    x, _ = digits()
    rows = Rows.of(x, 7)
    starts = torch.stack([x[torch.randperm(len(x), generator=rng(s))[:7]] for s in range(5)])
    settings = {"max_iterations": 15, "tolerance": 1.0, "bounded": bounded}
    together = lloyd(rows, starts, **settings)
    assert len(set(together.iterations)) > 1  # some converge and drop out, some are stopped
    for r, start in enumerate(starts):
        alone = lloyd(rows, start[None], **settings)
        assert alone.iterations == [together.iterations[r]]
        torch.testing.assert_close(alone.centers[0], together.centers[r], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(alone.explained[0], together.explained[r], rtol=1e-7, atol=0)


def test_bounded_equals_dense_over_many_iterations_and_blocks(monkeypatch):
    monkeypatch.setattr(kmeans_module, "CPU_BLOCK", 37 * 16)  # ragged blocks
    g = rng()
    x = torch.randn(1500, 16, generator=g)  # no structure: slow convergence
    rows, start = Rows.of(x, 12), x[None, :12]
    for iterations in (1, 2, 5, 20, 60):
        fast = lloyd(rows, start, max_iterations=iterations, tolerance=0.0, bounded=True)
        slow = lloyd(rows, start, max_iterations=iterations, tolerance=0.0, bounded=False)
        assert fast.iterations == slow.iterations
        torch.testing.assert_close(fast.centers, slow.centers, rtol=0, atol=1e-4)
    assert fast.iterations[0] > 20


def test_bounds_spare_most_of_the_work(monkeypatch):
    seen = []
    real = kmeans_module._scores
    monkeypatch.setattr(kmeans_module, "_scores", lambda x, *a, **k: seen.append(len(x)) or real(x, *a, **k))
    x, _ = digits()
    ends = one_lloyd(x, x[:10], bounded=True)
    assert sum(seen) < 0.7 * len(x) * ends.iterations[0]


def test_threads_are_left_as_they_were():
    x, _ = blobs()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    lloyd(Rows.of(x, 2), torch.stack([x[:2], x[2:4]]), max_iterations=5, tolerance=0.0, bounded=True)
    with ThreadPoolExecutor(1) as pool:
        after = torch.get_num_threads(), pool.submit(torch.get_num_threads).result()
    torch.set_num_threads(before)
    assert after == (3, 3)


@WAYS
def test_an_empty_cluster_takes_the_farthest_row(bounded):
    x = torch.tensor([[0.0], [1.0], [2.0], [30.0]])
    # The second center is nobody's nearest. All rows: mean 8.25, farthest is 30.
    ends = one_lloyd(x, torch.tensor([[0.0], [-100.0]]), bounded=bounded, max_iterations=1)
    assert ends.centers[0].flatten().tolist() == [8.25, 30.0]
    ends = one_lloyd(x, torch.tensor([[0.0], [-100.0]]), bounded=bounded)
    assert ends.centers[0].flatten().tolist() == [1.0, 30.0]


@WAYS
def test_several_empty_clusters_take_different_rows_and_leave_other_starts_alone(bounded):
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [9.0, 0.0], [0.0, 20.0]])
    far = torch.tensor([[0.0, 0.0], [500.0, 0.0], [600.0, 0.0], [700.0, 0.0]])
    ends = lloyd(Rows.of(x, 4), torch.stack([x, far, x]), max_iterations=50, tolerance=0.0, bounded=bounded)
    assert sorted(nearest(x, ends.centers[1]).tolist()) == [0, 1, 2, 3]
    assert ends.explained.tolist() == pytest.approx([float(x.square().sum())] * 3)
    assert torch.equal(ends.centers[0], x)
    assert torch.equal(ends.centers[2], x)


@WAYS
def test_a_labeled_row_refills_no_cluster(bounded):
    x = torch.tensor([[0.0], [1.0], [2.0], [300.0]])
    labels = torch.tensor([-1, -1, -1, 0])  # the row at 300 is the farthest, but belongs to class 0; next comes 0
    ends = one_lloyd(x, torch.tensor([[1.0], [-900.0]]), bounded=bounded, labels=labels, max_iterations=1)
    assert ends.centers[0].flatten().tolist() == [75.75, 0.0]


# --- k-means as a whole -----------------------------------------------------------------------------------------------


def test_finds_separated_blobs():
    x, y = blobs(num=12)
    found = kmeans(x, 12, generator=rng())
    assert adjusted_rand_score(y, found.assignment) == 1.0
    for k in range(12):
        torch.testing.assert_close(found.centers[k], x[found.assignment == k].mean(dim=0), rtol=1e-4, atol=1e-4)
    assert found.inertia == pytest.approx(naive_inertia(x, found.centers.double().numpy(), found.assignment.tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_inertia_never_increases_over_iterations(seed):
    x, _ = digits()
    course = [
        kmeans(x, 10, num_starts=1, max_iterations=t, tolerance=0.0, generator=rng(seed)).inertia for t in range(1, 15)
    ]
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(course))
    assert course[-1] < 0.98 * course[0]


def test_assignment_is_the_nearest_returned_center():
    x, _ = digits()
    found = kmeans(x, 10, num_starts=2, max_iterations=3, generator=rng())  # stopped early
    distances = torch.cdist(x.double(), found.centers.double())
    assert (distances.gather(1, found.assignment[:, None])[:, 0] <= distances.amin(dim=1) + 1e-4).all()
    assert found.iterations <= 3


def test_as_good_as_scikit_learn_on_digits():
    x, _ = digits()
    theirs = KMeans(10, n_init=10, random_state=0).fit(x.numpy()).inertia_
    assert kmeans(x, 10, generator=rng()).inertia <= 1.005 * theirs


def test_the_best_start_is_returned():
    x, _ = blobs(num=15, each=20, dim=2, spread=1.5)
    rows = Rows.of(x - x.mean(dim=0), 15)
    starts = plus_plus(rows, 15, chosen=x[:0], num_starts=8, generator=rng(3))
    ends = lloyd(rows, starts, max_iterations=200, tolerance=0.0)
    each = [inertia(rows.x, c, nearest(rows.x, c)) for c in ends.centers]
    assert max(each) > 1.01 * min(each)  # else this says nothing
    found = kmeans(x, 15, num_starts=8, tolerance=0.0, generator=rng(3))
    assert found.inertia == pytest.approx(min(each), rel=1e-4)


def test_same_seed_same_result_and_the_input_is_left_alone():
    x, _ = digits()
    before = x.clone()
    a, b = (kmeans(x, 10, num_starts=3, generator=rng(5)) for _ in range(2))
    assert torch.equal(a.centers, b.centers)
    assert torch.equal(a.assignment, b.assignment)
    assert (a.inertia, a.iterations) == (b.inertia, b.iterations)
    assert torch.equal(x, before)
    c = kmeans(x, 10, num_starts=1, max_iterations=1, generator=rng(6))
    d = kmeans(x, 10, num_starts=1, max_iterations=1, generator=rng(7))
    assert not torch.equal(c.centers, d.centers)


@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_offset_and_scale_do_not_matter(shift, size):
    x, y = blobs()
    moved = (x.double() + shift) * size
    found = kmeans(moved, 6, generator=rng())
    assert adjusted_rand_score(y, found.assignment) == 1.0
    want = sum(float((moved[y == k] - moved[y == k].mean(dim=0)).square().sum()) for k in range(6))
    assert found.inertia == pytest.approx(want, rel=0.02)


def test_one_cluster_is_the_mean():
    x, _ = blobs()
    found = kmeans(x, 1, generator=rng())
    torch.testing.assert_close(found.centers[0], x.mean(dim=0), rtol=1e-4, atol=1e-4)
    assert found.assignment.unique().tolist() == [0]


def test_equal_points():
    x = torch.full((7, 3), 0.1)
    found = kmeans(x, 3, generator=rng())
    torch.testing.assert_close(found.centers, x[:3])
    assert found.inertia == pytest.approx(0.0, abs=1e-10)
    assert found.iterations < 5


@pytest.mark.parametrize("seed", range(5))
def test_as_many_clusters_as_rows(seed):
    x = torch.randn(9, 4, generator=rng(seed))
    found = kmeans(x, 9, num_starts=1, generator=rng(seed))
    assert sorted(found.assignment.tolist()) == list(range(9))
    assert found.inertia == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("distinct", [1, 3])
def test_more_clusters_than_distinct_points(distinct):
    x = torch.randn(distinct, 4, generator=rng()).repeat(5, 1)
    found = kmeans(x, distinct + 2, generator=rng())
    assert found.inertia == pytest.approx(0.0, abs=1e-8)
    assert len(found.assignment.unique()) == distinct
    assert torch.cdist(found.centers, x).amin(dim=1).max() < 1e-3  # the idle ones stay on rows


@WAYS
def test_idle_clusters_do_not_wander(bounded):
    for seed in range(20):
        x = torch.randn(1 + seed % 5, 1 + seed % 7 * 9, generator=rng(seed)).repeat(4, 1)
        rows = Rows.of(x, len(x))
        starts = plus_plus(rows, len(x), chosen=x[:0], num_starts=2, generator=rng(seed))
        ends = lloyd(rows, starts, max_iterations=200, tolerance=0.0, bounded=bounded)
        assert max(ends.iterations) < 40


def test_chances_are_squared_distances(monkeypatch):
    """With one candidate: from the chosen 0, the rows at 1, 2 and 3 are drawn in proportion 1 : 4 : 9."""
    monkeypatch.setattr(math, "log", lambda _: -1.0)
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    starts = plus_plus(Rows.of(x, 2), 1, chosen=x[:1], num_starts=20_000, generator=rng())
    assert (starts[:, 0] == 0).all()
    share = torch.bincount(starts[:, 1, 0].long(), minlength=4) / 20_000
    torch.testing.assert_close(share, torch.tensor([0.0, 1.0, 4.0, 9.0]) / 14, rtol=0, atol=0.012)


def test_of_the_candidates_the_one_that_leaves_least_is_taken():
    x = torch.cat([torch.zeros(1, 1), torch.full((50, 1), 10.0), torch.full((20, 1), -9.0)])
    starts = plus_plus(Rows.of(x, 2), 1, chosen=x[:1], num_starts=2000, generator=rng())
    drawn = 50 * 100 / (50 * 100 + 20 * 81)
    share = (starts[:, 1, 0] == 10).float().mean().item()
    assert share == pytest.approx(1 - (1 - drawn) ** 2, abs=0.02)  # L = 2: -9 only when both candidates are


def half_labeled(y, num_seen):
    """Every second row of the seen classes carries its label."""
    return torch.where((y < num_seen) & (torch.arange(len(y)) % 2 == 0), y, -1)


def test_labeled_rows_keep_their_class_and_count_in_the_means():
    x = torch.tensor([[0.0], [10.0], [11.0], [1.0], [50.0]])
    labels = torch.tensor([0, 0, 1, -1, -1])  # the 10 is nearer to 11, yet of class 0
    found = kmeans(x, 3, generator=rng(), labels=labels, num_seen=2)
    # Starts 5, 11, 50 (drawn): 1 goes to 0; means (0 + 10 + 1) / 3, 11, 50.
    assert found.assignment.tolist() == [0, 0, 1, 0, 2]
    torch.testing.assert_close(found.centers.flatten(), torch.tensor([11 / 3, 11.0, 50.0]))
    assert found.inertia == pytest.approx(sum((v - 11 / 3) ** 2 for v in (0, 10, 1)), rel=1e-5)


def test_recovers_six_blobs_by_name():
    x, y = blobs()
    found = kmeans(x, 6, generator=rng(), labels=half_labeled(y, 3), num_seen=3)
    assert torch.equal(found.assignment[y < 3], y[y < 3])
    assert adjusted_rand_score(y, found.assignment) == 1.0


def test_labels_help_to_recognize_the_seen_digits():
    """Over six choices of seen digits; plain clusters are named by the same labels."""
    x, digit = digits()
    plain = kmeans(x, 10, generator=rng()).assignment
    gains = []
    for seed in range(6):
        y = torch.randperm(10, generator=rng(seed))[digit]
        labels = half_labeled(y, 5)
        found = kmeans(x, 10, num_starts=3, generator=rng(), labels=labels, num_seen=5).assignment
        assert torch.equal(found[labels >= 0], y[labels >= 0])
        asked = (y < 5) & (labels < 0)
        named = name_clusters(plain, labels, num_clusters=10, num_seen=5)
        gains.append(float((found == y)[asked].float().mean() - (named == y)[asked].float().mean()))
    assert sum(gains) / len(gains) > 0.04, gains
    assert min(gains) > -0.02, gains


@pytest.mark.parametrize("every", [1, 2])
def test_only_seen_classes(every):
    x, y = blobs()
    labels = torch.where(torch.arange(len(y)) % every == 0, y, -1)  # with every = 1 no row is left to choose
    found = kmeans(x, 6, generator=rng(), labels=labels, num_seen=6)
    assert torch.equal(found.assignment, y)
    torch.testing.assert_close(found.centers[2], x[y == 2].mean(dim=0), rtol=1e-4, atol=1e-4)


SIX = torch.ones(6, 2)


def six_with(value):
    return SIX.index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(value))


@pytest.mark.parametrize(
    ("x", "settings", "error", "message"),
    [
        (SIX, {"k": 7}, DataError, "7 clusters need as many unlabeled rows, and there are 6. Lower num_clusters = 7"),
        (torch.ones(6), {}, DataError, "x has shape (6,). Give one row of features for each sample, (M, F)."),
        (six_with(math.nan), {}, DataError, "1 of 6 rows of x hold NaN, infinity or more than float32 can"),
        (torch.full((6, 2), 3e38), {}, DataError, "x reaches 3.0e+38, more than squares in float32 can hold. Scale"),
        (SIX, {"k": 0}, ConfigError, "num_clusters = 0 must be at least 1."),
        (SIX, {"num_starts": 0}, ConfigError, "num_starts = 0 must be at least 1."),
        (SIX, {"max_iterations": 0}, ConfigError, "max_iterations = 0 must be at least 1."),
        (SIX, {"num_seen": 3}, ConfigError, "num_seen = 3 must lie in [0, 2]: the clusters include the seen classes."),
        (SIX, {"num_seen": 1}, ConfigError, "num_seen = 1 needs the labels of the seen classes."),
        (SIX, {"num_seen": 1, "labels": [0, 1] * 3}, DataError, "label 1 is no seen class: labels lie in [0, 1)"),
        (SIX, {"num_seen": 1, "labels": [0] * 6}, DataError, "1 clusters need as many unlabeled rows, and there are 0"),
    ],
)
def test_what_cannot_be_clustered_is_refused(x, settings, error, message):
    k, labels = settings.pop("k", 2), settings.pop("labels", None)
    labels = None if labels is None else torch.tensor(labels)
    with pytest.raises(error) as raised:
        kmeans(x, k, generator=rng(), labels=labels, **settings)
    assert message in str(raised.value)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e35])
def test_the_unit_of_the_numbers_makes_no_difference(scale):
    x = 9 * torch.eye(4)[torch.arange(40) % 4] + torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    plain, scaled = (kmeans(x * s, 4, generator=torch.Generator().manual_seed(0)) for s in (1.0, scale))
    assert torch.equal(scaled.assignment, plain.assignment)
    torch.testing.assert_close(scaled.centers.double() / scale, plain.centers.double(), rtol=1e-4, atol=1e-4)
