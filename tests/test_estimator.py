"""scikit-learn's contract, and the words in which it is kept."""

import dataclasses
import json
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy.cluster.hierarchy import dendrogram
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.kernel_approximation import RBFSampler
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import opencon
import opencon.estimator.classifier as module
from opencon.encoders import ENCODERS
from opencon.errors import ConfigError, DataError, MissingExtraError
from opencon.estimator import DiscoveryWarning, InputError, OpenWorldClassifier, samples
from opencon.estimator.groups import unlike_their_labels
from opencon.estimator.labels import encode_labels, with_new
from opencon.estimator.samples import read_samples
from opencon.openworld.fit import OpenWorldConfig
from opencon.photos.features import VIEWS_FOR_STEPS, Extractor, FeatureSettings
from opencon.runtime import seeded

DOCS = Path(__file__).parents[1] / "docs/estimator.md"

# Every check of scikit-learn that is not met, and why.
NOT_MET = {"check_classifiers_classes": "it takes -1 for a class; here -1 means unlabeled"}


@parametrize_with_checks(
    [OpenWorldClassifier(), OpenWorldClassifier(steps=2)], expected_failed_checks=lambda _: NOT_MET
)
@pytest.mark.filterwarnings("ignore:y has no unlabeled row")
def test_scikit_learn_contract(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def blobs():
    """Five round clouds of 30 rows in 12 dimensions: their truth, and y with half of the first three labeled."""
    rng = np.random.default_rng(0)
    truth = np.arange(150) % 5
    X = (10 * np.eye(12)[truth] + rng.normal(size=(150, 12))).astype(np.float32)
    y = np.where((truth < 3) & (np.arange(150) < 75), truth, -1)
    return X, truth, y


@pytest.fixture(scope="module")
def fitted(blobs):
    X, _, y = blobs
    return OpenWorldClassifier(n_novel=2, steps=5).fit(X, y)


# --- what comes back --------------------------------------------------------------------------------------------------


def test_seen_classes_are_recognized_and_new_ones_grouped(blobs, fitted):
    X, truth, _ = blobs
    assert fitted.classes_.tolist() == [0, 1, 2, 3, 4]
    assert (fitted.n_seen_, fitted.n_novel_, fitted.n_features_in_) == (3, 2, 12)
    found = fitted.predict(X)
    np.testing.assert_array_equal(found[truth < 3], truth[truth < 3])
    groups = {c: set(found[truth == c]) for c in (3, 4)}
    assert sorted(map(sorted, groups.values())) == [[3], [4]]
    np.testing.assert_array_equal(fitted.is_novel(X), truth >= 3)
    assert fitted.count_ is None


def test_new_groups_come_in_order_of_size(blobs):
    X, truth, y = blobs
    keep = (truth != 3) | (np.arange(150) < 60)
    model = OpenWorldClassifier(n_novel=2, steps=0).fit(X[keep], y[keep])
    sizes = [(model.labels_ == group).sum() for group in model.classes_[3:]]
    assert sizes == [30, 12]


def test_all_answers_agree(blobs, fitted):
    X, truth, _ = blobs
    p = fitted.predict_proba(X)
    assert p.shape == (150, 5)
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(fitted.classes_[p.argmax(axis=1)], fitted.predict(X))
    np.testing.assert_array_equal(fitted.labels_, fitted.predict(X))
    np.testing.assert_allclose(fitted.embedding_, fitted.transform(X), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(fitted.embedding_, axis=1), 1, atol=1e-5)
    score = fitted.novelty_score(X)
    assert score.shape == (150,)
    assert score[truth >= 3].min() > 0 > score[truth < 3].max()
    names = fitted.get_feature_names_out()
    assert len(names) == fitted.embedding_.shape[1]
    assert names[0] == "openworldclassifier0"


def test_fit_predict_and_fit_transform(blobs, fitted):
    X, _, y = blobs
    make = clone(fitted)
    np.testing.assert_array_equal(make.fit_predict(X, y), fitted.labels_)
    np.testing.assert_array_equal(make.fit_transform(X, y), fitted.embedding_)


def test_pickle_and_clone(blobs, fitted):
    X, _, _ = blobs
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))
    assert clone(fitted).get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        clone(fitted).novelty_score(X)


def test_the_seed_decides(blobs):
    X, _, y = blobs
    state = torch.get_rng_state()

    def embedding(random_state):
        return OpenWorldClassifier(2, steps=3, random_state=random_state).fit(X, y).embedding_

    np.testing.assert_array_equal(embedding(0), embedding(np.int64(0)))
    np.testing.assert_array_equal(embedding(np.random.RandomState(5)), embedding(np.random.RandomState(5)))
    assert not np.array_equal(embedding(0), embedding(1))
    assert not np.array_equal(embedding(None), embedding(None))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unknown_number_of_groups(blobs):
    pytest.importorskip("opencon.counting")
    X, truth, y = blobs
    model = OpenWorldClassifier(steps=0).fit(X, y)
    assert model.count_.num_classes == 5
    assert model.count_.low <= 5 <= model.count_.high
    assert (model.n_seen_, model.n_novel_) == (3, 2)
    np.testing.assert_array_equal(model.is_novel(X), truth >= 3)


