"""Streamed images equal resident ones, and no file, no exception and no gone disk can hang or spoil a run."""

import subprocess
import sys
import threading
import time
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import opencon.data.sources as sources
import opencon.data.streaming as streaming
from opencon.config import AugmentConfig, DataConfig, EncoderConfig, EvalConfig, RunConfig, SplitConfig, TrainConfig
from opencon.data.augment import Augment
from opencon.data.benchmarks import load_dataset
from opencon.data.decoders import GRAY
from opencon.data.listings import list_folder
from opencon.data.loader import TwoStreamLoader
from opencon.data.sources import load_listing, read_images
from opencon.data.streaming import SLOTS, StreamedImages
from opencon.errors import ConfigError, DataError
from opencon.experiments.evaluate import evaluate_run
from opencon.experiments.train import Callbacks, train
from opencon.methods import OpenConConfig
from opencon.training.run_folder import RunFolder

CPU = torch.device("cpu")
SIZE = 16


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Four classes of 20 JPEGs each, of several shapes."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for c in range(4):
        (root / f"class{c}").mkdir()
        for i in range(20):
            shape = ((40, 30), (25, 50), (90, 70))[i % 3]
            small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(small).resize(shape).save(root / f"class{c}" / f"{i:02d}.jpg")
    return root


def both(root):
    """The same images, resident and streamed."""
    listing = list_folder(root)
    return load_listing(listing, SIZE), load_listing(listing, SIZE, memory_gb=0)


def numbers(n, **kwargs):
    """Made-up files: image i is filled with the number i."""
    return StreamedImages([Path(str(i)) for i in range(n)], 2, lambda path, size: filled(int(str(path))), **kwargs)


def filled(value):
    return np.full((3, 2, 2), value, dtype=np.uint8)


def until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


# --- the same images --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_batches", [0, 1, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS + 2])
@pytest.mark.parametrize("size", [1, 7, 8, 19])
def test_batches_are_the_rows_asked_for(num_batches, size):
    images = numbers(250, threads=3)
    rows = torch.randint(0, 250, (num_batches, size), generator=torch.Generator().manual_seed(size))  # with repeats
    buffer = images.buffer(size)
    got = []
    for batch in images.batches(rows.unbind() if num_batches else (), buffer):
        assert batch.data_ptr() == buffer.data_ptr()
        assert (batch == batch[:, :1, :1, :1]).all()
        got.append(batch[:, 0, 0, 0].tolist())
    assert got == rows.tolist()


def test_files_are_decoded_as_when_resident(photos):
    resident, streamed = both(photos)
    assert isinstance(streamed.images, StreamedImages)
    assert streamed.images.shape == resident.images.shape == (80, 3, SIZE, SIZE)
    assert len(streamed) == len(resident) == 80
    assert streamed.images.dtype == resident.images.dtype
    assert torch.equal(streamed.classes, resident.classes)
    assert streamed.files == resident.files
    chunks = [chunk.clone() for chunk in streamed.images.in_order(32)]
    assert [len(chunk) for chunk in chunks] == [32, 32, 16]
    assert torch.equal(torch.cat(chunks), resident.images)
    (whole,) = streamed.images.to(CPU).in_order(1000)
    assert torch.equal(whole, resident.images)


def loader(images, labels):
    augment = Augment(AugmentConfig(size=12), image_size=12, channels=3)
    return TwoStreamLoader(images, labels, batch_shares=(3, 5), augments=(augment, augment), seed=7)


@pytest.mark.parametrize("epochs", [(0, 1), (1,)])  # the second as after a resume
def test_every_step_gets_the_same_batch(photos, epochs):
    resident, streamed = both(photos)
    labels = torch.where(torch.arange(80) % 3 == 0, resident.classes, -1)
    a, b = loader(resident.images, labels), loader(streamed.images, labels)
    assert len(a) == len(b) == 9
    steps = []
    for epoch in epochs:
        draws = a.draw(epoch), b.draw(epoch)
        for step, other in zip(a.feed(draws[0]), b.feed(draws[1]), strict=True):
            x, y = a.batch(draws[0], torch.tensor([step])), b.batch(draws[1], torch.tensor([other]))
            assert torch.equal(x.labels, y.labels)
            assert all(torch.equal(v, w) for v, w in zip(x.views, y.views, strict=True))
            steps.append(step)
    assert steps == [*range(9)] * len(epochs)


