import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from opencon.errors import ConfigError, DataError
from opencon.metrics import (
    OpenWorldAccuracy,
    classes_in_use,
    clustering_scores,
    evaluate,
    knn_accuracy,
    match,
    novelty_detection,
    open_world_accuracy,
)
from tests.naive import metrics as naive


def labels(seed, *, rows=40, groups=5, classes=5):
    rng = np.random.default_rng(seed)
    return rng.integers(groups, size=rows), rng.integers(classes, size=rows)


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- naming -----------------------------------------------------------------------------------------------------------


def test_match_names_the_groups():
    assert match([7, 7, 3, 3, 3], [0, 0, 5, 5, 0]) == {7: 0, 3: 5}


def test_match_takes_any_numbers_and_leaves_spare_groups_without_a_name():
    naming = match([10**9, 4, 4, 9], [2, 2, 2, 2])
    assert naming == {4: 2}  # the largest share of the only class


def test_match_gives_no_name_without_a_shared_row():
    # Group 1 lies in class 0 only, which is taken; class 1 is free but has nothing to do with it.
    assert match([0, 0, 0, 1], [0, 0, 1, 0]) in ({0: 0}, {0: 1, 1: 0})
    assert match([0, 0, 0, 0, 1], [0, 0, 0, 1, 0]) == {0: 0}


def test_match_of_nothing_is_empty():
    assert match([], []) == {}


@pytest.mark.parametrize("seed", range(20))
def test_all_is_the_best_of_all_120_namings(seed):
    predicted, truth = labels(seed)
    for protocol in ("orca", "gcd"):
        got = open_world_accuracy(predicted, truth, num_seen=2, protocol=protocol)
        assert got.all == pytest.approx(naive.best_naming_accuracy(predicted.tolist(), truth.tolist()))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("groups", "classes"), [(3, 6), (6, 3), (1, 4), (4, 1)])
def test_numbers_of_groups_and_classes_may_differ(seed, groups, classes):
    predicted, truth = labels(seed, groups=groups, classes=classes)
    got = open_world_accuracy(predicted, truth, num_seen=1, protocol="gcd").all
    assert got == pytest.approx(naive.best_naming_accuracy(predicted.tolist(), truth.tolist()))


# --- protocols --------------------------------------------------------------------------------------------------------


def test_the_protocols_disagree_completely_on_swapped_seen_classes():
    truth, predicted = np.array([0, 0, 1, 1, 2, 2]), np.array([1, 1, 0, 0, 2, 2])
    assert open_world_accuracy(predicted, truth, num_seen=2, protocol="orca") == OpenWorldAccuracy(1, 1, 0, "orca")
    assert open_world_accuracy(predicted, truth, num_seen=2, protocol="gcd") == OpenWorldAccuracy(1, 1, 1, "gcd")


def test_orca_novel_may_use_the_group_of_a_seen_class():
    # All novel images sit in group 0, which the seen class 0 also needs.
    truth, predicted = [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]
    assert open_world_accuracy(predicted, truth, num_seen=1, protocol="orca").novel == 1.0
    assert open_world_accuracy(predicted, truth, num_seen=1, protocol="gcd").novel == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_orca_against_the_words_of_the_protocol(seed):
    predicted, truth = labels(seed)
    got = open_world_accuracy(predicted, truth, num_seen=3, protocol="orca")
    novel = [(p, t) for p, t in zip(predicted.tolist(), truth.tolist(), strict=True) if t >= 3]
    seen = [(p, t) for p, t in zip(predicted.tolist(), truth.tolist(), strict=True) if t < 3]
    assert got.novel == pytest.approx(naive.best_naming_accuracy(*zip(*novel, strict=True)))
    assert got.seen == pytest.approx(sum(p == t for p, t in seen) / len(seen))


@pytest.mark.parametrize("protocol", ["orca", "gcd"])
def test_an_empty_subset_has_no_accuracy(protocol):
    only_seen = open_world_accuracy([0, 1], [0, 1], num_seen=2, protocol=protocol)
    assert (only_seen.all, only_seen.seen) == (1.0, 1.0)
    assert math.isnan(only_seen.novel)
    only_novel = open_world_accuracy([0, 1], [2, 3], num_seen=2, protocol=protocol)
    assert (only_novel.all, only_novel.novel) == (1.0, 1.0)
    assert math.isnan(only_novel.seen)
    nothing = open_world_accuracy([], [], num_seen=2, protocol=protocol)
    assert all(math.isnan(x) for x in (nothing.all, nothing.novel, nothing.seen))


def test_the_protocol_has_no_default_and_is_checked():
    with pytest.raises(TypeError, match="protocol"):
        open_world_accuracy([0], [0], num_seen=1)
    with pytest.raises(ConfigError, match=r"protocol = 'cgd' must be one of 'orca', 'gcd'\."):
        open_world_accuracy([0], [0], num_seen=1, protocol="cgd")


