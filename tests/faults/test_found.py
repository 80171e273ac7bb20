"""What a torture test has found once, each as a user would meet it."""

import contextlib
import csv
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from opencon import cli
from opencon.config import with_settings
from opencon.data.benchmarks import CIFAR_FILES, _read_archive
from opencon.data.tables import read_table
from opencon.errors import ConfigError, DataError, RunError
from opencon.experiments.recipes import get_recipe, read_config
from opencon.experiments.results import Predictions, renamed
from opencon.photos import discover as discovering
from opencon.photos import set_aside
from opencon.photos.discover import open_folder
from opencon.photos.listing import typical_side
from opencon.photos.names import _read_assignments, _read_rows
from opencon.photos.pieces import pieces_of
from opencon.photos.run_model import is_run
from opencon.report import embed as report_embed
from opencon.report.figures import blank_figure, embedding_figure, save_png
from opencon.report.paper_figures import class_figure, confusion_figure
from opencon.report.side_by_side import Panel, confusions_figure, maps_figure
from opencon.report.sweep_chart import sweep_chart
from opencon.report.table import PhotoRow, PhotoTable, as_text, from_text
from opencon.review.run import open_run
from opencon.review.take import Taken, sort_photos
from opencon.training.run_folder import RunFolder
from tests.test_cli import opencon, refused

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("encoder.head_hidden=-5", "encoder.head_hidden = -5 must lie between 1 and"),
        ("encoder.head_hidden=0", "encoder.head_hidden = 0 must lie between 1 and"),
        ("encoder.head_dim=99999999999", "encoder.head_dim = 99999999999 must lie between 2 and"),
        ("augment.size=99999999", "augment.size = 99999999 must lie between 8 and"),
        ("augment.rand_ops=99999", "augment.rand_ops = 99999 must lie between 0 and 100"),
        ("data.image_size=99999999", "data.image_size = 99999999 must lie between 8 and"),
        ("train.lr=1e400", "train.lr = inf must be"),
        ("train.weight_decay=NaN", "train.weight_decay = nan must"),
        ("method.weight_novel=Infinity", "method.weight_novel = inf must be"),
        ("train.seed=18446744073709551616", "train.seed = 18446744073709551616 must be a whole number from 0 to"),
        ("split.seed=4294967296", "split.seed = 4294967296 must be a whole number from 0 to"),
        ("split.labeled_ratio=1e-320", "training images are labeled, which is none"),
        ("train.seed=" + "1" * 5000, "must be a whole number"),
        ("train.lr=1" + "0" * 400, "is larger than any number here can be"),
        ("train.lr=" + "[" * 5000, "must be a number"),
    ],
)
def test_what_no_run_can_have_is_refused_before_it_starts(capsys, setting, why):
    message = refused(capsys, "train", "digits", "--set", setting, "--dry-run", "--device", "cpu")
    assert why in message
    assert len(message) < 400


def test_a_seed_may_be_as_large_as_random_streams_tell_apart():
    assert with_settings(get_recipe("digits"), [f"train.seed={2**63 - 1}"]).train.seed == 2**63 - 1
    with pytest.raises(ConfigError, match="2\\^63"):
        with_settings(get_recipe("digits"), [f"train.seed={2**63}"])


# --- pipes ------------------------------------------------------------------------------------------------------------


def test_no_pipe_is_waited_for(capsys, tmp_path):
    pipe = tmp_path / "a.jpg"
    os.mkfifo(pipe)
    assert typical_side((pipe,)) is None
    for name in ("labels.csv", "list.txt", "run.toml", "weights.pt", "encoder.safetensors"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="not a regular file"):
        read_table(tmp_path / "labels.csv", {"path": ("path",)})
    with pytest.raises(ConfigError, match="not a regular file"):
        read_config(tmp_path / "run.toml")
    for words in (
        ["discover", tmp_path, "--labels", "labels.csv", "--dry-run"],
        ["discover", tmp_path, "--labels", "labels.csv", "--encoder", "encoder.safetensors", "--dry-run"],
        ["train", "digits", "--weights", "weights.pt", "--epochs", "1", "--out", "out"],
    ):
        assert opencon(capsys, *words).code == 2


# --- folders of discoveries -------------------------------------------------------------------------------------------


