"""CIFAR as image files: in the official order, packed when first read."""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.config import DataConfig, with_settings
from opencon.data import cifar_images
from opencon.data.benchmarks import DATASETS, dataset_info, load_dataset
from opencon.errors import DataError
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import train


def as_images(root, per_class=4):
    """A tiny CIFAR-10 as image files, named by their number in an order that runs through the classes."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 10 * per_class, 32, 32, 3), dtype=np.uint8)
    for part, images in zip(("train", "test"), pixels, strict=True):
        for i, image in enumerate(images):
            folder = root / part / f"class {i % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{i}.png")
    return pixels


def check(root, pixels):
    config = DataConfig(name="cifar10", root=str(root))
    info, data = dataset_info(config), load_dataset(config)
    assert (info.num_train, info.num_test) == (len(pixels[0]), len(pixels[1]))
    assert info.class_names == data.train.class_names == tuple(f"class {c}" for c in range(10))
    assert info.mean == DATASETS["cifar10"].info.mean
    for part, want in zip((data.train, data.held_out()), pixels, strict=True):
        assert torch.equal(part.images, torch.from_numpy(want).permute(0, 3, 1, 2))
        assert part.classes.tolist() == [i % 10 for i in range(len(want))]


def test_the_official_order_from_files_and_from_the_pack_alone(tmp_path, monkeypatch):
    pixels = as_images(tmp_path)
    check(tmp_path, pixels)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "cifar10.safetensors", tmp_path / "elsewhere")
    monkeypatch.setattr(cifar_images, "load_listing", lambda *a: pytest.fail("files were read again"))
    check(tmp_path, pixels)
    check(tmp_path / "elsewhere", pixels)


def test_a_file_more_makes_a_new_pack(tmp_path):
    pixels = as_images(tmp_path)
    check(tmp_path, pixels)
    more = np.concatenate([pixels[0], pixels[1][:1]])
    Image.fromarray(more[-1]).save(tmp_path / "train" / "class 0" / "40.png")
    os.utime(tmp_path / "train" / "class 0")  # on disks with coarse times
    check(tmp_path, (more, pixels[1]))
    check(tmp_path, (more, pixels[1]))


def test_without_a_place_for_the_pack_files_are_read_each_time(tmp_path, monkeypatch):
    pixels = as_images(tmp_path)

    def full(*args, **kwargs):
        raise OSError("no room")

    monkeypatch.setattr(cifar_images, "save_file", full)
    check(tmp_path, pixels)
    assert {path.name for path in tmp_path.iterdir()} == {"train", "test"}


def test_images_that_cannot_be_read_are_named_each_time(tmp_path):
    as_images(tmp_path)
    (tmp_path / "train" / "class 3" / "13.png").write_bytes(b"damaged")
    for _ in range(2):
        data = load_dataset(DataConfig(name="cifar10", root=str(tmp_path)))
        assert len(data.train) == 39
        assert "13.png" in data.train.problems[0]


@pytest.mark.parametrize("lost", ["train/class 3", "test/class 9", "test"])
def test_some_classes_are_no_cifar(lost, tmp_path):
    as_images(tmp_path)
    shutil.rmtree(tmp_path / lost)
    with pytest.raises(DataError, match=r"cifar10 is not there: .* or the images themselves in folders train/CLASS"):
        dataset_info(DataConfig(name="cifar10", root=str(tmp_path)))


def test_a_damaged_pack_says_what_to_do(tmp_path):
    (tmp_path / "cifar10.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"cannot read .*cifar10.safetensors .* Delete it"):
        dataset_info(DataConfig(name="cifar10", root=str(tmp_path)))


@pytest.mark.parametrize("recipe", ["simclr/cifar10", "opencon/cifar10", "concord/cifar10"])
def test_recipes_take_it_as_it_comes(recipe, tmp_path):
    as_images(tmp_path / "data", per_class=20)
    tiny = ["encoder.name=convnet", "encoder.train_from=all", "train.epochs=1", "train.batch_size=32"]
    config = with_settings(get_recipe(recipe), [f"data.root={tmp_path / 'data'}", *tiny, "train.compile=false"])
    result = train(config, tmp_path / "run", torch.device("cpu"))
    assert result["num_images"] > 0
    assert (tmp_path / "run" / "encoder.safetensors").exists()
