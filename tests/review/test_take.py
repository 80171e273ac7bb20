"""What is taken away: folders, tables and data sets; nothing is written over, and undoing takes back exactly that."""

import csv
import json
import os

import pytest

from opencon.errors import ConfigError, RunError
from opencon.photos.listing import find_photos
from opencon.review.run import JUNK, STRANGERS, open_run
from opencon.review.state import State
from opencon.review.take import folder_names, labels_csv, labels_jsonl, sort_photos, taken, undo_sort, write_table


@pytest.fixture
def state(run):
    state = State(open_run(run))
    for asked in (
        {"do": "name", "group": 2, "name": "owl"},
        {"do": "move", "photos": [30], "to": JUNK},
        {"do": "move", "photos": [31], "to": STRANGERS},
    ):
        state.apply(state.complete(asked))
    return state


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("way", ["copy", "hardlink", "symlink", "imagefolder"])
def test_photos_are_sorted_and_taken_back(state, tmp_path, way):
    photos, into = state.run.root, tmp_path / "out"
    before = bytes_of(photos)
    counts = sort_photos(taken(state), photos, into, way=way)
    assert counts == {"cat": 10, "dog": 10, "owl": 10, "new-2": 8, "unlike everything": 1}
    made = into / "owl" / "IMG_0020.jpg"
    assert made.read_bytes() == before["IMG_0020.jpg"]
    assert made.is_symlink() == (way == "symlink")
    assert os.path.samefile(made, photos / "IMG_0020.jpg") == (way in ("hardlink", "symlink"))
    assert not list(into.rglob("IMG_0030.jpg"))
    removed, kept = undo_sort(into)
    assert (removed, kept) == (39 + (way == "imagefolder"), [])
    assert list(into.iterdir()) == []
    assert bytes_of(photos) == before


def test_nothing_is_written_over(state, tmp_path):
    into = tmp_path / "out"
    (into / "owl").mkdir(parents=True)
    (into / "owl" / "IMG_0020.jpg").write_text("mine")
    with pytest.raises(RunError, match="is not empty"):
        sort_photos(taken(state), state.run.root, into)
    assert [path.name for path in into.rglob("*") if path.is_file()] == ["IMG_0020.jpg"]
    fresh = tmp_path / "fresh"
    sort_photos(taken(state), state.run.root, fresh)
    with pytest.raises(RunError, match="sorted before"):
        sort_photos(taken(state), state.run.root, fresh)


def test_a_file_that_was_changed_since_stays(state, tmp_path):
    into = tmp_path / "out"
    sort_photos(taken(state), state.run.root, into)
    (into / "owl" / "IMG_0020.jpg").write_text("edited")
    (into / "owl" / "notes.txt").write_text("mine")
    (into / "dog" / "IMG_0010.jpg").unlink()
    removed, kept = undo_sort(into)
    assert (removed, kept) == (37, ["owl/IMG_0020.jpg"])
    assert sorted(path.name for path in into.rglob("*") if path.is_file()) == [
        "IMG_0020.jpg",
        "notes.txt",
        "sorted.jsonl",
    ]


def test_a_sort_that_was_killed_can_be_taken_back(state, tmp_path):
    into = tmp_path / "out"
    sort_photos(taken(state), state.run.root, into)
    manifest = (into / "sorted.jsonl").read_text().splitlines(keepends=True)
    made = into / json.loads(manifest[-1])["made"]
    made.write_bytes(made.read_bytes()[:7])
    (into / "sorted.jsonl").write_text("".join(manifest) + '{"made": "ow')
    assert undo_sort(into) == (39, [])


def test_undoing_reaches_no_file_outside(state, tmp_path):
    into, mine = tmp_path / "out", tmp_path / "mine.jpg"
    sort_photos(taken(state), state.run.root, into)
    source = state.run.root / "IMG_0000.jpg"
    mine.write_bytes(source.read_bytes())
    with (into / "sorted.jsonl").open("a") as manifest:
        for made in ("../mine.jpg", str(mine)):
            manifest.write(json.dumps({"made": made, "from": str(source), "way": "copy"}) + "\n")
    undo_sort(into)
    assert mine.exists()