# --- score ------------------------------------------------------------------------------------------------------------


def test_score_is_the_accuracy_on_rows_with_seen_labels(blobs, fitted):
    X, truth, y = blobs
    assert fitted.score(X, truth) == fitted.score(X, y) == 1.0
    wrong = y.copy()
    rows = np.flatnonzero(y == 0)[:9]
    wrong[rows] = 1  # 9 of 45 labeled rows
    assert fitted.score(X, wrong) == pytest.approx(36 / 45)
    weight = np.ones(150)
    weight[rows] = 0
    assert fitted.score(X, wrong, sample_weight=weight) == 1.0
    with pytest.raises(InputError, match="no label in y is a seen class"):
        fitted.score(X, np.full(150, 4))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        fitted.score(X, y[:-1])


def test_score_with_strings(blobs):
    X, truth, y = blobs
    names = strings(y)
    model = OpenWorldClassifier(2, steps=0).fit(X, names)
    assert model.score(X, names) == 1.0
    assert model.score(X, [f"a much longer name {c}" if c >= 3 else f"class {c}" for c in truth]) == 1.0


# --- labels -----------------------------------------------------------------------------------------------------------


def strings(y):
    return np.array([f"class {c}" if c >= 0 else None for c in y], dtype=object)


def test_string_labels(blobs):
    X, truth, y = blobs
    model = OpenWorldClassifier(2, steps=0).fit(X, strings(y))
    assert model.classes_.tolist() == ["class 0", "class 1", "class 2", "new-1", "new-2"]
    assert set(model.predict(X)[truth >= 3]) == {"new-1", "new-2"}
    np.testing.assert_array_equal(model.predict(X)[truth < 3], strings(y)[y >= 0][truth[truth < 3]])


def test_whole_numbers_with_gaps(blobs):
    X, truth, y = blobs
    values = np.array([7, -40, 120, -1])
    model = OpenWorldClassifier(2, steps=0).fit(X, values[y].astype(np.int8))
    assert model.classes_.tolist() == [-40, 7, 120, 121, 122]
    np.testing.assert_array_equal(model.predict(X)[truth < 3], values[truth[truth < 3]])


@pytest.mark.parametrize(
    ("y", "classes", "codes"),
    [
        ([3, -1, 1, 3], [1, 3], [1, -1, 0, 1]),
        ([3.0, -1.0, 1.0], [1.0, 3.0], [1, -1, 0]),
        ([3, None, -1, 1], [1, 3], [1, -1, -1, 0]),
        (["b", None, "a"], ["a", "b"], [1, -1, 0]),
        (np.array(["b", np.nan, "a"], dtype=object), ["a", "b"], [1, -1, 0]),
        (["b", np.nan, "a", None, -1], ["a", "b"], [1, -1, 0, -1, -1]),
        (np.array(["b", "a"]), ["a", "b"], [1, 0]),
        ([True, False], [False, True], [1, 0]),
        ([-1, -1], [], [-1, -1]),
        ([None, None], [], [-1, -1]),
    ],
)
def test_labels_are_numbered(y, classes, codes):
    found, numbers = encode_labels(y)
    assert found.tolist() == classes
    assert numbers.tolist() == codes


def test_the_string_minus_one_is_a_class():
    with pytest.warns(UserWarning, match='class named "-1". Among strings, None'):
        classes, codes = encode_labels(np.array(["a", -1]))  # NumPy makes strings of both
    assert (classes.tolist(), codes.tolist()) == (["-1", "a"], [1, 0])


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (np.array([0, 1]), [0, 1, 2, 3]),
        (np.array([255], dtype=np.uint8), [255, 256, 257]),
        (np.array([0.0, 5.0], dtype=np.float32), [0.0, 5.0, 6.0, 7.0]),
        (np.array(["a"]), ["a", "new-1", "new-2"]),
        (np.array(["new-1", "new-3"]), ["new-1", "new-3", "new-2", "new-4"]),
        (np.array([-7, -2]), [-7, -2, 0, 1]),  # -1 means unlabeled
        (np.array([0, 2**63 - 1]), [0, 2**63 - 1, 1, 2]),  # there is no larger one
        (np.array([2**63 - 2]), [2**63 - 2, 2**63 - 1, 0]),
        (np.array([2**64 - 1], dtype=np.uint64), [2**64 - 1, 0, 1]),
        (np.array([0.0, 1e17]), [0.0, 1e17, 1.0, 2.0]),  # 1e17 + 1 is 1e17
        (np.array([], dtype=np.int64), [0, 1]),
        (np.array([], dtype=str), ["new-1", "new-2"]),
        (np.array([False, True]), [0, 1, 2, 3]),
    ],
)
def test_labels_of_new_groups_are_new(classes, labels):
    assert with_new(classes, 2).tolist() == labels
    assert with_new(classes, 0) is classes
    for taken in labels[-2:]:
        found = with_new(classes, 2, taken=taken).tolist()
        assert len({*found, taken}) == len(labels) + 1


