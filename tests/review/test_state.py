"""Decisions: what each does, what it leaves alone, and that replaying and undoing give the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencon.review.run import JUNK, STRANGERS, open_run
from opencon.review.state import RefusedError, State
from tests.review.made import EACH, make_discovery


@pytest.fixture
def state(run):
    return State(open_run(run))


def do(state, **asked):
    entry = state.complete(asked)
    state.apply(entry)
    return entry


def snapshot(state):
    return state.place.tolist(), state.looked.tolist(), dict(state.groups), set(state.apart)


def test_it_begins_as_the_discovery_left_it(state):
    assert state.place.tolist() == [i // EACH for i in range(4 * EACH)]
    assert state.looked.nonzero()[0].tolist() == [0, 1, EACH, EACH + 1]
    assert [group.name for group in state.groups.values()] == ["cat", "dog", "new-1", "new-2"]


def test_a_move_takes_the_named_photos_and_no_other(state):
    before = state.place.copy()
    do(state, do="move", photos=[5, 25], to=3)
    assert [i for i in range(40) if state.place[i] != before[i]] == [5, 25]
    assert state.place[[5, 25]].tolist() == [3, 3]
    assert state.looked[[5, 25]].all()


def test_photos_go_to_junk_and_come_back(state):
    do(state, do="move", photos=[7], to=JUNK)
    assert state.place[7] == JUNK
    do(state, do="move", photos=[7], to=0)
    assert state.place[7] == 0


def test_a_new_group_has_a_number_that_no_group_had(state):
    entry = do(state, do="new", photos=[30, 31], name="owl")
    assert state.groups[entry["id"]].name == "owl"
    assert state.members(entry["id"]).tolist() == [30, 31]
    do(state, do="undo")
    assert entry["id"] not in state.groups
    assert do(state, do="new", photos=[30], name="")["id"] > entry["id"]
    assert state.groups[state.place[30]].name == "new-3"


def test_a_merge_moves_whole_groups_and_does_not_count_as_looking(state):
    do(state, do="merge", groups=[2, 3], into=2)
    assert len(state.members(2)) == 2 * EACH
    assert 3 not in state.groups
    assert not state.looked[20:].any()


def test_the_first_part_of_a_split_keeps_the_name(state):
    entry = do(state, do="split", group=2, parts=[[20, 21, 22], [23, 24], [25]])
    assert state.members(2).tolist() == [20, 21, 22, 26, 27, 28, 29]
    assert [state.groups[g].name for g in entry["ids"]] == ["new-1 (2)", "new-1 (3)"]
    assert state.members(entry["ids"][0]).tolist() == [23, 24]


def test_confirming_moves_nothing(state):
    before = state.place.copy()
    do(state, do="confirm", photos=list(range(10)))
    assert (state.place == before).all()
    assert state.looked[:10].all()


def test_two_groups_can_be_told_apart_and_that_can_be_taken_back(state):
    do(state, do="apart", groups=[3, 2])
    assert state.apart == {(2, 3)}
    do(state, do="apart", groups=[2, 3])
    assert state.apart == {(2, 3)}
    do(state, do="undo")
    do(state, do="undo")
    assert state.apart == set()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"do": "move", "photos": [], "to": 0}, "Select"),
        ({"do": "move", "photos": [40], "to": 0}, "Select"),
        ({"do": "move", "photos": [-1], "to": 0}, "Select"),
        ({"do": "move", "photos": [1.0], "to": 0}, "Select"),
        ({"do": "move", "photos": [True], "to": 0}, "Select"),
        ({"do": "move", "photos": [3, 3], "to": 0}, "twice"),
        ({"do": "move", "photos": "all", "to": 0}, "Select"),
        ({"do": "move", "photos": [1], "to": 9}, "gone"),
        ({"do": "move", "photos": [1], "to": -3}, "gone"),
        ({"do": "move", "photos": [1], "to": True}, "gone"),
        ({"do": "name", "group": 2, "name": "cat"}, "already"),
        ({"do": "name", "group": 2, "name": "  "}, "Give the group a name"),
        ({"do": "name", "group": 2, "name": None}, "Give the group a name"),
        ({"do": "name", "group": 2, "name": "a\x00b"}, "letters"),
        ({"do": "name", "group": 2, "name": "a\u202eb"}, "letters"),
        ({"do": "name", "group": 2, "name": "x" * 121}, "121"),
        ({"do": "merge", "groups": [1], "into": 1}, "two groups"),
        ({"do": "merge", "groups": [1, 1], "into": 1}, "differ"),
        ({"do": "merge", "groups": [1, 2], "into": 3}, "one of them"),
        ({"do": "merge", "groups": [1, 99], "into": 1}, "gone"),
        ({"do": "apart", "groups": [1, 2, 3]}, "two groups"),
        ({"do": "split", "group": 2, "parts": [[20]]}, "2 to"),
        ({"do": "split", "group": 2, "parts": [[20], [20]]}, "left the group"),
        ({"do": "split", "group": 2, "parts": [[20], [30]]}, "left the group"),
        ({"do": "undo"}, "nothing to undo"),
        ({"do": "redo"}, "nothing to redo"),
        ({"do": "learned", "file": "../.."}, "older or newer"),
        ({"do": "_set"}, "older or newer"),
        ({}, "older or newer"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(state, asked, why):
    before = snapshot(state)
    with pytest.raises(RefusedError, match=why):
        state.complete(asked)
    assert snapshot(state) == before


def test_a_new_decision_ends_redoing(state):
    do(state, do="move", photos=[5], to=1)
    do(state, do="undo")
    do(state, do="name", group=2, name="owl")
    assert state.can_redo == 0
    assert state.place[5] == 0


CHOICES = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 39), st.integers(0, 39), st.integers(0, 9)), max_size=25)


def some_decision(state, kind, a, b, g):
    groups = sorted(state.groups)
    one, two = groups[g % len(groups)], groups[(g + 1) % len(groups)]
    members = [int(i) for i in state.members(one)]
    return [
        {"do": "move", "photos": sorted({a, b}), "to": one},
        {"do": "move", "photos": [a], "to": [JUNK, STRANGERS][g % 2]},
        {"do": "new", "photos": sorted({a, b}), "name": f"name {a} {b} {g}"},
        {"do": "name", "group": one, "name": f"called {a} {b}"},
        {"do": "merge", "groups": [one, two], "into": two},
        {"do": "split", "group": one, "parts": [members[::2], members[1::2]]},
        {"do": "confirm", "photos": [a]},
        {"do": "apart", "groups": [one, two]},
        {"do": ["undo", "redo"][g % 2]},
    ][kind]


@given(choices=CHOICES)
def test_undoing_all_gives_the_beginning_and_replaying_the_log_the_same(choices, tmp_path_factory):
    run = open_run(made_once(tmp_path_factory))
    state, log = State(run), []
    start = snapshot(state)
    for choice in choices:
        try:
            entry = state.complete(some_decision(state, *choice))
        except RefusedError:
            continue
        state.apply(entry)
        log.append(entry)
    again = State(run)
    for entry in log:
        again.apply(entry)
    assert snapshot(again) == snapshot(state)
    assert (state.place[state.place >= 0] == [g for g in state.place.tolist() if g >= 0 and g in state.groups]).all()
    end = snapshot(state)
    taken_back = state.can_undo
    for _ in range(taken_back):
        do(state, do="undo")
    assert snapshot(state) == start
    for _ in range(taken_back):
        do(state, do="redo")
    assert snapshot(state) == end


MADE = {}


def made_once(tmp_path_factory):
    if "run" not in MADE:
        MADE["run"] = make_discovery(tmp_path_factory.mktemp("made"))
    return MADE["run"]


def test_what_changed_since_a_version_is_what_a_page_is_missing(state):
    do(state, do="move", photos=[5], to=1)
    seen = state.version
    do(state, do="move", photos=[6, 7], to=1)
    do(state, do="undo")
    assert state.changed_since(seen).tolist() == [6, 7]
    assert len(state.changed_since(state.version)) == 0


def test_what_was_learned_moves_only_what_nobody_placed(run):
    found = open_run(run)
    place = np.full(40, 1, np.int32)
    state = State(found, lambda file: (place, np.full(40, 0.5, np.float32)))
    do(state, do="move", photos=[30], to=JUNK)
    do(state, do="move", photos=[31], to=0)
    before = snapshot(state)
    state.apply({"do": "learned", "file": "1", "groups": {}, "gone": [2, 3]})
    assert state.place[[0, 30, 31]].tolist() == [0, JUNK, 0]
    assert (np.delete(state.place, [0, 1, 30, 31]) == 1).all()
    assert set(state.groups) == {0, 1}
    do(state, do="undo")
    assert snapshot(state) == before
