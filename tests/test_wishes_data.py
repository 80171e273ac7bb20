"""What a researcher wants of data, runs and results, each wish in a few lines."""

import csv
import json
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import opencon
from opencon.cli import main
from opencon.experiments import workbench
from opencon.experiments.workbench import open_run
from opencon.methods import METHODS
from tests.small_pile import SEEN, SETTINGS, make_pile


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_pile(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """OpenCon on a folder and a pile, whose truth is known for the number in the end."""
    out = tmp_path_factory.mktemp("runs") / "opencon"
    files = {"labeled": root / "labeled", "unlabeled": root / "pile", "truth": "folders"}
    return opencon.train("digits", out=out, settings=SETTINGS, device="cpu", **files)


@pytest.mark.parametrize("method", METHODS.names())
def test_every_method_trains_on_images_that_mostly_have_no_class(root, tmp_path, method):
    special = {"cgdl": {"train.batch_size": 32}, "kmeans": {"train.epochs": 0}}  # nine in ten are labeled; no epoch
    files = {"labeled": root / "labeled", "unlabeled": root / "pile"}
    run = opencon.train(
        f"{method}/digits", out=tmp_path, settings=SETTINGS | special.get(method, {}), device="cpu", **files
    )
    uses_labels = METHODS[method].config.uses_labels
    assert not {"all", "novel", "knn20"} & set(run.result) or not uses_labels  # nobody knows
    if uses_labels:
        assert 0 <= run.result["held_out"] <= 1
        assert 0 <= run.result["stability"] <= 1
        assert 1 <= run.result["classes_in_use"] <= 10
    table = run.model().predict(root / "pile")
    said = dict(zip(run.predictions().files, run.predictions().predicted, strict=True))
    same = [said[row.file.split(str(root) + "/")[1]] == row.closest for row in table]
    assert np.mean(same) == pytest.approx(json.loads((tmp_path / "classes.json").read_text())["agrees"], abs=0.02)
    assert np.mean(same) > (0.5 if method == "cgdl" else 0.99)  # CGDL rejects by a density that no single row knows


def command(*words):
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in words])
    assert done.value.code == 0


def test_the_command_line_takes_a_folder_and_a_pile(root, tmp_path, capsys):
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    where = ["--labeled", root / "labeled", "--unlabeled", root / "pile", "--device", "cpu"]
    command("train", "orca/digits", *where, "--out", tmp_path / "run", *settings)
    shown = " ".join(capsys.readouterr().out.split())
    assert "labeled in 4 classes" in shown
    assert "no truth: the labels kept back, how stable the groups are" in shown
    command("predict", tmp_path / "run", root / "pile/7", "--csv", tmp_path / "said.csv")
    with (tmp_path / "said.csv").open() as file:
        said = list(csv.DictReader(file))
    assert {row["predicted"] for row in said} <= {"", *SEEN, *(f"new-{i}" for i in range(1, 7))}
    (tmp_path / "names.csv").write_text("group,name\nnew-1,seven\n")
    command("name", tmp_path / "run", tmp_path / "names.csv")
    assert "The names hold for predict, export and the predictions" in capsys.readouterr().out
    command("evaluate", tmp_path / "run", "--truth", "folders", "--predictions", tmp_path / "judged.csv")
    assert "protocol" in capsys.readouterr().out
    assert "truth" in (tmp_path / "judged.csv").read_text().splitlines()[0].split(",")
    command("export", tmp_path / "run", "--out", tmp_path / "model", "--no-onnx")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "README.md",
        "encoder.safetensors",
        "model.json",
        "model.safetensors",
    }
    assert "ORCA" in (tmp_path / "model/README.md").read_text()


def test_truth_is_for_the_number_in_the_end(root, run, tmp_path):
    """With and without it the same weights are learned, and labels that are kept back teach nothing."""
    bench = open_run(run.folder, torch.device("cpu"))
    assert len(bench.kept_back) == run.result["num_held_out"] > 0
    assert (bench.labels[bench.kept_back] == -1).all()
    assert (bench.labels >= 0).sum() == len(bench.split.labeled)
    assert run.result["num_images"] == len(run.predictions())
    assert {"all", "novel", "seen", "held_out"} <= set(run.result)
    files = {"labeled": root / "labeled", "unlabeled": root / "pile"}
    blind = opencon.train("digits", out=tmp_path / "blind", settings=SETTINGS, device="cpu", **files)
    mine, other = (torch.load(r.folder / "checkpoint.pt", weights_only=True)["method"] for r in (run, blind))
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name
    # And it may come when all is done.
    again = opencon.evaluate(blind, truth="folders", device="cpu")
    assert {key: again[key] for key in ("all", "novel", "seen")} == {
        key: run.result[key] for key in ("all", "novel", "seen")
    }
    known = opencon.open_run(blind.folder, truth="folders", device="cpu")
    assert known.predictions().matching == run.predictions().matching
    test = opencon.evaluate(blind, test=root / "pile", device="cpu")
    assert (test["on"], test["num_images"]) == ("test", len(list((root / "pile").rglob("*.png"))))
    with pytest.raises(
        opencon.errors.ConfigError, match=r"Leave out --protocol, or say what is known \(--truth, --test\)"
    ):
        opencon.evaluate(blind, protocol="gcd", device="cpu")
    with pytest.raises(
        opencon.errors.ConfigError, match=r"Use eval\.on=unlabeled \(--on unlabeled\), or give some \(--test"
    ):
        opencon.evaluate(blind, on="test", device="cpu")