def test_a_missing_photo_stops_with_a_sentence_and_what_was_made_can_be_taken_back(state, tmp_path):
    (state.run.root / "IMG_0035.jpg").unlink()
    with pytest.raises(RunError, match=r"IMG_0035\.jpg.*--undo"):
        sort_photos(taken(state), state.run.root, tmp_path / "out")
    assert undo_sort(tmp_path / "out")[0] == 34


def test_photos_of_one_name_get_names_of_their_own(state, tmp_path):
    (state.run.root / "sub").mkdir()
    (state.run.root / "sub" / "IMG_0020.jpg").write_bytes(b"another")
    state.run.files[21] = "sub/IMG_0020.jpg"
    sort_photos(taken(state), state.run.root, tmp_path / "out")
    assert (tmp_path / "out" / "owl" / "IMG_0020 (2).jpg").read_bytes() == b"another"


def test_names_of_folders_are_safe_everywhere():
    labels = {
        "a/b",
        "a\\b",
        "..",
        ".",
        "",
        "con",
        "COM1.x",
        "Cat",
        "cat",
        "-rf",
        "x" * 300,
        "é" * 90,
        "sorted.jsonl",
        "a:b\n",
    }
    names = folder_names(labels)
    assert len({name.casefold() for name in names.values()}) == len(labels)
    for name in names.values():
        assert name not in ("", ".", "..")
        assert not set(name) & set('/\\:*?"<>|\n')
        assert not name.startswith("-")
        assert len(name.encode()) < 120
    assert names["Cat"] == "Cat"
    assert names["con"] == "_con"


@pytest.mark.parametrize(("form", "name"), [(labels_csv, "labels.csv"), (labels_jsonl, "labels.jsonl")])
def test_tables_are_read_back_by_discover(state, form, name, tmp_path):
    (tmp_path / name).write_text(form(taken(state)))
    photos = find_photos(state.run.root, labels=tmp_path / name)
    assert photos.class_names == ("cat", "dog", "new-2", "owl")
    labels = dict(zip((path.name for path in photos.paths), photos.labels, strict=True))
    assert labels["IMG_0020.jpg"] == 3
    assert labels["IMG_0030.jpg"] == labels["IMG_0031.jpg"] == -1


def test_an_image_folder_is_read_back_by_discover(state, tmp_path):
    sort_photos(taken(state), state.run.root, tmp_path / "out", way="imagefolder")
    with (tmp_path / "out" / "metadata.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"file_name": "owl/IMG_0020.jpg", "label": "owl"} in rows
    photos = find_photos(manifest=tmp_path / "out" / "metadata.csv")
    assert photos.class_names == ("cat", "dog", "new-2", "owl")
    assert len(photos.paths) == 39


def test_only_what_was_looked_at(state):
    rows = taken(state, looked_only=True)
    assert [row.file for row in rows] == [f"IMG_{i:04d}.jpg" for i in (0, 1, 10, 11, 31)]


def test_a_table_is_never_written_over(state, tmp_path):
    write_table(taken(state), tmp_path / "labels.csv")
    with pytest.raises(RunError, match="exists already"):
        write_table(taken(state), tmp_path / "labels.csv")
    with pytest.raises(ConfigError, match=r"\.csv or \.jsonl"):
        write_table(taken(state), tmp_path / "labels.txt")


def test_an_unknown_way_is_refused(state, tmp_path):
    with pytest.raises(ConfigError, match="copy, hardlink"):
        sort_photos(taken(state), state.run.root, tmp_path / "out", way="move")
    assert not (tmp_path / "out").exists()


def test_lines_of_a_manifest_that_are_no_lines_of_ours_are_passed_over(state, tmp_path):
    into = tmp_path / "out"
    sort_photos(taken(state), state.run.root, into)
    manifest = into / "sorted.jsonl"
    odd = [
        b"\xff",
        b"[]",
        b'{"made": "owl/IMG_0020.jpg"}',
        b'{"made": 3, "from": "", "way": "copy"}',
        b'{"made": "a\\u0000"',
    ]
    manifest.write_bytes(b"\n".join(odd) + b"\n" + manifest.read_bytes())
    assert undo_sort(into) == (39, [])


def test_a_folder_without_a_manifest_is_not_undone(tmp_path):
    with pytest.raises(RunError, match="nothing was sorted"):
        undo_sort(tmp_path)
