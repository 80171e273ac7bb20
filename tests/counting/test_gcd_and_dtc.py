from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from opencon.cluster.kmeans import kmeans
from opencon.counting import dtc, gcd
from opencon.counting.base import CountEstimate
from opencon.counting.dtc import Apart, count_by_probes, groups_that_count, keep_classes
from opencon.counting.gcd import count_by_accuracy
from opencon.counting.tree import estimate_classes
from opencon.errors import ConfigError, DataError
from opencon.openworld.engine import COUNTERS
from opencon.runtime import generator
from tests.naive.gcd_and_dtc_count import naive_accuracy, naive_dtc, naive_silhouette

CPU = torch.device("cpu")
BOTH = ["gcd", "dtc"]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(sizes, *, dim=8, spread=0.1, seed=0):
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


# --- the answer on data whose answer is known -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_probes_count_separate_blobs(seed):
    x, y = blobs([24] * 8, spread=0.05, seed=seed)
    found = count_by_probes(x, some_labels(y, 5, 8), num_seen=5, max_classes=14)
    # The unlabeled rows stand apart best in 8. Probes that are apart stay so for a few k more, of which the last one counts.
    assert found.low == 8
    assert found.num_classes in (8, 9)


@pytest.mark.parametrize("by", BOTH)
def test_all_classes_seen(by):
    x, y = blobs([24] * 6, spread=0.05)
    assert COUNTERS[by](x, some_labels(y, 6, 8), num_seen=6, max_classes=12).num_classes in (6, 7)


def test_accuracy_is_flat_where_labels_say_nothing():
    # 3 seen classes far apart and 3 novel ones: from 4 groups to 6, no labeled row moves.
    x, y = blobs([30] * 6, dim=3, spread=0.01, seed=1)
    found = count_by_accuracy(x, some_labels(y, 3, 15), num_seen=3, max_classes=12)
    score = dict(found.curve)
    assert score[found.num_classes] == max(score.values())
    assert found.low <= found.num_classes <= found.high
    assert {value for k, value in score.items() if found.low <= k <= found.high} == {score[found.num_classes]}


# --- against the naive forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_gcd_tries_k_means_on_unit_rows(seed):
    x, y = blobs([15] * 5, dim=4, spread=0.8, seed=seed)
    x, labels = x * (1 + torch.arange(len(x))[:, None] % 3), some_labels(y, 3, 7)
    found = count_by_accuracy(x, labels, num_seen=3, seed=seed, max_classes=7)
    known = labels >= 0
    want = {}
    for k in range(3, 8):
        group = kmeans(F.normalize(x, dim=1), k, generator=generator(CPU, seed, gcd.CLUSTER)).assignment
        want[k] = naive_accuracy(group[known].tolist(), labels[known].tolist())
    curve = dict(found.curve)
    assert curve == pytest.approx({k: want[k] for k in curve})
    assert curve[found.num_classes] == max(curve.values())
    share = curve[found.num_classes]
    error = (share * (1 - share) / int(known.sum())) ** 0.5
    near = [k for k, value in curve.items() if value >= share - error]
    assert (found.low, found.high) == (min(near), max(near))


@pytest.mark.parametrize("peak", [1, 2, 37, 99, 150])
def test_gcd_searches_as_brent_does(peak, monkeypatch):
    """With a known curve in place of k-means: the peak is found, without trying everything."""
    asked = []

    def fake(x, k, *, generator):
        asked.append(k)
        return SimpleNamespace(assignment=torch.full((len(x),), k))

    monkeypatch.setattr(gcd, "kmeans", fake)
    monkeypatch.setattr(gcd, "accuracy", lambda group, truth: 1 - abs(int(group[0]) - peak) / 200)
    labels = torch.tensor([0] + [-1] * 399)
    found = count_by_accuracy(torch.randn(400, 2, generator=rng()), labels, num_seen=1, max_classes=150)
    assert found.num_classes == peak
    assert len(asked) == len(set(asked)) == len(found.curve) < 25
    assert all(1 <= k <= 150 for k in asked)
    assert ("look further with max_classes above 150" in found.why) == (peak == 150)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_seen", [2, 3, 4])