def test_files_of_ones_own_change_nothing_that_a_configuration_says(root, tmp_path):
    file = tmp_path / "mine.toml"
    files = {"labeled": root / "labeled", "unlabeled": root / "pile"}
    file.write_text('recipe = "orca/digits"\n[split]\nnum_classes = 9\nseen_classes = ["2", "0"]\nheld_out = 0.0\n')
    split = opencon.configure(file, **files).split
    assert (split.num_classes, split.seen_classes, split.held_out) == (9, ("2", "0"), 0.0)
    assert opencon.configure(opencon.configure(file), **files).split == split
    file.write_text(
        'recipe = "orca/digits"\n[split]\nnum_classes = 9\n'
    )  # the recipe's own number of seen classes goes
    assert opencon.configure(file, **files).split.num_seen is None
    file.write_text('recipe = "orca/digits"\n[split]\nnum_seen = 3\n')  # that of the file stays, and does not fit
    with pytest.raises(
        opencon.errors.ConfigError, match=r"split\.num_seen = 3, but the files give labels of 4 classes"
    ):
        opencon.train(file, out=tmp_path / "run", settings=SETTINGS, device="cpu", **files)


def test_a_run_is_a_configuration(run, tmp_path):
    assert opencon.configure(run.folder / "config.json") == run.config
    assert opencon.configure(str(run.folder / "config.json"), seed=7).train.seed == 7


def test_the_number_of_classes_is_estimated_without_the_truth(root, monkeypatch):
    shown = []
    monkeypatch.setattr(
        workbench, "estimated_classes", lambda config, dataset, labels, device: shown.append(labels) or 7
    )
    files = {"labeled": root / "labeled", "unlabeled": root / "pile", "truth": "folders"}
    config = opencon.configure("digits", SETTINGS | {"split.num_classes": None}, **files)
    bench = workbench.prepare(config, torch.device("cpu"))
    given = bench.dataset.train.given
    assert bench.split.num_classes == 7
    assert (bench.dataset.train.classes[~given] < len(SEEN)).any()  # there would be something to see
    assert torch.equal(shown[0] >= 0, given)


