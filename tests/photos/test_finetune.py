from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from opencon.data.sources import read_images
from opencon.encoders.pretrained import open_encoder
from opencon.errors import ConfigError
from opencon.photos import finetune as finetuning
from opencon.photos.features import FeatureSettings
from opencon.photos.finetune import check_finetune, finetune, fingerprint_of
from opencon.training.run_folder import RunFolder
from tests.small_model import make_run

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path):
    """Paths, labels, and the classes that a fit has found."""
    paths = []
    for i in range(12):
        paths.append(tmp_path / f"{i}.png")
        Image.new("RGB", (32, 32), ((i % 3) * 100, 40 + 3 * i, 200)).save(paths[-1])
    return paths, torch.tensor([0, 1, -1] * 4), torch.tensor([0, 1, 2] * 3 + [0, 1, 0])


@pytest.fixture
def out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_json("config.json", {"features": {}})
    return folder


@pytest.fixture
def asked(monkeypatch):
    """What the short run was given, which trains nothing here."""
    asked = {}

    def short_run(method, images, labels, **how):
        asked.update(how, method=method, images=images, labels=labels)

    monkeypatch.setattr(finetuning, "short_run", short_run)
    return asked


def test_only_the_last_stages_move_and_the_file_opens_as_an_encoder(photos, out):
    told = []
    tuned = finetune(
        *photos,
        FeatureSettings(image_size=32),
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
    assert changed == {"stage6", "stage7", "last"}
    assert told[-1][0] == told[-1][1]


def test_the_size_of_the_encoder_is_kept_where_none_was_asked_for(photos, out, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    opened = replace(open_encoder(str(run), None), image_size=24)
    monkeypatch.setattr("opencon.photos.finetune.open_encoder", lambda name, size: opened)
    tuned = finetune(*photos, FeatureSettings(encoder=str(run)), num_classes=3, out=out, device=CPU, steps=1)
    assert tuned.image_size == 24


def test_it_starts_from_the_classes_there_are(photos, out, tmp_path, asked):
    """Two of nine unlabeled photos are said to be seen: ten of twelve are, and eight carry a label."""
    paths, _, classes = photos
    run = make_run(tmp_path / "run")
    finetune(*photos, FeatureSettings(encoder=str(run)), num_classes=3, out=out, device=CPU, steps=7)
    method = asked["method"]
    images = read_images(paths, 8)[0].float() / 255
    z = method.eval().embed(images).detach()
    for c in range(3):
        torch.testing.assert_close(method.classifier.weight[c].detach(), F.normalize(z[classes == c].sum(dim=0), dim=0))
    assert bool(method.is_started)
    assert method.task.labeled_ratio == pytest.approx(8 / 9)
    torch.testing.assert_close(method.shares, torch.tensor([2.0, 1.0, 4.0]) / 7)
    bank = asked["features"]()
    torch.testing.assert_close(bank.z, z)
    assert torch.equal(bank.labels, asked["labels"])
    assert (asked["steps"], asked["seed"]) == (7, 0)


def test_the_encoder_that_is_kept_is_the_average(photos, out, monkeypatch):
    """After one step the average has gone 9 of 11 parts of the way, as its warm-up says."""

    def one_step(method, images, labels, **how):
        with torch.no_grad():
            method.embedder.encoder.last.conv.weight.add_(1.0)
        method.twin.update()

    monkeypatch.setattr(finetuning, "short_run", one_step)
    finetune(*photos, FeatureSettings(image_size=32), num_classes=3, out=out, device=CPU)
    name = "last.conv.weight"
    start, kept = (
        open_encoder("efficientnet_lite0", 32).net.state_dict()[name],
        load_file(out.path / "encoder.safetensors"),
    )
    torch.testing.assert_close(kept[name], start + 9 / 11)


def test_a_stopped_run_is_known_by_its_photos_labels_and_classes(photos, out, asked):
    paths, labels, classes = photos
    finetune(*photos, FeatureSettings(image_size=32), num_classes=3, out=out, device=CPU)
    images = read_images(paths, 32)[0]
    own = torch.where(labels >= 0, labels, classes)
    assert fingerprint_of(images, labels, own) in asked["identity"]
    others = [(images.flip(0), labels, own), (images, labels.flip(0), own), (images, labels, own.flip(0))]
    assert len({fingerprint_of(*each) for each in [(images, labels, own), *others]}) == 4


def test_what_the_user_says_counts_more_than_a_prediction(photos, out, tmp_path, asked):
    """A labeled photo starts in its own class, whatever the fit called it; else a class could lose all its photos."""
    paths, labels, classes = photos
    run = make_run(tmp_path / "run")
    wrong = torch.where(labels >= 0, 2, classes)
    finetune(paths, labels, wrong, FeatureSettings(encoder=str(run)), num_classes=3, out=out, device=CPU, steps=1)
    right = torch.where(labels >= 0, labels, classes)
    z = asked["method"].eval().embed(read_images(paths, 8)[0].float() / 255).detach()
    for c in range(3):
        torch.testing.assert_close(
            asked["method"].classifier.weight[c].detach(), F.normalize(z[right == c].sum(dim=0), dim=0)
        )
    assert asked["method"].task.labeled_ratio <= 1


def test_a_photo_that_is_gone_takes_its_label_and_its_class_with_it(photos, out, asked):
    paths, labels, _ = photos
    paths[2].unlink()
    finetune(*photos, FeatureSettings(image_size=32), num_classes=3, out=out, device=CPU)
    assert torch.equal(asked["labels"], torch.cat([labels[:2], labels[3:]]))
    assert len(asked["images"]) == 11
    torch.testing.assert_close(asked["method"].shares, torch.tensor([2.0, 1.0, 3.0]) / 6)


def test_a_stopped_run_goes_on_to_the_same_weights(photos, tmp_path):
    def tune(name, **how):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir(exist_ok=True)
        folder.write_json("config.json", {"features": {}})
        finetune(*photos, FeatureSettings(image_size=32), num_classes=3, out=folder, device=CPU, steps=3, **how)
        return load_file(folder.path / "encoder.safetensors")

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    whole = tune("whole")
    with pytest.raises(KeyboardInterrupt):
        tune("stopped", progress=stop)
    assert (tmp_path / "stopped" / "checkpoint.pt").exists()
    told = []
    after = tune("stopped", progress=lambda done, total: told.append(done))
    assert told == [3], "two of three epochs are not repeated"
    start = open_encoder("efficientnet_lite0", 32).net.state_dict()
    moved = sum(float((whole[name].double() - start[name].double()).square().sum()) for name in whole)
    off = sum(float((whole[name].double() - after[name].double()).square().sum()) for name in whole)
    assert off < 1e-6 * moved, "rounding alone is between them"
    (tmp_path / "stopped" / "checkpoint.pt").unlink()  # a kill between two files leaves the older one
    told.clear()
    tune("stopped", progress=lambda done, total: told.append(done))
    assert told == [3]
    told.clear()
    again = tune("stopped", progress=lambda done, total: told.append(done))
    assert told == [], "a run that has ended is not trained again while its discovery is still at work"
    assert all(torch.equal(again[name], after[name]) for name in after)


def test_photos_without_any_label_teach_too(photos, out):
    paths, labels, classes = photos
    none = torch.full_like(labels, -1)
    tuned = finetune(paths, none, classes, FeatureSettings(image_size=32), num_classes=3, out=out, device=CPU, steps=2)
    assert all(bool(t.isfinite().all()) for t in open_encoder(tuned.encoder, 32).net.state_dict().values())


def test_gray_encoders_and_foreign_ones_are_refused(tmp_path):
    gray = open_encoder(str(make_run(tmp_path / "gray", channels=1)), None)
    with pytest.raises(ConfigError, match="works with encoders of color images"):
        check_finetune(gray, 12)
    with pytest.raises(ConfigError, match=r"works with .*resnet18.*, not with other"):
        check_finetune(replace(gray, name="other"), 12)


def test_refuses_what_does_not_fit_in_memory(photos, out, monkeypatch):
    monkeypatch.setattr("opencon.photos.finetune.MAX_GB", 1e-6)
    with pytest.raises(ConfigError, match="holds all photos in memory: 12 at 32 px"):
        finetune(*photos, FeatureSettings(image_size=32), num_classes=3, out=out, device=CPU, steps=1)
