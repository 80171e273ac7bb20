"""Features in shards: every source, workers that die, damaged photos, and what reads them."""

import errno
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.errors import DataError, RunError
from opencon.photos import embed
from opencon.photos.embed import Embedded, Plan, make_plan, work
from opencon.photos.features import Extractor, FeatureSettings, photo_features
from opencon.photos.pieces import pieces_of
from tests.test_cli import works

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def extractor():
    return Extractor.open(FeatureSettings(image_size=32), CPU)


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 36, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Twenty photos, of which one is damaged and one is a pipe."""
    folder = tmp_path / "photos"
    for i in range(20):
        path = folder / f"{i % 3}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(i))
    (folder / "0/bad.jpg").write_bytes(b"no picture")
    os.mkfifo(folder / "0/pipe.jpg")
    return folder


def test_files_are_embedded_as_a_discovery_embeds_them(photos, tmp_path, extractor):
    plan = make_plan(str(photos), extractor, tmp_path / "out", size=8)
    seen = []
    assert work(plan, extractor, lambda done, total: seen.append((done, total))) == 0
    assert seen[-1] == (3, 3)
    embedded = Embedded.open(tmp_path / "out")
    names = [record["name"] for records, _ in embedded for record in records]
    assert sorted(names) == sorted(f"{i % 3}/{i:02}.png" for i in range(20))
    assert dict(embedded.problems).keys() == {"0/bad.jpg", "0/pipe.jpg"}
    assert "is not an image" in dict(embedded.problems)["0/bad.jpg"]
    assert len(embedded) == 20
    assert embedded.check() == []
    expected = photo_features([photos / name for name in names], extractor, cache=None).plain
    assert torch.allclose(torch.from_numpy(embedded.all_rows()), expected, atol=1e-5)
    assert isinstance(embedded.rows(0), np.memmap)  # not read before it is used


def test_processes_decode_the_same(photos, tmp_path, extractor, monkeypatch):
    monkeypatch.setattr(embed, "usable_cores", lambda: 2)
    for how in ("threads", "processes"):
        work(make_plan(str(photos), extractor, tmp_path / how, size=8), extractor, decode_in=how)
    one, other = (Embedded.open(tmp_path / how) for how in ("threads", "processes"))
    assert [one.records(k) for k in range(3)] == [other.records(k) for k in range(3)]
    assert len(one.problems) == 2
    assert np.array_equal(one.all_rows(), other.all_rows())


def test_half_the_numbers_for_half_the_disk(photos, tmp_path, extractor):
    for half in (False, True):
        work(make_plan(str(photos), extractor, tmp_path / str(half), half=half), extractor)
    whole, half = (Embedded.open(tmp_path / name).all_rows() for name in ("False", "True"))
    assert half.dtype == np.float16
    assert np.allclose(whole, half, rtol=1e-3, atol=1e-3)
    with pytest.raises(RunError, match="another precision"):
        make_plan(str(photos), extractor, tmp_path / "True")


def test_a_table_brings_labels(photos, tmp_path, extractor):
    table = tmp_path / "table.csv"
    table.write_text("path,label\nphotos/0/00.png,cat\nphotos/1/01.png,\nphotos/nowhere.png,dog\n")
    work(make_plan(str(table), extractor, tmp_path / "out"), extractor)
    embedded = Embedded.open(tmp_path / "out")
    assert embedded.records(0)[:2] == [{"name": "photos/0/00.png", "label": "cat"}, {"name": "photos/1/01.png"}]
    assert embedded.problems[0][0] == "photos/nowhere.png"


def test_tars_and_their_labels(tmp_path, extractor):
    folder = tmp_path / "tars"
    folder.mkdir()
    for k in range(2):
        with tarfile.open(folder / f"{k}.tar", "w") as tar:
            for name, content in [
                (f"{k}a.png", picture(k)),
                (f"{k}a.cls", b"7"),
                (f"{k}b.cls", b"cat\n"),
                (f"{k}b.png", picture(k + 10)),
                (f"{k}c.png", b""),
                (f"{k}c.json", b"{}"),
            ]:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            link = tarfile.TarInfo(f"{k}d.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    torn = folder / "2.tar"
    torn.write_bytes((folder / "0.tar").read_bytes()[:1000])
    work(make_plan(str(folder), extractor, tmp_path / "out"), extractor)
    embedded = Embedded.open(tmp_path / "out")
    assert [(r["name"], r.get("label")) for r in embedded.records(1)] == [
        ("1a.png", "7"),
        ("1b.png", "cat"),
        ("1c.png", None),
    ]
    assert ("1c.png", "is empty") in embedded.problems
    assert any(name == "2.tar" and "to its end" in why for name, why in embedded.problems)
    assert len(embedded) == 4


def test_parquet_with_bytes_of_images(tmp_path, extractor):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = [{"bytes": picture(i), "path": f"{i}.png"} for i in range(5)] + [{"bytes": None, "path": "none.png"}]
    parquet.write_table(
        pa.table({"image": cells, "label": [0, 1, 0, 1, None, 0]}), tmp_path / "a.parquet", row_group_size=3
    )
    work(make_plan(str(tmp_path / "a.parquet"), extractor, tmp_path / "out"), extractor)
    embedded = Embedded.open(tmp_path / "out")
    assert embedded.plan.num_shards == 2
    assert embedded.records(1)[0] == {"name": "3.png", "label": "1"}
    assert embedded.problems == [("none.png", "has no bytes in its row")]


def test_a_damaged_parquet_file_is_a_row_with_a_reason(tmp_path, extractor):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"image": [picture(0)], "label": ["cat"]}), path)
    pieces = pieces_of(str(path), 8)
    path.write_bytes(path.read_bytes()[:-40])
    (photo,) = pieces[0].photos()
    assert (photo.name, photo.content) == ("a.parquet#0", None)
    assert photo.error.startswith("cannot be read (ArrowInvalid")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        pieces_of(str(path), 8)
    parquet.write_table(pa.table({"pixels": [1]}), path)
    with pytest.raises(DataError, match="has no column of images"):
        pieces_of(str(path), 8)


def test_an_address_is_read_through_fsspec(tmp_path, extractor):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for i in range(3):
        memory.pipe(f"/photos/{i}.png", picture(i))
    work(make_plan("memory://photos", extractor, tmp_path / "out"), extractor)
    embedded = Embedded.open(tmp_path / "out")
    assert (len(embedded), embedded.problems) == (3, [])


def test_what_cannot_be_is_said(photos, tmp_path, extractor):
    for source, why in ((tmp_path / "nowhere", "does not exist"), (photos / "0/bad.jpg", "is no folder, table")):
        with pytest.raises(DataError, match=why):
            pieces_of(str(source), 8)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/a.tex").touch()
    with pytest.raises(RunError, match="is not empty and holds no features"):
        make_plan(str(photos), extractor, tmp_path / "thesis")
    make_plan(str(photos), extractor, tmp_path / "out", size=8)
    with pytest.raises(RunError, match="features of another photos_in_a_shard"):
        make_plan(str(photos), extractor, tmp_path / "out", size=9)
    with pytest.raises(RunError, match=r"3 of 3 shards in .* are missing"):
        Embedded.open(tmp_path / "out")
    with pytest.raises(RunError, match="holds no features"):
        Embedded.open(photos)


def test_claims_keep_workers_apart_and_end_with_them(photos, tmp_path, extractor, monkeypatch):
    plan = make_plan(str(photos), extractor, tmp_path / "out", size=8)
    plan.file(0, "claim").write_text(f"elsewhere {os.getpid()}")
    plan.file(1, "claim").write_text("elsewhere 1")
    os.utime(plan.file(1, "claim"), (time.time() - 2 * embed.STALE,) * 2)  # not touched for long
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    plan.file(2, "claim").write_text(f"{os.uname().nodename} {child.pid}")  # on this machine, and dead
    assert work(plan, extractor) == 1
    assert [plan.is_done(k) for k in range(3)] == [False, True, True]
    plan.file(0, "claim").unlink()
    assert work(plan, extractor) == 0


def test_a_claim_has_its_content_or_is_not_there(photos, tmp_path, extractor, monkeypatch):
    """Nobody could tell whose an empty one is: its shard would be left alone for minutes."""
    plan = make_plan(str(photos), extractor, tmp_path / "out", size=8)

    def refuse(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "link", refuse)
        full.setattr(os, "replace", refuse)
        with pytest.raises(RunError, match="the disk is full"):
            work(plan, extractor)
    assert list((plan.out / "shards").iterdir()) == []
    monkeypatch.setattr(os, "link", refuse)  # a file system without links
    assert work(plan, extractor) == 0


@pytest.mark.parametrize("line", [b"\xff", b"{", b"[]", b'["files", 3, ["a"], [], 0]', b'["zip", "a", [], [], 0]', b""])
def test_a_damaged_list_of_photos_is_said(photos, tmp_path, extractor, line):
    plan = make_plan(str(photos), extractor, tmp_path / "out", size=8)
    whole = (plan.out / "pieces.jsonl").read_bytes().splitlines()
    (plan.out / "pieces.jsonl").write_bytes(b"\n".join([whole[0], line]))
    with pytest.raises(RunError, match=r"pieces.jsonl, line 2 cannot be read"):
        Plan.read(plan.out).piece(1)


def test_a_shard_that_was_cut_off_is_computed_again(photos, tmp_path, extractor):
    plan = make_plan(str(photos), extractor, tmp_path / "out", size=8)
    work(plan, extractor)
    whole = plan.file(1, "npy").read_bytes()
    plan.file(1, "npy").write_bytes(whole[:-4])
    assert not plan.is_done(1)
    work(plan, extractor)
    assert plan.file(1, "npy").read_bytes() == whole
    plan.file(1, "npy").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert Embedded.open(tmp_path / "out").check() == [1]


def test_what_killed_workers_left_is_removed(photos, tmp_path, extractor):
    plan = make_plan(str(photos), extractor, tmp_path / "out", size=6)
    work(plan, extractor)
    whole = sorted(p.name for p in (plan.out / "shards").iterdir())
    here, child = os.uname().nodename, subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    plan.file(0, "claim").write_text(f"{here} {child.pid}")  # killed between the marker and the end of its claim
    plan.file(1, f"npy.{here}-{child.pid}.partial").write_bytes(b"half")
    alive = plan.file(2, f"npy.{here}-{os.getpid()}.partial")
    alive.write_bytes(b"half")
    work(plan, extractor)
    assert sorted(p.name for p in (plan.out / "shards").iterdir()) == sorted([*whole, alive.name])


def test_kills_at_random_moments_lose_nothing_and_double_nothing(photos, tmp_path):
    """Workers are killed by SIGKILL until all is done; the files are those of an undisturbed run, byte for byte."""
    code = "import sys; from opencon.cli import main; main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def command(out):
        words = ["embed", photos, "--out", out, "--size", 32, "--shard", 2, "--device", "cpu"]
        return [sys.executable, "-c", code, *map(str, words)]

    subprocess.run(command(tmp_path / "whole"), env=environment, check=True, capture_output=True)
    rng, killed = random.Random(0), 0
    for _ in range(4):
        worker = subprocess.Popen(command(tmp_path / "out"), env=environment, stdout=subprocess.DEVNULL)
        before = len(list((tmp_path / "out").rglob("*.done")))
        while worker.poll() is None and len(list((tmp_path / "out").rglob("*.done"))) <= before + rng.randrange(2):
            time.sleep(0.005)
        killed += worker.poll() is None
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert killed >= 2
    subprocess.run(command(tmp_path / "out"), env=environment, check=True, capture_output=True)

    def content(out):
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((out / "shards").iterdir())}

    assert content(tmp_path / "out") == content(tmp_path / "whole")
    names = [r["name"] for k in range(11) for r in Embedded.open(tmp_path / "out").records(k)]
    assert len(names) == len(set(names)) == 22


def test_the_command_with_two_workers(photos, tmp_path, capsys):
    words = ["embed", photos, "--out", tmp_path / "out", "--size", "32", "--shard", "6", "--device", "cpu"]
    out = works(capsys, *words, "--workers", "2").out
    assert "20 photos in" in out
    assert "2 cannot be read" in out
    record = json.loads((tmp_path / "out/embed.json").read_text())
    assert (record["shards"], record["features"]) == (4, 1280)
