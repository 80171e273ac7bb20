"""The table of a discovery and of predictions, line by line."""

import csv
import io

from opencon.assignments import COLUMNS, as_table
from opencon.model import PhotoPrediction


def test_every_kind_of_line():
    rows = [
        (PhotoPrediction("a.jpg", "cat", False, 0.91234, -1.5, False, ("x.jpg", "y.jpg"), None), "cat"),
        (PhotoPrediction("b, c.jpg", "new-1", True, 0.5, 2.0, False, (), None), ""),
        (PhotoPrediction("odd.jpg", None, False, 0.75, 3.0, True, ("x.jpg",), None), "dog"),
        (PhotoPrediction.unread("torn.jpg", "is empty"), ""),
    ]
    table = csv.DictReader(io.StringIO(as_table(rows)))
    assert tuple(table.fieldnames) == COLUMNS
    assert [tuple(line.values()) for line in table] == [
        ("a.jpg", "cat", "seen", "0.9123", "-1.5000", "no", "cat", "x.jpg|y.jpg", ""),
        ("b, c.jpg", "new-1", "new", "0.5000", "2.0000", "no", "", "", ""),
        ("odd.jpg", "", "", "0.7500", "3.0000", "yes", "dog", "x.jpg", ""),  # unlike everything: none of these
        ("torn.jpg", "", "", "", "", "", "", "", "is empty"),  # nothing was measured
    ]
