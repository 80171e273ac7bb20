import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import opencon.novelty as novelty_module
from opencon import cli
from opencon.errors import ConfigError, DataError
from opencon.experiments.workbench import open_run
from opencon.metrics import NoveltyDetection, novelty_detection
from opencon.novelty import KNN, MSP, SCORES, Energy, Mahalanobis, Prototype, detection, novelty_table
from opencon.prototypes import seen_score
from tests.naive import metrics as naive_metrics
from tests.naive import novelty as naive

NAMES = SCORES.names()
ON_FEATURES = [name for name in NAMES if SCORES[name].on == "features"]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def rows_and_labels(seed=0, *, dim=5, classes=3, labeled=7, unlabeled=6):
    """float64 rows, the labeled ones around class centers; labels with -1, in no order."""
    g = rng(seed)
    labels = torch.cat([torch.arange(classes).repeat_interleave(labeled), torch.full((unlabeled,), -1)])
    centers = 2 * torch.randn(classes + 1, dim, generator=g, dtype=torch.float64)
    z = centers[labels] + torch.randn(len(labels), dim, generator=g, dtype=torch.float64) * torch.arange(1, dim + 1)
    order = torch.randperm(len(labels), generator=g)
    return z[order], labels[order]


def blobs(seed=0, *, dim=16, seen=3, novel=3, each=40, spread=0.3):
    """Rows of seen and novel classes, half of the seen ones labeled; logits that know the seen centers."""
    g = rng(seed)
    y = torch.arange(seen + novel).repeat_interleave(each)
    centers = torch.randn(seen + novel, dim, generator=g)
    z = torch.nn.functional.normalize(centers[y] + spread * torch.randn(len(y), dim, generator=g), dim=1)
    labels = torch.where((y < seen) & (torch.arange(len(y)) % 2 == 0), y, -1)
    logits = 10 * z @ torch.nn.functional.normalize(centers[:seen], dim=1).T
    return z, y, labels, logits


# --- each score is its formula ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_scores_on_logits_equal_the_formulas(seed):
    logits = 3 * torch.randn(9, 4, generator=rng(seed), dtype=torch.float64)
    want = [naive.naive_msp(row) for row in logits.tolist()]
    np.testing.assert_allclose(MSP().score(logits).numpy(), want)
    for temperature in (0.5, 1.0, 3.0):
        want = [naive.naive_energy(row, temperature) for row in logits.tolist()]
        np.testing.assert_allclose(Energy(temperature).score(logits).numpy(), want)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dim", [2, 5, 30])  # 30 features and 21 labeled rows: the sample covariance has no inverse
def test_mahalanobis_equals_the_formula(seed, dim):
    z, labels = rows_and_labels(seed, dim=dim)
    got = Mahalanobis().fit(z, labels).score(z)
    want = [naive.naive_mahalanobis(q, list(z.numpy()), labels.tolist()) for q in z.numpy()]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_prototype_equals_the_formula(seed):
    z, labels = rows_and_labels(seed)
    want = [naive.naive_prototype(q, list(z.numpy()), labels.tolist()) for q in z.numpy()]
    np.testing.assert_allclose(Prototype().fit(z, labels).score(z).numpy(), want)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 5, 21])
def test_knn_equals_the_formula(seed, k):
    z, labels = rows_and_labels(seed)
    want = [naive.naive_knn(q, list(z.numpy()), labels.tolist(), k) for q in z.numpy()]
    np.testing.assert_allclose(KNN(k).fit(z, labels).score(z).numpy(), want, atol=1e-12)


def test_closed_forms():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert MSP().score(logits).tolist() == pytest.approx([1 / 4, 1 / 2])
    assert Energy().score(logits).tolist() == pytest.approx([math.log(4), math.log(6)])
    assert Energy(2.0).score(logits).tolist() == pytest.approx([2 * math.log(4), 2 * math.log(math.sqrt(3) + 3)])
    # Two classes, 10 apart along the first axis; in both, variance 1 along it and 4 along the second.
    z = torch.tensor([[1.0, 2], [1, -2], [-1, 2], [-1, -2]], dtype=torch.float64)
    z = torch.cat([z, z + torch.tensor([10.0, 0])]).repeat(500, 1)  # many rows: almost nothing is shrunk
    labels = torch.arange(2).repeat_interleave(4).repeat(500)
    score = Mahalanobis().fit(z, labels).score(torch.tensor([[0.0, 0], [3, 0], [0, 6], [8, 4]], dtype=torch.float64))
    assert score.tolist() == pytest.approx([0, -9, -9, -8], rel=2e-2, abs=1e-9)
    axes = torch.eye(3, dtype=torch.float64)
    fitted = Prototype().fit(5 * axes[:2], torch.tensor([7, 3]))  # any length, any class numbers
    assert fitted.score(torch.tensor([[3.0, 4, 0], [0, 0, 2], [-1, 0, 0]], dtype=torch.float64)).tolist() == [0.8, 0, 0]
    assert KNN(2).fit(5 * axes[:2], torch.tensor([0, 1])).score(2 * axes[:1]).tolist() == pytest.approx([-math.sqrt(2)])


