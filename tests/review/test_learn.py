"""Learning again: which decisions become which labels, what is recognized, and a whole round on a real discovery."""

import time

import numpy as np
import pytest
from PIL import Image

import opencon
from opencon.photos.model import OpenConModel
from opencon.review.learn import LEFT_OUT, UNLABELED, Lesson, lesson, place_of, recognized
from opencon.review.run import JUNK, STRANGERS, open_run
from opencon.review.session import Session
from opencon.review.state import RefusedError, State
from tests.small_model import COLORS, PER_COLOR, make_run


@pytest.fixture
def state(run):
    return State(open_run(run))


def apply(state, **asked):
    entry = state.complete(asked)
    state.apply(entry)
    return entry


def test_labels_that_came_with_the_photos_are_the_first_lesson(state):
    found = lesson(state)
    assert found.groups == [0, 1]
    assert found.others == [2, 3]
    assert found.labels[[0, 1, 10, 11]].tolist() == [0, 0, 1, 1]
    assert (found.labels[20:] == UNLABELED).all()
    assert set(found.labels[:10].tolist()) == {0, UNLABELED}  # typical photos teach too, strays do not


def test_moved_photos_are_labeled_and_junk_is_left_out(state):
    apply(state, do="move", photos=[25, 26], to=0)
    apply(state, do="move", photos=[27], to=JUNK)
    apply(state, do="move", photos=[28], to=STRANGERS)
    found = lesson(state)
    assert found.labels[[25, 26, 27, 28]].tolist() == [0, 0, LEFT_OUT, UNLABELED]


def test_a_named_group_teaches_by_its_typical_half(state):
    apply(state, do="name", group=2, name="owl")
    found = lesson(state)
    assert found.groups == [0, 1, 2]
    own = np.flatnonzero(found.labels == 2)
    assert set(own) < set(range(20, 30))
    assert 5 <= len(own) <= 6  # half of each of two parts


def test_the_parts_of_a_merge_stay_together_and_those_of_a_split_apart(state):
    apply(state, do="merge", groups=[2, 3], into=2)
    own = np.flatnonzero(lesson(state).labels == 2)
    assert own.min() < 30 <= own.max()
    apply(state, do="split", group=2, parts=[list(range(20, 30)), list(range(30, 40))])
    labels = lesson(state).labels
    assert set(labels[20:30].tolist()) == {2, UNLABELED}
    assert set(labels[30:40].tolist()) == {3, UNLABELED}


def test_untouched_groups_are_recognized_by_what_they_share():
    place = np.array([0, 0, 5, 5, 5, 7, 7, 9])
    classes = np.array([0, 0, 2, 2, 2, 1, 1, 3])
    found = recognized(classes, Lesson(np.zeros(8), [0], [5, 7]), place)
    assert found == [0, 7, 5, None]


def test_what_was_looked_at_stays_and_strangers_go_to_their_pile():
    after = place_of(
        np.array([0, 1, 1]), np.array([False, True, False]), [4, 6], np.array([False, False, True]), np.array([9, 9, 9])
    )
    assert after.tolist() == [4, STRANGERS, 9]


# --- a whole round ----------------------------------------------------------------------------------------------------


def shaded_photos(folder):
    """Twelve photos in each of four colors. Each has light and shade of its own: a plain one would show nothing."""
    folder.mkdir()
    rng, paths = np.random.default_rng(0), []
    for name, color in COLORS.items():
        for i in range(PER_COLOR):
            shade = Image.fromarray(rng.uniform(0.6, 1.0, (6, 6)).astype(np.float32)).resize((24, 24))
            paths.append(folder / f"{name}{i}.png")
            Image.fromarray((np.array(color) * np.asarray(shade)[..., None]).astype(np.uint8)).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def discovered(tmp_path_factory):
    """A real discovery of photos in four colors, of which two are seen classes."""
    root = tmp_path_factory.mktemp("colors")
    paths = shaded_photos(root / "pile")
    encoder = make_run(root / "encoder")
    table = ["path,label"]
    table += [f"{path.name},{''.join(c for c in path.stem if c.isalpha())}" for path in (*paths[:3], *paths[12:15])]
    (root / "labels.csv").write_text("\n".join(table) + "\n")
    opencon.discover(root / "pile", labels=root / "labels.csv", out=root / "run", encoder=encoder, novel=2)
    return root / "run"


def learned(session, **more):
    session.learner.start(session.state, look_for_more=False, **more)
    end = time.monotonic() + 120
    while (status := session.learner.status(session.state))["is"] == "running":
        assert time.monotonic() < end
        time.sleep(0.05)
    return status


def test_a_discovery_says_where_its_photos_are_and_keeps_its_features(discovered):
    run = open_run(discovered)
    assert run.path(0).is_file()
    assert np.load(run.features).shape == (48, 128)


def test_learning_accepted_is_a_decision_that_replays_and_can_be_undone(discovered):
    session = Session(open_run(discovered))
    state = session.state
    with pytest.raises(RefusedError, match="nothing to accept"):
        session.decide({"do": "learned"})
    new = [g for g, group in state.groups.items() if group.kind == "new" and len(state.members(g)) > 2]
    session.decide({"do": "name", "group": new[0], "name": "sky"})
    stray = int(state.members(new[0])[0])
    session.decide({"do": "move", "photos": [stray], "to": 0})
    before = state.place.copy()
    status = learned(session)
    assert status["is"] == "done", status
    assert (state.place == before).all()  # nothing changes until it is accepted
    moved = sum(way["number"] for way in status["ways"])
    assert moved == status["moved"]
    session.decide({"do": "learned"})
    assert int((state.place != before).sum()) == moved
    assert state.place[stray] == 0
    assert state.groups[new[0]].name == "sky"
    session.close()

    again = Session(open_run(discovered))
    assert again.state.place.tolist() == state.place.tolist()
    again.decide({"do": "undo"})
    assert again.state.place.tolist() == before.tolist()
    model = OpenConModel.from_pretrained(discovered / "review" / "learned" / again.log.entries[-2]["file"])
    assert "sky" in model.names
    again.close()


def test_what_was_thrown_away_leaves_nothing(discovered):
    session = Session(open_run(discovered))
    folder = discovered / "review" / "learned"
    before = sorted(path.name for path in folder.iterdir())
    session.decide({"do": "confirm", "photos": [int(session.state.members(0)[-1])]})
    assert learned(session)["is"] == "done"
    session.learner.discard()
    assert sorted(path.name for path in folder.iterdir()) == before
    assert session.learner.status(session.state) == {"is": "idle"}
    session.close()


def test_a_failure_is_said_and_the_next_try_works(discovered):
    session = Session(open_run(discovered))
    features = discovered / "features.npy"
    content = features.read_bytes()
    features.write_bytes(content[: len(content) // 2])
    try:
        status = learned(session)
    finally:
        features.write_bytes(content)
    assert status["is"] == "failed"
    assert status["why"]
    session.learner.discard()
    session.learner.start(session.state, look_for_more=False)
    session.learner._process.kill()
    session.learner._process.wait()
    assert session.learner.status(session.state)["is"] == "failed"
    assert learned(session)["is"] == "done"
    session.learner.discard()
    session.close()


def test_without_features_learning_is_refused(run):
    session = Session(open_run(run))
    with pytest.raises(RefusedError, match="kept no features"):
        session.learner.start(session.state, look_for_more=False)
    session.close()