def test_dtc_equals_its_description(seed, num_seen):
    x, y = blobs([9] * 5, dim=3, spread=0.5, seed=seed)
    labels = some_labels(y, num_seen, 4)
    found = count_by_probes(x, labels, num_seen=num_seen, seed=seed, max_classes=7)
    kept_labels, A = keep_classes(labels.numpy(), num_seen, seed)
    classes = {int(c) for c in labels[torch.from_numpy(kept_labels) >= 0]}
    clusterings = {
        k: kmeans(
            x,
            k,
            generator=generator(CPU, seed, dtc.CLUSTER),
            labels=torch.from_numpy(kept_labels),
            num_seen=A,
        ).assignment.tolist()
        for k in range(num_seen, 8)
    }
    k_a, k_s, halfway, large, curve = naive_dtc(x.tolist(), labels.tolist(), classes, clusterings)
    kept = groups_that_count(np.array(clusterings[halfway]), labels.numpy(), kept_labels)
    assert large <= kept
    assert set(range(A)) <= kept
    assert dict(found.curve) == pytest.approx(curve, abs=1e-5)
    assert found.num_classes == max(num_seen, len(kept))
    assert (found.low, found.high) == (min(k_a, k_s, found.num_classes), max(k_a, k_s, found.num_classes))
    assert f"among {k_a} groups" in found.why
    assert f"apart best in {k_s} " in found.why


@given(st.integers(0, 1000), st.integers(3, 14), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_silhouette_equals_the_formula(seed, rows, num_groups):
    x = torch.randn(rows + 3, 3, generator=rng(seed))
    group = torch.randint(0, num_groups, (rows + 3,), generator=rng(seed)).numpy()
    unlabeled = np.arange(3, rows + 3)
    got = Apart(x, unlabeled, seed).silhouette(group)
    few = not 2 <= len(set(group[3:])) < rows
    want = 0.0 if few else naive_silhouette(x[3:].tolist(), group[3:].tolist())
    assert got == pytest.approx(want, abs=1e-5)


def test_a_silhouette_of_many_rows_looks_at_some(monkeypatch):
    x, y = blobs([50] * 4, spread=0.05)
    whole = Apart(x, np.arange(200), 0)
    monkeypatch.setattr(dtc, "MOST_APART", 60)
    some = Apart(x, np.arange(200), 0)
    assert len(some.rows) == len(set(some.rows.tolist())) == 60
    assert some.silhouette(y.numpy()) == pytest.approx(whole.silhouette(y.numpy()), abs=0.02)


# --- the parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_seen", "num_kept"), [(2, 1), (3, 2), (5, 3), (10, 6), (50, 30)])
def test_six_tenths_of_the_seen_classes_keep_their_labels(num_seen, num_kept):
    labels = np.concatenate([np.repeat(np.arange(num_seen), 2), [-1, -1, -1]])
    drawn = set()
    for seed in range(5):
        kept, A = keep_classes(labels, num_seen, seed)
        assert num_kept == A
        assert sorted(set(kept.tolist())) == list(range(-1, A))
        assert (kept[labels < 0] == -1).all()
        assert len({(a, b) for a, b in zip(kept.tolist(), labels.tolist(), strict=True) if a >= 0}) == A
        drawn.add(tuple(kept.tolist()))
    assert len(drawn) > 1


def test_tiny_groups_do_not_count_unless_they_are_a_seen_class():
    group = np.array([3] * 200 + [4] * 2 + [5] * 3 + [0] * 2 + [6] * 2 + [4])
    labels = np.array([-1] * 205 + [0, 0] + [1, 1] + [1])
    kept_labels = np.where(labels == 0, 0, -1)
    # 200 rows; 2 are 1 % of the largest, which is not more than 1 %; class 0 is kept, class 1 is found in group 6.
    assert groups_that_count(group, labels, kept_labels) == {0, 3, 5, 6}


def test_the_same_seed_gives_the_same_and_another_may_not():
    x, y = blobs([15] * 6, spread=0.9)
    labels = some_labels(y, 4, 6)
    for by in BOTH:
        first, again = (COUNTERS[by](x, labels, num_seen=4, seed=3, max_classes=10) for _ in range(2))
        assert first == again
        others = {COUNTERS[by](x, labels, num_seen=4, seed=seed, max_classes=10).curve for seed in range(4)}
        assert len(others) > 1


@pytest.mark.parametrize("by", BOTH)
def test_hidden_classes_and_other_kinds_of_tensors(by):
    x, y = blobs([15] * 4)
    labels = some_labels(y, 3, 6)
    want = COUNTERS[by](x, labels, num_seen=3, max_classes=7)
    assert COUNTERS[by](x.requires_grad_(), labels.int(), num_seen=3, max_classes=7) == want
    torch.manual_seed(5)
    before = torch.get_rng_state()
    told = []
    COUNTERS[by](x, labels, num_seen=3, max_classes=7, progress=lambda done, total: told.append((done, total)))
    assert torch.equal(torch.get_rng_state(), before)
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total in told} == {5}


