"""Rows and labels that cannot be worked with: each refusal once, wherever they come from."""

import re

import pytest
import torch

from opencon.errors import DataError
from opencon.rows import check_labels, check_rows, check_shape

GOOD = torch.arange(12.0).view(6, 2)


def with_value(value, *, dtype=torch.float32):
    x = GOOD.clone().to(dtype)
    x[4, 1], x[5, 0] = value, value
    return x


@pytest.mark.parametrize("x", [GOOD, GOOD.half(), GOOD.double(), GOOD.long(), GOOD[:1], 3e38 * torch.ones(2, 2)])
def test_rows_of_any_kind_of_number_pass(x):
    check_rows(x, num_features=2)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(6), "x has shape (6,). Give one row of features for each sample, (M, F)."),
        (torch.ones(2, 3, 4), "x has shape (2, 3, 4). Give one row of features"),
        (torch.ones(6, 0), "x has shape (6, 0). Give one row of features"),
        (torch.ones(0, 3), "x has shape (0, 3): there is no row in it."),
        (with_value(torch.nan), "2 of 6 rows of x hold NaN, infinity or more than float32 can, the first is row 4."),
        (with_value(-torch.inf), "2 of 6 rows of x hold NaN, infinity"),
        (with_value(1e60, dtype=torch.float64), "2 of 6 rows of x hold NaN, infinity or more than float32 can"),
    ],
)
def test_rows_that_are_refused(x, message):
    with pytest.raises(DataError, match=re.escape(message)):
        check_rows(x)


def test_another_number_of_features():
    with pytest.raises(DataError, match=r"x has 2 features, but the model was trained with 5. Use the same ones."):
        check_rows(GOOD, num_features=5)


def test_the_message_says_what_the_rows_are_called():
    for refuse in (check_rows, check_shape):
        with pytest.raises(DataError, match=r"^the logits has shape \(6,\)"):
            refuse(torch.ones(6), what="the logits")


def test_the_shape_alone_is_looked_at_where_numbers_would_cost_a_pass():
    check_shape(with_value(torch.nan))
    check_shape(torch.ones(0, 3))


@pytest.mark.parametrize(
    ("labels", "num_seen", "want"),
    [
        ([0, 1, -1, 1, -1, 0], None, 2),
        ([0, 1, -1, 1, -1, 0], 2, 2),
        ([-1] * 6, None, 0),
        ([-1] * 6, 0, 0),
        ([2, 1, 0, 2, 1, 0], None, 3),
    ],
)
def test_the_number_of_seen_classes(labels, num_seen, want):
    assert check_labels(torch.tensor(labels), 6, num_seen=num_seen) == want


@pytest.mark.parametrize(
    ("labels", "num_seen", "message"),
    [
        ([0] * 5, None, "labels has shape (5,), x has 6 rows. Give one label per row, -1 for none."),
        ([[0]] * 6, None, "labels has shape (6, 1), x has 6 rows."),
        ([0, -2, 1, 0, 0, 0], None, "label -2 is no seen class: labels lie in [0, 2), or are -1 for unlabeled."),
        ([0, 1, 2, 0, 0, 0], 2, "label 2 is no seen class: labels lie in [0, 2), or are -1 for unlabeled."),
        ([-1, 0, -1, -1, -1, -1], 0, "label 0 is no seen class: without seen classes all are -1."),
        ([0, 3, -1, -1, -1, -1], None, "seen classes [1, 2] of 4 have no labeled row. Label one of each, and number"),
        ([0, -1, -1, -1, -1, -1], 2, "seen classes [1] of 2 have no labeled row."),
    ],
)
def test_labels_that_are_refused(labels, num_seen, message):
    with pytest.raises(DataError, match=re.escape(message)):
        check_labels(torch.tensor(labels), 6, num_seen=num_seen)