class NAType:
    """As pandas has it: neither equal to anything nor true or false."""

    def __bool__(self):
        raise TypeError

    def __eq__(self, other):
        return self

    __hash__ = None


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.array([2.0, np.nan, 0.0, -1.0]), [0, 2]),
        (np.array(["b", NAType(), "a", None], dtype=object), ["a", "b"]),
        (np.array([2, NAType(), 0, -1], dtype=object), [0, 2]),
        (["b", float("nan"), "a", -1], ["a", "b"]),
    ],
)
def test_what_pandas_makes_of_a_missing_label_is_one(y, classes):
    found, codes = encode_labels(y)
    assert found.tolist() == classes
    assert codes.tolist() == [1, -1, 0, -1]


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (None, "requires y to be passed.*-1 for every row"),
        (np.full(150, np.nan), "nothing but NaN.*-1 for every row"),
        (np.full(150, np.inf), "infinity"),
        (np.linspace(0, 1, 150), "continuous"),
        (np.array(["a", 1, None] * 50, dtype=object), "y holds int, str. Give labels that are all strings"),
        (np.array([True, None] * 75, dtype=object), "y holds bool"),
        (np.array([2**70, None] * 75, dtype=object), "beyond 64 bits"),
        (np.zeros((150, 2)), "1d array"),
        ([0, 1], "inconsistent numbers of samples"),
    ],
)
def test_labels_that_cannot_work(blobs, y, words):
    with pytest.raises(ValueError, match=words):
        OpenWorldClassifier(2, steps=0).fit(blobs[0], y)


@pytest.mark.parametrize("n_novel", [4, "auto"])
def test_without_unlabeled_rows_it_is_a_classifier(blobs, n_novel):
    X, truth, _ = blobs
    with pytest.warns(UserWarning, match="no unlabeled row"):
        model = OpenWorldClassifier(n_novel, steps=5).fit(X, truth)
    assert model.count_ is None  # nothing to estimate
    assert (model.n_seen_, model.n_novel_) == (5, 0)
    np.testing.assert_array_equal(model.predict(X), truth)
    assert not model.is_novel(X).any()


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"n_novel": -1}, 'n_novel = -1 must be a whole number, 0 or more, or "auto"'),
        ({"n_novel": 2.5}, 'n_novel = 2.5 must be a whole number, 0 or more, or "auto"'),
        ({"n_novel": True}, "n_novel = True must be a whole number"),
        ({"n_novel": "many"}, "n_novel = 'many' must be a whole number"),
        ({"steps": None}, "steps = None must be a whole number"),
        ({"steps": "auto"}, r"steps = 'auto' must be a whole number, 0 or more\.$"),
        ({"steps": -3}, "steps = -3 must be a whole number, 0 or more"),
        ({"lr": 0.0}, "lr = 0.0 must be above zero"),
        ({"lr": "fast"}, "lr = 'fast' must be a number above zero"),
        ({"random_state": -1}, r"seed = -1 must be a whole number from 0 to 2\^63 - 1"),
        ({"method": "opncon"}, "Did you mean 'opencon'"),
        ({"n_novel": (1, 2, 3)}, r"n_novel = \(1, 2, 3\) must be a number, \(low, high\)"),
        ({"n_novel": (3, 2)}, "low must not be above high"),
        ({"n_novel": (1, 2.5)}, r"n_novel\[1\] = 2.5 must be a whole number"),
        ({"max_classes": 2}, "max_classes = 2 must be at least 3: 3 seen classes"),
        ({"max_classes": 4, "n_novel": 2}, "max_classes = 4 must be at least 5"),
        ({"max_classes": "many"}, "max_classes = 'many' must be a whole number"),
        ({"encoder": 5}, "encoder = 5 must be the name of an encoder"),
        ({"scale": "always"}, "scale = 'always' must be True, False or \"auto\""),
        ({"outlier_label": "odd"}, "outlier_label = 'odd' must be a whole number"),
        ({"outlier_label": 1}, "outlier_label = 1 is a class in y"),
    ],
)
def test_bad_parameters_are_refused_in_fit(blobs, setting, words):
    X, _, y = blobs
    model = OpenWorldClassifier(**setting)
    with pytest.raises((ValueError, TypeError), match=words) as refused:
        model.fit(X, y)
    assert isinstance(refused.value, (ConfigError, DataError, TypeError))


def test_no_step_is_taken_unless_asked_for(blobs, monkeypatch):
    X, _, y = blobs
    histories = []
    fit_features = module.fit_features

    def spy(*rows, **how):
        fitted = fit_features(*rows, **how)
        histories.append(fitted.history)
        return fitted

    monkeypatch.setattr(module, "fit_features", spy)
    OpenWorldClassifier(2).fit(X, y)
    OpenWorldClassifier(2, steps=3).fit(X, y)
    assert histories[0] == []
    assert len(histories[1]) == 3  # 150 rows are one batch