def test_values_are_plain_floats():
    accuracy = open_world_accuracy(torch.tensor([0, 1]), torch.tensor([0, 1]), num_seen=1, protocol="orca")
    assert [type(v) for v in (accuracy.all, accuracy.novel, accuracy.seen)] == [float] * 3


def test_bad_ids_are_refused_by_name():
    with pytest.raises(DataError, match="predicted has 2 rows but truth has 1"):
        match([0, 1], [0])
    with pytest.raises(DataError, match="truth holds -1: classes are numbered from 0"):
        match([0, 1], [0, -1])
    with pytest.raises(DataError, match=r"predicted must be one row of whole numbers, not float64 of shape \(2,\)"):
        match([0.5, 1.0], [0, 1])


pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(pairs, st.permutations(range(5)))
def test_renaming_groups_changes_neither_all_nor_novel(rows, names):
    predicted, truth = (np.array(x) for x in zip(*rows, strict=True))
    renamed = np.array(names)[predicted]
    before = open_world_accuracy(predicted, truth, num_seen=2, protocol="orca")
    after = open_world_accuracy(renamed, truth, num_seen=2, protocol="orca")
    assert after.all == before.all
    assert after.novel == pytest.approx(before.novel, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(pairs, st.integers(0, 5))
def test_gcd_all_is_the_weighted_mean_of_seen_and_novel(rows, num_seen):
    predicted, truth = (np.array(x) for x in zip(*rows, strict=True))
    got = open_world_accuracy(predicted, truth, num_seen=num_seen, protocol="gcd")
    share_seen = (truth < num_seen).mean()
    parts = [(share_seen, got.seen), (1 - share_seen, got.novel)]
    assert got.all == pytest.approx(sum(share * value for share, value in parts if share > 0))


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_a_matching_of_its_own_is_at_least_as_good(rows):
    predicted, truth = (np.array(x) for x in zip(*rows, strict=True))
    orca = open_world_accuracy(predicted, truth, num_seen=2, protocol="orca")
    gcd = open_world_accuracy(predicted, truth, num_seen=2, protocol="gcd")
    assert math.isnan(orca.novel) or orca.novel >= gcd.novel


# --- agreement of partitions ------------------------------------------------------------------------------------------


def test_clustering_scores_are_those_of_all_rows_and_of_novel_rows():
    predicted, truth = labels(3)
    got = clustering_scores(predicted, truth, num_seen=2)
    novel = truth >= 2
    assert got.nmi_all == pytest.approx(normalized_mutual_info_score(truth, predicted))
    assert got.nmi_novel == pytest.approx(normalized_mutual_info_score(truth[novel], predicted[novel]))
    assert got.ari_all == pytest.approx(adjusted_rand_score(truth, predicted))
    assert got.ari_novel == pytest.approx(adjusted_rand_score(truth[novel], predicted[novel]))


def test_clustering_scores_of_a_renamed_perfect_partition_and_of_no_novel_row():
    got = clustering_scores([5, 5, 0, 0], [0, 0, 1, 1], num_seen=2)
    assert (got.nmi_all, got.ari_all) == (pytest.approx(1.0), pytest.approx(1.0))
    assert math.isnan(got.nmi_novel)
    assert math.isnan(got.ari_novel)


# --- novelty ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rows", [12, 60, 101])
@pytest.mark.parametrize("decimals", [0, 8])  # 0: many ties
def test_novelty_detection_matches_the_loops(seed, rows, decimals):
    rng = np.random.default_rng(seed)
    is_novel = np.arange(rows) % 3 == 0
    score = np.round(2 * rng.normal(size=rows) + is_novel, decimals)
    got = novelty_detection(score, is_novel)
    assert got.auroc == pytest.approx(naive.auroc(score.tolist(), is_novel.tolist()))
    assert got.aupr == pytest.approx(naive.aupr(score.tolist(), is_novel.tolist()))
    assert got.fpr95 == pytest.approx(naive.fpr95(score.tolist(), is_novel.tolist()))


def test_fpr95_lets_exactly_one_in_twenty_seen_go():
    # Seen scores 0..19: the bar is 18, the largest that keeps 19 of 20. Novel ones at the bar pass as seen.
    score = [*range(20), 17.5, 18, 18.5, 19.5]
    is_novel = [False] * 20 + [True] * 4
    assert novelty_detection(score, is_novel).fpr95 == 0.5
    # With 19 seen images none may go: the bar is the newest of them.
    assert novelty_detection(score[1:], is_novel[1:]).fpr95 == 0.75


@pytest.mark.parametrize(
    ("score", "auroc", "aupr", "fpr95"),
    [([0, 0, 0, 1], 1.0, 1.0, 0.0), ([1, 1, 1, 0], 0.0, 0.25, 1.0), ([2, 2, 2, 2], 0.5, 0.25, 1.0)],
    ids=["perfect", "reversed", "constant"],
)
def test_novelty_detection_closed_forms(score, auroc, aupr, fpr95):
    got = novelty_detection(score, [False, False, False, True])
    assert (got.auroc, got.aupr, got.fpr95) == (auroc, aupr, fpr95)


@pytest.mark.parametrize("is_novel", [[True, True], [False, False]])
def test_novelty_detection_needs_both_kinds(is_novel):
    got = novelty_detection([0.1, 0.2], is_novel)
    assert all(math.isnan(x) for x in (got.auroc, got.aupr, got.fpr95))


def test_novelty_detection_refuses_scores_that_do_not_fit():
    with pytest.raises(DataError, match="novelty has 1 entries that are not finite"):
        novelty_detection([0.1, float("nan")], [True, False])
    with pytest.raises(DataError, match=r"novelty has shape \(2,\), is_novel \(1,\)"):
        novelty_detection([0.1, 0.2], [True])


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_classes_in_use():
    assert classes_in_use([3, 3, 0], 5) == 2
    assert classes_in_use([], 5) == 0
    with pytest.raises(DataError, match=r"reach from 0 to 5, but must lie in \[0, 5\)"):
        classes_in_use([0, 5], 5)


@pytest.mark.parametrize("num_queries", [7, 20, 50, 1000])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_knn_accuracy_matches_the_loop(k, num_queries):
    rng = np.random.default_rng(0)
    truth = rng.integers(4, size=50)
    z = rng.normal(size=(50, 3)) + 0.8 * np.eye(4, 3)[truth]
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    queries = range(0, 50, math.ceil(50 / num_queries))
    want = naive.knn_accuracy(z, truth, k, queries)
    assert 0.2 < want < 0.9  # else it shows nothing
    assert knn_accuracy(z, truth, k=k, num_queries=num_queries) == pytest.approx(want)
    assert knn_accuracy(torch.tensor(z), torch.tensor(truth), k=k, num_queries=num_queries) == pytest.approx(want)


def test_knn_accuracy_in_blocks(monkeypatch):
    rng = np.random.default_rng(1)
    z, truth = rng.normal(size=(30, 4)), rng.integers(3, size=30)
    whole = knn_accuracy(z, truth, k=3)
    monkeypatch.setattr("opencon.metrics.BLOCK_SCORES", 4 * 30)  # blocks of 4 queries, the last of 2
    assert knn_accuracy(z, truth, k=3) == whole


def test_knn_accuracy_does_not_ask_the_row_itself():
    # Each row's nearest other row is of the other class.
    angle = np.array([0.0, 0.1, 2.0, 2.1])
    z = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    assert knn_accuracy(z, np.array([0, 1, 0, 1]), k=1) == 0.0


def test_knn_accuracy_gives_ties_to_the_nearest():
    angle = np.array([0.0, 0.1, 0.2])
    z = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    # Row 0 is judged alone: the nearest is of class 1, the second of class 0, one vote each.
    assert knn_accuracy(z, np.array([1, 1, 0]), k=2, num_queries=1) == 1.0
    assert knn_accuracy(z, np.array([0, 1, 0]), k=2, num_queries=1) == 0.0


def test_knn_accuracy_says_what_it_needs():
    z = np.eye(3)
    with pytest.raises(ConfigError, match="k = 3 neighbors must be at least 1 and fewer than the 3 rows"):
        knn_accuracy(z, np.arange(3), k=3)
    with pytest.raises(DataError, match="z has 3 rows but truth has 2"):
        knn_accuracy(z, np.arange(2), k=1)
    with pytest.raises(ConfigError, match="num_queries = 0 must be at least 1"):
        knn_accuracy(z, np.arange(3), k=1, num_queries=0)


def test_evaluate_is_a_flat_record_of_all_of_it():
    predicted, truth = labels(4)
    novelty = np.random.default_rng(0).normal(size=len(truth))
    record = evaluate(predicted, truth, num_seen=2, num_classes=5, protocol="orca", on="unlabeled", novelty=novelty)
    accuracy = open_world_accuracy(predicted, truth, num_seen=2, protocol="orca")
    assert (record["protocol"], record["on"], record["num_images"]) == ("orca", "unlabeled", 40)
    assert (record["all"], record["novel"], record["seen"]) == (accuracy.all, accuracy.novel, accuracy.seen)
    assert record["ari_novel"] == clustering_scores(predicted, truth, num_seen=2).ari_novel
    assert record["auroc"] == novelty_detection(novelty, truth >= 2).auroc
    assert record["classes_in_use"] == len(set(predicted.tolist()))
    assert json.loads(json.dumps(record)) == record  # plain values only


def test_evaluate_without_a_score_has_no_detection_numbers():
    record = evaluate([0, 1], [0, 1], num_seen=1, num_classes=2, protocol="gcd", on="test")
    assert list(record) == [
        "protocol", "on", "num_images", "all", "novel", "seen",
        "nmi_all", "nmi_novel", "ari_all", "ari_novel", "classes_in_use",
    ]  # fmt: skip


def test_class_numbers_are_not_taken_for_yes_and_no():
    with pytest.raises(DataError, match="is_novel holds 2: say true or false"):
        novelty_detection([0.1, 0.2, 0.3], [0, 1, 2])
