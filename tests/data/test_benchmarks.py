import dataclasses
import hashlib
import io
import os
import pickle
import tarfile
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.config import DataConfig
from opencon.data import benchmarks
from opencon.data.benchmarks import CIFAR_FILES, DATASETS, data_root, dataset_info, load_dataset, unpickle_plain
from opencon.errors import ConfigError, DataError
from tests.data.test_cifar_images import as_images

NAMES = {"cifar10": 10, "cifar100": 100}
IMAGES_PER_FILE = 7


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch, tmp_path):
    """Neither the user's own data nor the network is ever touched."""
    monkeypatch.setenv("OPENCON_DATA", str(tmp_path / "default"))

    def offline(url, timeout=None):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", offline)


def cifar_contents(name):
    """Files laid out like the official ones, with few images: {member: pickled bytes}, and the plain parts."""
    files, num_classes = CIFAR_FILES[name], NAMES[name]
    rng = np.random.default_rng(0)
    plain = {}
    for member in [*files.train, *files.test]:
        plain[member] = {
            "data": rng.integers(0, 256, (IMAGES_PER_FILE, 3072), dtype=np.uint8),
            files.labels_key: rng.integers(0, num_classes, IMAGES_PER_FILE).tolist(),
            "filenames": ["x.png"] * IMAGES_PER_FILE,
        }
    (meta,) = files.meta
    plain[meta] = {files.names_key: [f"class {c}" for c in range(num_classes)]}
    return {member: pickle.dumps(content, protocol=2) for member, content in plain.items()}, plain


def expect(monkeypatch, name, contents, archive=b""):
    """Make the checksum table that of these contents."""
    files = CIFAR_FILES[name]
    sums = {part: {m: md5(contents[m]) for m in getattr(files, part)} for part in ("train", "test", "meta")}
    monkeypatch.setitem(CIFAR_FILES, name, dataclasses.replace(files, archive_md5=md5(archive), **sums))


def write_folder(root, name, contents):
    folder = root / CIFAR_FILES[name].folder
    folder.mkdir(parents=True)
    for member, content in contents.items():
        (folder / member).write_bytes(content)
    return folder