def test_in_the_plane_a_kernel_helps():
    """The advice of the docs: five clouds in a row, of which directions from the middle tell but two."""
    truth = np.arange(150) % 5
    X = np.stack([10.0 * truth, np.zeros(150)], axis=1) + np.random.default_rng(0).normal(size=(150, 2))
    y = np.where((truth < 3) & (np.arange(150) < 75), truth, -1)
    pipe = make_pipeline(StandardScaler(), RBFSampler(n_components=200, random_state=0), OpenWorldClassifier(2))
    pipe.fit(X, y)
    assert pipe.score(X, truth) > 0.95
    assert ((pipe[-1].labels_ > 2) == (truth > 2)).mean() > 0.95
    assert OpenWorldClassifier(2).fit(X, y).score(X, truth) < 0.8


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [scipy.sparse.csr_matrix, scipy.sparse.coo_array])
def test_sparse_rows_are_filled_in_up_to_a_bound(blobs, form, monkeypatch):
    X, _, y = blobs
    X = np.where(np.abs(X) > 3, X, 0)
    model, sparse = OpenWorldClassifier(2).fit(X, y), form(X)
    np.testing.assert_array_equal(OpenWorldClassifier(2).fit(sparse, y).embedding_, model.embedding_)
    np.testing.assert_array_equal(model.predict_proba(sparse), model.predict_proba(X))
    monkeypatch.setattr(samples, "MOST_DENSE", X.size - 1)
    with pytest.raises(InputError, match=r"150 x 12 numbers are too many to fill in.*TruncatedSVD"):
        OpenWorldClassifier(2).fit(sparse, y)


def test_weights_of_rows_are_refused(blobs):
    X, _, y = blobs
    with pytest.raises(TypeError, match=r"fit takes no sample_weight: all rows count alike. Repeat a row"):
        OpenWorldClassifier(2).fit(X, y, sample_weight=np.ones(150))


def test_rows_without_a_direction_have_an_embedding():
    """Rows that are all the same, and a row at the middle of the others."""
    same = OpenWorldClassifier(0).fit(np.ones((20, 3)), [0] * 5 + [1] * 5 + [-1] * 10)
    np.testing.assert_allclose(np.linalg.norm(same.embedding_, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(same.transform(np.ones((2, 3))), same.embedding_[:2])
    assert np.isfinite(same.predict_proba(np.zeros((2, 3)))).all()


def test_small_gray_images_are_rows_of_pixels(blobs):
    X, truth, y = blobs
    pixels = np.clip(X / 20 + 0.25, 0, 1).reshape(-1, 3, 4)
    pixels = np.concatenate([pixels, pixels], axis=1)  # 6 x 4: a side of 3 could be taken for colors
    model = OpenWorldClassifier(2, steps=0).fit(pixels, y)
    assert model.n_features_in_ == 24
    np.testing.assert_array_equal(model.predict(pixels)[truth < 3], truth[truth < 3])
    bytes_ = np.round(pixels * 255).astype(np.uint8)
    np.testing.assert_array_equal(model.transform(bytes_), model.transform(pixels))
    np.testing.assert_array_equal(model.transform(bytes_[..., None]), model.transform(pixels))
    rows, views = read_samples(bytes_).rows(FeatureSettings(), None)
    np.testing.assert_allclose(rows, bytes_.reshape(150, 24) / 255, rtol=1e-6)
    assert views is None
    for other in (X, pixels[:, :5], pixels.reshape(150, 4, 6)):
        with pytest.raises(InputError, match=r"X holds .*, but fit was given gray images of 6 x 4 pixels"):
            model.predict(other)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 16, 16), "gray images of 16 x 16 pixels"),
        ((4, 16, 17), samples.ENCODED),
        ((4, 8, 8, 3), samples.ENCODED),
        ((4, 3, 8, 8), samples.ENCODED),
        ((4, 8), samples.ROWS),
    ],
)
def test_size_and_color_decide_what_becomes_of_an_image(shape, kind):
    assert read_samples(np.zeros(shape, dtype=np.uint8)).kind == kind


@pytest.mark.parametrize(
    ("X", "words"),
    [
        ("photo.jpg", "single path, 'photo.jpg'. Give a list"),
        (Path("photo.jpg"), "single path"),
        (np.zeros((0, 8, 8)), r"shape \(0, 8, 8\): there is no image"),
        (np.full((4, 8, 8), 16.0), r"must lie in \[0, 1\]"),
        (np.zeros((4, 8, 8), dtype=np.int64), "give uint8, or floating point"),
        (np.zeros((4, 8, 8, 2)), "with 1 or 3 channels"),
        (np.zeros((4, 8, 8, 3, 1)), "expected"),
    ],
)
def test_images_that_cannot_work(X, words):
    with pytest.raises(InputError, match=words) as refused:
        OpenWorldClassifier(1).fit(X, [0, 0, -1, -1])
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, DataError)


