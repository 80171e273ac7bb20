"""What a model says of photos, and the names it gives."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opencon.encoders.pretrained import open_encoder
from opencon.encoders.stored import EncoderFacts
from opencon.errors import DataError
from opencon.openworld.model import OpenWorldModel, Prediction
from opencon.photos import model as model_module
from opencon.photos.features import Extractor, FeatureSettings, photo_features
from opencon.photos.guesses import Guess
from opencon.photos.model import MOST_EXAMPLES, NEAREST, OpenConModel
from tests.small_model import CPU, NAMES, PER_COLOR, fit, given_labels, make_model, make_photos, make_run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def photos(place):
    return make_photos(place / "photos")


@pytest.fixture(scope="module")
def run(place):
    return make_run(place / "run")


@pytest.fixture(scope="module")
def model(photos, run):
    return make_model(photos, run)


# --- what it says -----------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_classifier_and_nearest_examples_those_of_a_loop(model, photos):
    extractor = Extractor(model.load_encoder(), model.features, CPU, torch.float32)
    rows = photo_features(photos, extractor, cache=None).plain
    said, z = model.classifier.predict(rows), model.classifier.embed(rows).detach()
    names = [name for files in model.example_files for name in files]
    got = model.predict(photos)
    assert (got.class_names, got.num_seen) == (NAMES, 2)
    assert [photo.file for photo in got] == [str(path) for path in photos]
    for i, photo in enumerate(got):
        c = int(said.classes[i])
        assert photo.closest == NAMES[c]
        assert photo.kind == (None if photo.unlike_everything else "new" if c >= 2 else "seen")
        assert photo.unlike_everything == bool(said.unlike_everything[i])
        assert photo.error is None
        assert photo.confidence == pytest.approx(float(said.confidence[i]), abs=1e-5)
        assert photo.novelty == pytest.approx(float(said.novelty[i]), abs=1e-2)
        cosines = sorted(((float(z[i] @ row), name) for row, name in zip(model.example_rows, names, strict=True)))[::-1]
        assert len(photo.nearest) == NEAREST
        for name, (cosine, _) in zip(photo.nearest, cosines, strict=False):
            assert {n: s for s, n in cosines}[name] == pytest.approx(cosine, abs=1e-5)


def test_the_colors_are_told_apart(model, photos):
    """Not a matter of this file, but if it failed the tests here would say little."""
    labels = [photo.predicted for photo in model.predict(photos)]
    parts = [set(labels[c * PER_COLOR : (c + 1) * PER_COLOR]) for c in range(4)]
    assert parts[0] == {"red"}
    assert parts[1] == {"green"}
    assert sorted(map(tuple, parts[2:])) == [("new-1",), ("new-2",)]


def test_examples_are_the_most_typical_members(photos, run, monkeypatch):
    monkeypatch.setattr(model_module, "MOST_EXAMPLES", 3)
    features = FeatureSettings(encoder=str(run), num_views=0)
    fitted, labels = fit(photos, features), given_labels()
    fitted.prediction.unlike_everything[-1] = True  # belongs to nothing
    fitted.prediction.classes[0] = 1  # its label says otherwise
    files = [path.name for path in photos]
    model = OpenConModel.of(fitted, NAMES, features, EncoderFacts.of(open_encoder(str(run))), files, labels)
    members = {c: [] for c in range(4)}
    for i, file in enumerate(files):
        if labels[i] < 0 and fitted.prediction.unlike_everything[i]:
            continue
        c = int(labels[i]) if labels[i] >= 0 else int(fitted.prediction.classes[i])
        members[c].append((float(fitted.z[i] @ fitted.model.prototypes[c]), file, i))
    assert model.sizes == tuple(len(members[c]) for c in range(4))
    assert sum(model.sizes) == len(files) - int((fitted.prediction.unlike_everything & (labels < 0)).sum())
    best = [sorted(members[c], reverse=True)[:3] for c in range(4)]
    assert model.example_files == tuple(tuple(file for _, file, _ in rows) for rows in best)
    assert torch.equal(model.example_rows, torch.stack([fitted.z[i] for rows in best for _, _, i in rows]))


def test_few_examples_are_kept_and_a_photo_is_not_its_own_neighbor(model):
    assert MOST_EXAMPLES == 20
    assert all(1 <= len(files) <= MOST_EXAMPLES for files in model.example_files)
    names = [name for files in model.example_files for name in files]
    with_itself, without = (model.nearest_examples(model.example_rows, own) for own in (None, names))
    assert [near[0] for near in with_itself] == names
    for name, near in zip(names, without, strict=True):
        assert name not in near
        assert len(near) == NEAREST


def test_a_model_of_few_examples_names_those_it_has(model):
    lone = replace(model, example_files=(("a",), (), (), ()), example_rows=model.example_rows[:1])
    assert lone.nearest_examples(model.example_rows[:2]) == [("a",), ("a",)]
    assert lone.nearest_examples(model.example_rows[:2], ["a", "b"]) == [(), ("a",)]
    none = replace(model, example_files=((), (), (), ()), example_rows=model.example_rows[:0])
    assert none.nearest_examples(model.example_rows[:1]) == [()]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_order_is_kept_in_chunks_with_twins_and_unreadable_files(model, photos, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(model_module, "CHUNK", chunk)
    broken, empty, absent = tmp_path / "broken.jpg", tmp_path / "empty.png", tmp_path / "absent.png"
    broken.write_bytes(b"no image at all")
    empty.touch()
    twin = shutil.copy(photos[30], tmp_path / "twin.png")
    broken_twin = shutil.copy(broken, tmp_path / "broken_twin.jpg")
    paths = [photos[30], broken, photos[0], twin, absent, photos[0], empty, photos[13], broken_twin, photos[47]]
    seen = []
    got = list(model.predict(paths, progress=lambda done, total: seen.append((done, total))))
    assert [photo.file for photo in got] == [str(path) for path in paths]
    single = {path: model.predict(path)[0] for path in set(paths)}
    for path, photo in zip(paths, got, strict=True):
        want = single[path]
        assert (photo.predicted, photo.kind, photo.error) == (want.predicted, want.kind, want.error)
        assert photo.confidence == pytest.approx(want.confidence, abs=1e-4)
    assert got[3].predicted == got[0].predicted
    assert seen[-1] == (10, 10)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    for at, why in ((1, "is not an image"), (4, "does not exist"), (6, "is empty"), (8, "is not an image")):
        photo = got[at]
        assert photo.error.startswith(why)
        assert (photo.predicted, photo.kind, photo.unlike_everything) == (None, None, False)
        assert (photo.confidence, photo.novelty) == (None, None)  # null in JSON
        assert photo.nearest == ()


def test_first_rows_come_before_the_last_photo_is_read(model, photos, monkeypatch):
    monkeypatch.setattr(model_module, "CHUNK", 4)
    done = []
    rows = model.predict_each(photos, progress=lambda i, total: done.append(i))
    assert not done
    next(rows)
    assert max(done) == 4


def test_a_folder_stands_for_its_images(model, photos, tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    shutil.copy(photos[0], inner / "1.png")
    shutil.copy(photos[12], tmp_path / "a" / "2.PNG")
    (inner / "notes.txt").write_text("x")
    got = list(model.predict([photos[40], tmp_path / "a"]))
    assert [Path(photo.file).name for photo in got] == [photos[40].name, "2.PNG", "1.png"]
    assert [photo.predicted for photo in got][1:] == ["green", "red"]
    assert list(model.predict(str(tmp_path / "a"))) == list(model.predict([tmp_path / "a"]))
    assert list(model.predict([])) == []


def test_a_folder_without_images_is_said_at_once(model, tmp_path):
    with pytest.raises(DataError, match=r"no image in the folder .*Readable: .bmp"):
        model.predict_each([tmp_path])


def test_what_is_unlike_everything_has_no_label_but_neighbors(model, photos):
    strict = OpenWorldModel.from_settings(model.classifier.settings())
    state = model.classifier.state_dict()
    nothing = torch.full_like(state["strangers.oddness"], 1e-9)  # less than that of any photo
    strict.load_state_dict({**state, "strangers.oddness": nothing})
    before, after = (m.predict(photos[::12]) for m in (model, replace(model, classifier=strict)))
    assert [photo.kind for photo in before] == ["seen", "seen", "new", "new"]
    for was, photo in zip(before, after, strict=True):
        assert photo.unlike_everything
        assert (photo.predicted, photo.kind, photo.error) == (None, None, None)
        assert (photo.nearest, photo.closest) == (was.nearest, was.predicted)
        assert len(photo.nearest) == NEAREST


def test_cached_features_are_used_the_second_time(model, photos, tmp_path, monkeypatch):
    first = list(model.predict(photos, cache=tmp_path / "cache"))

    def fail(*args):
        raise AssertionError("computed again")

    monkeypatch.setattr(Extractor, "__call__", fail)
    assert list(model.predict(photos, cache=tmp_path / "cache")) == first


# --- names ------------------------------------------------------------------------------------------------------------


def test_renamed(model, photos, tmp_path):
    new = model.renamed({"new-1": "sky", "new-2": "new-1"})
    assert new.class_names == ("red", "green", "sky", "new-1")
    assert model.class_names == NAMES
    before = {photo.file: photo.predicted for photo in model.predict(photos)}
    names = dict(zip(NAMES, new.class_names, strict=True))
    new.save(tmp_path / "new")
    for photo in OpenConModel.from_pretrained(tmp_path / "new").predict(photos):
        assert photo.predicted == names[before[photo.file]]


def test_a_first_name_stays_with_its_group_whatever_the_classes_are_called(model, tmp_path):
    """A seen class may be called new-1, and be renamed: the groups' own first names do not move up."""
    model = replace(model, class_names=("new-1", "green", "new-2", "new-3"), first_names=())
    model.renamed({"new-1": "sofa", "new-2": "lamp", "new-3": "chair"}).save(tmp_path / "new")
    again = OpenConModel.from_pretrained(tmp_path / "new").renamed({"new-2": "table lamp"})
    assert again.class_names == ("sofa", "green", "table lamp", "chair")