def config(root, **data):
    return RunConfig(
        data=DataConfig(name="folder", root=str(root), image_size=SIZE, **data),
        split=SplitConfig(num_seen=2),
        encoder=EncoderConfig(name="convnet", train_from="conv2", frozen_norm="measured"),
        method=OpenConConfig(ramp_epochs=2),
        train=TrainConfig(epochs=3, batch_size=16, lr=0.05, save_seconds=0),
        eval=EvalConfig(every=1),
    )


def outcome(folder):
    """Weights and measures of a run."""
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in RunFolder(folder).read_metrics()]
    return RunFolder(folder).load_checkpoint()["method"], records


def assert_same_outcome(a, b):
    (weights, records), (others, other_records) = outcome(a), outcome(b)
    assert records == other_records
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[key], others[key]) for key in weights)


@pytest.fixture(scope="module")
def resident_run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "resident"
    said = []
    train(config(photos), out, CPU, callbacks=Callbacks(say=said.append))
    assert not said
    return out


def test_a_streamed_run_equals_a_resident_one(photos, resident_run, tmp_path, monkeypatch):
    monkeypatch.setattr("opencon.experiments.workbench.BATCH", 32)  # several chunks
    monkeypatch.setattr("opencon.training.embedding.BATCH", 32)
    said = []
    train(config(photos, memory_gb=0), tmp_path / "streamed", CPU, callbacks=Callbacks(say=said.append))
    assert said == ["The images would take 6.14e-05 GB: they are read from their files while training."]
    assert_same_outcome(resident_run, tmp_path / "streamed")
    record = evaluate_run(tmp_path / "streamed", CPU)
    assert record == {key: outcome(resident_run)[1][-1][key] for key in record}


def test_a_streamed_run_interrupted_and_resumed_in_memory_equals_a_resident_one(photos, resident_run, tmp_path):
    def interrupt(record):
        raise KeyboardInterrupt

    out = tmp_path / "resumed"
    with pytest.raises(KeyboardInterrupt):
        train(config(photos, memory_gb=0), out, CPU, callbacks=Callbacks(epoch_done=interrupt))
    with pytest.raises(KeyboardInterrupt):
        train(config(photos, memory_gb=0), out, CPU, callbacks=Callbacks(epoch_done=interrupt))
    assert RunFolder(out).load_checkpoint()["epochs_done"] == 2
    train(config(photos, memory_gb=1), out, CPU)
    assert_same_outcome(resident_run, out)


# --- when they are streamed -------------------------------------------------------------------------------------------


def test_images_are_streamed_beyond_the_limit_and_not_at_it(photos, monkeypatch):
    listing, gb = list_folder(photos), 80 * 3 * SIZE**2 / 1e9
    assert isinstance(load_listing(listing, SIZE, memory_gb=gb).images, torch.Tensor)
    assert isinstance(load_listing(listing, SIZE, memory_gb=gb * 0.999).images, StreamedImages)
    for limit, kind in ((gb, torch.Tensor), (gb * 0.999, StreamedImages)):
        monkeypatch.setattr(sources, "spare_memory_gb", lambda limit=limit: limit)
        data = load_dataset(DataConfig(name="folder", root=str(photos), image_size=SIZE))
        assert isinstance(data.train.images, kind)


def test_spare_memory_is_half_of_the_smaller_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pages = {"SC_PHYS_PAGES": 4_000_000, "SC_PAGE_SIZE": 4000}
    monkeypatch.setattr(sources.os, "sysconf", pages.__getitem__)
    assert sources.spare_memory_gb() == 8.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for gpu, spare in ((6e9, 3.0), (80e9, 8.0)):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i, gpu=gpu: type("P", (), {"total_memory": gpu})
        )
        assert sources.spare_memory_gb() == spare