@pytest.fixture(scope="module")
def small_encoder(tmp_path_factory):
    """A network for images of 16 x 16 pixels, as a finished run leaves it."""
    folder = tmp_path_factory.mktemp("encoder") / "run"
    folder.mkdir()
    with seeded(0):
        net = ENCODERS["convnet"].build(3, 16)
    save_file(net.state_dict(), folder / "encoder.safetensors", metadata={"encoder": "convnet"})
    (folder / "config.json").write_text(json.dumps({"encoder": {"mean": [0.5] * 3, "std": [0.25] * 3}}))
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """24 square photos of three colors, as an array and as files; y with half of the first two colors labeled."""
    folder = tmp_path_factory.mktemp("photos")
    truth = np.arange(24) % 3
    color = np.array([[220, 40, 40], [40, 220, 40], [40, 40, 220]])[truth]
    noise = np.random.default_rng(0).integers(-30, 30, size=(24, 16, 16, 3))
    images = (color[:, None, None] + noise).astype(np.uint8)
    paths = [folder / f"{i}.png" for i in range(24)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    return images, paths, truth, np.where((truth < 2) & (np.arange(24) < 12), truth, -1)


def test_images_and_photo_files_go_through_the_encoder(photos, small_encoder, tmp_path):
    images, paths, truth, y = photos
    model = OpenWorldClassifier(1, steps=2, encoder=small_encoder, cache=tmp_path / "cache").fit(paths, y)
    assert (model.n_seen_, model.n_novel_) == (2, 1)
    after_fit = set((tmp_path / "cache").rglob("*.*"))
    np.testing.assert_array_equal(model.predict([str(p) for p in paths]), truth)
    assert 0 < len(after_fit) < len(set((tmp_path / "cache").rglob("*.*")))
    np.testing.assert_allclose(model.transform(images), model.transform(paths), atol=1e-5)  # the same pixels
    from_arrays = clone(model).fit(images / 255, y)
    np.testing.assert_array_equal(from_arrays.predict(paths), truth)
    wide = np.concatenate([images[:, :, :4] * 0, images, images[:, :, :4] * 0], axis=2)
    np.testing.assert_array_equal(from_arrays.transform(wide), from_arrays.transform(images))  # the central square


def test_the_encoder_makes_views_where_they_are_wanted(photos, small_encoder):
    images, paths, _, _ = photos
    for X in (images, paths):
        for num_views in (0, 2):
            rows, views = read_samples(X).rows(FeatureSettings(encoder=small_encoder, num_views=num_views), None)
            assert rows.shape[0] == 24
            assert views is None if num_views == 0 else views.shape == (24, 2, rows.shape[1])


@pytest.mark.parametrize(("steps", "num_views"), [(0, 0), (2, VIEWS_FOR_STEPS)])
def test_views_are_computed_only_for_steps_and_never_to_predict(
    photos, small_encoder, tmp_path, monkeypatch, steps, num_views
):
    images, paths, _, y = photos
    asked = []
    build = Extractor.__init__

    def spy(self, encoder, settings, device):
        asked.append(settings.num_views)
        build(self, encoder, settings, device)

    monkeypatch.setattr(Extractor, "__init__", spy)
    for X in (images, paths):
        asked.clear()
        model = OpenWorldClassifier(1, steps=steps, encoder=small_encoder).fit(X, y)
        assert set(asked) == {num_views}
        asked.clear()
        model.predict(X)
        assert set(asked) == {0}


def test_a_photo_that_cannot_be_read_is_named(photos, small_encoder, tmp_path):
    _, paths, _, y = photos
    (tmp_path / "bad.jpg").write_text("no image")
    with pytest.raises(InputError, match=r"2 of 24 photos cannot be read. The first is .*bad.jpg: it is not an image"):
        OpenWorldClassifier(1, encoder=small_encoder).fit([*paths[:22], tmp_path / "bad.jpg", tmp_path / "none.jpg"], y)


# --- with others ------------------------------------------------------------------------------------------------------


def test_in_a_pipeline_and_a_grid_search(blobs):
    X, truth, y = blobs
    pipe = make_pipeline(StandardScaler(), OpenWorldClassifier(2, steps=2)).fit(X * 100 + 7, y)
    assert pipe.score(X * 100 + 7, truth) == 1.0
    assert pipe.predict_proba(X).shape == (150, 5)
    search = GridSearchCV(pipe, {"openworldclassifier__n_novel": [1, 2]}, cv=3, error_score="raise").fit(X, y)
    assert search.predict(X).shape == (150,)
    assert search.best_score_ == 1.0
    groups = make_pipeline(OpenWorldClassifier(2, steps=2), KMeans(5, n_init=3, random_state=0))
    assert len(set(groups.fit(X, y).predict(X))) == 5  # as a transformer
    folds = KFold(3, shuffle=True, random_state=0)  # stratifying cannot sort None
    scores = cross_val_score(OpenWorldClassifier(2, steps=0), X, strings(y), cv=folds)
    assert scores.tolist() == [1.0] * 3


def test_importing_the_package_stays_light():
    code = "import sys, opencon; print(*(name in sys.modules for name in ('torch', 'sklearn', 'numpy')))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.split() == ["False"] * 3
    assert opencon.OpenWorldClassifier is OpenWorldClassifier
    assert "OpenWorldClassifier" in dir(opencon)
    with pytest.raises(AttributeError, match="has no attribute 'OpenWorld'"):
        _ = opencon.OpenWorld


# --- docs/estimator.md ------------------------------------------------------------------------------------------------


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.M | re.S)


