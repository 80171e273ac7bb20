"""Suggestions against the obvious slow way."""

import itertools

import numpy as np
import pytest

from opencon.review import suggest
from opencon.review.run import JUNK, open_run
from opencon.review.state import State


@pytest.fixture
def state(run):
    return State(open_run(run))


def apply(state, **asked):
    state.apply(state.complete(asked))


def test_halves_of_one_group_are_the_likeliest_merge(state):
    members = [int(i) for i in state.members(2)]
    apply(state, do="split", group=2, parts=[members[::2], members[1::2]])
    pairs = suggest.likely_merges(state, 3)
    assert (pairs[0].a, pairs[0].b) == (2, 4)
    other = state.run.z[members[1::2]].mean(axis=0)
    near = sorted(members[::2], key=lambda i: -float(state.run.z[i] @ other))
    assert pairs[0].border_a == near[:3]


def test_what_was_told_apart_is_not_asked_again_and_seen_classes_never_are(state):
    members = [int(i) for i in state.members(2)]
    apply(state, do="split", group=2, parts=[members[::2], members[1::2]])
    apply(state, do="apart", groups=[2, 4])
    asked = {(pair.a, pair.b) for pair in suggest.likely_merges(state, 3)}
    assert (2, 4) not in asked
    assert (0, 1) not in asked


def test_two_groups_that_were_merged_come_apart_again(state):
    apply(state, do="merge", groups=[2, 3], into=2)
    parts = suggest.parts_of(state, 2, 2)
    assert sorted(map(sorted, parts)) == [list(range(20, 30)), list(range(30, 40))]


def test_parts_are_disjoint_and_complete_whatever_their_number(state):
    for number in (2, 3, 5, 12):
        parts = suggest.parts_of(state, 1, number)
        assert sorted(i for part in parts for i in part) == state.members(1).tolist()
        assert 2 <= len(parts) <= number


def test_similar_photos_stand_together(state):
    apply(state, do="merge", groups=[1, 2], into=1)
    apply(state, do="merge", groups=[1, 3], into=1)
    order = suggest.alike(state, 1)
    assert sorted(order) == list(range(10, 40))
    changes = sum(a // 10 != b // 10 for a, b in itertools.pairwise(order))
    assert changes == 2  # each of the three groups in one piece


def test_photos_that_coincide_do_not_split(state):
    object.__setattr__(state.run, "z", np.repeat(state.run.z[:1], 40, axis=0))
    assert len(suggest.parts_of(state, 1, 2)) == 1


def test_similar_photos_are_sorted_by_their_cosine(state):
    z = np.asarray(state.run.z)
    order = sorted((i for i in range(40) if i != 7), key=lambda i: -float(z[i] @ z[7]))
    assert suggest.similar(state, 7, 5) == order[:5]
    assert suggest.similar(state, 7, 100) == order
    assert suggest.similar(state, 7, 3, np.array([1, 7, 20, 30])) == [i for i in order if i in (1, 20, 30)]


def test_more_for_a_group_begins_with_what_left_it(state):
    apply(state, do="merge", groups=[1, 3], into=1)
    apply(state, do="new", photos=[30, 31, 32], name="bee")
    more = suggest.more_for(state, 4, 10)
    assert set(more[:7]) == set(range(33, 40))
    apply(state, do="move", photos=[33], to=JUNK)
    apply(state, do="confirm", photos=[34])
    assert not {33, 34} & set(suggest.more_for(state, 4, 40))


def test_why_a_photo_is_where_it_is(state):
    about = suggest.about(state, 5, 4)
    assert about["examples"][:2] in ([0, 1], [1, 0])
    assert set(about["similar"]) <= set(range(40)) - {5}
    state.run.twin_of[[6, 8]] = 5
    assert suggest.about(state, 6, 4)["twins"] == [5, 8]
