from dataclasses import replace

import pytest
import torch
from PIL import Image

from opencon.encoders.pretrained import open_encoder
from opencon.errors import ConfigError
from opencon.photos import finetune as finetuning
from opencon.photos.features import FeatureSettings
from opencon.photos.finetune import check_finetune, finetune
from opencon.training.run_folder import RunFolder
from tests.small_model import make_run

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path):
    paths = []
    for i in range(12):
        paths.append(tmp_path / f"{i}.png")
        Image.new("RGB", (32, 32), ((i % 3) * 100, 40 + 3 * i, 200)).save(paths[-1])
    return paths, torch.tensor([0, 1, -1] * 4)


def test_only_the_last_stage_moves_and_the_file_opens_as_an_encoder(photos, tmp_path):
    paths, labels = photos
    out = RunFolder(tmp_path)
    out.write_json("config.json", {"features": {}})
    settings = FeatureSettings(image_size=32)
    told = []
    tuned = finetune(
        paths,
        labels,
        settings,
        num_classes=3,
        out=out,
        device=CPU,
        steps=2,
        progress=lambda done, total: told.append((done, total)),
    )
    assert tuned.image_size == 32  # the size it learned at, whatever the file says or does not
    before, after = open_encoder("efficientnet_lite0", 32), open_encoder(tuned.encoder, tuned.image_size)
    assert (after.name, after.mean, after.std) == (before.name, before.mean, before.std)
    changed = {
        name.split(".")[0]
        for name, tensor in after.net.state_dict().items()
        if not torch.equal(tensor, before.net.state_dict()[name])
    }
    assert changed == {"stage7", "last"}
    assert told[-1][0] == told[-1][1]


def test_the_size_of_the_encoder_is_kept_where_none_was_asked_for(photos, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    out = RunFolder(tmp_path)
    out.write_json("config.json", {"features": {}})
    opened = replace(open_encoder(str(run), None), image_size=24)
    monkeypatch.setattr("opencon.photos.finetune.open_encoder", lambda name, size: opened)
    tuned = finetune(*photos, FeatureSettings(encoder=str(run)), num_classes=3, out=out, device=CPU, steps=1)
    assert tuned.image_size == 24


def test_a_photo_that_is_gone_takes_its_label_with_it(photos, tmp_path, monkeypatch):
    paths, labels = photos
    out = RunFolder(tmp_path)
    out.write_json("config.json", {"features": {}})
    paths[0].unlink()
    given = []
    loader = finetuning.TwoStreamLoader
    monkeypatch.setattr(finetuning, "TwoStreamLoader", lambda x, y, **how: given.append(y) or loader(x, y, **how))
    finetune(paths, labels, FeatureSettings(image_size=32), num_classes=3, out=out, device=CPU, steps=1)
    assert torch.equal(given[0], labels[1:])


def test_gray_encoders_and_foreign_ones_are_refused(photos, tmp_path):
    gray = open_encoder(str(make_run(tmp_path / "gray", channels=1)), None)
    with pytest.raises(ConfigError, match="works with encoders of color images"):
        check_finetune(gray, 12)
    with pytest.raises(ConfigError, match=r"works with .*resnet18.*, not with other"):
        check_finetune(replace(gray, name="other"), 12)


def test_refuses_what_does_not_fit_in_memory(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("opencon.photos.finetune.MAX_GB", 1e-6)
    with pytest.raises(ConfigError, match="holds all photos in memory: 12 at 32 px"):
        finetune(*photos, FeatureSettings(image_size=32), num_classes=3, out=RunFolder(tmp_path), device=CPU, steps=1)