def tar_bytes(name, contents):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in {**contents, "readme.html": b"hello"}.items():
            entry = tarfile.TarInfo(f"{CIFAR_FILES[name].folder}/{member}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def write_archive(root, name, content):
    root.mkdir(parents=True, exist_ok=True)
    path = root / CIFAR_FILES[name].archive
    path.write_bytes(content)
    return path


# --- the registry -----------------------------------------------------------------------------------------------------


def test_names():
    photos = {"cub200", "fgvc_aircraft", "herbarium19", "imagenet100", "imagenet1k", "stanford_cars"}
    assert {*DATASETS.names()} == {"cifar10", "cifar100", "digits", "folder", "list"} | photos
    for name in DATASETS.names():
        info = DATASETS[name].info
        assert info.name == name
        assert len(info.mean) == len(info.std) == info.channels
        assert info.needs


def test_unknown_name():
    with pytest.raises(ConfigError, match=r"unknown data set 'cifar1000'. Did you mean 'cifar100'\?"):
        dataset_info(DataConfig(name="cifar1000"))


def test_data_root(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root(DataConfig(name="cifar10", root="~/here")) == tmp_path / "here"
    assert data_root(DataConfig(name="cifar10")) == tmp_path / "default"
    monkeypatch.delenv("OPENCON_DATA")
    assert data_root(DataConfig(name="cifar10")) == tmp_path / ".cache" / "opencon"


@pytest.mark.parametrize(("name", "own"), [("digits", 8), ("cifar10", 32)])
def test_image_size_of_a_fixed_data_set(name, own):
    message = (
        rf"image_size = 64, but the images of {name} are {own} pixels wide. Leave image_size out; it is for data sets "
    )
    with pytest.raises(ConfigError, match=message):
        dataset_info(DataConfig(name=name, image_size=64))
    dataset_info(DataConfig(name=name, image_size=own), download=True)


# --- digits -----------------------------------------------------------------------------------------------------------


def test_digits():
    data = load_dataset(DataConfig(name="digits"))
    assert data.info == dataset_info(DataConfig(name="digits"))
    assert data.train.images.shape == (1797, 1, 8, 8) == (data.info.num_train, data.info.channels, 8, 8)
    assert data.train.class_names == tuple("0123456789")
    assert data.train.classes[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (int(data.train.images.min()), int(data.train.images.max())) == (0, 255)
    assert data.train.images[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]  # 0 0 5 13 9 1 0 0 of 16
    pixels = data.train.images.double() / 255
    assert data.info.mean == (pytest.approx(float(pixels.mean()), abs=5e-5),)
    assert data.info.std == (pytest.approx(float(pixels.std()), abs=5e-5),)


def test_digits_have_no_test_images():
    data = load_dataset(DataConfig(name="digits"))
    assert data.test is None
    with pytest.raises(DataError, match=r"^digits has no held-out test images; use eval\.on=unlabeled$"):
        data.held_out()


def test_digits_need_no_root():
    with pytest.warns(UserWarning, match="data.root = 'x' has no effect: digits come with scikit-learn"):
        dataset_info(DataConfig(name="digits", root="x"))


# --- CIFAR ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "itself", "archive"])
@pytest.mark.parametrize("name", NAMES)
def test_cifar(name, kind, tmp_path, monkeypatch):
    contents, plain = cifar_contents(name)
    expect(monkeypatch, name, contents)
    root = tmp_path / "data"
    if kind == "archive":
        write_archive(root, name, tar_bytes(name, contents))
    else:
        folder = write_folder(root, name, contents)
        root = folder if kind == "itself" else root
    before = sorted(os.walk(root))
    config = DataConfig(name=name, root=str(root))
    assert dataset_info(config).num_classes == NAMES[name]
    data = load_dataset(config)
    files = CIFAR_FILES[name]
    for part, got in ((files.train, data.train), (files.test, data.held_out())):
        want = np.concatenate([plain[m]["data"] for m in part])
        assert got.images.shape == (IMAGES_PER_FILE * len(part), 3, 32, 32)
        # a row is 1024 red, then 1024 green, then 1024 blue values, row by row
        for i, channel, y, x in [(0, 0, 0, 0), (3, 1, 2, 5), (6, 2, 31, 30)]:
            assert got.images[i, channel, y, x] == want[i, channel * 1024 + y * 32 + x]
        assert got.classes.tolist() == [c for m in part for c in plain[m][files.labels_key]]
        assert got.classes.dtype == torch.int64
        assert got.class_names[3] == "class 3"
    assert sorted(os.walk(root)) == before


def test_official_files_come_before_image_files(tmp_path, monkeypatch):
    as_images(tmp_path)
    contents, _ = cifar_contents("cifar10")
    expect(monkeypatch, "cifar10", contents)
    write_folder(tmp_path, "cifar10", contents)
    data = load_dataset(DataConfig(name="cifar10", root=str(tmp_path)))
    assert len(data.train) == 5 * IMAGES_PER_FILE


def test_the_official_counts():
    for name, num_classes in NAMES.items():
        info = DATASETS[name].info
        assert (info.num_classes, info.num_train, info.num_test, info.image_size) == (num_classes, 50_000, 10_000, 32)


def test_missing_files(tmp_path):
    config = DataConfig(name="cifar100", root=str(tmp_path))
    for look in (dataset_info, load_dataset):
        with pytest.raises(
            DataError, match=r"looked for .*/cifar-100-python.tar.gz and .*/cifar-100-python\. .*--download"
        ):
            look(config)
    dataset_info(config, download=True)


def test_folder_with_a_file_missing(tmp_path, monkeypatch):
    contents, _ = cifar_contents("cifar10")
    folder = write_folder(tmp_path, "cifar10", contents)
    (folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-py \(data_batch_3 missing there\)"):
        dataset_info(DataConfig(name="cifar10", root=str(tmp_path)))


def test_wrong_checksums(tmp_path):
    """Against the official table every made-up file is a damaged one, and is never unpickled."""
    contents, _ = cifar_contents("cifar10")
    folder = write_folder(tmp_path / "a", "cifar10", contents)
    again = "delete it and download again with --download"
    with pytest.raises(DataError, match=rf"corrupt archive {folder}/data_batch_1 \(.*wrong checksum\): {again}"):
        load_dataset(DataConfig(name="cifar10", root=str(tmp_path / "a")))
    archive = write_archive(tmp_path / "b", "cifar10", tar_bytes("cifar10", contents))
    with pytest.raises(DataError, match=rf"corrupt archive {archive} \(data_batch_1 has the wrong checksum\): {again}"):
        load_dataset(DataConfig(name="cifar10", root=str(tmp_path / "b")))


@pytest.mark.parametrize("damage", ["cut", "not a tar", "empty", "flipped", "member missing"])
def test_damaged_archive(damage, tmp_path, monkeypatch):
    contents, _ = cifar_contents("cifar100")
    expect(monkeypatch, "cifar100", contents)
    whole = tar_bytes("cifar100", contents)
    middle = len(whole) // 2
    content = {
        "cut": whole[:middle],
        "not a tar": b"<html>404</html>",
        "empty": b"",
        "flipped": whole[:middle] + bytes(255 - b for b in whole[middle : middle + 64]) + whole[middle + 64 :],
        "member missing": tar_bytes("cifar100", {m: contents[m] for m in ("train", "meta")}),
    }[damage]
    write_archive(tmp_path, "cifar100", content)
    with pytest.raises(DataError, match=r"corrupt archive .*tar.gz .*: delete it and download again"):
        load_dataset(DataConfig(name="cifar100", root=str(tmp_path)))


class Malice:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path, monkeypatch):
    marker = str(tmp_path / "executed")
    contents, _ = cifar_contents("cifar100")
    contents["train"] = pickle.dumps({"data": Malice(marker)}, protocol=2)
    expect(monkeypatch, "cifar100", contents)
    write_folder(tmp_path, "cifar100", contents)
    with pytest.raises(
        DataError, match=r"refused to load train in .*: it asks for \w+\.mkdir, which plain arrays do not"
    ):
        load_dataset(DataConfig(name="cifar100", root=str(tmp_path)))
    assert not os.path.exists(marker)
    pickle.loads(contents["train"])  # the test can fail: plain pickle does run it
    assert os.path.exists(marker)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps({"a": 1})[:-3],
        b"cbuiltins\neval\n(S'1+1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        pickle.dumps(np.random.default_rng(0)),
    ],
)
def test_pickles_that_are_no_plain_arrays(content):
    with pytest.raises(DataError, match="refused to load it"):
        unpickle_plain(content, "it")


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_plain_arrays_pass(protocol):
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    got = unpickle_plain(pickle.dumps({"a": array, "b": ["x", 1, None]}, protocol=protocol), "it")
    assert got["a"].tolist() == array.tolist()
    assert got["a"].dtype == np.uint8
    assert got["b"] == ["x", 1, None]


def test_old_module_name_of_numpy():
    """The official files were written by an old NumPy, under another module name."""
    content = pickle.dumps(np.arange(3), protocol=2)
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert unpickle_plain(old, "it").tolist() == [0, 1, 2]
    new = content.replace(b"numpy.core.multiarray", b"numpy._core.multiarray")
    assert unpickle_plain(new, "it").tolist() == [0, 1, 2]


# --- download ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def official(monkeypatch):
    """A made-up official archive and a server that has it; lists the addresses asked for."""
    contents, _ = cifar_contents("cifar100")
    archive = tar_bytes("cifar100", contents)
    expect(monkeypatch, "cifar100", contents, archive)
    asked = []

    def serve(url, timeout=None):
        asked.append(url)
        return io.BytesIO(archive)

    monkeypatch.setattr(urllib.request, "urlopen", serve)
    return asked


def test_download(official, tmp_path):
    config = DataConfig(name="cifar100", root=str(tmp_path / "new" / "place"))
    assert len(load_dataset(config, download=True).train) == IMAGES_PER_FILE
    assert official == ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"]
    assert os.listdir(tmp_path / "new" / "place") == ["cifar-100-python.tar.gz"]
    load_dataset(config, download=True)
    load_dataset(config)
    assert len(official) == 1  # what is there is not fetched again


def test_damaged_download_leaves_nothing(official, tmp_path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout=None: io.BytesIO(b"<html>sorry</html>"))
    with pytest.raises(DataError, match=r"the download of https://.*cifar-100-python.tar.gz arrived damaged"):
        load_dataset(DataConfig(name="cifar100", root=str(tmp_path)), download=True)
    assert os.listdir(tmp_path) == []


def test_interrupted_download_leaves_nothing(official, tmp_path, monkeypatch):
    class Broken(io.BytesIO):
        def read(self, size=-1):
            if self.tell():
                raise ConnectionResetError("reset by peer")
            return super().read(10)

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout=None: Broken(b"x" * 100))
    with pytest.raises(DataError, match=r"cannot download .*\(reset by peer\)"):
        load_dataset(DataConfig(name="cifar100", root=str(tmp_path)), download=True)
    assert os.listdir(tmp_path) == []