def test_a_confident_msp_still_tells_rows_apart():
    logits = torch.tensor([[18.0, 0], [20, 0], [19, 0]])  # float32 probabilities would all be 1
    assert MSP().score(logits).argsort().tolist() == [0, 2, 1]


@pytest.mark.parametrize("form", ["cosine", "standardized"])
def test_prototypes_that_were_learned_elsewhere(form):
    z, _, labels, _ = blobs()
    prototypes = 3 * torch.nn.functional.normalize(torch.randn(6, 16, generator=rng(1)), dim=1)
    score = Prototype(form, prototypes, num_seen=3)
    want = seen_score(z @ prototypes.T / 3, num_seen=3, form=form)
    torch.testing.assert_close(score.score(z), want)
    torch.testing.assert_close(score.fit(z, labels).score(z), want)  # fitting does not replace them
    assert not torch.allclose(Prototype(form).fit(z, labels).score(z), want)


@pytest.mark.parametrize(("labeled", "k"), [(3, 3), (60, 50)])
def test_neighbors_without_a_number(labeled, k):
    z, labels = rows_and_labels(labeled=labeled)
    torch.testing.assert_close(KNN().fit(z, labels).score(z), KNN(k).fit(z, labels).score(z))
    labels[(labels == 0).nonzero()[1:, 0]] = 1  # classes of 1, more and as many rows as before: the middle one decides
    torch.testing.assert_close(KNN().fit(z, labels).score(z), KNN(k).fit(z, labels).score(z))


def test_a_class_of_one_row_has_a_mean_and_no_spread():
    z, labels = rows_and_labels()
    one = torch.cat([z, torch.full((1, 5), 100.0, dtype=torch.float64)])
    fitted = Mahalanobis().fit(one, torch.cat([labels, torch.tensor([3])]))
    far = torch.full((1, 5), 100.0, dtype=torch.float64)
    assert fitted.score(far).item() == pytest.approx(0, abs=1e-6)
    assert Mahalanobis().fit(z, labels).score(far).item() < -100


def test_directions_without_labeled_variation_still_count():
    # Labeled rows vary in two of six features. A pseudo-inverse would not see a step along the others.
    z, labels = rows_and_labels(dim=2, labeled=30)
    z = torch.cat([z, torch.zeros(len(z), 4, dtype=torch.float64)], dim=1)
    step = torch.tensor([0, 0, 0, 0, 0, 3.0], dtype=torch.float64)
    fitted = Mahalanobis().fit(z, labels)
    assert bool((fitted.score(z + step) < fitted.score(z) - 1).all())


# --- what all of them do ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_larger_is_more_likely_seen(name, seed):
    z, y, labels, logits = blobs(seed)
    x = logits if SCORES[name].on == "logits" else z
    judged = labels < 0
    score = SCORES[name]().fit(x, labels).score(x[judged])
    is_novel = (y[judged] >= 3).numpy()
    assert score[~torch.from_numpy(is_novel)].mean() > score[torch.from_numpy(is_novel)].mean()
    assert detection(score, is_novel).auroc > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_arrays_and_tensors_of_any_kind_give_the_same(name):
    z, _, labels, logits = blobs()
    x = logits if SCORES[name].on == "logits" else z
    want = SCORES[name]().fit(x, labels).score(x)
    assert isinstance(want, torch.Tensor)
    assert want.shape == (len(x),)
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    for array in (x.numpy(), frozen, x.numpy()[::-1][::-1], np.asfortranarray(x.numpy()), x.double().numpy()):
        got = SCORES[name]().fit(array, labels.numpy()).score(array)
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
    leaf = x.clone().requires_grad_()
    assert not SCORES[name]().fit(leaf, labels.int()).score(leaf).requires_grad
    assert SCORES[name]().fit(x, labels).score(x.bfloat16()).dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_change_nothing(name, monkeypatch):
    z, _, labels, logits = blobs()
    x = logits if SCORES[name].on == "logits" else z
    want = SCORES[name]().fit(x, labels).score(x)
    monkeypatch.setattr(novelty_module, "BLOCK", 1000)
    torch.testing.assert_close(SCORES[name]().fit(x, labels).score(x), want)
    assert SCORES[name]().fit(x, labels).score(x[:0]).shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_unlabeled_rows_and_the_order_teach_nothing(name):
    z, _, labels, logits = blobs()
    x = logits if SCORES[name].on == "logits" else z
    want = SCORES[name]().fit(x, labels).score(x)
    only = SCORES[name]().fit(x[labels >= 0], labels[labels >= 0]).score(x)
    order = torch.randperm(len(x), generator=rng())
    mixed = SCORES[name]().fit(x[order], labels[order]).score(x)
    torch.testing.assert_close(only, want)
    torch.testing.assert_close(mixed, want)
    torch.testing.assert_close(
        SCORES[name]().fit(x, 10 * labels.clamp(min=-0.1).long() - (labels < 0).long()).score(x), want
    )


