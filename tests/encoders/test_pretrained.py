"""Encoders by one word."""

import json

import pytest
import torch
from safetensors.torch import save_file

from opencon.encoders import ENCODERS
from opencon.encoders.pretrained import fingerprint, open_encoder
from opencon.errors import ConfigError, DataError
from opencon.runtime import seeded


def finished_run(folder, name="resnet18_cifar", config=True, channels=3, size=32, **settings):
    """What a finished run leaves, as far as it matters here."""
    folder.mkdir()
    with seeded(1):
        net = ENCODERS[name].build(channels, size).eval()
    save_file(net.state_dict(), folder / "encoder.safetensors", metadata={"encoder": name})
    if config:
        own = {"encoder": {"mean": [0.1, 0.2, 0.3][:channels], "std": [0.5] * channels}, **settings}
        (folder / "config.json").write_text(json.dumps(own))
    return net


def test_installed_weights():
    encoder = open_encoder("efficientnet_lite0")
    assert (encoder.name, encoder.image_size) == ("efficientnet_lite0", 224)
    assert (encoder.mean, encoder.std) == ((127 / 255,), (128 / 255,))
    assert not encoder.net.training
    assert encoder.fingerprint == open_encoder("efficientnet_lite0", 64).fingerprint


def test_a_run_by_its_folder_or_its_file(tmp_path):
    net = finished_run(tmp_path / "a")
    x = torch.randn(2, 3, 32, 32)
    for word in (tmp_path / "a", tmp_path / "a" / "encoder.safetensors"):
        encoder = open_encoder(str(word))
        assert (encoder.name, encoder.image_size) == ("resnet18_cifar", 32)
        assert (encoder.mean, encoder.std) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
        with torch.no_grad():
            torch.testing.assert_close(encoder.net(x), net(x))


@pytest.mark.parametrize(
    ("settings", "size"),
    [({}, 224), ({"data": {"image_size": 96}}, 96), ({"data": {"image_size": 96}, "augment": {"size": 64}}, 64)],
)
def test_the_size_is_that_of_the_runs_views(tmp_path, settings, size):
    finished_run(tmp_path / "a", "resnet18", **settings)
    assert open_encoder(str(tmp_path / "a")).image_size == size
    assert open_encoder(str(tmp_path / "a"), 48).image_size == 48


def test_a_small_network_for_gray_images(tmp_path):
    finished_run(tmp_path / "a", "convnet", channels=1, size=8)
    encoder = open_encoder(str(tmp_path / "a"))
    assert (encoder.net.in_channels, encoder.image_size, len(encoder.net.stages)) == (1, 8, 3)


def test_a_file_without_its_run_is_warned_about(tmp_path):
    finished_run(tmp_path / "a", config=False)
    with pytest.warns(UserWarning, match=r"no readable config\.json beside .* may not be how it was trained"):
        encoder = open_encoder(str(tmp_path / "a"))
    assert encoder.mean == (0.5,)


def test_unknown_words_are_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown encoder 'efficientnet_lite1'. Did you mean 'efficientnet_lite0'\?"):
        open_encoder("efficientnet_lite1")
    with pytest.raises(ConfigError, match=r"'resnet50' would start at random.* Use efficientnet_lite0, .*timm:NAME"):
        open_encoder("resnet50")


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"gone\.safetensors cannot be read .* finished run"):
        open_encoder(str(tmp_path / "gone.safetensors"))
    with pytest.raises(DataError, match=r"encoder\.safetensors cannot be read"):
        open_encoder(str(tmp_path))
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=r"a\.safetensors does not say which encoder it holds"):
        open_encoder(str(tmp_path / "a.safetensors"))


def test_a_fingerprint_sees_every_weight():
    with seeded(0):
        net = ENCODERS["convnet"].build(3, 8)
    before = fingerprint(net)
    assert before == fingerprint(net)
    with torch.no_grad():
        net.conv3.bn.running_var[-1] += 1e-6
    assert fingerprint(net) != before
