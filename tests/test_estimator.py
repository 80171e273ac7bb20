"""scikit-learn's contract, and the words in which it is kept."""

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
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.exceptions import NotFittedError
from sklearn.kernel_approximation import RBFSampler
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import opencon
import opencon.estimator as module
from opencon.encoders import ENCODERS
from opencon.errors import ConfigError, DataError
from opencon.estimator import InputError, OpenWorldClassifier, encode_labels, read_samples, with_new
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
    ],
)
def test_labels_of_new_groups_are_new(classes, labels):
    assert with_new(classes, 2).tolist() == labels
    assert with_new(classes, 0) is classes


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
        (None, "requires y to be passed.*KMeans"),
        ([-1] * 150, r"no labeled row \(all 150 are -1 or None\).*KMeans"),
        ([None] * 150, "no labeled row"),
        (np.full(150, np.nan), "no labeled row"),
        (np.full(150, np.inf), "infinity"),
        (np.linspace(0, 1, 150), "continuous"),
        (np.array(["a", 1, None] * 50, dtype=object), "y holds int, str. Give labels that are all strings"),
        (np.array([True, None] * 75, dtype=object), "y holds bool"),
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
        ({"random_state": -1}, "seed = -1 must not be negative"),
        ({"method": "opncon"}, "Did you mean 'opencon'"),
    ],
)
def test_bad_parameters_are_refused_in_fit(blobs, setting, words):
    X, _, y = blobs
    model = OpenWorldClassifier(**setting)
    with pytest.raises(ConfigError, match=words):
        model.fit(X, y)


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


def test_sparse_rows_are_refused(blobs):
    X, _, y = blobs
    with pytest.raises(TypeError, match="Sparse data was passed"):
        OpenWorldClassifier(2).fit(scipy.sparse.csr_matrix(X), y)


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
        ((4, 16, 17), module.ENCODED),
        ((4, 8, 8, 3), module.ENCODED),
        ((4, 3, 8, 8), module.ENCODED),
        ((4, 8), module.ROWS),
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
    with pytest.raises(DataError, match=words):
        OpenWorldClassifier(1).fit(X, [0, 0, -1, -1])


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
    assert f"up to {module.SMALL_SIDE} x {module.SMALL_SIDE} pixels" in text
    for name, value in OpenWorldClassifier().get_params().items():
        shown = f'"{value}"' if isinstance(value, str) else value
        assert f"| `{name}={shown}` |" in text


def test_nothing_warns_in_ordinary_use(blobs):
    X, _, y = blobs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OpenWorldClassifier(2, steps=2).fit(X, y).predict(X)