def test_rows_of_any_length_where_only_direction_counts():
    z, _, labels, _ = blobs()
    length = 0.5 + torch.rand(len(z), 1, generator=rng())
    for name in ("prototype", "knn"):
        torch.testing.assert_close(
            SCORES[name]().fit(z * length, labels).score(7 * z), SCORES[name]().fit(z, labels).score(z)
        )


# --- detection ----------------------------------------------------------------------------------------------------------


def test_detection_turns_the_sign():
    score, is_novel = torch.tensor([0.9, 0.8, 0.2, 0.1]), np.array([False, False, True, True])
    assert detection(score, is_novel) == NoveltyDetection(auroc=1.0, aupr=1.0, fpr95=0.0)
    assert detection(-score.numpy(), is_novel) == NoveltyDetection(auroc=0.0, aupr=pytest.approx(5 / 12), fpr95=1.0)
    assert detection(score, is_novel) == novelty_detection(-score.numpy(), is_novel)


@given(st.integers(0, 10_000), st.integers(1, 130), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_fpr95_is_the_fifth_percentile_of_the_seen_scores(seed, num_seen, num_novel):
    g = np.random.default_rng(seed)
    seen, novel = g.normal(1, 1, num_seen), g.normal(0, 1, num_novel)
    is_novel = np.repeat([False, True], [num_seen, num_novel])
    got = detection(np.concatenate([seen, novel]), is_novel).fpr95
    assert got == pytest.approx(naive_metrics.fpr95((-np.concatenate([seen, novel])).tolist(), is_novel.tolist()))
    # Interpolating the percentile moves the threshold by less than one seen score, and the share by the novel between.
    ordered = np.sort(seen)
    place = num_seen // 20
    gap = ((novel >= ordered[max(place - 1, 0)]) & (novel <= ordered[min(place + 1, num_seen - 1)])).mean()
    assert abs(got - naive.interpolated_fpr95(seen, novel)) <= gap + 1e-12


def test_the_table_has_every_score_and_the_methods_own():
    z, y, labels, logits = blobs(spread=0.5)
    rows = (labels < 0).nonzero()[:, 0]
    is_novel = (y[rows] >= 3).numpy()
    own = -logits.amax(dim=1)
    table = novelty_table(z, labels, rows=rows, is_novel=is_novel, logits=logits, own_novelty=own)
    assert list(table) == ["own", *NAMES]
    known = labels >= 0
    assert table["own"] == novelty_detection(own[rows].numpy(), is_novel, labeled=own[known].numpy())
    assert table["own"].auroc > 0.8
    for name in NAMES:
        x = logits if SCORES[name].on == "logits" else z
        score = SCORES[name]().fit(x, labels)
        assert table[name] == detection(score.score(x[rows]), is_novel, labeled=score.score_learned(x[known]))
    assert list(novelty_table(z.numpy(), labels.numpy(), rows=rows.numpy(), is_novel=is_novel)) == ON_FEATURES
    assert list(novelty_table(z, labels, rows=rows, is_novel=is_novel, names=["knn"])) == ["knn"]


def test_the_table_judges_only_the_rows_asked_for():
    z, y, labels, _ = blobs(spread=0.5)
    rows = (labels < 0).nonzero()[::3, 0]
    is_novel = (y[rows] >= 3).numpy()
    knn = KNN().fit(z, labels)
    want = detection(knn.score(z[rows]), is_novel, labeled=knn.score_learned(z[labels >= 0]))
    assert novelty_table(z, labels, rows=rows, is_novel=is_novel)["knn"] == want


def test_the_threshold_of_the_table_accepts_95_percent_of_the_labeled():
    """Labeled rows that score higher than other seen ones move the threshold up, and FPR95 down."""
    seen, novel, labeled = torch.arange(100.0), torch.arange(100.0) - 10, torch.arange(100.0) + 50
    is_novel = np.repeat([False, True], 100)
    scores = torch.cat([seen, novel])
    assert detection(scores, is_novel).fpr95 == pytest.approx(0.85)  # from 5 on
    assert detection(scores, is_novel, labeled=labeled).fpr95 == pytest.approx(0.35)  # from 55 on


def test_a_labeled_row_is_not_its_own_neighbor():
    z, _, labels, _ = blobs(spread=0.5)
    knn, known = KNN(k=1).fit(z, labels), labels >= 0
    assert knn.score(z[known]).abs().max() < 1e-3
    assert (knn.score_learned(z[known]) < -1e-3).all()
    torch.testing.assert_close(knn.score_learned(z[known]), KNN(k=2).fit(z, labels).score(z[known]))


def test_the_table_takes_the_prototypes_that_a_method_has_learned():
    z, y, labels, _ = blobs(spread=0.5)
    rows = (labels < 0).nonzero()[:, 0]
    is_novel = (y[rows] >= 3).numpy()
    learned = F.normalize(torch.randn(3, z.shape[1], generator=torch.Generator().manual_seed(0)), dim=1).to(z.dtype)
    table = novelty_table(z, labels, rows=rows, is_novel=is_novel, prototypes=learned, names=["prototype"])
    score = Prototype("cosine", learned, 3)
    assert table["prototype"] == detection(score.score(z[rows]), is_novel, labeled=score.score(z[labels >= 0]))


# --- what the user can fix ----------------------------------------------------------------------------------------------

Z, LABELS = rows_and_labels()


@pytest.mark.parametrize("name", ["msp", "knn"])  # one on logits, one on features: all else is shared
@pytest.mark.parametrize(
    ("x", "labels", "message"),
    [
        (Z[0], LABELS, r"(logits|features) has shape \(5,\). Give one row of features for each sample"),
        (Z, LABELS[:-1], r"labels must be 27 whole numbers, .* not torch.int64 of shape \(26,\)"),
        (Z, LABELS.double(), r"labels must be 27 whole numbers, .* not torch.float64"),
        (Z.index_fill(0, torch.tensor([4]), math.nan), LABELS, r"1 of 27 rows of (logits|features) hold NaN, infinity"),
    ],
)
def test_what_cannot_be_fitted_says_why(name, x, labels, message):
    with pytest.raises(DataError, match=message):
        SCORES[name]().fit(x, labels)


@pytest.mark.parametrize("name", ON_FEATURES)
def test_features_need_labels_first(name):
    kind = SCORES[name].__name__
    with pytest.raises(DataError, match=f"none of 27 rows is labeled, and {kind} learns from labeled rows"):
        SCORES[name]().fit(Z, torch.full_like(LABELS, -1))
    with pytest.raises(DataError, match=rf"{kind} has not learned anything yet. Call fit\(features, labels\) first"):
        SCORES[name]().score(Z)
    with pytest.raises(DataError, match=f"x has 4 features, but {kind} learned from 5. Give rows of the same encoder"):
        SCORES[name]().fit(Z, LABELS).score(Z[:, :4])
    with pytest.raises(DataError, match=r"1 of 3 rows of features hold NaN, .* the first is row 2"):
        SCORES[name]().fit(Z, LABELS).score(Z[:3].index_fill(0, torch.tensor([2]), math.inf))


@pytest.mark.parametrize("name", ["msp", "energy"])
def test_logits_need_none(name):
    torch.testing.assert_close(
        SCORES[name]().fit(Z, torch.full_like(LABELS, -1)).score(Z), SCORES[name]().score(Z), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Energy(0), ConfigError, "temperature = 0 must be above zero"),
        (lambda: KNN(0), ConfigError, "k = 0 must be at least 1"),
        (lambda: KNN(22).fit(Z, LABELS), ConfigError, "k = 22 is more than the 21 labeled rows"),
        (lambda: Prototype("cos"), ConfigError, "form = 'cos' must be one of 'standardized', 'cosine'"),
        (lambda: Prototype(num_seen=3), ConfigError, "prototypes and num_seen come together"),
        (lambda: Prototype(prototypes=Z), ConfigError, "prototypes and num_seen come together"),
        (lambda: Prototype("cosine", Z, 28), ConfigError, "num_seen = 28 must lie between 1 and the 27 prototypes"),
        (lambda: Prototype("cosine", Z[0], 1), DataError, r"prototypes has shape \(5,\). Give one row of features"),
        (
            lambda: SCORES["mahalonobis"],
            ConfigError,
            "unknown novelty score 'mahalonobis'. Did you mean 'mahalanobis'?",
        ),
        (
            lambda: Mahalanobis().fit(Z[:3], torch.arange(3)),
            DataError,
            "each of 3 seen classes has one labeled row, .* take the score 'prototype'",
        ),
        (
            lambda: Mahalanobis().fit(torch.ones(4, 2), torch.tensor([0, 0, 1, 1])),
            DataError,
            "the labeled rows of each class are all the same",
        ),
    ],
)
def test_bad_settings_say_why(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- on a trained run -----------------------------------------------------------------------------------------------------

TRAIN = ["--set", "train.epochs=2", "--set", "train.batch_size=256", "--device", "cpu"]


def opencon(capsys, *args):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in args])
    return int(stop.value.code or 0), *capsys.readouterr()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("novelty") / "run"
    with pytest.raises(SystemExit):
        cli.main(["train", "digits", "--out", str(out), *TRAIN])
    return out


