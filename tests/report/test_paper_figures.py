import re
import subprocess
import sys
import types

import numpy as np
import pytest
from PIL import Image

from opencon.errors import ConfigError, DataError, MissingExtraError
from opencon.metrics import open_world_accuracy
from opencon.report import figures, paper_figures
from opencon.report.paper_figures import (
    choose_classes,
    class_figure,
    confusion,
    confusion_figure,
    novelty_figure,
)

LONG = "a very long name of a class, great white shark, man-eater, man-eating shark, Carcharodon carcharias"


def embedded(rows=60, classes=6, dim=5, seed=0):
    """(rows, dim) unit rows that lie in groups, and their classes."""
    rng = np.random.default_rng(seed)
    truth = np.arange(rows) % classes
    z = rng.normal(size=(classes, dim))[truth] + 0.1 * rng.normal(size=(rows, dim))
    return z / np.linalg.norm(z, axis=1, keepdims=True), truth


def names(classes):
    return [f"class {c}" for c in range(classes)]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, as matplotlib objects."""
    from matplotlib.figure import Figure

    kept, save = [], Figure.savefig

    def keep(self, *args, **kwargs):
        kept.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def texts(figure):
    from matplotlib.text import Text

    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


def ink_at_the_rim(path):
    """Whether anything is drawn on the outermost pixels, as where something is cut off."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).min(axis=2)
    return min(pixels[0].min(), pixels[-1].min(), pixels[:, 0].min(), pixels[:, -1].min()) < 250


# --- some classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "num_seen", "number", "want"),
    [
        (100, 50, 10, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]),
        (12, 6, 10, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]),
        (12, 2, 10, [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]),  # few seen: more novel
        (12, 10, 10, [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]),  # few novel: more seen
        (4, 2, 10, [0, 1, 2, 3]),
        (3, 3, 10, [0, 1, 2]),
        (3, 0, 2, [0, 1]),
    ],
)
def test_half_of_the_chosen_classes_are_seen(classes, num_seen, number, want):
    assert choose_classes(np.arange(classes), num_seen, number=number) == want


def test_only_classes_with_images_are_chosen():
    assert choose_classes([7, 3, 7, 9], 5, number=2) == [3, 7]


def test_the_class_figure_shows_each_chosen_class_in_its_color(tmp_path, drawn):
    from matplotlib.colors import to_hex

    z, truth = embedded(rows=90, classes=6)
    options = {"num_seen": 3, "class_names": names(6), "title": "A title", "projection": "pca"}
    path = class_figure(z, truth, **options, classes=[0, 2, 4], path=tmp_path / "a.png")
    clouds = drawn[0].axes[0].collections
    _, xy = figures.project(z[np.isin(truth, [0, 2, 4])], projection="pca")
    for i, (cloud, c) in enumerate(zip(clouds, [0, 2, 4], strict=True)):
        assert to_hex(cloud.get_facecolors()[0]) == figures.COLORS[i]
        np.testing.assert_allclose(cloud.get_offsets(), xy[i::3])
        assert len(cloud.get_paths()[0].vertices) == (4 if c >= 3 else 26)  # a triangle for novel, a circle for seen
    assert not ink_at_the_rim(path)
    found = texts(drawn[0])
    assert {"class 0", "class 2", "class 4", "seen", "novel", "A title"} <= set(found)
    assert not {"class 1", "class 3", "class 5"} & set(found)
    assert "Embedding, colored by true class (PCA)" in found
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_long_names_are_not_cut_off(tmp_path, drawn):
    z, truth = embedded(rows=40, classes=4)
    some = {"num_seen": 2, "class_names": [LONG, "x" * 70, *names(2)], "title": LONG}
    assert not ink_at_the_rim(class_figure(z, truth, **some, path=tmp_path / "a.png", projection="pca"))
    assert not ink_at_the_rim(confusion_figure(truth, truth, **some, path=tmp_path / "b.png"))
    shown = [re.sub(r"\n", " ", text) for text in texts(drawn[0])]
    assert LONG in shown
    assert {LONG, "x" * 70} <= set(texts(drawn[1]))


def test_umap_is_asked_as_the_paper_does_and_replaced_where_it_is_missing(tmp_path, monkeypatch, drawn):
    asked = {}

    class Umap:
        def __init__(self, **options):
            asked.update(options)

        def fit_transform(self, z):
            asked["shape"] = z.shape
            return z[:, :2]

    z, truth = embedded(rows=40, classes=4)
    options = {"num_seen": 2, "class_names": names(4), "title": "", "path": tmp_path / "a.png", "classes": [1, 2]}
    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Umap))
    class_figure(z, truth, **options, seed=3)
    assert asked == {"n_neighbors": 15, "random_state": 3, "n_jobs": 1, "shape": (20, 5)}
    assert any("(UMAP)" in text for text in texts(drawn[0]))
    monkeypatch.setitem(sys.modules, "umap", None)
    class_figure(z, truth, **options)
    assert any("(PCA; umap-learn is not installed)" in text for text in texts(drawn[1]))


