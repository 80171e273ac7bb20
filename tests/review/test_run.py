"""Reading the folder of a discovery: what it holds, what older ones lack, and what is wrong with it."""

import csv
import json

import numpy as np
import pytest

from opencon.errors import RunError
from opencon.review.run import NOBODY, STRANGERS, open_run
from opencon.review.session import Session, set_aside


def rewrite(run, change):
    """assignments.csv with its rows changed; new columns are added."""
    with (run / "assignments.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for i, row in enumerate(rows):
        change(i, row)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (run / "assignments.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        table.writerows(rows)


def test_what_a_discovery_says(run):
    found = open_run(run)
    assert (len(found.files), found.num_seen, found.title) == (40, 2, "photos")
    assert found.path(3).is_file()
    assert (found.twin_of == NOBODY).all()
    assert found.suggested == {}


def test_strangers_twins_guesses_and_unreadable_photos_are_found_where_they_are_told(run):
    def change(i, row):
        row["twin_of"] = "IMG_0003.jpg" if i in (4, 5) else ""
        row["looks_like"] = "owl, great gray, 62%" if row["predicted"] == "new-1" else ""
        if i == 7:
            row.update(predicted="", unlike_everything="yes")
        if i == 39:
            row.update(predicted="", error="is no image")

    rewrite(run, change)
    np.save(run / "embeddings.npy", np.load(run / "embeddings.npy")[:39])
    found = open_run(run)
    assert np.flatnonzero(found.twin_of == 3).tolist() == [4, 5]
    assert found.suggested == {"new-1": ("owl, great gray",)}
    assert found.place[7] == STRANGERS
    assert found.unreadable == (("IMG_0039.jpg", "is no image"),)
    session = Session(found)
    assert next(g for g in session.groups() if g["name"] == "new-1")["suggested"] == ["owl, great gray"]
    session.close()


def test_a_name_that_a_spreadsheet_would_take_for_a_formula_is_read_back(run, tmp_path):
    (tmp_path / "photos" / "IMG_0005.jpg").rename(tmp_path / "photos" / "=1.jpg")
    rewrite(run, lambda i, row: row.update(file="'=1.jpg") if i == 5 else None)
    assert open_run(run).path(5).is_file()


def test_groups_may_be_renamed_between_two_reviews_but_not_found_anew(run):
    before = open_run(run).identity
    model = json.loads((run / "model.json").read_text())
    model["class_names"][2] = "owl"
    (run / "model.json").write_text(json.dumps(model))
    rewrite(run, lambda i, row: row.update(predicted=row["predicted"].replace("new-1", "owl")))
    assert open_run(run).identity == before
    (run / "model.json").write_text(json.dumps(model | {"sha256": "1" * 64}))
    assert open_run(run).identity != before


def test_photos_that_were_moved_are_found_where_the_user_says(run, tmp_path):
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="--photos DIR"):
        open_run(run)
    assert open_run(run, tmp_path / "elsewhere").path(0).is_file()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("discovery.json", '{"what": "an older one"}', "does not say where its photos lie"),
        ("discovery.json", None, "no finished discovery"),
        ("assignments.csv", None, "no finished discovery"),
        ("embeddings.npy", b"\x93NUMPY", "cannot read"),
        ("model.json", "[]", "JSON object"),
        ("model.json", "{}", "not a model"),
        ("model.json", '{"class_names": ["cat"], "classifier": {"num_seen": 1}}', "does not have"),
        ("model.json", '{"class_names": ["cat"], "classifier": {"num_seen": 1}, "sha256": "\\ud800"}', "does not have"),
        ("model.json", '{"class_names": ["cat"], "classifier": {}}', "not a model"),
        ("model.json", '{"class_names": [3], "classifier": {"num_seen": 1}}', "not a model"),
        ("embeddings.npy", b"", "cannot read"),
        ("assignments.csv", "file,predicted\na.jpg,cat\n", "has no column given"),
        ("assignments.csv", "file,predicted,given,confidence,error\na.jpg,cat,,high,\n", "could not convert"),
        ("assignments.csv", "file,predicted,given,confidence,error\na.jpg,cat,,1,,b,c\n", "cannot be read"),
    ],
)
def test_a_damaged_folder_is_explained(run, name, content, why):
    if content is None:
        (run / name).unlink()
    elif isinstance(content, bytes):
        (run / name).write_bytes(content)
    else:
        (run / name).write_text(content)
    with pytest.raises(RunError, match=why):
        open_run(run)


def test_tables_and_rows_that_do_not_fit_are_refused(run):
    np.save(run / "embeddings.npy", np.load(run / "embeddings.npy")[:5])
    with pytest.raises(RunError, match=r"has 40 photos and embeddings\.npy 5"):
        open_run(run)


def test_starting_over_keeps_the_old_decisions(run):
    assert set_aside(run) is None
    for number in (1, 2):
        session = Session(open_run(run))
        session.decide({"do": "confirm", "photos": [number]})
        session.close()
        assert set_aside(run) == run / f"review-{number}"
    assert Session(open_run(run)).state.version == 0
    assert (run / "review-2" / "decisions.jsonl").read_text().count("\n") == 2