def test_evaluate_compares_the_scores(capsys, run):
    code, out, _ = opencon(capsys, "evaluate", run, "--novelty", "--json", "--device", "cpu")
    assert code == 0
    record = json.loads(out)
    assert list(record["novelty"]) == ["own", *NAMES]
    own = record["novelty"]["own"]
    assert (own["auroc"], own["aupr"]) == (record["auroc"], record["aupr"])  # its FPR95 has another threshold
    assert all(0 <= value <= 1 for row in record["novelty"].values() for value in row.values())
    code, table, _ = opencon(capsys, "evaluate", run, "--novelty", "--device", "cpu")
    assert code == 0
    rows = {line.split("│")[1].strip(): line for line in table.splitlines() if line.startswith("│")}
    assert [f"{record['novelty']['knn'][key]:.1%}" for key in ("fpr95", "auroc", "aupr")] == [
        cell.strip() for cell in rows["knn"].split("│")[2:5]
    ]
    code, out, _ = opencon(capsys, "evaluate", run, "--json", "--device", "cpu")
    assert "novelty" not in json.loads(out)


def test_opencons_own_score_is_the_prototype_score_with_its_prototypes(run):
    bench = open_run(run, torch.device("cpu"))
    _, bank, assignment = bench.score("unlabeled", "orca")
    score = Prototype("standardized", bench.method.prototypes, num_seen=5).score(bank.z)
    torch.testing.assert_close(score, -assignment.novelty)
    # Its seen logits are 10 cosines, so the largest of them is the paper's form.
    cosine = Prototype("cosine", bench.method.prototypes, num_seen=5).score(bank.z)
    torch.testing.assert_close(10 * cosine, assignment.seen_logits.amax(dim=1))


