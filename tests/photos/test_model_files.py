"""A model on disk and back, its model card, and what can go wrong with its files."""

import json
import os
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from opencon import encoders
from opencon.encoders import efficientnet_lite
from opencon.encoders.pretrained import PretrainedEncoder, fingerprint, open_encoder
from opencon.encoders.stored import EncoderFacts, stored_encoder
from opencon.encoders.timm import TimmEncoder
from opencon.errors import ConfigError, DataError, RunError
from opencon.photos import model as model_module
from opencon.photos.model import OpenConModel
from opencon.training.run_folder import RunFolder
from tests.small_model import CPU, NAMES, make_model, make_photos, make_run

BAD_NAME = os.fsdecode(b"caf\xe9.png")  # Latin-1, which is no UTF-8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def photos(place):
    return make_photos(place / "photos")


@pytest.fixture(scope="module")
def run(place):
    return make_run(place / "run")


@pytest.fixture(scope="module")
def model(photos, run):
    return make_model(photos, run)


@pytest.fixture
def saved(model, tmp_path):
    model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def pretrained(model, tmp_path):
    model.save_pretrained(tmp_path / "pretrained")
    return tmp_path / "pretrained"


def edit(folder, **changes):
    path = folder / "model.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, **changes}))


def same(one, other):
    assert other.class_names == one.class_names
    assert other.example_files == one.example_files
    assert other.sizes == one.sizes
    assert torch.equal(other.example_rows, one.example_rows)
    assert other.classifier.settings() == one.classifier.settings()
    state = other.classifier.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in one.classifier.state_dict().items())


# --- on disk and back -------------------------------------------------------------------------------------------------


def test_round_trip_says_the_same_bit_for_bit(model, photos, saved):
    back = OpenConModel.from_pretrained(saved)
    same(model, back)
    assert back.home is None
    assert list(back.predict(photos)) == list(model.predict(photos))
    assert sorted(path.name for path in saved.iterdir()) == ["model.json", "model.safetensors"]
    assert not back.classifier.training


def test_a_run_folder_will_do(model, photos, tmp_path):
    model.save(RunFolder(tmp_path))
    same(model, OpenConModel.from_pretrained(str(tmp_path)))


def test_a_pretrained_folder_needs_nothing_else(model, photos, run, pretrained, tmp_path, monkeypatch):
    want = list(model.predict(photos))
    moved = pretrained.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(model_module, "open_encoder", None)  # would open the run
    state = torch.get_rng_state()
    back = OpenConModel.from_pretrained(moved)
    assert list(back.predict(photos)) == want
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(path.name for path in moved.iterdir()) == [
        "README.md",
        "encoder.safetensors",
        "model.json",
        "model.safetensors",
    ]
    assert str(run) not in (moved / "model.json").read_text()  # nor tells of it
    back.save(tmp_path / "again")  # its encoder goes with it
    shutil.rmtree(moved)
    assert list(OpenConModel.from_pretrained(tmp_path / "again").predict(photos)) == want


def test_a_pretrained_folder_can_be_written_over_itself(model, photos, pretrained):
    OpenConModel.from_pretrained(pretrained).renamed({"new-1": "sky"}).save_pretrained(pretrained)
    back = OpenConModel.from_pretrained(pretrained)
    assert back.class_names == ("red", "green", "sky", "new-2")
    assert len(list(back.predict(photos))) == len(photos)


def test_efficientnet_lite0_without_the_weights_package(photos, tmp_path, monkeypatch):
    model = make_model(photos, "efficientnet_lite0", image_size=32)
    model.save_pretrained(tmp_path / "model")
    want = list(model.predict(photos[::6]))

    def fail():
        raise DataError("not installed")

    monkeypatch.setattr(efficientnet_lite, "installed_weights", fail)
    with pytest.raises(DataError, match="not installed"):
        open_encoder("efficientnet_lite0")
    back = OpenConModel.from_pretrained(tmp_path / "model")
    assert list(back.predict(photos[::6])) == want
    facts = asdict(back.encoder)
    assert (facts["name"], facts["image_size"], facts["in_channels"]) == ("efficientnet_lite0", 32, 3)


