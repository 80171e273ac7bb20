import pytest
import torch
from PIL import Image

from opencon.encoders.pretrained import open_encoder
from opencon.errors import ConfigError
from opencon.features import FeatureSettings
from opencon.finetune import finetune
from opencon.runs import RunFolder

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
    file = finetune(
        paths,
        labels,
        settings,
        num_classes=3,
        out=out,
        device=CPU,
        steps=2,
        progress=lambda done, total: told.append((done, total)),
    )
    before, after = open_encoder("efficientnet_lite0", 32), open_encoder(str(file), 32)
    assert (after.name, after.mean, after.std) == (before.name, before.mean, before.std)
    changed = {
        name.split(".")[0]
        for name, tensor in after.net.state_dict().items()
        if not torch.equal(tensor, before.net.state_dict()[name])
    }
    assert changed == {"stage7", "last"}
    assert told[-1][0] == told[-1][1]


def test_refuses_what_does_not_fit_in_memory(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("opencon.finetune.MAX_GB", 1e-6)
    with pytest.raises(ConfigError, match="holds all photos in memory: 12 at 32 px"):
        finetune(*photos, FeatureSettings(image_size=32), num_classes=3, out=RunFolder(tmp_path), device=CPU, steps=1)