def test_a_list_with_empty_classes_and_a_column_of_truth(root, tmp_path):
    lines = ["path,label,truth"]
    for part in ("labeled", "pile"):
        for path in sorted((root / part).rglob("*.png")):
            name = path.parent.name
            known = "" if name == "9" else name  # nobody knows the nines
            lines.append(f"{path},{name if part == 'labeled' else ''},{known}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    settings = SETTINGS | {"data.name": "list", "split.num_seen": None, "train.epochs": 1}
    run = opencon.train("gcd/digits", out=tmp_path / "run", settings=settings, data=tmp_path / "list.csv", device="cpu")
    found = run.predictions()
    known = sum("/9/" not in file for file in found.files)
    assert (run.result["num_images"], len(found)) == (known, len(list((root / "pile").rglob("*.png"))) + 4 * 1)
    assert (found.truth == -1).sum() == len(found) - known


def test_several_methods_and_seeds_in_one_command(root, tmp_path, capsys):
    """On images whose classes nobody knows: then other measures stand in the table."""
    where = {"data.name": "folder", "data.unlabeled": root / "pile", "split.num_seen": "none"}
    settings = [word for key, value in (SETTINGS | where).items() for word in ("--set", f"{key}={value}")]
    place = ["--data", root / "labeled", "--device", "cpu", "--out", tmp_path / "sweep"]
    command("sweep", "orca/digits", "simgcd/digits", "--seeds", "0-1", *place, *settings, "--format", "csv")
    shown = capsys.readouterr().out
    assert "seed 1: held_out " in shown
    rows = list(csv.DictReader(shown[shown.index("method,") :].splitlines()))
    assert [row["method"] for row in rows] == ["ORCA", "SimGCD"]
    assert all(0 <= float(row[f"{name}_mean"]) <= 100 for row in rows for name in ("held_out", "stability", "classes"))
    command("compare", tmp_path / "sweep")
    assert "no truth" in capsys.readouterr().out


def test_which_classes_are_seen_by_name(tmp_path):
    names = ["7", "1", "4"]
    (tmp_path / "seen.txt").write_text("7\n1\n# not this one\n4\n")
    settings = {"split.seen_classes": str(tmp_path / "seen.txt"), "train.epochs": 1}
    run = opencon.train("digits", out=tmp_path / "run", settings=settings, device="cpu")
    assert json.loads((run.folder / "config.json").read_text())["split"]["seen_classes"] == names
    assert list(run.predictions().true_names[:3]) == names
    assert list(run.model().class_names[:3]) == names
    assert opencon.configure("digits", ["split.seen_classes=7,1,4"]).split.seen_classes == tuple(names)
    with pytest.raises(opencon.errors.ConfigError, match=r"there is no class 'seven'"):
        opencon.train("digits", out=tmp_path / "no", settings={"split.seen_classes": "seven"}, device="cpu")


def test_encoders_of_timm_in_train(tmp_path, monkeypatch):
    class Body(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.layer = nn.Linear(channels * 64, 12)

        def forward(self, x):
            return self.layer(x.flatten(1))

    timm, data = types.ModuleType("timm"), types.ModuleType("timm.data")
    timm.create_model = lambda name, *, pretrained, num_classes, in_chans=3, **more: Body(in_chans)
    timm.list_models = lambda: ["tiny"]
    timm.data = data
    data.resolve_model_data_config = lambda net: {"input_size": (3, 8, 8), "mean": (0.5,), "std": (0.5,)}
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    settings = {"encoder.name": "timm:tiny", "encoder.weights": "installed", "train.epochs": 1}
    run = opencon.train("digits", out=tmp_path / "run", settings=settings, device="cpu")
    model = run.model()
    assert model.method.embedder.encoder.num_features == 12
    opencon.export(run.folder, tmp_path / "model", onnx=False)
    assert opencon.OpenConModel.from_pretrained(tmp_path / "model").names == model.names


def test_callbacks_see_method_optimizer_and_record(tmp_path):
    class Norms(opencon.Callback):
        def __init__(self):
            self.seen = []

        def epoch_done(self, training, record):
            norm = sum(float(p.detach().norm()) for p in training.method.parameters())
            self.seen.append((record["epoch"], norm, len(training.optimizer.param_groups), record["loss"]))

    watcher = Norms()
    opencon.train("digits", out=tmp_path, settings={"train.epochs": 2}, device="cpu", callbacks=[watcher])
    assert [epoch for epoch, *_ in watcher.seen] == [0, 1]
    assert watcher.seen[0][1] != watcher.seen[1][1]  # it learns
    assert all(groups >= 1 for _, _, groups, _ in watcher.seen)


def test_a_run_says_what_it_found(run):
    again = opencon.open_run(run.folder, device="cpu")
    assert again.result == run.result
    assert again.config.split.num_classes == 10
    assert len(again.metrics) == 1
    found, z = again.predictions(), again.embeddings()
    assert z.shape == (len(found), 128)
    assert np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)
    known = found.truth >= 0
    right = float((found.matched == found.truth)[known].mean())
    assert right == pytest.approx(run.result["all"])
    table = again.confusion()
    assert table.counts.sum() == known.sum()
    diagonal = sum(table.counts[i, i] for i in range(len(table.rows)))
    assert diagonal / known.sum() == pytest.approx(run.result["all"])


def test_figures_for_a_method_without_a_novelty_score(root, tmp_path):
    pytest.importorskip("matplotlib")
    files = {"labeled": root / "labeled", "unlabeled": root / "pile", "truth": "folders"}
    runs = [
        opencon.train(f"{name}/digits", out=tmp_path / name / "run", settings=SETTINGS, device="cpu", **files)
        for name in ("orca", "gcd")
    ]
    with pytest.warns(UserWarning, match=r"no novelty.png: orca has no novelty score of its own"):
        opencon.evaluate(runs[0], figures=tmp_path / "figures", picture=tmp_path / "one.png", classes=20, device="cpu")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"classes.png", "confusion.png"}
    assert (tmp_path / "one.png").stat().st_size > 10_000
    pictures = opencon.draw([run.folder for run in runs], tmp_path / "both", classes=10, device="cpu")
    assert [path.name for path in pictures] == ["maps.png", "confusions.png"]
    with Image.open(pictures[0]) as image:
        assert image.width > 1.5 * image.height  # two panels, though both folders have the same name
    blind = {"labeled": root / "labeled", "unlabeled": root / "pile"}
    blind_run = opencon.train("gcd/digits", out=tmp_path / "blind", settings=SETTINGS, device="cpu", **blind)
    (picture,) = opencon.draw(blind_run, tmp_path / "alone", device="cpu")  # colored by group
    assert picture.name == "maps.png"
    with pytest.raises(opencon.errors.ConfigError, match=r"known to some of these runs and not to others"):
        opencon.draw([runs[0], blind_run], tmp_path / "both", device="cpu")
    with pytest.raises(opencon.errors.ConfigError, match="--classes 30 must be 10 or 20"):
        opencon.draw(runs, tmp_path / "both", classes=30)