def test_no_network(tmp_path):
    where = rf"{tmp_path}/cifar-100-python.tar.gz"
    with pytest.raises(DataError, match=rf"cannot download https://.* to {where} \(.*no network.*Fetch it by hand"):
        load_dataset(DataConfig(name="cifar100", root=str(tmp_path)), download=True)


# --- your own files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    for name in ("cat", "dog", "emu"):
        (root / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (20, 10)).save(root / name / f"{i}.png")
    (root / "dog" / "1.png").write_bytes(b"")
    return root


def test_folder(photos):
    config = DataConfig(name="folder", root=str(photos), image_size=12)
    info = dataset_info(config)
    assert (info.num_classes, info.num_train, info.num_test, info.image_size) == (3, 6, 0, 12)
    data = load_dataset(config)
    assert data.train.images.shape == (5, 3, 12, 12)
    assert data.info.num_train == 5  # one proved unreadable
    assert len(data.train.problems) == 1
    with pytest.raises(DataError, match="folder has no held-out test images"):
        data.held_out()


def test_list(photos):
    path = photos / "list.txt"
    path.write_text("cat/0.png b\ncat/1.png a\ndog/0.png b\n")
    config = DataConfig(name="list", root=str(path), image_size=12)
    info = dataset_info(config)
    assert (info.num_classes, info.num_train, info.image_size) == (2, 3, 12)
    assert load_dataset(config).train.classes.tolist() == [1, 0, 1]


def test_looking_decodes_nothing(photos, monkeypatch):
    monkeypatch.setattr(Image, "open", None)
    assert dataset_info(DataConfig(name="folder", root=str(photos))).image_size == benchmarks.IMAGE_SIZE == 224


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "'folder' needs data.root: the folder with one sub-f"),
        ("list", "'list' needs data.root: the list file"),
    ],
)
def test_own_files_need_a_root(name, message):
    with pytest.raises(ConfigError, match=message):
        dataset_info(DataConfig(name=name))


def test_missing_own_files_are_found_early(tmp_path):
    with pytest.raises(DataError, match="there is no folder"):
        dataset_info(DataConfig(name="folder", root=str(tmp_path / "no")), download=True)
    with pytest.raises(DataError, match="there is no list file"):
        dataset_info(DataConfig(name="list", root=str(tmp_path / "no")))