@pytest.mark.slow
def test_real_umap_keeps_groups_together(monkeypatch):
    monkeypatch.delitem(sys.modules, "umap")
    pytest.importorskip("umap", reason="umap-learn is not installed")
    z, truth = embedded(rows=120, classes=3)
    how, xy = paper_figures.project_classes(z, "umap", 0)
    assert how == "UMAP"
    apart = np.linalg.norm(xy[:, None] - xy[None, :], axis=2) + np.diag([np.inf] * 120)
    assert (truth[apart.argmin(axis=1)] == truth).mean() > 0.95


# --- novelty ----------------------------------------------------------------------------------------------------------


def test_the_novelty_figure_hatches_what_is_mistaken(tmp_path, drawn):
    truth = np.array([0] * 10 + [1] * 20)
    novelty = np.r_[np.linspace(0, 0.4, 10), np.linspace(0.31, 1, 20)]  # 6 of the 20 lie at or below 0.5
    options = {"num_seen": 1, "title": "A title"}
    path = novelty_figure(novelty, truth, **options, threshold=0.5, path=tmp_path / "a.png")
    assert not ink_at_the_rim(path)
    share = (novelty[10:] <= 0.5).mean()
    assert f"taken for seen ({share:.0%})" in texts(drawn[0])
    assert {"seen", "novel", "threshold", "A title"} <= set(texts(drawn[0]))
    (hatched,) = [p for p in drawn[0].axes[0].patches if p.get_hatch()]
    low, high = hatched.get_xy()[:, 0].min(), hatched.get_xy()[:, 0].max()
    heights = hatched.get_xy()[:, 1]
    assert low == pytest.approx(0, abs=1e-9)
    assert high == pytest.approx(1, abs=1e-9)
    assert heights.max() <= 100 * share
    novelty_figure(novelty, truth, **options, threshold=None, path=path)
    assert not [p for p in drawn[1].axes[0].patches if p.get_hatch()]


@pytest.mark.parametrize("num_seen", [0, 2])
def test_novelty_of_one_kind_can_be_drawn(tmp_path, recwarn, num_seen):
    novelty_figure([0.1, 0.2, 0.3], [0, 1, 1], num_seen=num_seen, threshold=0.25, title="", path=tmp_path / "a.png")
    assert len(recwarn) == 0


# --- confusion --------------------------------------------------------------------------------------------------------


def naive_confusion(predicted, truth, naming, classes):
    """Count one image at a time."""
    unmatched = sorted({g for g in predicted if g not in naming})
    counts = [[0] * (len(classes) + len(unmatched)) for _ in classes]
    for group, c in zip(predicted, truth, strict=True):
        column = classes.index(naming[group]) if group in naming else len(classes) + unmatched.index(group)
        counts[classes.index(c)][column] += 1
    return counts


@pytest.mark.parametrize("seed", range(5))
def test_confusion_counts_and_its_diagonal_is_the_accuracy(seed):
    rng = np.random.default_rng(seed)
    truth = rng.choice([0, 1, 3, 4], 200)
    predicted = np.where(rng.random(200) < 0.7, (truth * 3 + 1) % 10, rng.integers(0, 10, 200))
    counts, classes, columns = confusion(predicted, truth)
    naming = figures.match(predicted.tolist(), truth.tolist())
    assert counts.tolist() == naive_confusion(predicted.tolist(), truth.tolist(), naming, [0, 1, 3, 4])
    assert classes == [0, 1, 3, 4]
    assert columns == [0, 1, 3, 4] + [-1] * (counts.shape[1] - 4)
    accuracy = open_world_accuracy(predicted, truth, num_seen=2, protocol="gcd").all
    assert counts[:, :4].trace() / 200 == pytest.approx(accuracy)


def test_fewer_groups_than_classes_leave_an_empty_column():
    counts, classes, columns = confusion([5, 5, 5, 5], [0, 1, 1, 2])
    assert classes == columns == [0, 1, 2]
    assert counts.tolist() == [[0, 1, 0], [0, 2, 0], [0, 1, 0]]


