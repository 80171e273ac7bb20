"""When a result is called shaky, and what is said to help."""

from types import SimpleNamespace

import pytest

from opencon.report.doubt import doubt_of
from opencon.report.table import PhotoRow, PhotoTable


def table(sizes=(40, 40, 40), labels=(20, 20), confidence=0.9, wrong=0):
    """`labels` photos of each seen class (the first `wrong` of a look like b), then `sizes` unlabeled of each class."""
    names = ("a", "b", "new-1", "new-2", "new-3")[: len(sizes)]
    rows = []

    def add(closest, given, kind):
        rows.append(
            PhotoRow(
                file=f"{len(rows)}.jpg",
                closest=closest,
                kind=kind,
                confidence=confidence,
                novelty=0.0,
                unlike_everything=False,
                given=given,
            )
        )

    for c, num in enumerate(labels):
        for i in range(num):
            add("b" if c == 0 and i < wrong else names[c], names[c], "seen")
    for c, num in enumerate(sizes):
        for _ in range(num):
            add(names[c], None, "seen" if c < len(labels) else "new")
    return PhotoTable(tuple(rows), names, len(labels))


def count(low, number, high):
    return SimpleNamespace(num_classes=number, low=low, high=high)


SURE = {"a": 1.0, "b": 0.95, "new-1": 0.97}


def test_nothing_is_said_where_nothing_speaks_against_it():
    assert doubt_of(table(), count(3, 3, 3), SURE) == ""
    assert doubt_of(table(), count(3, 3, 9), SURE) == ""  # a wide interval of groups that come back
    assert doubt_of(table(), None, SURE) == ""
    assert doubt_of(table(sizes=(0, 0, 0)), None, {}) == ""


@pytest.mark.parametrize(
    ("made", "number", "stable", "reason", "way_out"),
    [
        (table((2, 2, 2)), None, SURE, "there are only 6 photos for 3 groups", "five more labels of b and more photos"),
        (
            table(),
            None,
            {"a": 0.9, "b": 0.8, "new-1": 0.4},
            "3 in ten photos change their group when half of them are grouped again",
            "five more labels of b and a look at new-1",
        ),
        (table(), count(2, 3, 6), dict.fromkeys(SURE, 0.85), "2 to 6 classes fit nearly as well as 3", "labels of a"),
        (table(labels=(1, 20)), None, SURE, "a has a single label", "five more labels of a"),
        (table(labels=(20, 2)), None, SURE, "b has only 2 labels", "five more labels of b"),
        (table(wrong=9), None, SURE, "9 of your 40 labels look like something else", "the doubtful labels"),
        (table(confidence=0.6), None, SURE, "about 4 in ten photos are in the wrong place", "labels of b"),
        (
            table((40, 40), labels=(), confidence=0.6),
            None,
            {"a": 0.9, "b": 0.9},
            "about 4 in ten",
            "a few photos of each kind that you can name",
        ),
    ],
)
def test_a_reason_and_what_would_help(made, number, stable, reason, way_out):
    said = doubt_of(made, number, stable)
    assert said.startswith(f"Take this with care: {reason}")
    assert f"It would help to have {way_out}" in said or way_out in said
    assert said.endswith(".")
    assert said.count(". ") == 1


def test_two_reasons_at_most():
    said = doubt_of(table((2, 2, 2), labels=(1, 1)), count(1, 3, 9), dict.fromkeys(SURE, 0.3))
    assert said.count(" and ") == 2  # one between reasons, one between what would help
    assert "single label" not in said


def test_a_class_that_no_half_had_a_photo_of_says_nothing():
    assert doubt_of(table(), None, SURE | {"new-1": float("nan")}) == ""