def test_half_of_a_discoverys_first_file_is_no_strange_folder(tmp_path):
    (tmp_path / "discovery.json.partial").write_text("{")
    open_folder(tmp_path)
    assert (tmp_path / "discovery.json").is_file()


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    def full(data, path):
        raise OSError(28, "No space left on device", str(path))

    with (
        pytest.raises(RunError, match=r"report.html: the disk is full"),
        discovering.explained(tmp_path / "report.html"),
    ):
        full(None, tmp_path / "report.html")


@pytest.mark.parametrize("content", [b"file,given\na,b\n", b"error\n" * 3, b"file,given,error\na\n"])
def test_a_damaged_table_of_a_discovery_is_said(tmp_path, content):
    path = tmp_path / "assignments.csv"
    path.write_bytes(content)
    with pytest.raises(RunError, match="cannot be read"):
        _read_assignments(path)


@pytest.mark.parametrize(
    "array", [np.zeros((3, 4), np.float64), np.zeros(3, np.float32), np.zeros((3, 5), np.float32), None]
)
def test_damaged_embeddings_are_said(tmp_path, array):
    path = tmp_path / "embeddings.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00\xff\xff")
    if array is not None:
        np.save(path, array)
    with pytest.raises(RunError, match="cannot be read"):
        _read_rows(path, 4)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1", "@x", "'=x", "''-x", "cat", "'cat", "", "\t=1"])
def test_no_name_becomes_a_formula_and_every_name_comes_back(name):
    cell = as_text(name)
    assert not cell.startswith(("=", "+", "-", "@", "\t"))
    assert from_text(cell) == name


def test_formulas_and_bars_in_assignments():
    row = PhotoRow(
        file="-a|b.jpg",
        closest="=HYPERLINK(1)",
        kind="seen",
        confidence=0.5,
        novelty=-0.25,
        unlike_everything=False,
        given="+x",
        nearest=("a|b.jpg", "c\\d.jpg"),
    )
    line = next(csv.DictReader(io.StringIO(PhotoTable((row,), ("=HYPERLINK(1)",), 1).to_csv())))
    assert (line["file"], line["predicted"], line["given"]) == ("'-a|b.jpg", "'=HYPERLINK(1)", "'+x")
    assert line["novelty"] == "-0.2500"  # a number stays a number
    assert line["nearest"] == "a\\|b.jpg|c\\\\d.jpg"


