"""The demonstration, with a recipe of two epochs."""

import shutil
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import opencon.experiments.demo as demo_module
import opencon.experiments.evaluate as evaluate_module
from opencon.config import with_settings
from opencon.errors import OpenConError, RunError
from opencon.experiments.demo import Group, discovered, pixel_kmeans, run_demo
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import Callbacks
from opencon.experiments.workbench import open_run
from opencon.methods import Assignment
from opencon.metrics import open_world_accuracy

CPU = torch.device("cpu")


def short_recipe(name):
    return with_settings(get_recipe(name), ["train.epochs=2", "train.batch_size=256", "train.save_seconds=0"])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Two epochs, few images in the picture, and no t-SNE for the page: `shown` has a whole one."""
    monkeypatch.setattr(demo_module, "get_recipe", short_recipe)
    monkeypatch.setattr(evaluate_module, "MOST_DRAWN", 20)
    monkeypatch.setattr(demo_module, "map_positions", lambda z, *, seed: ("two columns", z[:, :2]))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """One demonstration that the tests look at."""
    out = tmp_path_factory.mktemp("demo") / "run"
    records = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "get_recipe", short_recipe)
        patch.setattr(evaluate_module, "MOST_DRAWN", 20)
        outcome = run_demo(out, CPU, callbacks=Callbacks(epoch_done=records.append))
    return SimpleNamespace(out=out, outcome=outcome, records=records)


def assigned(out):
    """Predicted and true class of every unlabeled image."""
    bench = open_run(out, CPU)
    _, _, assignment = bench.score("unlabeled", "orca")
    rows = bench.split.unlabeled
    return assignment.classes[rows].tolist(), bench.dataset.train.classes[rows].tolist()


def test_two_rows_measured_in_the_same_way(shown):
    (first, kmeans), (second, ours) = shown.outcome.rows
    assert (first, second) == ("k-means on pixels", "OpenCon")
    for record in (kmeans, ours):
        assert (record["protocol"], record["on"], record["num_images"]) == ("orca", "unlabeled", 1332)
        assert 0.1 < record["all"] <= 1.0
    assert ours == shown.outcome.result
    assert [record["epoch"] for record in shown.records] == [0, 1]


def test_pixels_cluster_well_but_k_means_knows_the_seen_ones(shown):
    """Digits are easy for k-means (0.7 to 0.8 of all), and the labeled images name its clusters."""
    record = pixel_kmeans(open_run(shown.out, CPU))
    assert 0.6 < record["all"] < 0.9
    assert record["seen"] > 0.6  # plain accuracy: chance without naming is 0.1


def test_the_result_is_that_of_the_run(shown):
    predicted, truth = assigned(shown.out)
    accuracy = open_world_accuracy(predicted, truth, num_seen=5, protocol="orca")
    assert shown.outcome.result["all"] == pytest.approx(accuracy.all)
    assert shown.outcome.result["novel"] == pytest.approx(accuracy.novel)


def test_groups_equal_a_count_by_hand(shown):
    predicted, truth = assigned(shown.out)
    members = {g: [t for p, t in zip(predicted, truth, strict=True) if p == g] for g in range(5, 10)}
    largest_first = sorted((g for g in members if members[g]), key=lambda g: (-len(members[g]), g))
    want = []
    for i, g in enumerate(largest_first):
        counts = Counter(members[g])
        digit = max(counts, key=lambda d: (counts[d], -d))
        want.append(Group(f"new-{i + 1}", len(members[g]), str(digit), counts[digit] / len(members[g])))
    assert shown.outcome.groups == want


def test_discovered_on_a_made_up_assignment():
    """Classes 0 and 1 are seen. Group 2 holds b, b, c; group 3 nothing; group 4 c, c, c, a; image 0 is labeled."""
    truth = torch.tensor([0, 0, 1, 2, 2, 3, 3, 3, 3, 0])
    predicted = torch.tensor([4, 0, 1, 2, 2, 2, 4, 4, 4, 4])
    bench = SimpleNamespace(
        split=SimpleNamespace(unlabeled=torch.arange(1, 10), num_seen=2, num_classes=5),
        dataset=SimpleNamespace(train=SimpleNamespace(classes=truth, class_names=("a", "s", "b", "c"))),
    )
    assert discovered(bench, Assignment(predicted)) == [
        Group("new-1", 4, "c", 0.75),
        Group("new-2", 3, "b", pytest.approx(2 / 3)),
    ]


def test_a_picture_is_drawn(shown):
    assert shown.outcome.picture == shown.out / "embedding.png"
    assert shown.outcome.picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_the_picture_is_missing(shown, tmp_path, monkeypatch):
    out = shutil.copytree(shown.out, tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    again = run_demo(out, CPU)
    assert again.picture is None
    assert again.page.is_file()


def test_again_shows_what_is_there_and_another_seed_is_refused(shown, tmp_path):
    shutil.copytree(shown.out, tmp_path / "run")
    again = run_demo(tmp_path / "run", CPU)
    assert again.result == shown.outcome.result
    assert again.groups == shown.outcome.groups
    with pytest.raises(OpenConError, match=r"train.seed: 0 in the run, 1 now"):
        run_demo(tmp_path / "run", CPU, seed=1)


def test_a_folder_with_other_things_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        run_demo(tmp_path, CPU)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_run_is_refused_and_left_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"data": {"name": "cifar100"}}')
    (tmp_path / "checkpoint.pt").write_bytes(b"a night of training")
    with pytest.raises(OpenConError):
        run_demo(tmp_path, CPU)
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"a night of training"


def test_k_means_sees_the_pixels_of_every_image(shown, monkeypatch):
    """All 1797 images are clustered, with the labels that the learner knows and no others."""
    calls = []

    def spy(z, labels, *, num_clusters, num_seen, seed):
        calls.append((z, labels))
        assert (num_clusters, num_seen) == (10, 5)
        return torch.zeros(len(z), dtype=torch.long)

    monkeypatch.setattr(demo_module, "cluster_and_name", spy)
    bench = open_run(shown.out, CPU)
    pixel_kmeans(bench)
    z, labels = calls[0]
    assert z.shape == (1797, 64)
    np.testing.assert_array_equal(z.numpy(), bench.dataset.train.images.flatten(1).numpy())
    assert (labels[bench.split.unlabeled] == -1).all()
    assert (labels[bench.split.labeled] == bench.dataset.train.classes[bench.split.labeled]).all()
