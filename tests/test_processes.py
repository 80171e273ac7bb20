"""Workers answer, raise what was raised, and never outlive the one who asked."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from PIL import Image

import opencon.data.decoders as decoders
from opencon.data.decoders import GRAY, Slot, in_processes
from opencon.data.listings import list_folder
from opencon.data.pixel_budget import PixelBudget
from opencon.data.sources import load_listing, read_images
from opencon.errors import ConfigError, RunError
from opencon.processes import Processes, SharedBytes, beside, can_share

CPU, GPU = torch.device("cpu"), torch.device("cuda")
pytestmark = pytest.mark.skipif(not can_share(), reason="workers need Linux")


@pytest.fixture(scope="module")
def workers():
    with Processes(2) as started:
        yield started


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twenty photos, of which one is none, and one is damaged further on."""
    root = tmp_path_factory.mktemp("photos") / "things"
    root.mkdir()
    rng = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(root / f"{i:02}.jpg")
    (root / "03.jpg").write_text("no image")
    (root / "07.jpg").write_bytes((root / "06.jpg").read_bytes()[:700])
    return [root / f"{i:02}.jpg" for i in range(20)]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never happened")


def test_a_call_runs_in_another_process_and_its_error_comes_back(workers):
    assert workers.submit(os.getpid).result() != os.getpid()
    assert list(workers.map(len, ["a", "bb", "ccc"])) == [1, 2, 3]
    with pytest.raises(ValueError, match="invalid literal"):
        workers.submit(int, "x").result()
    number, lock = workers.submit(beside).result()
    assert (number, os.path.exists(lock)) == (2, True)
    assert beside() == (1, "")


def test_a_worker_that_is_killed_is_said():
    with Processes(1) as one:
        pid = one.submit(os.getpid).result()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunError, match="ended from outside"):
            one.submit(os.getpid).result()


def test_workers_end_with_a_killed_program_and_do_not_import_it(tmp_path):
    """The program has no `if __name__ == "__main__"`: `multiprocessing` would run it again in each worker."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os, time
        from opencon.processes import Processes
        workers = Processes(1)
        print(workers.submit(os.getpid).result(), flush=True)
        time.sleep(600)
        """)
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == ""  # it was run once
    until(lambda: not is_running(pid))


def zeros(item, size):
    return np.full((3, size, size), item, np.uint8)


def test_memory_at_the_same_place_is_not_taken_for_the_old_one(workers):
    for value in (1, 2, 3):
        slot = Slot.new((1, 3, 2, 2), workers)
        assert [piece.result() for piece in slot.fill(workers, zeros, [value])] == [[None]]
        assert slot.pixels.unique().tolist() == [value]
        del slot


def test_processes_decode_what_threads_do(workers, photos):
    (one, kept, problems), (other, kept_too, problems_too) = (read_images(photos, 16, who) for who in (None, workers))
    assert kept == kept_too == [i for i in range(20) if i not in (3, 7)]
    assert problems == problems_too
    assert torch.equal(one, other)


def read_all(images, rows):
    with pytest.warns(UserWarning, match="A gray image takes its place"):
        return [batch.clone() for batch in images.batches(rows, images.buffer(6))]


def test_training_reads_the_same_batches_from_processes(photos):
    listing = list_folder(photos[0].parent.parent)
    threads, processes = (load_listing(listing, 16, 0, how).images for how in ("threads", "processes"))
    processes.threads = 2
    rows = torch.arange(len(threads)).split(6) * 2
    of_threads, of_processes = (read_all(images, rows) for images in (threads, processes))
    assert all(torch.equal(a, b) for a, b in zip(of_threads, of_processes, strict=True))
    assert bool((of_processes[1][0] == GRAY).all())  # photo 07 is the seventh: 03 was set aside
    first = processes.workers()
    assert processes.workers() is first  # they stay


def test_who_decodes(monkeypatch):
    monkeypatch.setattr(decoders, "usable_cores", lambda: 16)
    many = decoders.MANY
    cases = [("auto", many, GPU), ("auto", many - 1, GPU), ("auto", many, CPU), ("threads", many, GPU)]
    assert [in_processes(*case) for case in cases] == [True, False, False, False]
    assert in_processes("processes", 1, CPU)
    monkeypatch.setattr(decoders, "usable_cores", lambda: 2)
    assert not in_processes("auto", many, GPU)
    monkeypatch.setattr(decoders, "can_share", lambda: False)
    with pytest.raises(ConfigError, match="Decode in threads"):
        in_processes("processes", 1, CPU)


def hold(lock, log, name):
    """Hold a large image for a while, and note when."""
    with PixelBudget(10, lock).take(11):
        began = time.monotonic()
        time.sleep(0.2)
        with open(log, "a") as file:
            file.write(f"{name} {began} {time.monotonic()}\n")


def test_large_images_of_all_processes_come_one_by_one(workers, tmp_path):
    lock = SharedBytes((1,))
    calls = [workers.submit(hold, lock.address[0], tmp_path / "log", name) for name in "ab"]
    for call in calls:
        call.result()
    spans = sorted([float(n) for n in line.split()[1:]] for line in (tmp_path / "log").read_text().splitlines())
    assert spans[0][1] <= spans[1][0]