def test_a_name_for_several_makes_them_one(model, photos):
    """Two halves of a class each lose against a third one, together they win."""
    both = model.renamed({"new-1": "sky", "new-2": "sky"})
    assert (both.names, both.num_seen_names) == (("red", "green", "sky"), 2)
    p = torch.tensor([[0.4, 0.0, 0.3, 0.3], [0.5, 0.1, 0.2, 0.2], [0.1, 0.2, 0.0, 0.7]])
    none = torch.zeros(3)
    said = Prediction(p.argmax(dim=1), p, p.amax(dim=1), none, none, none.bool())
    assert model.named(said)[0] == ["red", "red", "new-2"]
    names, confidence = both.named(said)
    assert names == ["sky", "red", "sky"]
    assert confidence == pytest.approx([0.6, 0.5, 0.7])
    before, after = model.predict(photos), both.predict(photos)
    sky = {"new-1": "sky", "new-2": "sky"}
    assert [photo.predicted for photo in after] == [sky.get(old.predicted, old.predicted) for old in before]
    assert all((photo.kind == "new") == (photo.predicted == "sky") for photo in after)
    assert (after.class_names, after.num_seen) == (("red", "green", "sky"), 2)
    assert both.renamed({"sky": "sea"}).class_names == ("red", "green", "sea", "sea")
    assert both.renamed({"new-2": "sea"}).class_names == (
        "red",
        "green",
        "sky",
        "sea",
    )  # apart again, by the first name


