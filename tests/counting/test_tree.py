import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.datasets import load_digits
from sklearn.metrics import silhouette_score

from opencon.counting import tree
from opencon.counting.base import CountEstimate
from opencon.counting.tree import (
    Grains,
    directions,
    draw_rows,
    drop_classes,
    estimate_classes,
    groupings,
    labeled_share,
    make_grains,
    score,
    silhouette,
    ward,
)
from opencon.errors import ConfigError, DataError
from tests.naive.tree_count import naive_labeled_share, naive_silhouette, naive_ward


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(sizes, *, dim=32, spread=0.1, seed=0):
    """Rows around random directions of length about sqrt(dim), in class order."""
    g = rng(seed)
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.randn(len(sizes), dim, generator=g)[y] + spread * torch.randn(len(y), dim, generator=g), y


def some_labels(y, num_seen, each):
    """The first `each` rows of every seen class keep their label."""
    labels = torch.full_like(y, -1)
    for c in range(num_seen):
        labels[(y == c).nonzero()[:each, 0]] = c
    return labels


def grains_of_rows(x, labels=None, num_seen=0):
    labels = torch.full((len(x),), -1) if labels is None else labels
    return make_grains(x.double(), labels, num_seen, len(x), rng())


@pytest.fixture
def few_trees(monkeypatch):
    monkeypatch.setattr(tree, "TREES", 2)
    monkeypatch.setattr(tree, "HALVES", 2)


# --- the answer on data whose answer is known -------------------------------------------------------------------------


@pytest.mark.parametrize(("num_classes", "num_seen"), [(2, 1), (3, 2), (6, 3), (12, 6), (12, 12), (30, 15)])
def test_separate_blobs_are_counted_exactly(num_classes, num_seen, few_trees):
    x, y = blobs([24] * num_classes, seed=num_classes)
    found = estimate_classes(x, some_labels(y, num_seen, 8), num_seen=num_seen)
    assert (found.low, found.num_classes, found.high) == (num_classes,) * 3


@pytest.mark.parametrize("num_classes", [2, 5, 20])
def test_without_labels_the_silhouette_counts_them(num_classes, few_trees):
    x, y = blobs([24] * num_classes, seed=num_classes)
    found = estimate_classes(x, torch.full_like(y, -1), num_seen=0)
    assert found.num_classes == num_classes
    assert "without labels" in found.why


def test_one_label_for_each_seen_class(few_trees):
    x, y = blobs([20] * 8)
    assert estimate_classes(x, some_labels(y, 4, 1), num_seen=4).num_classes == 8


def test_one_seen_class_alone_is_not_cut(few_trees):
    x, y = blobs([60], spread=1.0)
    assert estimate_classes(x, some_labels(y, 1, 30), num_seen=1).num_classes == 1


def test_classes_of_very_different_size(few_trees):
    x, y = blobs([300, 5, 100, 20, 5, 60, 10])
    assert estimate_classes(x, some_labels(y, 3, 5), num_seen=3).num_classes == 7