def test_the_examples_of_the_docs_run(capsys):
    example, *more = blocks()
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    names = {}
    exec(compile(example, "estimator.md", "exec"), names)
    model, X, truth = names["model"], names["X"], names["truth"]
    assert model.classes_.tolist() == list(range(10))
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert model.score(X, truth) > 0.9
    groups = [np.bincount(truth[model.labels_ == group], minlength=10) for group in model.classes_[5:]]
    assert sorted(counts.argmax() for counts in groups) == [5, 6, 7, 8, 9]
    assert all(counts.max() > 0.8 * counts.sum() for counts in groups)
    for block in more:
        exec(compile(block, "estimator.md", "exec"), names)


def test_the_docs_name_the_numbers_of_the_code():
    text = DOCS.read_text(encoding="utf-8")
    assert f"{OpenWorldConfig.noise:g} standard deviations" in text
    assert f"up to {samples.SMALL_SIDE} x {samples.SMALL_SIDE} pixels" in text
    assert f"more than {module.WILD:g} times the median" in text
    for name, value in OpenWorldClassifier().get_params().items():
        shown = f'"{value}"' if isinstance(value, str) else value
        assert f"| `{name}={shown}` |" in text


def test_nothing_warns_in_ordinary_use(blobs):
    X, _, y = blobs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OpenWorldClassifier(2, steps=2).fit(X, y).predict(X)


# --- what it says of its result ---------------------------------------------------------------------------------------


def plain_warnings(fit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = fit()
    assert {warning.category for warning in caught} <= {DiscoveryWarning}
    assert all(warning.filename == __file__ for warning in caught)
    return fitted, [str(warning.message) for warning in caught]


def half_labeled(truth, hidden):
    return np.where((truth != hidden) & (np.random.default_rng(0).random(len(truth)) < 0.5), truth, -1)


@pytest.mark.parametrize("load", [load_wine, load_breast_cancer])
def test_columns_in_wild_units_are_scaled(load):
    X, truth = load(return_X_y=True)
    y = half_labeled(truth, truth.max())

    def right(model):
        unlabeled = y < 0
        return opencon.open_world_accuracy(
            model.labels_[unlabeled], truth[unlabeled], num_seen=model.n_seen_, protocol="gcd"
        ).all

    plain, said = plain_warnings(lambda: OpenWorldClassifier(1, scale=False).fit(X, y))
    assert re.search("one column of X varies [0-9,]+ times as much as the median column", said[0])
    model, said = plain_warnings(lambda: OpenWorldClassifier(1).fit(X, y))
    assert said == []
    np.testing.assert_allclose(model.scale_, X.std(axis=0), rtol=1e-4)
    assert right(model) > max(0.94, right(plain) + 0.03)
    scaled = OpenWorldClassifier(1, scale=False).fit(StandardScaler().fit_transform(X), y)
    np.testing.assert_array_equal(scaled.labels_, model.labels_)
    np.testing.assert_array_equal(model.predict(X), model.labels_)
    np.testing.assert_allclose(model.transform(X), model.embedding_, atol=1e-5)


def test_columns_of_one_kind_are_left_alone(blobs):
    X, _, y = blobs
    assert OpenWorldClassifier(2).fit(X, y).scale_ is None
    np.testing.assert_allclose(OpenWorldClassifier(2, scale=True).fit(X, y).scale_, X.std(axis=0), rtol=1e-5)


@pytest.mark.parametrize("asked", [2, (2, 4)])
def test_a_lost_group_is_said(asked):
    rows, y = np.ones((20, 3)), [0] * 5 + [1] * 5 + [-1] * 10  # nothing tells them apart
    model, said = plain_warnings(lambda: OpenWorldClassifier(asked).fit(rows, y))
    assert model.n_novel_ == 0
    assert said[0].startswith("n_novel = 2 was asked for, and 0 are left")


@pytest.fixture(scope="module")
def many():
    """Thirty clouds of 12 rows; y names the first three."""
    truth = np.arange(360) % 30
    X = 10 * np.eye(32)[truth] + np.random.default_rng(0).normal(size=(360, 32))
    return X.astype(np.float32), truth, np.where((truth < 3) & (np.arange(360) < 180), truth, -1)


def test_a_limit_that_was_reached_is_said_and_can_be_raised(many):
    X, _, y = many
    model, said = plain_warnings(lambda: OpenWorldClassifier(max_classes=20).fit(X, y))
    assert len(model.classes_) <= 20
    assert said == [
        "20 classes are the most that were looked for, so there may be more. Look further with max_classes above 20."
    ]
    model, said = plain_warnings(lambda: OpenWorldClassifier(max_classes=40).fit(X, y))
    assert said == []
    assert model.n_novel_ == 27


def test_a_range_is_kept_to(many):
    X, _, y = many
    for low, high in ((2, 6), (30, 40)):
        model, _ = plain_warnings(lambda: OpenWorldClassifier((low, high)).fit(X, y))  # noqa: B023
        assert low <= model.n_novel_ <= high
        assert model.count_.num_classes == len(model.classes_)


@pytest.mark.parametrize("hidden", [1, 2, None])
def test_a_hidden_class_that_was_not_found_is_said(hidden):
    """Versicolor and virginica overlap, and look like one class where one of them has no label."""
    X, truth = load_iris(return_X_y=True)
    y = half_labeled(truth, hidden)
    model, said = plain_warnings(lambda: OpenWorldClassifier().fit(X, y))
    if hidden is None:
        assert (model.n_novel_, said) == (0, [])
    elif model.n_novel_ == 0:  # else it was found after all
        assert re.search(
            f"no new group was found, but unlabeled rows that went to (., )?{3 - hidden} do not look", said[0]
        )


def test_rows_that_differ_from_the_labeled_ones_of_their_class_are_noticed():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4))
    member, labeled = np.repeat([0, 1, 1], 30), np.where(np.arange(90) % 3 == 0, np.repeat([0, 1, -1], 30), -1)
    assert unlike_their_labels(x, member, labeled) == []
    x[60:] += 4.0  # unlabeled rows that went to class 1
    assert unlike_their_labels(x, member, labeled) == [1]
    assert unlike_their_labels(x, member, np.full(90, -1)) == []


