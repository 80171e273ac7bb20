"""A trained run as a model: opened, exported, renamed, drawn from its files alone."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import opencon
from opencon import OpenConModel
from opencon.encoders import ENCODERS
from opencon.errors import RunError
from opencon.photos.run_model import RunModel

PAGE = Path(__file__).parents[2] / "docs/use-a-run.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    return opencon.train("digits", out=out, settings={"train.epochs": 1}, device="cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Forty digits as files, in order."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("photos")
    for i, image in enumerate(load_digits().images[:40]):
        Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(folder / f"{i:02}.png")
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "model"
    opencon.export(run.folder, out, onnx=False)
    return out


def said(model, photos):
    return [(row.predicted, row.kind, row.confidence, row.nearest) for row in model.predict(photos)]


def test_it_says_of_an_image_what_the_run_said(run, photos):
    found = run.predictions()
    of = dict(zip(found.files, found.predicted, strict=True))
    rows = run.model().predict(photos)
    same = [row.closest == of[f"digits {i}"] for i, row in enumerate(rows) if f"digits {i}" in of]
    assert len(same) > 20
    assert all(same)
    assert {row.kind for row in rows} <= {"seen", "new", None}
    assert all(name.startswith("digits ") for row in rows for name in row.nearest)


def test_no_data_is_needed(run, photos, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("the images of the run were asked for")

    monkeypatch.setattr("opencon.experiments.workbench.load_dataset", refuse)
    assert len(said(OpenConModel.from_pretrained(run.folder), photos)) == 40


def test_an_exported_run_says_the_same_wherever_it_lies(run, exported, photos, tmp_path):
    shutil.copytree(exported, tmp_path / "elsewhere")
    model = OpenConModel.from_pretrained(tmp_path / "elsewhere")
    assert isinstance(model, RunModel)
    assert said(model, photos) == said(run.model(), photos)
    plain = json.loads((exported / "model.json").read_text())
    assert plain["preprocessing"]["image_size"] == 8
    assert plain["config"]["data"] == {"name": "digits"}
    assert str(run.folder) not in (exported / "model.json").read_text()
    assert "OpenCon (arXiv:2208.02764)" in (exported / "README.md").read_text()


def test_an_unfinished_run_is_judged_by_its_data(tmp_path, photos):
    class Stop(opencon.Callback):
        def epoch_done(self, training, record):
            raise KeyboardInterrupt

    settings = {"train.epochs": 3, "train.save_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        opencon.train("digits", out=tmp_path, settings=settings, device="cpu", callbacks=[Stop()])
    assert not (tmp_path / "classes.json").exists()
    assert len(said(OpenConModel.from_pretrained(tmp_path), photos)) == 40


def test_averaged_weights_are_the_ones_that_judge(tmp_path, photos):
    settings = {"train.epochs": 1, "eval.average": 0.9, "eval.fresh_norms": True, "eval.mirror": True}
    run = opencon.train("digits", out=tmp_path / "run", settings=settings, device="cpu")
    found = run.predictions()
    of = dict(zip(found.files, found.predicted, strict=True))
    rows = run.model().predict(photos)
    assert all(row.closest == of[f"digits {i}"] for i, row in enumerate(rows) if f"digits {i}" in of)


def test_groups_get_names(run, photos, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run")
    opencon.name(tmp_path / "run", {"new-1": "mine"})
    model = OpenConModel.from_pretrained(tmp_path / "run")
    assert "mine" in model.names
    assert model.first_names[5] == "new-1"
    before, now = run.predictions(), opencon.open_run(tmp_path / "run", device="cpu").predictions()
    assert [{"new-1": "mine"}.get(name, name) for name in before.predicted] == now.predicted
    opencon.export(tmp_path / "run", tmp_path / "model", onnx=False)
    assert "mine" in OpenConModel.from_pretrained(tmp_path / "model").names


def test_damage_is_said(exported, run, tmp_path):
    shutil.copytree(exported, tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"does not belong to model.json, or is damaged"):
        OpenConModel.from_pretrained(tmp_path / "model")
    shutil.copytree(run.folder, tmp_path / "run")
    (tmp_path / "run/classes.json").write_text("{}")
    with pytest.raises(RunError, match=r"the classes of .* cannot be read"):
        OpenConModel.from_pretrained(tmp_path / "run")
    shutil.copy(run.folder / "classes.json", tmp_path / "run")
    content = bytearray((run.folder / "classes.safetensors").read_bytes())
    content[7] ^= 1  # the length of the header
    (tmp_path / "run/classes.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"the classes of .* cannot be read \(SafetensorError"):
        OpenConModel.from_pretrained(tmp_path / "run")
    shutil.copy(run.folder / "classes.safetensors", tmp_path / "run")
    facts = json.loads((run.folder / "classes.json").read_text())
    (tmp_path / "run/classes.json").write_text(json.dumps(facts | {"sizes": [None, *facts["sizes"][1:]]}))
    with pytest.raises(RunError, match=r"the classes of .* cannot be read"):
        OpenConModel.from_pretrained(tmp_path / "run")
    shutil.copy(exported / "model.safetensors", tmp_path / "model")
    for file in ("encoder.safetensors", "model.safetensors"):
        (tmp_path / "model" / file).unlink()
        os.mkfifo(tmp_path / "model" / file)
        with pytest.raises(RunError, match="not a regular file"):
            OpenConModel.from_pretrained(tmp_path / "model")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_encoder_is_an_ordinary_module_in_five_lines(run, tmp_path, monkeypatch):
    text = PAGE.read_text(encoding="utf-8").split("## The encoder in plain PyTorch")[1]
    block = text.split("```python\n")[1].split("```")[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/digits").symlink_to(run.folder)
    names = {}
    exec(compile(block, PAGE.name, "exec"), names)
    assert names["features"].shape == (4, 128)
    method = run.model().method
    images = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(names["encoder"](images), method.embedder.features(images))


def test_weights_have_the_names_of_torchvision_but_for_the_stem():
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    wanted = {"conv1.weight", *(f"bn1.{part}" for part in norm)}
    for layer in range(1, 5):
        for block in range(2):
            at = f"layer{layer}.{block}"
            wanted |= {f"{at}.conv{i}.weight" for i in (1, 2)} | {f"{at}.bn{i}.{part}" for i in (1, 2) for part in norm}
        if layer > 1:
            wanted |= {f"layer{layer}.0.downsample.0.weight"}
            wanted |= {f"layer{layer}.0.downsample.1.{part}" for part in norm}
    with torch.device("meta"):
        names = ENCODERS["resnet18"].build(3, 224).state_dict()
    assert {name.removeprefix("stem.") for name in names} == wanted