def test_few_features_keep_their_length(few_trees):
    # Four groups on a line through the mean: two directions, four lengths.
    g = rng()
    y = torch.arange(4).repeat_interleave(20)
    x = torch.tensor([[-3.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [3.0, 0.0]])[y] + 0.05 * torch.randn(80, 2, generator=g)
    assert estimate_classes(x, some_labels(y, 2, 5), num_seen=2).num_classes == 4


def test_many_features_do_not(few_trees):
    # Four directions; each row at a length of its own, over three orders of magnitude.
    x, y = blobs([40] * 4, dim=64, spread=0.05)
    x = x * torch.logspace(-1, 2, len(x))[torch.randperm(len(x), generator=rng()), None]
    assert estimate_classes(x, some_labels(y, 2, 5), num_seen=2).num_classes == 4


def nested(seed=0):
    """Four wide groups, each of three close ones: 4 or 12 classes, as one likes."""
    g = rng(seed)
    y = torch.arange(12).repeat_interleave(20)
    wide, close = torch.randn(4, 32, generator=g), torch.randn(12, 32, generator=g)
    return wide[y // 3] + 0.45 * close[y] + 0.1 * torch.randn(240, 32, generator=g), y


def test_blurred_labels_widen_the_interval(few_trees, monkeypatch):
    x, y = blobs([40] * 8, spread=2.5)
    labels = some_labels(y, 4, 20)
    wide = estimate_classes(x, labels, num_seen=4)
    monkeypatch.setattr(tree, "BLUR", 0.0)
    narrow = estimate_classes(x, labels, num_seen=4)
    assert wide.num_classes == narrow.num_classes
    assert wide.low <= narrow.low <= narrow.high < wide.high
    top = max(value for _, value in wide.curve)
    inside = [k for k, value in wide.curve if wide.low <= k <= wide.high]
    assert all(
        k in inside for k, value in wide.curve if value >= top - 0.02
    )  # at least a fifth of the labeled rows are wrong
    assert f"{wide.low} to {wide.high} fit nearly as well." in wide.why


def test_the_labels_say_which_of_two_answers_is_meant(few_trees):
    x, y = nested()
    fine = estimate_classes(x, some_labels(y, 6, 10), num_seen=6)
    coarse = estimate_classes(x, some_labels(y // 3, 2, 60), num_seen=2)
    assert fine.num_classes == 12
    assert coarse.num_classes == 4


def test_digits_are_about_ten():
    data = load_digits()
    y = torch.tensor(data.target)
    labels = torch.where((y < 5) & (torch.arange(len(y)) % 2 == 0), y, -1)
    found = estimate_classes(torch.tensor(data.data, dtype=torch.float32), labels, num_seen=5)
    assert 9 <= found.num_classes <= 12
    assert found.low <= 10 <= found.high


# --- what every answer has ---------------------------------------------------------------------------------------------


@given(
    st.integers(0, 1000),
    st.integers(1, 60),
    st.sampled_from([1, 2, 20]),
    st.integers(0, 4),
    st.sampled_from(["random", "constant", "twice", "one apart"]),
)
@settings(max_examples=40, deadline=None)
def test_every_answer_is_sound(seed, rows, dim, num_seen, kind):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "TREES", 2)
        patch.setattr(tree, "HALVES", 2)
        rows = max(rows, num_seen)
        x = torch.randn(rows, dim, generator=rng(seed))
        if kind == "constant":
            x[:] = x[0].clone()
        elif kind == "twice":
            x[rows // 2 :] = x[: rows - rows // 2].clone()
        elif kind == "one apart":
            x[1:] = x[0].clone()
            x[0] += 1
        labels = torch.full((rows,), -1)
        labels[:num_seen] = torch.arange(num_seen)
        found = estimate_classes(x, labels, num_seen=num_seen, seed=seed)
    assert max(num_seen, 1) <= found.low <= found.num_classes <= found.high <= max(rows, 1)
    ks = [k for k, _ in found.curve]
    assert ks == sorted(set(ks))
    assert found.num_classes in ks
    assert dict(found.curve)[found.num_classes] == pytest.approx(max(dict(found.curve).values()))
    assert np.isfinite([value for _, value in found.curve]).all()
    assert found.why.endswith(".")
    assert all(type(n) is int for n in (found.num_classes, found.low, found.high, *ks))


def test_same_seed_same_answer_and_no_global_randomness(few_trees):
    x, y = blobs([60] * 10, spread=1.2)
    labels = some_labels(y, 5, 20)
    torch.manual_seed(1)
    first = estimate_classes(x, labels, num_seen=5, seed=3)
    before = torch.get_rng_state()
    torch.manual_seed(2)
    assert estimate_classes(x, labels, num_seen=5, seed=3) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert estimate_classes(x, labels, num_seen=5, seed=4).curve != first.curve


def test_nothing_but_features_and_given_labels_goes_in():
    parameters = set(inspect.signature(estimate_classes).parameters)
    assert parameters == {"x", "labels", "num_seen", "seed", "max_classes", "progress"}


def test_the_input_is_left_alone(few_trees):
    x, y = blobs([10] * 4)
    labels = some_labels(y, 2, 4)
    x_before, labels_before = x.clone(), labels.clone()
    estimate_classes(x.requires_grad_(), labels, num_seen=2)
    assert torch.equal(x, x_before)
    assert torch.equal(labels, labels_before)


@pytest.mark.parametrize("dim", [2, 32])
def test_scale_does_not_matter(dim, few_trees):
    x, y = blobs([20] * 6, dim=dim, spread=0.3)
    labels = some_labels(y, 3, 8)
    plain = estimate_classes(x, labels, num_seen=3)
    scaled = estimate_classes(1000 * x, labels, num_seen=3)
    np.testing.assert_allclose(plain.curve, scaled.curve, atol=1e-4)


def test_an_offset_does_not_matter_to_few_features(few_trees):
    x, y = blobs([20] * 6, dim=3, spread=0.3)
    labels = some_labels(y, 3, 8)
    plain = estimate_classes(x, labels, num_seen=3)
    moved = estimate_classes(x + 5, labels, num_seen=3)
    np.testing.assert_allclose(plain.curve, moved.curve, atol=1e-4)


def test_names_of_the_seen_classes_do_not_matter(few_trees):
    x, y = blobs([20] * 6, spread=0.8)
    labels = some_labels(y, 3, 8)
    renamed = torch.tensor([2, 0, 1, -1])[labels]
    assert estimate_classes(x, labels, num_seen=3).curve == estimate_classes(x, renamed, num_seen=3).curve


def test_progress_counts_the_trees(few_trees):
    seen = []
    x, y = blobs([10] * 4)
    estimate_classes(x, some_labels(y, 2, 4), num_seen=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_range_is_from_the_seen_classes_to_the_most_allowed(few_trees):
    x, y = blobs([20] * 8)
    found = estimate_classes(x, some_labels(y, 3, 5), num_seen=3, max_classes=6)
    assert [k for k, _ in found.curve] == [3, 4, 5, 6]
    assert found.num_classes == 6
    assert "max_classes above 6" in found.why
    found = estimate_classes(x, some_labels(y, 3, 5), num_seen=3)
    assert found.curve[-1][0] == 50
    assert "max_classes" not in found.why


def test_the_sentence_says_what_was_found(few_trees):
    x, y = blobs([20] * 4)
    found = estimate_classes(x, some_labels(y, 2, 5), num_seen=2)
    start = "2 to 40 groups were tried, and 4 fit best: 100% of 10 labeled ones lie in the group of their class, and"
    assert found.why.startswith(start)
    assert found.why.endswith("; no other number fits nearly as well.")


# --- the edges ---------------------------------------------------------------------------------------------------------


def test_all_labeled_leaves_nothing_to_find():
    x, y = blobs([5] * 3)
    found = estimate_classes(x, y, num_seen=3)
    assert found == CountEstimate(3, 3, 3, ((3, 0.0),), "All 15 rows are labeled, so the 3 seen classes are all.")


def test_too_few_rows_leave_no_choice():
    found = estimate_classes(torch.randn(5, 3, generator=rng()), torch.tensor([0, 1, 2, -1, -1]), num_seen=3)
    assert (found.low, found.num_classes, found.high) == (3, 3, 3)
    assert "leave no choice above 3" in found.why


@pytest.mark.parametrize("rows", [10, 1000])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_constant_features_are_one_class(rows, value, few_trees):
    x = torch.full((rows, 20), value)
    assert estimate_classes(x, torch.full((rows,), -1), num_seen=0).num_classes == 1


def test_rounding_is_no_difference(few_trees):
    x = torch.randn(20, generator=rng()) * (1 + 3e-8 * torch.randn(100, 20, generator=rng()))
    assert len(torch.unique(x, dim=0)) > 50
    assert estimate_classes(x, torch.full((100,), -1), num_seen=0).num_classes == 1


def test_groups_of_the_same_rows_do_not_stand_apart():
    x = torch.randn(1, 7, generator=rng(), dtype=torch.float64).expand(30, 7)  # float32 sums would be exact here
    assert silhouette(grains_of_rows(x), np.repeat([0, 1, 2], [7, 10, 13]), 3) == 0.0
    far = torch.cat([x, x[:10] + 1])
    assert silhouette(grains_of_rows(far), np.arange(40) // 10, 4) == pytest.approx(10 / 40)


def test_fewer_different_rows_than_seen_classes(few_trees):
    x = torch.zeros(1000, 20)
    labels = torch.full((1000,), -1)
    labels[:4] = torch.arange(4)
    found = estimate_classes(x, labels, num_seen=4)
    assert found.num_classes == 4
    assert found.why.startswith("Fewer than 4 rows differ")


def test_every_row_many_times(few_trees):
    x, y = blobs([1] * 6)
    x, y = x.repeat(100, 1), y.repeat(100)
    assert estimate_classes(x, some_labels(y, 3, 10), num_seen=3).num_classes == 6


# --- the parts ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_ward_merges_as_the_inertia_says(seed, rows):
    x = torch.randn(rows, 3, generator=rng(seed), dtype=torch.float64).numpy()
    assert list(ward(x, np.ones(rows))) == naive_ward(list(x))


def test_ward_knows_how_many_rows_a_grain_has():
    # The pair in the middle is nearest, but many rows make it dear: 50 * 1.0 against 0.5 * 1.2^2.
    means, counts = np.array([[0.0], [1.0], [5.0], [6.2]]), np.array([100.0, 100.0, 1.0, 1.0])
    assert next(ward(means, counts)) == (2, 3)


def test_groups_agree_with_scipy():
    x, _ = blobs([30] * 6, spread=0.4)
    tree = linkage(x.double().numpy(), "ward")
    for k, group in groupings(grains_of_rows(x), 2, 12):
        other = fcluster(tree, k, "maxclust")
        if k <= 6:  # above, the step of k-means may move rows
            assert len(set(zip(group.tolist(), other.tolist(), strict=True))) == k


def test_each_grain_goes_to_the_nearest_mean():
    x = torch.randn(80, 4, generator=rng(), dtype=torch.float64)
    grains = make_grains(x, torch.full((80,), -1), 0, 40, rng())
    means = grains.sums / grains.counts[:, None]
    merges = list(ward(means, grains.counts))
    seen = []
    for k, group in groupings(grains, 3, 9):
        seen.append(k)
        owner = list(range(len(means)))
        for kept, gone in merges[: len(means) - k]:
            owner = [kept if o == gone else o for o in owner]
        names = sorted(set(owner))
        center = []
        for name in names:
            inside = [i for i, o in enumerate(owner) if o == name]
            center.append(grains.sums[inside].sum(axis=0) / grains.counts[inside].sum())
        want = [int(np.argmin([((m - c) ** 2).sum() for c in center])) for m in means]
        assert group.tolist() == want
    assert seen == [9, 8, 7, 6, 5, 4, 3]


@given(st.integers(0, 1000), st.integers(2, 14), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_silhouette_equals_the_formula(seed, rows, num_groups):
    x = torch.randn(rows, 3, generator=rng(seed), dtype=torch.float64)
    group = torch.randint(0, num_groups, (rows,), generator=rng(seed)).numpy()
    want = naive_silhouette(list(x.numpy()), group.tolist())
    assert silhouette(grains_of_rows(x), group, num_groups) == pytest.approx(want, abs=1e-9)


def test_silhouette_agrees_with_scikit_learn():
    x, y = blobs([15] * 5, spread=1.5)
    want = silhouette_score(x.double().numpy(), y.numpy(), metric="sqeuclidean")
    assert silhouette(grains_of_rows(x), y.numpy(), 5) == pytest.approx(want, abs=1e-9)


def test_silhouette_in_closed_form():
    # Two pairs, 1 wide and 10 apart: a = 1; b = (100 + 121) / 2 outside, (81 + 100) / 2 inside.
    grains = grains_of_rows(torch.tensor([[0.0], [1.0], [10.0], [11.0]]))
    outside, inside = 1 - 1 / 110.5, 1 - 1 / 90.5
    assert silhouette(grains, np.array([0, 0, 1, 1]), 2) == pytest.approx((outside + inside) / 2)


def test_silhouette_of_grains_is_near_that_of_their_rows():
    x, y = blobs([200] * 5, spread=0.7)
    grains = make_grains(x.double(), y, 5, 100, rng())
    group = grains.labeled.argmax(axis=1)
    assert (grains.labeled > 0).sum(axis=1).max() == 1  # no grain holds two classes
    want = silhouette_score(x.double().numpy(), y.numpy(), metric="sqeuclidean")
    assert silhouette(grains, group, 5) == pytest.approx(want, abs=0.01)


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_labeled_share_equals_trying_every_naming(seed, rows, num_groups, num_seen):
    g = rng(seed)
    labels = torch.randint(-1, num_seen, (rows,), generator=g)
    group = torch.randint(0, num_groups, (rows,), generator=g).numpy()
    grains = grains_of_rows(torch.zeros(rows, 1), labels, num_seen)
    want = naive_labeled_share(labels.tolist(), group.tolist(), num_groups, num_seen)
    assert labeled_share(grains.labeled, group, num_groups) == pytest.approx(want)


def test_merged_and_split_classes_both_cost():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, -1, -1])
    labeled = grains_of_rows(torch.zeros(10, 1), labels, 2).labeled
    shares = [
        labeled_share(labeled, np.array(group), 4)
        for group in ([0, 0, 0, 0, 1, 1, 1, 1, 2, 3], [0] * 10, [0, 0, 0, 2, 1, 1, 3, 3, 0, 0])
    ]
    assert shares == [1.0, 0.5, 5 / 8]


def test_the_score_is_the_share_plus_twice_the_silhouette():
    assert score(0.75, 0.25) == 1.25


def test_grains_hold_the_sums_of_their_rows():
    x, y = blobs([50] * 4)
    z, labels = x.double(), some_labels(y, 2, 7)
    grains = make_grains(z, labels, 2, 30, rng())
    assert len(grains.counts) <= 30
    assert grains.counts.sum() == 200
    np.testing.assert_allclose(grains.sums.sum(axis=0), z.sum(dim=0).numpy())
    np.testing.assert_allclose(grains.squares.sum(), z.square().sum().item())
    assert grains.labeled.sum(axis=0).tolist() == [7, 7]
    assert isinstance(grains, Grains)


def test_directions_are_centered_cosines():
    x = torch.randn(30, 20, generator=rng()) + 3
    cosine = x / x.norm(dim=1, keepdim=True)
    centered = (cosine - cosine.mean(dim=0)).double()
    unit = centered / centered.norm(dim=1, keepdim=True)
    z = directions(x)
    scale = torch.cdist(z, z)[0, 1] / torch.cdist(unit, unit)[0, 1]
    torch.testing.assert_close(torch.cdist(z, z), scale * torch.cdist(unit, unit), atol=1e-5, rtol=1e-4)
    assert z.square().sum(dim=1).mean().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("rows", [50, 400])
def test_directions_keep_the_64_that_vary_most(rows):
    x = torch.randn(rows, 200, generator=rng()) * torch.linspace(1, 0, 200) ** 2
    z = directions(x)
    cosine = x / x.norm(dim=1, keepdim=True)
    centered = cosine - cosine.mean(dim=0)
    unit = (centered / centered.norm(dim=1, keepdim=True)).double()
    values = torch.linalg.svdvals(unit - unit.mean(dim=0)).square()
    kept = min(64, rows)
    assert z.shape == (rows, kept)
    share = (values[:kept].sum() / values.sum()).item()
    assert z.square().sum(dim=1).mean().item() == pytest.approx(share, abs=1e-4)


def test_many_rows_are_sampled(few_trees, monkeypatch):
    monkeypatch.setattr(tree, "MAX_ROWS", 200)
    x, y = blobs([100] * 6)
    found = estimate_classes(x, some_labels(y, 3, 10), num_seen=3)
    assert found.num_classes == 6
    assert "of 20 labeled ones" in found.why  # 30 of 600 are labeled: a tenth of the 200 places


@pytest.mark.parametrize(("labeled", "want"), [(0, 0), (4, 4), (40, 10), (500, 50), (1000, 100)])
def test_sampled_rows_keep_the_share_of_the_labeled(labeled, want):
    labels = torch.full((1000,), -1)
    labels[:labeled] = 0
    rows = draw_rows(labels, 100, rng())
    assert len(rows) == len(set(rows.tolist())) == 100
    assert rows.tolist() == sorted(rows.tolist())
    assert int((labels[rows] >= 0).sum()) == want


def test_few_rows_are_all_used():
    assert draw_rows(torch.full((7,), -1), 7, rng()).tolist() == list(range(7))


@pytest.mark.parametrize(("num_seen", "kept"), [(0, 0), (1, 1), (2, 2), (3, 2), (6, 4), (50, 34)])
def test_two_thirds_of_the_seen_classes_keep_their_labels(num_seen, kept):
    labels = torch.cat([torch.arange(num_seen), torch.tensor([-1])])
    dropped = drop_classes(labels, num_seen, rng())
    assert int((dropped >= 0).sum()) == kept
    assert bool(((dropped == labels) | (dropped == -1)).all())


# --- what the user can fix ----------------------------------------------------------------------------------------------

X, NONE = torch.randn(6, 3, generator=rng()), torch.full((6,), -1)


@pytest.mark.parametrize(
    ("x", "labels", "settings", "error", "message"),
    [
        (X, NONE, {"num_seen": -1}, ConfigError, "num_seen = -1 must not be negative"),
        (X, NONE, {"num_seen": 0, "max_classes": 0}, ConfigError, "max_classes = 0 must be at least 1"),
        (X, NONE, {"num_seen": 3, "max_classes": 2}, ConfigError, "not below num_seen = 3"),
        (X, NONE + 1, {"num_seen": 3}, DataError, r"seen classes \[1, 2\] of 3 have no labeled row"),
        (X.log(), NONE, {"num_seen": 0}, DataError, r"\d of 6 rows of x hold NaN, infinity or more than float32 can"),
    ],
)
def test_what_cannot_be_counted_says_why(x, labels, settings, error, message):
    with pytest.raises(error, match=message):
        estimate_classes(x, labels, **settings)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e19, 1e36])
def test_the_unit_of_the_numbers_makes_no_difference(scale):
    truth = torch.arange(6).repeat_interleave(40)
    x = 8 * torch.eye(6, 20)[truth] + torch.randn(240, 20, generator=torch.Generator().manual_seed(0))
    for part in (x, x[:, :6]):  # by direction, and with their length
        labels = torch.where((truth < 2) & (torch.arange(240) % 8 == 0), truth, -1)
        counts = [estimate_classes(part * s, labels, num_seen=2).num_classes for s in (1.0, scale)]
        assert counts[0] == counts[1] == 6


def test_groups_that_do_not_stand_apart_are_not_said_to():
    noise = torch.randn(300, 30, generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(300) < 40, torch.arange(300) % 2, -1)
    assert "little more than a guess" in estimate_classes(noise, labels, num_seen=2).why
    truth = torch.arange(300) % 5
    apart = estimate_classes(noise + 20 * torch.eye(5, 30)[truth], torch.where(truth < 2, truth, -1), num_seen=2)
    assert "the groups stand apart" in apart.why