def test_the_names():
    assert COUNTERS.names() == ["dtc", "engine", "gcd", "tree"]
    assert COUNTERS["tree"] is estimate_classes
    with pytest.raises(ConfigError, match=r"unknown way to count 'gdc'. Did you mean 'gcd'\?"):
        COUNTERS["gdc"]


def test_digits_to_within_a_few():
    digits = load_digits()
    x, y = torch.tensor(digits.data[::3], dtype=torch.float32), torch.tensor(digits.target[::3])
    labels = some_labels(y, 5, 30)
    for by in BOTH:
        assert 7 <= COUNTERS[by](x, labels, num_seen=5, max_classes=20).num_classes <= 14


# --- the edges, and what the user can fix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", BOTH)
def test_nothing_to_find(by):
    x, y = blobs([5] * 3)
    found = COUNTERS[by](x, y, num_seen=3)
    assert found == CountEstimate(3, 3, 3, ((3, 0.0),), "All 15 rows are labeled, so the 3 seen classes are all.")
    labels = torch.tensor([0, 1, 2, -1, -1])
    found = COUNTERS[by](x[:5], labels, num_seen=3)
    assert (found.low, found.num_classes, found.high) == (3, 3, 3)
    assert "leave no choice above 3" in found.why


def test_the_most_that_was_tried_is_said():
    x, y = blobs([24] * 8, spread=0.01)
    found = count_by_probes(x, some_labels(y, 6, 8), num_seen=6, max_classes=7)
    assert found.num_classes == 7
    assert found.why.endswith("It is the most that was tried: look further with max_classes above 7.")


@pytest.mark.parametrize("by", BOTH)
def test_few_rows_are_free(by):
    x, y = blobs([30] * 4)
    labels = y.clone()
    labels[-2:] = -1
    labels[y == 3] = -1
    labels[90:118] = 2
    assert COUNTERS[by](x, labels, num_seen=3).num_classes >= 3


@pytest.mark.parametrize("by", BOTH)
def test_rows_that_are_all_the_same(by):
    labels = torch.full((40,), -1)
    labels[:6] = torch.arange(6) % 3
    assert COUNTERS[by](torch.ones(40, 5), labels, num_seen=3, max_classes=6).num_classes >= 3


X, NONE = torch.randn(12, 3, generator=rng()), torch.full((12,), -1)


@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize(
    ("x", "labels", "settings", "error", "message"),
    [
        (X, NONE, {"num_seen": 0}, DataError, r"counts by labeled rows of at least [12] seen classes, and there are 0"),
        (X, NONE + 1, {"num_seen": 2}, DataError, r"seen classes \[1\] of 2 have no labeled row"),
        (X.log(), NONE, {"num_seen": 0}, DataError, r"rows of x hold NaN, infinity or more than float32 can"),
        (X, NONE, {"num_seen": 3, "max_classes": 2}, ConfigError, "not below num_seen = 3"),
    ],
)
def test_what_cannot_be_counted_says_why(by, x, labels, settings, error, message):
    with pytest.raises(error, match=message):
        COUNTERS[by](x, labels, **settings)


def test_probes_need_two_seen_classes():
    with pytest.raises(DataError, match="dtc counts by labeled rows of at least 2 seen classes, and there are 1"):
        count_by_probes(X, torch.tensor([0] + [-1] * 11), num_seen=1)