def test_without_labels_everything_is_a_new_group(blobs):
    X, truth, _ = blobs
    for y, names in ((np.full(150, -1), [0, 1, 2, 3, 4]), ([None] * 150, [f"new-{i}" for i in range(1, 6)])):
        model = OpenWorldClassifier().fit(X, y)
        assert model.n_seen_ == 0
        assert model.classes_.tolist() == names
        assert all(len(set(model.labels_[truth == c])) == 1 for c in range(5))
        assert model.is_novel(X).all()
        assert np.isfinite(model.novelty_score(X)).all()
        with pytest.raises(InputError, match="no label in y is a seen class"):
            model.score(X, truth.astype(str))


# --- strangers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("names", "label"), [(None, -1), (None, 99), ("class", "odd")])
def test_strangers_have_a_label_of_their_own_where_one_is_set(blobs, names, label):
    X, _, y = blobs
    y = strings(y) if names else y
    model = OpenWorldClassifier(2, outlier_label=label).fit(X, y)
    plain = OpenWorldClassifier(2).fit(X, y)
    odd = -30 * np.ones((3, 12)) + np.random.default_rng(0).normal(size=(3, 12))
    rows = np.concatenate([X, odd])
    strange = plain.is_stranger(rows)
    assert strange[-3:].all()
    assert strange[:-3].mean() < 0.1
    assert set(plain.predict(rows)) <= set(plain.classes_.tolist())
    assert label not in model.classes_.tolist()
    np.testing.assert_array_equal(model.predict(rows) == label, strange)
    np.testing.assert_array_equal(model.predict(rows)[~strange], plain.predict(rows)[~strange])


def test_a_new_group_does_not_take_the_label_of_strangers(blobs):
    X, _, y = blobs
    assert OpenWorldClassifier(2, outlier_label=3).fit(X, y).classes_.tolist() == [0, 1, 2, 4, 5]


# --- groups -----------------------------------------------------------------------------------------------------------


def test_representatives_are_the_rows_in_the_middle(blobs, fitted):
    X, truth, _ = blobs
    found = fitted.representatives(n=4)
    assert list(found) == fitted.classes_.tolist()
    for label, rows in found.items():
        assert len(rows) == 4
        members = fitted.labels_ == label
        cosine = fitted.embedding_ @ fitted.model_.prototypes[list(found).index(label)].numpy()
        assert cosine[rows].min() >= np.sort(cosine[members])[-4]
        assert (np.diff(cosine[rows]) <= 0).all()
    some = fitted.representatives(X[truth != 4], n=200)
    assert min(map(len, some.values())) == 0
    assert 110 < sum(map(len, some.values())) <= 120  # a few may be strangers
    with pytest.raises(NotFittedError):
        OpenWorldClassifier().representatives()