def test_an_encoder_named_by_a_relative_path_is_found_from_elsewhere(photos, place, run, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    model = make_model(photos, "run")
    model.save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert list(OpenConModel.from_pretrained("model").predict(photos)) == list(
        OpenConModel.from_pretrained(tmp_path / "model").predict(photos)
    )


def test_a_model_whose_encoder_is_gone_can_still_be_renamed(photos, tmp_path):
    run = make_run(tmp_path / "run")
    model = make_model(photos, run)
    want = list(model.predict(photos))
    model.save(tmp_path / "model")
    run.rename(tmp_path / "away")
    OpenConModel.from_pretrained(tmp_path / "model").renamed({"red": "rot"}).save(tmp_path / "model")
    (tmp_path / "away").rename(run)
    got = list(OpenConModel.from_pretrained(tmp_path / "model").predict(photos))
    assert got == [replace(photo, closest="rot") if photo.closest == "red" else photo for photo in want]


def test_an_encoder_that_lies_in_the_models_own_folder_moves_with_it(photos, tmp_path):
    folder = make_run(tmp_path / "discovery")
    model = make_model(photos, folder / "encoder.safetensors")
    want = list(model.predict(photos))
    model.save(folder)
    folder.rename(tmp_path / "moved")
    assert list(OpenConModel.from_pretrained(tmp_path / "moved").predict(photos)) == want


def test_odd_names_survive(photos, run, tmp_path):
    names = ('say "red"', "gr\udce9en|\n", "новый 🐈", "\\")
    model = make_model(photos, run, names=names)
    model = replace(model, example_files=((BAD_NAME, *model.example_files[0][1:]), *model.example_files[1:]))
    model.save_pretrained(tmp_path / "model")
    back = OpenConModel.from_pretrained(tmp_path / "model")
    same(model, back)
    assert back.class_names == names
    assert (tmp_path / "model" / "model.json").read_text("ascii")
    card = (tmp_path / "model" / "README.md").read_text("utf-8")
    assert "| gr?en\\| | seen | 12 |" in card
    assert "| новый 🐈 | new | 12 |" in card


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_photos_with_odd_names_are_predicted(model, photos, tmp_path):
    for name in (BAD_NAME, "a b|c\n.png", "🐈.png"):
        shutil.copy(photos[0], tmp_path / name)
    got = list(model.predict(tmp_path))
    assert {Path(photo.file).name for photo in got} == {BAD_NAME, "a b|c\n.png", "🐈.png"}
    assert {photo.predicted for photo in got} == {"red"}


def test_an_encoder_of_timm_is_built_without_its_download(tmp_path, monkeypatch):
    asked = []

    def timm_encoder(name, *, image_size, in_channels=3, pretrained=True):
        asked.append((name, image_size, pretrained))
        body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
        return TimmEncoder(body, {"input_size": (3, 8, 8), "mean": (0.5,), "std": (0.2,)})

    monkeypatch.setattr(encoders, "timm_encoder", timm_encoder)
    net = timm_encoder("tiny", image_size=8)
    facts = EncoderFacts.of(PretrainedEncoder("timm:tiny", net, 8, net.mean, net.std, fingerprint(net)))
    safetensors.torch.save_file(net.state_dict(), tmp_path / "encoder.safetensors")
    back = stored_encoder(tmp_path / "encoder.safetensors", facts)
    assert asked[1:] == [("tiny", 8, False)]
    assert EncoderFacts.of(back) == facts
    assert not back.net.training


def test_gray_encoders_work_too(photos, tmp_path):
    run = make_run(tmp_path / "run", channels=1)
    model = make_model(photos, run)
    model.save_pretrained(tmp_path / "model")
    assert list(OpenConModel.from_pretrained(tmp_path / "model").predict(photos)) == list(model.predict(photos))


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_not_a_model(tmp_path, run):
    for folder in (tmp_path, run, tmp_path / "absent"):
        with pytest.raises(RunError, match=r"holds no model \(no model.json\). Give the folder that `opencon discover"):
            OpenConModel.from_pretrained(folder)
    (tmp_path / "model.json").write_text('{"name": "somebody else"}')
    with pytest.raises(RunError, match="is not a model of opencon"):
        OpenConModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("number", "way_out"), [(2, "Run the discovery again."), (4, "Run: pip install --upgrade opencon")]
)
def test_another_format_says_what_to_do(saved, number, way_out):
    edit(saved, format=number, opencon="9.1")
    with pytest.raises(RunError, match=rf"has format {number} \(opencon 9.1\).* reads format 3. {way_out}"):
        OpenConModel.from_pretrained(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00garbage", b'{"format": 3}', b'{"format": "one"}', b"[1]"])
def test_damaged_settings(saved, content):
    (saved / "model.json").write_bytes(content)
    with pytest.raises(RunError, match=r"cannot be read \(.*Copy it again, or run the discovery again.|is not a model"):
        OpenConModel.from_pretrained(saved)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_damaged_tensors(model, saved, damage):
    path = saved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    new = {"cut": content[:-100], "flip": content, "empty": b"", "other": safetensors.torch.save({"a": torch.ones(2)})}
    path.write_bytes(new[damage])
    with pytest.raises(RunError, match=r"model.safetensors does not belong to model.json, or is damaged"):
        OpenConModel.from_pretrained(saved)


def test_missing_tensors(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has model.json but no model.safetensors. Copy the whole folder."):
        OpenConModel.from_pretrained(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"class_names": ["a", "b"]},
        {"class_names": 3},
        {"sizes": None},
        {"classifier": {"dim": 3}},
        {"classifier": {"num_features": 128, "dim": 32, "num_seen": 2, "num_classes": 9}},
        {"features": {"encoder": 5}},
        {"features": {"colour": 5}},
        {"encoder": {}},
        {"example_files": [["a"]]},
    ],
)
def test_settings_that_do_not_fit(saved, changes):
    edit(saved, **changes)
    with pytest.raises(RunError, match=r"the model in .* cannot be read"):
        OpenConModel.from_pretrained(saved)


