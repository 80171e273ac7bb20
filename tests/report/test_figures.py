import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from opencon.errors import ConfigError, DataError, MissingExtraError
from opencon.report import figures
from opencon.report.figures import embedding_figure, project


def arguments(rows=40, classes=4, dim=5, num_seen=2, seed=0):
    rng = np.random.default_rng(seed)
    truth = np.arange(rows) % classes
    z = rng.normal(size=(classes, dim))[truth] + 0.2 * rng.normal(size=(rows, dim))
    return {
        "z": z / np.linalg.norm(z, axis=1, keepdims=True),
        "truth": truth,
        "predicted": np.where(rng.random(rows) < 0.8, truth, 0),
        "novelty": rng.normal(size=rows) + (truth >= num_seen),
        "num_seen": num_seen,
        "threshold": 0.5,
        "class_names": [f"class {c}" for c in range(classes)],
        "title": "A title",
    }


def pixels(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def color_share(image, color, opacity):
    """Share of pixels close to a color such as '#aabbcc' that lies on white."""
    rgb = opacity * np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) + (1 - opacity) * 255
    return (np.abs(image.astype(int) - rgb).max(axis=2) < 8).mean()


def texts(monkeypatch, tmp_path, **kwargs):
    """Every text of the figure, legends and ticks included."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found = []
    save = Figure.savefig

    def keep(self, *args, **kw):
        found.extend(t.get_text() for t in self.findobj(Text))
        save(self, *args, **kw)

    monkeypatch.setattr(Figure, "savefig", keep)
    embedding_figure(**kwargs, path=tmp_path / "figure.png", projection="pca")
    return [t for t in found if t]


@pytest.mark.parametrize("projection", ["auto", "pca"])
def test_a_png_of_readme_width_that_shows_something(tmp_path, projection):
    path = embedding_figure(**arguments(), path=tmp_path / "figure.png", projection=projection)
    assert path == tmp_path / "figure.png"
    image = pixels(path)
    assert image.shape == (520, 1100, 3)
    assert (image[0, 0] == 255).all()  # light background
    for c in range(4):  # every class is drawn
        assert color_share(image[100:, :640], figures.COLORS[c], 0.8) > 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["figure.png"]  # nothing half written stays behind


@pytest.mark.parametrize(
    "case",
    [
        {"classes": 1, "num_seen": 1},  # nothing novel
        {"classes": 1, "num_seen": 0},  # nothing seen
        {"classes": 13, "num_seen": 6},  # more classes than colors
        {"classes": 50, "num_seen": 6, "rows": 100},  # too many to name
        {"rows": 1, "classes": 1, "num_seen": 1},
        {"rows": 2, "classes": 2, "num_seen": 1},
        {"dim": 1},
    ],
    ids=str,
)
def test_draws_without_a_warning(tmp_path, recwarn, case):
    path = embedding_figure(**arguments(**case), path=tmp_path / "figure.png", projection="pca")
    assert pixels(path).shape == (520, 1100, 3)
    assert [str(w.message) for w in recwarn] == []


def test_a_constant_score_and_no_threshold_can_be_drawn(tmp_path, recwarn):
    kwargs = arguments(num_seen=4) | {"novelty": np.zeros(40), "threshold": None}
    path = embedding_figure(**kwargs, path=tmp_path / "figure.png", projection="pca")
    assert color_share(pixels(path)[100:, 700:], figures.SEEN, 0.55) > 0.01  # a bar with a width
    assert len(recwarn) == 0


def test_says_names_counts_auroc_and_the_share_in_other_groups(monkeypatch, tmp_path):
    kwargs = arguments() | {"predicted": np.arange(40) % 4}
    kwargs["predicted"][:4] = [1, 1, 1, 2]  # three of 40 in another group
    kwargs["novelty"] = (kwargs["truth"] >= 2).astype(float)
    found = texts(monkeypatch, tmp_path, **kwargs)
    for text in (
        "A title",
        "class 0",
        "class 3",
        "AUROC 1.000",
        "threshold",
        "seen (2 classes, 20)",
        "novel (2 classes, 20)",
    ):
        assert text in found
    assert any("7.5%" in text for text in found)
    assert any("PCA" in text for text in found)


def test_without_novel_images_there_is_no_auroc(monkeypatch, tmp_path):
    found = texts(monkeypatch, tmp_path, **arguments(num_seen=4))
    assert not any("AUROC" in text or "nan" in text for text in found)


def test_too_many_classes_go_without_names(monkeypatch, tmp_path):
    found = texts(monkeypatch, tmp_path, **arguments(classes=figures.NAMED_CLASSES + 1, rows=100))
    assert not any(text.startswith("class ") for text in found)


def test_same_input_same_bytes(tmp_path):
    first = embedding_figure(**arguments(), path=tmp_path / "a.png").read_bytes()
    assert embedding_figure(**arguments(), path=tmp_path / "b.png").read_bytes() == first


def test_a_failed_drawing_keeps_the_old_file(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = embedding_figure(**arguments(), path=tmp_path / "figure.png", projection="pca")
    before = path.read_bytes()

    def torn(self, name, **kwargs):
        name.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", torn)
    with pytest.raises(OSError, match="disk full"):
        embedding_figure(**arguments(seed=1), path=path, projection="pca")
    assert path.read_bytes() == before


# --- projection -------------------------------------------------------------------------------------------------------


def test_pca_keeps_the_two_largest_variances():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 4)) @ np.diag([0.1, 3.0, 1.0, 0.2]) + 7.0
    name, xy = project(z, projection="pca")
    largest = np.sort(np.linalg.eigvalsh(np.cov(z.T)))[::-1][:2]
    assert name == "PCA"
    np.testing.assert_allclose(np.cov(xy.T), np.diag(largest), atol=1e-9)
    np.testing.assert_allclose(xy.mean(axis=0), 0, atol=1e-9)


def test_tsne_is_the_default_for_small_sets_and_keeps_groups_together():
    kwargs = arguments(rows=90, classes=3)
    name, xy = project(kwargs["z"])
    assert name == "t-SNE"
    assert np.isfinite(xy).all()
    apart = np.linalg.norm(xy[:, None] - xy[None, :], axis=2) + np.diag([np.inf] * 90)
    assert (kwargs["truth"][apart.argmin(axis=1)] == kwargs["truth"]).mean() > 0.95
    np.testing.assert_array_equal(project(kwargs["z"])[1], xy)  # seeded


def test_identical_rows_can_be_projected(recwarn):
    for projection in ("pca", "tsne"):
        assert np.isfinite(project(np.ones((40, 3)), projection=projection)[1]).all()


def test_sets_too_small_or_too_large_for_tsne_get_pca(monkeypatch):
    assert project(np.eye(30))[0] == "PCA"
    assert project(np.eye(31))[0] == "t-SNE"
    monkeypatch.setattr(figures, "TSNE_IMAGES", (30, 50))
    assert project(np.eye(51))[0] == "PCA"
    message = "projection = 'tsne' needs 30 to 50 images, not 51. Use 'pca', or draw fewer images."
    with pytest.raises(ConfigError, match=re.escape(message)):
        project(np.eye(51), projection="tsne")


# --- what the user can fix --------------------------------------------------------------------------------------------


def test_without_matplotlib_the_message_names_the_command(tmp_path, monkeypatch):
    for module in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"drawing the figure needs matplotlib.*pip install 'opencon\[plots\]'"):
        embedding_figure(**arguments(), path=tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truth": np.zeros(3, int)}, r"truth has shape (3,), but z has 40 rows."),
        ({"predicted": np.zeros(3, int)}, r"predicted has shape (3,), but z has 40 rows."),
        ({"novelty": np.zeros(3)}, r"novelty has shape (3,), but z has 40 rows."),
        ({"novelty": np.full(40, np.nan)}, "not finite numbers"),
        ({"z": np.full((40, 2), np.inf)}, "not finite numbers"),
        ({"z": np.zeros((0, 2))}, "z has shape (0, 2); a figure needs at least one row"),
        ({"class_names": ["a", "b", "c"]}, "truth holds class 3, but class_names has 3 names"),
    ],
)
def test_input_that_does_not_fit_is_named(tmp_path, change, message):
    with pytest.raises(DataError, match=re.escape(message)):
        embedding_figure(**(arguments() | change), path=tmp_path / "figure.png")


def test_matplotlib_is_loaded_late_and_its_global_state_is_left_alone():
    code = (
        "import sys, opencon.report.figures; assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; before = matplotlib.rcParams.copy()\n"
        "import pathlib, tempfile, numpy as np\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    opencon.report.figures.embedding_figure(np.eye(3), [0, 1, 1], [0, 1, 1], [0.0, 1.0, 1.0], num_seen=1,\n"
        "        threshold=0.5, class_names=['a', 'b'], title='', path=pathlib.Path(folder) / 'a.png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules and matplotlib.rcParams.copy() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