def test_evaluate_counts_the_classes(capsys, run):
    code, out, _ = opencon(capsys, "evaluate", run, "--count", "gcd", "--json", "--device", "cpu")
    assert code == 0
    found = json.loads(out)["count"]
    assert found["low"] <= found["num_classes"] <= found["high"]
    assert found["num_classes"] in [k for k, _ in found["curve"]]
    code, out, _ = opencon(capsys, "evaluate", run, "--count", "gcd", "--device", "cpu")
    assert f"About {found['num_classes']} classes" in out
    assert "By GCD: " in out


def test_evaluate_refuses_what_it_cannot_do(capsys, run, tmp_path):
    code, out, err = opencon(capsys, "evaluate", run, "--count", "gdc", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "unknown way to count 'gdc'. Did you mean 'gcd'? Known: dtc, engine, gcd, tree." in err
    assert opencon(capsys, "pretrain", "digits", "--out", tmp_path / "simclr", *TRAIN)[0] == 0
    code, _, err = opencon(capsys, "evaluate", tmp_path / "simclr", "--novelty", "--device", "cpu")
    assert code == 2
    assert "simclr uses no labels, so no class is seen or novel to it." in err
    code, _, err = opencon(capsys, "evaluate", tmp_path / "simclr", "--count", "dtc", "--device", "cpu")
    assert code == 2
    assert "dtc counts by labeled rows of at least 2 seen classes, and there are 0" in err


def test_every_score_is_documented():
    text = (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in text] == []