def test_a_device_that_is_not_there(saved):
    with pytest.raises(ConfigError, match="is not a device"):
        OpenConModel.from_pretrained(saved, "gpu")
    assert OpenConModel.from_pretrained(saved, torch.device("cpu")).device == CPU


def test_a_damaged_encoder(pretrained, photos):
    path = pretrained / "encoder.safetensors"
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-10])
    back = OpenConModel.from_pretrained(pretrained)
    with pytest.raises(DataError, match=r"the encoder .* cannot be read .* Copy the whole folder"):
        back.predict(photos)
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"not the one that this model was trained with \(other weights\)"):
        back.predict(photos)
    path.unlink()
    with pytest.raises(DataError, match=r"the encoder .* cannot be read"):
        back.predict(photos)


def test_an_encoder_that_was_trained_on_is_refused(photos, tmp_path):
    run = make_run(tmp_path / "run")
    make_model(photos, run).save(tmp_path / "model")
    make_run(tmp_path / "run", seed=1)
    back = OpenConModel.from_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match=r"(?s)run' is not the one .* \(other weights\). Put the old one back"):
        back.predict(photos)
    make_run(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"encoder": {"mean": [0.1], "std": [1.0]}}')
    with pytest.raises(RunError, match=r"\(other mean, std\)"):
        back.predict(photos)


def test_a_save_that_is_cut_short_is_noticed_and_leaves_nothing_behind(model, saved, monkeypatch):
    def fail(self, name, data):
        raise KeyboardInterrupt

    other = replace(model, example_rows=-model.example_rows)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_json", fail)
        with pytest.raises(KeyboardInterrupt):
            other.save(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["model.json", "model.safetensors"]
    with pytest.raises(RunError, match="does not belong to"):
        OpenConModel.from_pretrained(saved)
    other.save(saved)
    same(other, OpenConModel.from_pretrained(saved))


def test_a_folder_with_other_things_is_left_alone(model, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no model"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    with pytest.raises(RunError, match="cannot create the folder"):
        model.save(tmp_path / "README.md" / "model")


# --- the card ---------------------------------------------------------------------------------------------------------


def test_the_card_counts_groups_of_one_name_as_one(model, tmp_path):
    model.renamed({"new-1": "red", "new-2": "sky"}).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text("utf-8")
    assert f"| red | seen | {model.sizes[0] + model.sizes[2]} |" in card
    assert "recognizes 2 seen classes" in card
    assert "and 1 new group that" in " ".join(card.split())


def test_the_card_leaves_out_groups_that_no_photo_fell_into(model, tmp_path):
    replace(model, sizes=(*model.sizes[:3], 0)).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "and 1 new group that" in " ".join(card.split())
    assert "| new-1 | new |" in card
    assert "| new-2 |" not in card


def test_the_card_says_what_the_model_is(model, photos, tmp_path, monkeypatch, capsys):
    model.save_pretrained(tmp_path, title="Colors", facts={"photos": "48 made up | ones", "labels": "10"})
    card = (tmp_path / "README.md").read_text("utf-8")
    assert "\n# Colors\n" in card
    assert "recognizes 2 seen classes" in card
    assert "2 new groups" in card
    for c, name in enumerate(NAMES):
        assert f"| {name} | {'seen' if c < 2 else 'new'} | {model.sizes[c]} |" in card
    assert "| photos | 48 made up \\| ones |" in card
    assert "| encoder | convnet at 8 px |" in card
    for section in ("## How it was made", "## Use", "## Intended use", "## Limits"):
        assert section in card
    assert "{" not in card.replace('{"images": images}', "")
    monkeypatch.chdir(tmp_path)
    Image.open(photos[0]).save("photo.jpg")
    code = card.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("photo.jpg red ")