def test_the_confusion_figure_marks_blocks_and_says_shares(tmp_path, drawn):
    from matplotlib.patches import Rectangle

    truth = np.repeat([0, 1, 2], 4)
    predicted = np.array([0, 0, 0, 7, 1, 1, 1, 1, 7, 7, 7, 9])
    options = {"num_seen": 2, "class_names": names(3), "title": "A title"}
    path = confusion_figure(predicted, truth, **options, path=tmp_path / "a.png")
    found = texts(drawn[0])
    assert {"75", "25", "100", "no match", "class 0", "class 2"} <= set(found)
    assert any("83.3% on the diagonal" in text for text in found)
    blocks = [p for p in drawn[0].axes[0].patches if isinstance(p, Rectangle)]
    assert [(b.get_xy(), b.get_width(), b.get_height()) for b in blocks] == [((-0.5, -0.5), 2, 2), ((1.5, 1.5), 1, 1)]
    assert not ink_at_the_rim(path)
    shares = np.asarray(drawn[0].axes[0].images[0].get_array())
    np.testing.assert_allclose(shares, [[0.75, 0, 0.25, 0], [0, 1, 0, 0], [0, 0, 0.75, 0.25]])


@pytest.mark.parametrize(("classes", "num_seen"), [(1, 1), (1, 0), (60, 20), (60, 60)])
def test_few_and_many_classes_without_a_warning(tmp_path, drawn, recwarn, classes, num_seen):
    truth = np.arange(2 * classes) % classes
    options = {"num_seen": num_seen, "class_names": names(classes), "title": ""}
    confusion_figure(truth, truth, **options, path=tmp_path / "a.png")
    found = texts(drawn[0])
    assert ("class 0" in found) == (classes <= figures.NAMED_CLASSES)
    if classes > figures.NAMED_CLASSES:
        assert f"seen ({num_seen})" in found
        assert (f"novel ({classes - num_seen})" in found) == (num_seen < classes)
    assert [str(w.message) for w in recwarn] == []


def test_same_input_same_bytes(tmp_path):
    z, truth = embedded(rows=40, classes=4)
    some = {"num_seen": 2, "class_names": names(4), "title": "t"}
    for draw in (
        lambda path: class_figure(z, truth, **some, path=path, projection="pca"),
        lambda path: confusion_figure(truth, truth, **some, path=path),
        lambda path: novelty_figure(z[:, 0], truth, num_seen=2, threshold=0.0, title="t", path=path),
    ):
        assert draw(tmp_path / "a.png").read_bytes() == draw(tmp_path / "b.png").read_bytes()


# --- what the user can fix --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truth": np.zeros(3, int)}, "truth has shape (3,), but there are 40 images. Give one entry per image."),
        ({"z": np.zeros((0, 2)), "truth": np.zeros(0, int)}, "there is no image to draw"),
        ({"class_names": ["a"]}, "truth holds class 3, but class_names has 1 names, from 0."),
    ],
)
def test_input_that_does_not_fit_is_named(tmp_path, change, message):
    z, truth = embedded(rows=40, classes=4)
    kwargs = {"z": z, "truth": truth, "num_seen": 2, "class_names": names(4), "title": "", "path": tmp_path / "a.png"}
    with pytest.raises(DataError, match=re.escape(message)):
        class_figure(**(kwargs | change))


def test_other_figures_check_too(tmp_path):
    some = {"num_seen": 1, "title": "", "path": tmp_path / "a.png"}
    with pytest.raises(DataError, match=re.escape("predicted has shape (2,), but there are 3 images")):
        confusion_figure([0, 1], [0, 1, 1], **some, class_names=names(2))
    with pytest.raises(DataError, match="novelty holds entries that are not finite numbers"):
        novelty_figure([0.0, np.nan], [0, 1], **some, threshold=None)


@pytest.mark.parametrize("classes", [[0, 9], []])
def test_classes_without_images_are_named(tmp_path, classes):
    z, truth = embedded(rows=40, classes=4)
    message = f"classes = {classes} must be among those with images; {[c for c in classes if c > 3]} have none."
    with pytest.raises(ConfigError, match=re.escape(message)):
        class_figure(z, truth, num_seen=2, class_names=names(4), title="", path=tmp_path / "a.png", classes=classes)


def test_without_matplotlib_the_message_names_the_command(tmp_path, monkeypatch):
    for module in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"drawing the figure needs matplotlib.*pip install 'opencon\[plots\]'"):
        novelty_figure([0.0, 1.0], [0, 1], num_seen=1, threshold=None, title="", path=tmp_path / "a.png")


def test_extras_are_loaded_late():
    code = "import sys, opencon.report.paper_figures; assert not {'matplotlib', 'umap'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
