import os
from pathlib import Path

import pytest
from PIL import Image

from opencon.errors import DataError
from opencon.photos.listing import from_table, from_two_folders, read_truth, typical_side


def picture(path, side=20):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side + 4), (200, 30, 60)).save(path)
    return path


@pytest.fixture
def folders(tmp_path):
    for name in ("known/cat/1.png", "known/cat/2.png", "known/dog/1.png", "pile/a.png", "pile/deep/b.png"):
        picture(tmp_path / name)
    return tmp_path


def labels_of(photos):
    return {
        name: photos.class_names[c] if c >= 0 else None for name, c in zip(photos.names(), photos.labels, strict=True)
    }


def test_two_folders(folders):
    photos = from_two_folders(folders / "known", folders / "pile")
    assert photos.class_names == ("cat", "dog")
    assert labels_of(photos) == {
        "known/cat/1.png": "cat",
        "known/cat/2.png": "cat",
        "known/dog/1.png": "dog",
        "pile/a.png": None,
        "pile/deep/b.png": None,
    }
    assert photos.num_labeled == 3
    assert photos.title == "pile"


def test_a_labeled_photo_inside_the_pile_counts_once_and_keeps_its_label(folders):
    photos = from_two_folders(folders / "known", folders)
    assert len(photos.paths) == 5
    assert labels_of(photos)["known/dog/1.png"] == "dog"
    os.symlink(folders / "known/cat/1.png", folders / "pile/again.png")
    assert len(from_two_folders(folders / "known", folders / "pile").paths) == 5


def test_names_do_not_depend_on_how_the_folder_is_typed(folders, monkeypatch):
    whole = from_two_folders(folders / "known", folders / "pile").names()
    monkeypatch.chdir(folders)
    assert from_two_folders(Path("known"), Path("pile")).names() == whole
    monkeypatch.chdir(folders / "pile")
    assert from_two_folders(Path("../known"), Path()).names() == whole


def test_a_table_beside_a_folder(folders):
    (folders / "labels.csv").write_text("path,label\nknown/cat/1.png,cat\npile/a.png,\nknown/dog/1.png, dog \n")
    photos = from_table(folders / "labels.csv", folders)
    found = labels_of(photos)
    assert photos.class_names == ("cat", "dog")
    assert len(found) == 5  # the others of the folder join, unlabeled
    assert found["known/cat/1.png"] == "cat"
    assert found["known/dog/1.png"] == "dog"
    assert found["known/cat/2.png"] is None
    assert found["pile/a.png"] is None


@pytest.mark.parametrize(
    "text",
    [
        "File,Class\nknown/cat/1.png,cat\npile/a.png,\nknown/dog/1.png,dog\n",
        '{"path": "known/cat/1.png", "label": "cat"}\n{"path": "pile/a.png", "label": null}\n'
        '{"filename": "known/dog/1.png", "class": "dog"}\n',
    ],
)
def test_a_manifest_holds_all_photos(folders, text):
    (folders / "all.txt").write_text(text)
    found = labels_of(from_table(folders / "all.txt"))
    assert found == {"known/cat/1.png": "cat", "pile/a.png": None, "known/dog/1.png": "dog"}


def test_names_with_commas_quotes_and_other_alphabets(folders):
    odd = 'pile/a, "b" <script> ж.png'
    picture(folders / odd)
    (folders / "labels.csv").write_text('path,label\n"pile/a, ""b"" <script> ж.png",чашка\n')
    assert labels_of(from_table(folders / "labels.csv")) == {odd: "чашка"}


def test_a_label_for_a_missing_file_is_set_aside_and_named(folders):
    (folders / "labels.csv").write_text("path,label\nknown/cat/1.png,cat\ngone.png,cat\nalso.png,dog\n")
    photos = from_table(folders / "labels.csv")
    assert labels_of(photos) == {"known/cat/1.png": "cat"}
    (note,) = photos.notes
    assert "line 3 and 1 more: there is no file" in note
    assert "gone.png" in note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\ngone.png,cat\n", "names no file that is there: line 2"),
        ("photo,kind\na,b\n", "Its first line must name the columns: path,label."),
        ("path,label\n,cat\n", "line 2 names no file. Give a path in every row."),
        ('{"path": "a.png"}\n{"label": "x"}\n', "line 2 names no file"),
        ('path,label\nknown/cat/1.png,cat\n"known/../known/cat/1.png",dog\n', "'cat' in line 2 and 'dog' in line 3"),
    ],
)
def test_tables_that_cannot_be_used(folders, text, message):
    (folders / "labels.csv").write_text(text)
    with pytest.raises(DataError) as refused:
        from_table(folders / "labels.csv")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("folder", "message"), [("nowhere", "does not exist"), ("empty", "it is empty"), ("texts", "only .txt files")]
)
def test_piles_that_cannot_be_used(folders, folder, message):
    (folders / "empty").mkdir()
    (folders / "texts").mkdir()
    (folders / "texts/readme.txt").write_text("hello")
    with pytest.raises(DataError, match=message):
        from_two_folders(folders / "known", folders / folder)


def test_typical_side_is_the_median_short_side_and_ignores_what_is_damaged(tmp_path):
    paths = [picture(tmp_path / f"{i}.png", side) for i, side in enumerate((10, 30, 90))]
    (tmp_path / "bad.png").write_bytes(b"nothing")
    assert typical_side((*paths, tmp_path / "bad.png")) == 30
    assert typical_side((tmp_path / "bad.png",)) is None


def test_truth(tmp_path):
    (tmp_path / "truth.csv").write_text("file,class,kind\na.png,cat,seen\nb.png,eel,novel\nc.png,,\n")
    assert read_truth(tmp_path / "truth.csv") == {"a.png": "cat", "b.png": "eel"}