def test_a_single_name_has_the_confidence_and_not_the_probability(model):
    one = model.renamed(dict.fromkeys(NAMES, "all"))
    p = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    none = torch.zeros(1)
    said = Prediction(p.argmax(dim=1), p, p.amax(dim=1), none, none, none.bool())
    assert one.named(said) == (["all"], [pytest.approx(0.4)])


def test_a_guess_belongs_to_a_new_group_until_somebody_names_it(model, photos, tmp_path):
    guessing = replace(model, guesses=(None, None, Guess("lake", 0.62), None))
    guessing.save(tmp_path / "new")
    again = OpenConModel.from_pretrained(tmp_path / "new")
    assert again.guesses == guessing.guesses
    table = again.predict(photos)
    assert {row.looks_like for row in table if row.predicted == "new-1"} == {"lake, 62%"}
    assert {row.looks_like for row in table if row.predicted != "new-1"} == {None}
    assert [group.looks_like for group in table.groups] == [None, None, "lake, 62%", None]
    assert {row.looks_like for row in again.renamed({"new-1": "sea"}).predict(photos)} == {None}


def test_a_stricter_rate_flags_fewer(model, photos):
    rates = (0.5, 0.05, 0.0)
    most, usual, none = (model.predict(photos, false_alarms=rate).num_unlike_everything for rate in rates)
    assert most >= usual >= none
    assert most > none


def test_a_group_may_turn_out_to_be_a_seen_class(model, photos):
    same = model.renamed({"new-1": "red"})
    assert (same.names, same.num_seen_names) == (("red", "green", "new-2"), 2)
    before = {photo.file: photo.predicted for photo in model.predict(photos)}
    assert "new-1" in before.values()
    for photo in same.predict(photos):
        assert photo.kind == ("new" if photo.predicted == "new-2" else "seen")
        assert photo.predicted == (before[photo.file] if before[photo.file] != "new-1" else "red")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"new_1": "sky"}, r"no group 'new_1' to rename. Did you mean 'new-1'\? There are: red, green, new-1, new-2."),
        ({"new-2": " "}, r"new name of 'new-2' is empty"),
    ],
)
def test_names_that_cannot_be_given(model, names, message):
    with pytest.raises(DataError, match=message):
        model.renamed(names)


def test_names_must_fit_the_classifier(model):
    with pytest.raises(DataError, match="4 classes and groups, but 3 names"):
        replace(model, class_names=("a", "b", "c"))
    with pytest.raises(DataError, match="not one row each"):
        replace(model, example_rows=model.example_rows[1:])