def test_a_class_name_that_is_no_text_on_a_strict_terminal(tmp_path):
    for name in (b"caf\xe9", b"dog"):
        folder = os.path.join(os.fsencode(tmp_path), b"labeled", name)
        os.makedirs(folder)
        for i in range(3):
            Image.new("RGB", (16, 16), (i, 0, 0)).save(
                os.path.join(folder, b"%d.png" % i).decode("utf-8", "surrogateescape")
            )
    (tmp_path / "unlabeled").mkdir()
    for i in range(3):
        Image.new("RGB", (16, 16), (0, i, 0)).save(tmp_path / "unlabeled" / f"{i}.png")
    words = [sys.executable, "-m", "opencon", "discover", str(tmp_path), "--dry-run", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8:strict"}
    ran = subprocess.run(words, capture_output=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert b"caf\\udce9" in ran.stdout


@pytest.mark.parametrize(
    "words", [["discover", "x" * 5000, "--dry-run"], ["evaluate", "y/" * 4000], ["compare", "z" * 5000]]
)
def test_paths_longer_than_the_system_takes_are_a_sentence(capsys, words):
    ran = opencon(capsys, *words)
    assert ran.code == 2
    assert ran.err.startswith("opencon: ")
    assert len(ran.err.replace("\n", "")) < 12_000


def test_memory_that_is_not_there_is_a_sentence(capsys, monkeypatch):
    for error in (
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
    ):

        def fail(error=error, **words):
            raise error

        monkeypatch.setattr(cli, "app", fail)
        with pytest.raises(SystemExit) as stop:
            cli.main([])
        assert stop.value.code == 2
        assert "not enough memory" in capsys.readouterr().err


ODD = ("caf\udce9", "a$b$ $\\frac{1", "_background", "\u202e=1")


def test_odd_class_names_are_drawn_as_they_are(tmp_path):
    rng, truth = np.random.default_rng(0), np.arange(4).repeat(3)
    z, predicted = rng.normal(size=(12, 5)), rng.permutation(truth)
    given = {"num_seen": 2, "class_names": ODD, "title": ODD[0], "path": tmp_path / "a.png"}
    embedding_figure(z, truth, predicted, None, threshold=None, **given)
    class_figure(z, truth, **given)
    confusion_figure(predicted, truth, **given)
    panel = Panel(title=ODD[1], z=z, truth=truth, num_seen=2, class_names=dict(enumerate(ODD)), predicted=predicted)
    maps_figure([panel], path=tmp_path / "b.png")
    confusions_figure([panel], path=tmp_path / "c.png")
    sweep_chart(
        {name: [(name, 1.0, 0.1)] for name in ODD}, x_title="x", y_title="y", title=ODD[2], path=tmp_path / "d.png"
    )


def test_a_picture_on_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=r"a.png: the disk is full"):
        save_png(blank_figure((1, 1)), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_all_who_decode_share_the_pixel_budget(monkeypatch, tmp_path):
    taken = []

    class Budget:
        def take(self, pixels):
            taken.append(pixels)
            return contextlib.nullcontext()

    for module in (report_embed, set_aside):
        monkeypatch.setattr(module, "BUDGET", Budget())
    assert report_embed.jpeg(lambda: Image.new("RGB", (300, 20)), 64, 70)
    noise = np.random.default_rng(0).integers(0, 255, (300, 20, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    assert set_aside.shows_nothing(tmp_path / "a.png")
    assert taken == [6000] * 3


# --- numbers and addresses that nobody means ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["sweep", "digits", "--seeds", "1" * 5000], r"(5,002 characters) must look like"),
        (["sweep", "digits", "--seeds", "0-999999999999"], "names 1,000,000,000,000 seeds"),
        (["sweep", "digits", "--minutes", "nan"], "--minutes nan must be a number of minutes"),
        (["sweep", "digits", "--at-once", "100000"], "--at-once 100000 must lie between 1 and 1000"),
        (["paper", "main", "--minutes", "inf"], "--minutes inf must be a number of minutes"),
        (["embed", "photos", "--out", "out", "--workers", "100000"], "--workers 100000 between 1 and 1000"),
        (["embed", "nothing://a", "--out", "out"], "cannot look into nothing://a (ValueError: Protocol not known"),
    ],
)
def test_what_nobody_means_is_refused(capsys, words, why):
    assert why in refused(capsys, *words)


def test_an_address_whose_package_is_missing_is_said(monkeypatch):
    def missing(source):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(DataError, match=r"addresses with s3:// need a package of their own.*Install s3fs"):
        pieces_of("s3://bucket/photos", 8)


def test_a_pipe_as_plugin_or_photo_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "a.py")
    assert "a.py: the file cannot be read (it is not a regular file)" in refused(
        capsys, "train", "digits", "--import", "a.py", "--dry-run"
    )
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(RunError, match=r"stopped at .*a.jpg \(there is no such file any more"):
        sort_photos([Taken("a.jpg", "cat", False)], tmp_path, tmp_path / "out")


# --- archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["nowhere", "cifar-100-python/train", "/etc/passwd"])
def test_a_link_in_an_archive_is_not_followed(tmp_path, target):
    files = CIFAR_FILES["cifar100"]
    with tarfile.open(tmp_path / files.archive, "w:gz") as tar:
        for name in files.members:
            member = tarfile.TarInfo(f"{files.folder}/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    with pytest.raises(DataError, match="train is not in it"):
        _read_archive(tmp_path / files.archive, files)


def test_endless_nesting_in_a_discovery_is_a_sentence(tmp_path, capsys):
    (tmp_path / "model.json").write_text("[" * 50_000)
    (tmp_path / "names.csv").write_text("group,name\nnew-1,cat\n")
    assert not is_run(tmp_path)
    refused(capsys, "name", tmp_path, tmp_path / "names.csv")
    (tmp_path / "assignments.csv").write_text("file\n")
    (tmp_path / "discovery.json").write_text("[" * 50_000)
    with pytest.raises(RunError, match="nested too deeply"):
        open_run(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"class_names": 3}'])
def test_damaged_classes_of_a_run_are_a_sentence_for_its_predictions_too(tmp_path, content):
    (tmp_path / "classes.json").write_text(content)
    found = Predictions(("a",), np.zeros(1, int), np.zeros(1, int), ("b",), ("b",), 1, None, None)
    with pytest.raises(RunError, match=r"classes\.json is damaged"):
        renamed(found, RunFolder(tmp_path))
