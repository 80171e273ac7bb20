"""Groups of many photos: a fit on a stated sample, exact counts over all of them, and a run that goes on."""

import csv
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import opencon.photos.group
from opencon.errors import ConfigError, RunError
from opencon.openworld.fit import OpenWorldConfig
from opencon.photos.embed import PIECES, PLAN, SHARDS, Embedded
from opencon.photos.group import draw_sample, group
from opencon.processes import FEWEST_CORES, Processes
from tests.test_cli import works

CONFIG = OpenWorldConfig(num_novel=2)
COUNTS = (300, 200, 250, 150)  # of four classes; the first two are labeled in part


@pytest.fixture
def features(tmp_path):
    """Shards as `opencon embed` leaves them, of four clusters far apart, with one unreadable photo in each shard."""
    folder, rng = tmp_path / "features", np.random.default_rng(0)
    (folder / SHARDS).mkdir(parents=True)
    classes = rng.permutation(np.repeat(np.arange(4), COUNTS))
    centers = rng.normal(size=(4, 24)) * 4
    rows = (centers[classes] + rng.normal(size=(len(classes), 24))).astype(np.float32)
    lines = []
    for k, part in enumerate(np.array_split(np.arange(len(rows)), 5)):
        records = [
            {"name": f"{i}-{classes[i]}.jpg"} | ({"label": "ab"[classes[i]]} if classes[i] < 2 and i % 4 == 0 else {})
            for i in part
        ]
        records.insert(1, {"name": f"bad{k}.jpg", "error": "is empty"})
        np.save(folder / SHARDS / f"{k:05}.npy", rows[part])
        (folder / SHARDS / f"{k:05}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        sizes = {kind: (folder / SHARDS / f"{k:05}.{kind}").stat().st_size for kind in ("npy", "jsonl")}
        (folder / SHARDS / f"{k:05}.done").write_text(
            json.dumps({"photos": len(records), "readable": len(part), "bytes": sizes, "sha256": {}})
        )
        lines.append(json.dumps(["files", "", [r["name"] for r in records], [], 0]) + "\n")
    (folder / PIECES).write_text("".join(lines))
    (folder / PLAN).write_text(json.dumps({"shards": 5, "features": 24}))
    return folder


def read(out):
    return [row for path in sorted((out / "assignments").glob("*.csv")) for row in csv.DictReader(path.open())]


@pytest.mark.parametrize("sample", [10_000, 400])
def test_every_photo_is_assigned_and_counted_whatever_the_sample(features, tmp_path, sample):
    result = group(features, tmp_path / "out", CONFIG, sample=sample)
    rows = read(tmp_path / "out")
    assert len({row["file"] for row in rows}) == len(rows) == 905
    assert sum(bool(row["error"]) for row in rows) == result["unreadable"] == 5
    assert (result["photos"], result["sampled"]) == (900, min(sample, 900))
    for entry in result["groups"]:
        assert entry["size"] == sum(row["predicted"] == entry["name"] for row in rows)
    # Four clusters far apart: each true class has one name, and the labeled ones their own.
    named = {}
    for row in rows:
        if row["predicted"]:
            named.setdefault(row["file"][-5], []).append(row["predicted"])
    best = {c: max(set(names), key=names.count) for c, names in named.items()}
    assert (best["0"], best["1"]) == ("a", "b")
    assert {best["2"], best["3"]} == {"new-1", "new-2"}
    assert sum(names.count(best[c]) for c, names in named.items()) > 0.95 * 900


def test_a_sample_has_every_class_and_is_what_the_seed_says(features):
    embedded = Embedded.open(features)
    with ThreadPoolExecutor(1) as thread:
        one, same, other = (draw_sample(embedded, 40, seed, thread) for seed in (0, 0, 1))
    assert len(one.x) == 40
    assert set(one.labels.tolist()) == {-1, 0, 1}
    assert int((one.labels >= 0).sum()) <= 21
    assert one.x.equal(same.x)
    assert not one.x.equal(other.x)
    assert one.num_photos == 900


def test_a_stopped_run_goes_on(features, tmp_path):
    out = tmp_path / "out"
    whole = group(features, tmp_path / "whole", CONFIG, sample=400)

    def stop(stage, done, total):
        if (stage, done) == ("assigning", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group(features, out, CONFIG, sample=400, progress=stop)
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert group(features, out, CONFIG, sample=400) == whole
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    assert read(out) == read(tmp_path / "whole")


def test_processes_write_the_same_tables(features, tmp_path, monkeypatch):
    one = group(features, tmp_path / "one", CONFIG, sample=400)
    monkeypatch.setattr(opencon.photos.group, "MANY", 900)
    monkeypatch.setattr(opencon.photos.group, "usable_cores", lambda: FEWEST_CORES)
    started = []
    monkeypatch.setattr(opencon.photos.group, "Processes", lambda n: started.append(n) or Processes(2))
    assert group(features, tmp_path / "two", CONFIG, sample=400) == one
    assert read(tmp_path / "two") == read(tmp_path / "one")
    assert started == [FEWEST_CORES]


def test_other_settings_and_damage_are_said(features, tmp_path):
    group(features, tmp_path / "out", CONFIG, sample=400)
    with pytest.raises(ConfigError, match="groups of other settings"):
        group(features, tmp_path / "out", CONFIG, sample=500)
    (tmp_path / "out/model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(RunError, match="Delete it to fit again"):
        group(features, tmp_path / "out", CONFIG, sample=400)
    with pytest.raises(RunError, match="is not empty and holds no groups"):
        group(features, features, CONFIG)


def test_the_command_says_what_it_has_seen(features, tmp_path, capsys):
    out = works(capsys, "group", features, "--out", tmp_path / "out", "--novel", "2", "--sample", "300").out
    assert "900 photos" in out
    assert "The fit saw a sample of 300" in out
