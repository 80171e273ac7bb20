"""Tables that people write, in every form, and what is refused of them."""

import re

import pytest

from opencon.data.tables import LABEL_COLUMNS, PATH_COLUMNS, read_table, rows_below_header
from opencon.errors import DataError

COLUMNS = {"path": PATH_COLUMNS, "label": LABEL_COLUMNS}


def written(tmp_path, text):
    table = tmp_path / "table.txt"
    table.write_bytes(text.encode() if isinstance(text, str) else text)
    return table


ROWS = [(2, {"path": "a b.png", "label": "cat"}), (3, {"path": "c.png", "label": ""})]


@pytest.mark.parametrize(
    "text",
    [
        "path,label\na b.png,cat\nc.png,\n",
        "label\tpath\ncat\ta b.png\n\tc.png",
        "Path; Label ;when\r\n a b.png ;cat;1999\r\nc.png\r\n",  # Windows; spaces; a column more; a short row
        '\ufefffile,class\n"a b.png","cat"\nc.png, \n',  # as Excel begins a file
        '"Filename",label\na b.png,cat\nc.png,\n,\n\n',  # empty rows at the end
    ],
)
def test_any_separator_and_any_order_of_the_columns(tmp_path, text):
    assert read_table(written(tmp_path, text), COLUMNS) == ROWS


def test_json_lines(tmp_path):
    text = '{"file": " a b.png", "label": "cat", "more": [1]}\n\n{"class": 7, "path": "c.png"}\n{"path": "d.png"}\n'
    assert read_table(written(tmp_path, text), COLUMNS) == [
        (1, {"path": "a b.png", "label": "cat"}),
        (3, {"path": "c.png", "label": "7"}),
        (4, {"path": "d.png", "label": ""}),
    ]


def test_the_first_of_several_names_wins(tmp_path):
    table = written(tmp_path, "class,filename,path,label\nseen,1.png,x/1.png,cat\n")
    assert read_table(table, COLUMNS) == [(2, {"path": "x/1.png", "label": "cat"})]


def test_what_is_optional_may_be_missing(tmp_path):
    table = written(tmp_path, "path\na.png\n")
    assert read_table(table, COLUMNS, optional=["label"]) == [(2, {"path": "a.png", "label": ""})]
    with pytest.raises(DataError, match="must name the columns: path,label"):
        read_table(table, COLUMNS)


def test_a_cell_is_read_as_it_stands(tmp_path):
    """Quotes protect separators and line breaks, and no sign but a line break ends a line: str.splitlines knows ten."""
    text = 'path,label\n"a, ""b"" <script> ж.png",a\x85b\n"two\nlines.png",x\nlast.png,c\u2028d\n'
    assert read_table(written(tmp_path, text), COLUMNS) == [
        (2, {"path": 'a, "b" <script> ж.png', "label": "a\x85b"}),
        (3, {"path": "two\nlines.png", "label": "x"}),
        (5, {"path": "last.png", "label": "c\u2028d"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''. Its first line must name the columns: path,label."),
        ("photo,kind\na,b\n", "begins with 'photo,kind'. Its first line must name the columns: path,label."),
        ('"path,label\na.png,cat\n', "must name the columns"),
        ("path,label\n \n", "has no row. Give one for each, with the columns path,label."),
        (b"path,label\ncaf\xe9.png,cat\n", "cannot be read as UTF-8 text"),
        (
            "path,label\na.png,cat\nb,c.png,dog\n",
            "line 3 cannot be understood: 'b,c.png,dog'. Expected 2 columns (path, label); quote what holds a separator.",
        ),
        (
            'path,label\n"a\nb.png",cat\nc.png,"dog\nd.png,dog\n',
            "line 4 cannot be understood: 'c.png,\"dog'. It is not valid CSV: unexpected end of data.",
        ),
        (
            '{"path": "a.png"}\n{"path": \n',
            'line 2 cannot be understood: \'{"path": \'. Expected {"path": ..., "label"',
        ),
        ('{"path": "a.png"}\n7\n', "line 2 cannot be understood: '7'"),
        ('{"path": "a.png"}\n["path"]\n', "line 2 cannot be understood"),
        ('{"name": "a.png"}\n', "line 1 cannot be understood"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read_table(written(tmp_path, text), COLUMNS)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*nowhere.csv. Give a table with the columns path,label."):
        read_table(tmp_path / "nowhere.csv", COLUMNS)
    with pytest.raises(DataError, match="cannot be read"):
        read_table(tmp_path, COLUMNS)


def test_a_header_further_down_keeps_the_numbers_of_the_lines(tmp_path):
    lines = ["# mine", "path,label", "a.png,cat", ""]
    assert rows_below_header(tmp_path, lines, COLUMNS, start=1) == [(3, {"path": "a.png", "label": "cat"})]
    assert rows_below_header(tmp_path, lines, COLUMNS) is None


@pytest.mark.parametrize("text", ["path,label\na.png,cat,\n,,\nb.png,\n", "path,label,\na.png,cat,\nb.png,,\n"])
def test_lines_of_a_spreadsheet_may_end_with_separators(tmp_path, text):
    (tmp_path / "table.csv").write_text(text)
    rows = read_table(tmp_path / "table.csv", {"path": PATH_COLUMNS, "label": LABEL_COLUMNS})
    assert [row for _, row in rows] == [{"path": "a.png", "label": "cat"}, {"path": "b.png", "label": ""}]
