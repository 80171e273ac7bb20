"""Files that say which images are labeled: a folder and a pile, lists with empty classes, held-out images."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.config import DataConfig, SplitConfig
from opencon.data.benchmarks import Given, dataset_info, load_dataset
from opencon.data.list_files import list_from_file
from opencon.data.split import check_given, make_split, names_from_file
from opencon.errors import ConfigError, DataError


def paint(path, shade=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 9, 3), shade, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def root(tmp_path):
    """Labeled: 10 cats and 4 dogs. The pile: 3 eggs and 2 cats in folders, and one image that lies in none."""
    for name, number in (("cat", 10), ("dog", 4)):
        for i in range(number):
            paint(tmp_path / f"labeled/{name}/{i}.png", i)
    for name, number in (("egg", 3), ("cat", 2)):
        for i in range(number):
            paint(tmp_path / f"pile/{name}/{i}.png", 100 + i)
    paint(tmp_path / "pile/loose.png", 200)
    return tmp_path


def config(root, **more):
    return DataConfig(name="folder", root=str(root / "labeled"), unlabeled=str(root / "pile"), image_size=8, **more)


def test_a_pile_has_no_classes_unless_somebody_says_them(root):
    data = load_dataset(config(root))
    assert data.train.class_names == ("cat", "dog")
    assert data.train.classes.tolist() == [0] * 10 + [1] * 4 + [-1] * 6
    assert data.train.given.tolist() == [True] * 14 + [False] * 6
    assert data.info.given == Given(num_seen=2, num_labeled=14, num_known=0)


def test_its_folders_can_be_the_truth(root):
    data = load_dataset(config(root, truth="folders"))
    assert data.train.class_names == ("cat", "dog", "egg")  # labeled ones first
    assert data.train.classes[14:].tolist() == [0, 0, 2, 2, 2, -1]
    assert dataset_info(config(root, truth="folders")).given.num_known == 5


def test_or_a_table(root):
    (root / "truth.csv").write_text("file,class\negg/0.png,egg\nloose.png,fig\n")
    data = load_dataset(config(root, truth=str(root / "truth.csv")))
    assert data.train.class_names == ("cat", "dog", "egg", "fig")
    assert data.train.classes[14:].tolist() == [-1, -1, 2, -1, -1, 3]


def test_an_image_in_both_counts_once_with_its_label(root):
    (root / "pile/again.png").symlink_to(root / "labeled/cat/0.png")
    assert len(load_dataset(config(root)).train) == 20


def test_held_out_images_share_the_classes(root):
    for name in ("dog", "owl"):
        paint(root / f"test/{name}/0.png")
    data = load_dataset(config(root, test=str(root / "test")))
    assert data.train.class_names == data.test.class_names == ("cat", "dog", "owl")
    assert data.test.classes.tolist() == [1, 2]
    assert data.info.num_test == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"truth": "folders", "unlabeled": None}, "data.truth = 'folders' says the classes of data.unlabeled"),
        ({"name": "digits", "unlabeled": "x"}, "data.unlabeled = 'x' is for data.name = folder, not for 'digits'"),
        ({"name": "cifar10", "test": "x"}, "data.test = 'x' is for data.name = folder or list"),
    ],
)
def test_settings_that_do_not_fit_are_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**{"name": "folder", "root": "a", **more})


def test_piles_from_which_nothing_comes_are_refused(root):
    with pytest.raises(DataError, match=r"is not a folder. Give the folder of the other images"):
        dataset_info(DataConfig(name="folder", root=str(root / "labeled"), unlabeled=str(root / "nowhere")))
    with pytest.raises(DataError, match=r"every image in .* is labeled, too"):
        dataset_info(DataConfig(name="folder", root=str(root / "labeled"), unlabeled=str(root / "labeled")))
    (root / "truth.csv").write_text("file,class\nother.png,egg\n")
    with pytest.raises(DataError, match=r"says the class of no image .*truth.csv names none of its images"):
        dataset_info(config(root, truth=str(root / "truth.csv")))


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_list_with_empty_classes(root, form):
    rows = [("labeled/dog/0.png", "dog", ""), ("pile/egg/0.png", "", "egg"), ("pile/loose.png", "", "")]
    if form == "csv":
        text = "path,label,truth\n" + "\n".join(",".join(row) for row in rows)
    else:
        text = "\n".join(json.dumps(dict(zip(("path", "label", "truth"), row, strict=True))) for row in rows)
    (root / "list").write_text(text)
    listing = list_from_file(root / "list")
    assert listing.class_names == ("dog", "egg")
    assert listing.classes == (0, 1, -1)
    assert listing.given == (True, False, False)


def test_without_an_empty_class_the_split_draws(root):
    (root / "list.csv").write_text("path,label\nlabeled/dog/0.png,dog\npile/egg/0.png,egg\n")
    assert list_from_file(root / "list.csv").given is None


def test_numbers_stay_in_order(root):
    lines = [f"labeled/cat/{i}.png,{i + 5}" for i in range(6)] + ["pile/loose.png,"]
    (root / "list.csv").write_text("path,label\n" + "\n".join(lines))
    assert list_from_file(root / "list.csv").class_names == ("5", "6", "7", "8", "9", "10")


# --- the split --------------------------------------------------------------------------------------------------------


def test_labels_are_those_of_the_files_but_for_some_kept_back(root):
    data = load_dataset(config(root, truth="folders")).train
    split = make_split(data.classes, SplitConfig(held_out=0.25, num_classes=3), num_data_classes=3, given=data.given)
    labels = split.visible_labels(data.classes)
    assert split.num_seen == 2
    assert [int((labels == c).sum()) for c in (0, 1)] == [8, 3]  # a quarter of 10, to even, and of 4
    assert not bool((labels[~data.given] >= 0).any())
    everything = make_split(data.classes, SplitConfig(held_out=0, num_classes=3), num_data_classes=3, given=data.given)
    assert torch.equal(everything.labeled, data.given.nonzero().flatten())


def test_a_class_keeps_at_least_one_label():
    classes, given = torch.tensor([0, 1, 1, -1]), torch.tensor([True, True, True, False])
    split = make_split(classes, SplitConfig(held_out=0.9, num_classes=3), num_data_classes=2, given=given)
    assert split.visible_labels(classes)[split.labeled].unique().tolist() == [0, 1]


def test_hidden_classes_do_not_move_the_split(root):
    data = load_dataset(config(root, truth="folders")).train
    blind = torch.where(data.given, data.classes, -1)
    how = {"num_data_classes": 3, "given": data.given}
    one, other = (make_split(c, SplitConfig(num_classes=3), **how) for c in (data.classes, blind))
    assert one.fingerprint == other.fingerprint


def test_seen_classes_by_name_take_labels_away(root):
    data = load_dataset(config(root, truth="folders")).train.seen_first(["dog"])
    assert data.class_names == ("dog", "cat", "egg")
    assert int(data.given.sum()) == 4
    assert data.classes[-1] == -1  # unknown stays unknown
    with pytest.raises(DataError, match=r"there is no class 'dgo'. Did you mean 'dog'\?"):
        data.seen_first(["dgo"])


@pytest.mark.parametrize(
    ("settings", "numbers", "error", "message"),
    [
        ({}, (0, 0, 9, 4), DataError, "no image carries a label"),
        ({}, (2, 9, 9, 4), DataError, "nothing is left to discover"),
        ({"num_seen": 3}, (2, 4, 9, 4), ConfigError, "the files give labels of 2 classes. Write split.num_seen=none"),
        ({"num_classes": 2}, (2, 4, 9, 4), ConfigError, "leaves no novel class: 2 are labeled"),
        ({}, (2, 2, 900, 4), ConfigError, "leaves no labeled image in a batch"),
    ],
)
def test_splits_that_cannot_work_are_refused(settings, numbers, error, message):
    with pytest.raises(error, match=message):
        check_given(SplitConfig(**settings), *numbers)


def test_names_of_seen_classes_from_a_file(tmp_path):
    (tmp_path / "seen.txt").write_text("# mine\nred fox\n\nowl\n")
    config = SplitConfig(seen_classes=(str(tmp_path / "seen.txt"),))
    assert names_from_file(config).seen_classes == ("red fox", "owl")
    assert names_from_file(config).num_seen == 2
    with pytest.raises(ConfigError, match=r"nowhere.txt cannot be read"):
        names_from_file(SplitConfig(seen_classes=("nowhere.txt",)))
    with pytest.raises(ConfigError, match="names 'owl' twice"):
        SplitConfig(seen_classes=("owl", "owl"))
