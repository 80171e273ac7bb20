"""The table of a discovery and of predictions, line by line."""

import csv
import io
import json
import sys
from dataclasses import replace

import pytest

from opencon.errors import MissingExtraError
from opencon.report.table import COLUMNS, Group, PhotoRow, PhotoTable


def row(file, closest, kind, confidence=0.5, novelty=2.0, unlike=False, given=None, nearest=()):
    return PhotoRow(
        file=file,
        closest=closest,
        kind=kind,
        confidence=confidence,
        novelty=novelty,
        unlike_everything=unlike,
        given=given,
        nearest=nearest,
    )


@pytest.fixture
def table():
    rows = (
        row("a.jpg", "cat", "seen", 0.91234, -1.5, given="cat", nearest=("x.jpg", "y.jpg")),
        replace(row("b, c.jpg", "new-1", "new"), looks_like="lake, 62%", twin_of="a.jpg"),
        row("odd.jpg", "cat", None, 0.75, 3.0, unlike=True, given="dog", nearest=("x.jpg",)),
        PhotoRow.unread("torn.jpg", "is empty"),
    )
    return PhotoTable(rows, ("cat", "dog", "new-1"), 2)


def test_every_kind_of_line(table):
    lines = csv.DictReader(io.StringIO(table.to_csv()))
    assert tuple(lines.fieldnames) == COLUMNS
    assert [tuple(line.values()) for line in lines] == [
        ("a.jpg", "cat", "seen", "0.9123", "-1.5000", "no", "cat", "x.jpg|y.jpg", "", "", ""),
        ("b, c.jpg", "new-1", "new", "0.5000", "2.0000", "no", "", "", "lake, 62%", "a.jpg", ""),
        ("odd.jpg", "", "", "0.7500", "3.0000", "yes", "dog", "x.jpg", "", "", ""),  # unlike everything: none of these
        ("torn.jpg", "", "", "", "", "", "", "", "", "", "is empty"),  # nothing was measured
    ]


def test_json_lines_speak_the_same_words(table):
    records = [json.loads(line) for line in table.to_json_lines()]
    assert [tuple(record) for record in records] == [COLUMNS] * 4
    assert records[2] == {
        "file": "odd.jpg",
        "predicted": None,
        "kind": None,
        "confidence": 0.75,
        "novelty": 3.0,
        "unlike_everything": True,
        "given": "dog",
        "nearest": ["x.jpg"],
        "looks_like": None,
        "twin_of": None,
        "error": None,
    }


def test_as_a_data_frame(table):
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["predicted"][:2].tolist() == ["cat", "new-1"]
    assert frame["confidence"].isna().tolist() == [False, False, False, True]
    assert isinstance(frame, pandas.DataFrame)


def test_without_pandas_the_command_is_named(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'opencon\[pandas\]'"):
        table.to_pandas()


def test_groups_count_unlabeled_photos_that_belong(table):
    assert table.groups == [Group("cat", "seen", 0), Group("dog", "seen", 0), Group("new-1", "new", 1, "lake, 62%")]
    more = PhotoTable(
        (*table.rows, row("d.jpg", "cat", "seen"), row("e.jpg", "dog", None, unlike=True)), ("cat", "dog"), 2
    )
    assert more.groups == [Group("cat", "seen", 1), Group("dog", "seen", 0)]
    assert more.num_unlike_everything == 1


def test_groups_of_one_name_are_one_group():
    rows = (row("a.jpg", "bird", "new"), row("b.jpg", "bird", "new"))
    assert PhotoTable(rows, ("cat", "bird", "bird"), 1).groups == [Group("cat", "seen", 0), Group("bird", "new", 2)]


def test_a_table_is_a_sequence_that_a_notebook_can_show(table):
    assert len(table) == 4
    assert table[1].file == "b, c.jpg"
    assert [entry.error for entry in table[2:]] == [None, "is empty"]
    assert repr(table) == "<PhotoTable: 1 photo: it falls into 1 new group>"
    hostile = PhotoTable((row("<script>x</script>\udcff.jpg", "a&b", "seen"),) * 12, ("a&b",), 1)
    html = hostile._repr_html_()
    assert "<script>" not in html
    assert "a&amp;b" in html
    assert "... and 2 more" in html


def test_a_table_of_nothing_readable_says_so():
    torn = PhotoRow.unread("torn.jpg", "is empty", given="cat")
    assert PhotoTable((torn,), ("cat",), 1).headline == "1 photo: none can be read"
    assert PhotoTable((torn, torn), ("cat",), 1).headline == "2 photos: none can be read"
    assert repr(PhotoTable((), ("cat",), 1)) == "<PhotoTable: no photo>"
    assert PhotoTable((torn,), ("cat",), 1).groups == [Group("cat", "seen", 0)]