@pytest.mark.parametrize("gb", [-1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none(gb):
    with pytest.raises(ConfigError, match=r"data\.memory_gb = .* must be a number of GB, 0 or more"):
        DataConfig(name="folder", memory_gb=gb)


# --- files that fail --------------------------------------------------------------------------------------------------


def test_files_that_are_no_images_are_set_aside_before_training(photos, tmp_path):
    for c in ("a", "b"):
        (tmp_path / c).mkdir()
        (tmp_path / c / "good.jpg").write_bytes((photos / "class0/00.jpg").read_bytes())
    (tmp_path / "a" / "empty.png").touch()
    (tmp_path / "b" / "words.jpg").write_text("not an image")
    resident, streamed = both(tmp_path)
    assert streamed.files == resident.files
    assert streamed.problems == resident.problems
    assert [p.rpartition("/")[2] for p in streamed.problems] == [
        "empty.png is empty",
        "words.jpg is not an image, whatever its name says",
    ]
    (tmp_path / "b" / "good.jpg").write_text("not an image either")
    with pytest.raises(DataError, match="class 'b' has no readable image"):
        load_listing(list_folder(tmp_path), SIZE, memory_gb=0)


def test_a_file_that_fails_later_is_gray_and_named_once(photos, tmp_path):
    paths = [tmp_path / f"{name}.jpg" for name in ("a", "b", "c")]
    whole = (photos / "class0/02.jpg").read_bytes()
    for path in paths:
        path.write_bytes(whole)
    paths[1].write_bytes(whole[: len(whole) // 2])  # its header is fine
    images = StreamedImages(paths, SIZE, sources._decode)
    good = read_images([paths[0]], SIZE)[0][0]
    with pytest.warns(UserWarning, match=r"/b\.jpg cannot be decoded \(OSError: .*\)\. A gray image takes its pl"):
        (batch,) = images.in_order(3)
    assert torch.equal(batch[0], good)
    assert (batch[1] == GRAY).all()
    assert torch.equal(batch[2], good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (again,) = images.in_order(3)
    assert torch.equal(again, batch)


def test_a_truncated_file_does_not_end_a_run(photos, tmp_path):
    for path in sorted(photos.rglob("*.jpg")):
        target = tmp_path / "photos" / path.relative_to(photos)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    target.write_bytes(path.read_bytes()[:-60])
    with pytest.warns(UserWarning, match=r"class3/19\.jpg cannot be decoded"):
        result = train(config(tmp_path / "photos", memory_gb=0), tmp_path / "run", CPU)
    assert np.isfinite(result["loss"])


def failing(bad, n):
    """Made-up files, of which those with `bad(number)` cannot be read."""

    def decode(path, size):
        if bad(int(str(path))):
            raise OSError("gone")
        return filled(int(str(path)) % 250)

    return StreamedImages([Path(str(i)) for i in range(n)], 2, decode, threads=2)


def test_a_disk_that_is_gone_ends_the_run(monkeypatch):
    monkeypatch.setattr(streaming, "MOST_IN_A_ROW", 6)
    images = failing(lambda i: i >= 10, 40)
    with (
        pytest.warns(UserWarning, match=r"cannot be decoded \(OSError: gone\)"),
        pytest.raises(DataError, match=r"6 files in a row cannot be decoded, the last of them 15 \(OSError: gone\)"),
    ):
        list(images.in_order(4))


@pytest.mark.parametrize("size", [1, 4])  # with 1, a batch is all good or all bad
def test_single_files_do_not_end_the_run_however_many(monkeypatch, size):
    monkeypatch.setattr(streaming, "MOST_IN_A_ROW", 2)
    images = failing(lambda i: i % 2 == 0, 40)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert len(list(images.in_order(size))) == 40 // size
    assert len(said) == 20


# --- threads ----------------------------------------------------------------------------------------------------------


def test_decoding_is_ahead_by_the_slots_and_never_touches_the_batch_in_use():
    done = []

    def decode(path, size):
        done.append(int(str(path)))
        return filled(int(str(path)))

    images = StreamedImages([Path(str(i)) for i in range(200)], 2, decode, threads=4)
    num_batches = 200 // 10
    for t, batch in enumerate(images.in_order(10)):
        ahead = min(t + SLOTS, num_batches) * 10
        until(lambda ahead=ahead: len(done) >= ahead)
        assert sorted(done) == list(range(ahead))
        assert batch[:, 0, 0, 0].tolist() == list(range(10 * t, 10 * t + 10))


def test_an_exception_waits_for_no_thread():
    stuck, begun = threading.Event(), []

    def decode(path, size):
        begun.append(path)
        if int(str(path)) >= 8:
            stuck.wait()
        return filled(1)

    images = StreamedImages([Path(str(i)) for i in range(400)], 2, decode, threads=2)
    before = set(threading.enumerate())

    def fails():
        with closing(images.in_order(8)) as chunks:
            next(chunks)
            until(lambda: len(begun) == 10)  # both threads are stuck, and work waits for them
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    stuck.set()
    until(lambda: not set(threading.enumerate()) - before)
    # A thread ends the piece it has begun; what was waiting has been dropped.
    assert len(begun) == 24


def test_a_failed_program_ends_although_files_are_waiting():
    """To decode all that is waiting would take longer than the time the program is given."""
    program = """
import os, pathlib, signal, threading, time
from contextlib import closing
from opencon.data.streaming import StreamedImages

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
images = StreamedImages([pathlib.Path("x")] * 1600, 2, lambda path, size: time.sleep(0.1), threads=1)
with closing(images.in_order(400)) as chunks:
    next(chunks)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert ended.returncode != 0