def test_merged_groups_are_one(blobs, fitted):
    X, truth, _ = blobs
    p = fitted.predict_proba(X)
    model = pickle.loads(pickle.dumps(fitted)).merge(4, 3)
    assert model.classes_.tolist() == [0, 1, 2, 4]
    assert (model.n_seen_, model.n_novel_) == (3, 1)
    np.testing.assert_allclose(model.predict_proba(X), np.c_[p[:, :3], p[:, 3:].sum(axis=1)], atol=1e-6)
    np.testing.assert_array_equal(model.predict(X), np.where(truth < 3, truth, 4))
    np.testing.assert_array_equal(model.labels_, model.predict(X))
    np.testing.assert_array_equal(model.novelty_score(X), fitted.novelty_score(X))
    assert len(model.representatives()[4]) == 5
    assert model.linkage().shape == (3, 4)


def test_a_group_can_become_part_of_a_seen_class(blobs, fitted):
    X, truth, _ = blobs
    group = fitted.predict(X[truth == 4])[0]
    model = pickle.loads(pickle.dumps(fitted)).merge(group, 1)
    assert (model.n_seen_, model.n_novel_) == (3, 1)
    np.testing.assert_array_equal(model.predict(X)[truth == 4], 1)
    np.testing.assert_array_equal(model.is_novel(X), truth == 3)
    np.testing.assert_array_equal(model.novelty_score(X) > 0, truth == 3)
    for labels, words in (
        ((0, 1), "two of these are seen classes"),
        ((7,), "7 is none of the labels in classes_: 0, 1"),
    ):
        with pytest.raises(InputError, match=words):
            model.merge(*labels)


def test_groups_get_other_labels(blobs):
    X, _, y = blobs
    model = OpenWorldClassifier(2, outlier_label="odd").fit(X, strings(y))
    before = model.predict(X)
    model.rename({"new-1": "a rather long name", "new-2": "new-1"})
    assert model.classes_.tolist() == ["class 0", "class 1", "class 2", "a rather long name", "new-1"]
    np.testing.assert_array_equal(model.predict(X) == "a rather long name", before == "new-1")
    known = model.labels_ != "odd"
    np.testing.assert_array_equal(model.labels_[known], model.predict(X)[known])
    for names, words in (
        ({"new-1": "class 0"}, "stand for two things.*use merge"),
        ({"new-1": "odd"}, "stand for two things"),
        ({"class 0": "x"}, "is a seen class"),
        ({"new-9": "x"}, "none of the labels"),
        ({"new-1": 5}, "not of the kind"),
    ):
        with pytest.raises(InputError, match=words):
            model.rename(names)


def test_the_tree_joins_what_is_alike():
    """Six clouds in three pairs: the first three merges make the pairs."""
    truth = np.arange(180) % 6
    centers = np.repeat(20 * np.eye(12)[:3], 2, axis=0) + 6 * np.eye(12)[6:]
    X = centers[truth] + np.random.default_rng(0).normal(size=(180, 12))
    model = OpenWorldClassifier(3).fit(X, np.where((truth < 3) & (np.arange(180) < 90), truth, -1))
    tree = model.linkage()
    assert tree.shape == (5, 4)
    of = {label: set(truth[model.labels_ == label] // 2) for label in model.classes_}
    pairs = [{int(a), int(b)} for a, b in tree[:3, :2]]
    assert all(of[model.classes_[a]] == of[model.classes_[b]] for a, b in map(sorted, pairs))
    dendrogram(tree, labels=model.classes_, no_plot=True)  # SciPy takes it


def test_a_class_that_stands_apart_is_stable_and_a_cut_one_is_not(blobs):
    X, truth, y = blobs
    model = OpenWorldClassifier(2).fit(X, y)
    stable = model.stability(X, y, n_resamples=2)
    assert stable.shape == (5,)
    assert stable.min() > 0.95
    keep = (truth < 3) | (np.arange(150) < 75)
    cut = OpenWorldClassifier(2).fit(X[keep], y[keep])
    shuffled = {f.name: getattr(cut._prediction, f.name).flip(0) for f in dataclasses.fields(cut._prediction)}
    cut._prediction = dataclasses.replace(cut._prediction, **shuffled)  # of other rows
    assert cut.stability(X[keep], y[keep], n_resamples=1).mean() < 0.7
    with pytest.raises(ValueError, match="inconsistent numbers"):
        model.stability(X[:-1], y[:-1])


def test_a_picture_has_a_color_for_each_class(blobs, fitted, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    assert fitted.plot(ax=axes) is axes
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert (
        named[:5] == [f"{label} ({(fitted.labels_ == label).sum()})" for label in fitted.classes_][: len(named)]
        or len(named) == 6
    )
    colors = {tuple(points.get_facecolor()[0]) for points in axes.collections}
    assert len(colors) == len(axes.collections)
    assert sum(len(points.get_offsets()) for points in axes.collections) == 150
    pyplot.close(figure)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match="opencon\\[plots\\]"):
        fitted.plot()
