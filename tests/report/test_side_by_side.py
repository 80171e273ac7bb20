import numpy as np
import pytest

from opencon.errors import DataError
from opencon.report.side_by_side import Panel, confusions_figure, maps_figure
from tests.report.test_paper_figures import drawn, embedded, texts  # noqa: F401 (a fixture)


def panel(title, classes, num_seen=2, word="class"):
    z, truth = embedded(rows=24, classes=classes)
    return Panel(title, z, truth, num_seen, {c: f"{word} {c}" for c in range(6)}, truth)


def test_runs_of_the_same_data_show_the_classes_that_all_have(drawn, tmp_path):  # noqa: F811
    maps_figure([panel("one", 5), panel("two", 4)], path=tmp_path / "maps.png", title="Both")
    (figure,) = drawn
    said = texts(figure)
    assert "Both" in said
    assert [name for name in said if name.startswith("class")] == ["class 0", "class 1", "class 2", "class 3"]
    assert [len(ax.collections) for ax in figure.axes[:2]] == [4, 4]


def test_runs_of_other_data_have_classes_of_their_own_and_no_common_legend(drawn, tmp_path):  # noqa: F811
    maps_figure([panel("one", 5), panel("two", 4, num_seen=3, word="thing")], path=tmp_path / "maps.png")
    (figure,) = drawn
    assert [len(ax.collections) for ax in figure.axes[:2]] == [5, 4]
    assert not [name for name in texts(figure) if name.startswith(("class", "thing"))]


def test_what_is_right_stands_above_each_confusion(drawn, tmp_path):  # noqa: F811
    right, wrong = panel("right", 4), panel("wrong", 4)
    wrong = Panel(wrong.title, wrong.z, wrong.truth, 2, wrong.class_names, np.zeros(24, dtype=int))
    confusions_figure([right, wrong], path=tmp_path / "confusions.png")
    assert {"right: 100.0%", "wrong: 25.0%"} <= set(texts(drawn[0]))


def test_runs_that_share_no_class_are_refused(tmp_path):
    other = Panel("other", np.eye(2), np.array([4, 5]), 2, {c: f"class {c}" for c in range(6)})
    with pytest.raises(DataError, match="share no class"):
        maps_figure([panel("one", 4), other], path=tmp_path / "maps.png")
