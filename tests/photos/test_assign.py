"""Very many embedded photos: a fit on a stated sample, exact counts over all of them, and a run that goes on."""

import csv
import io
import itertools
import json
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import opencon
import opencon.photos.sample
from opencon.encoders.stored import EncoderFacts
from opencon.errors import ConfigError, DataError, RunError
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.photos.assign import assign
from opencon.photos.embed import PIECES, PLAN, SHARDS, Embedded, make_plan, work
from opencon.photos.features import Extractor, FeatureSettings
from opencon.photos.listing import new_names
from opencon.photos.model import OpenConModel
from opencon.photos.sample import draw_sample, sample_rows
from opencon.processes import FEWEST_CORES, Processes
from opencon.review.run import open_run
from tests.test_cli import works

COUNTS = (300, 200, 250, 150)  # of four classes; the first two are labeled in part
FACTS = EncoderFacts(name="made", in_channels=3, image_size=1, mean=(0.0,), std=(1.0,), fingerprint="f")


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """Shards as `opencon embed` leaves them, of four clusters far apart, with one unreadable photo in each shard."""
    folder, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    (folder / SHARDS).mkdir(parents=True)
    classes = rng.permutation(np.repeat(np.arange(4), COUNTS))
    centers = rng.normal(size=(4, 24)) * 4
    rows = (centers[classes] + rng.normal(size=(len(classes), 24))).astype(np.float32)
    for k, part in enumerate(np.array_split(np.arange(len(rows)), 5)):
        records = [
            {"name": f"{i}-{classes[i]}.jpg"} | ({"label": "ab"[classes[i]]} if classes[i] < 2 and i % 4 == 0 else {})
            for i in part
        ]
        records.insert(1, {"name": f"bad{k}.jpg", "error": "is empty"})
        np.save(folder / SHARDS / f"{k:05}.npy", rows[part])
        (folder / SHARDS / f"{k:05}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        sizes = {kind: (folder / SHARDS / f"{k:05}.{kind}").stat().st_size for kind in ("npy", "jsonl")}
        done = {"photos": len(records), "readable": len(part), "bytes": sizes, "sha256": {}}
        (folder / SHARDS / f"{k:05}.done").write_text(json.dumps(done))
    (folder / PIECES).write_text("")
    (folder / PLAN).write_text(
        json.dumps({"shards": 5, "features": 24, "encoder": {"encoder": "made", "image_size": 1, "weights": "f"}})
    )
    return Embedded.open(folder)


def drawn(features, size, seed=0, labels=None):
    with ThreadPoolExecutor(1) as thread:
        return draw_sample(features, size, seed, thread, labels)


@pytest.fixture(scope="module")
def model(features):
    sample = drawn(features, 400)
    fitted = fit_features(sample.x, sample.labels, OpenWorldConfig(num_novel=2))
    names = (*sample.class_names, *itertools.islice(new_names(sample.class_names), 2))
    files = [str(place) for place in sample.places]
    return OpenConModel.of(fitted, names, FeatureSettings(), FACTS, files, sample.labels)


def read(out):
    return [row for path in sorted(out.glob("*.csv")) for row in csv.DictReader(path.open())]


def test_every_photo_is_assigned_and_counted(features, model, tmp_path):
    counts = assign(features, model, tmp_path)
    rows = read(tmp_path)
    assert len({row["file"] for row in rows}) == len(rows) == 905
    assert sum(bool(row["error"]) for row in rows) == counts["unreadable"] == 5
    assert counts["photos"] == 900
    assert counts["unlike_everything"] == sum(row["unlike_everything"] == "yes" for row in rows)
    for entry in counts["groups"]:
        assert entry["size"] == sum(row["predicted"] == entry["name"] for row in rows)
    # Four clusters far apart: each true class has one name, and the labeled ones their own.
    named = {}
    for row in rows:
        if row["predicted"]:
            named.setdefault(row["file"][-5], []).append(row["predicted"])
    best = {c: max(set(names), key=names.count) for c, names in named.items()}
    assert (best["0"], best["1"]) == ("a", "b")
    assert {best["2"], best["3"]} == {"new-1", "new-2"}
    assert sum(names.count(best[c]) for c, names in named.items()) > 0.9 * 900


def test_groups_of_one_name_count_as_one(features, model, tmp_path):
    one = assign(features, model, tmp_path / "one")
    two = assign(features, model.renamed({"new-1": "b"}), tmp_path / "two")
    sizes, merged = ({row["name"]: row["size"] for row in counts["groups"]} for counts in (one, two))
    assert merged == {"a": sizes["a"], "b": sizes["b"] + sizes["new-1"], "new-2": sizes["new-2"]}


def test_a_sample_has_every_class_and_is_what_the_seed_says(features):
    one, same, other = (drawn(features, 40, seed) for seed in (0, 0, 1))
    assert len(one.x) == len(one.places) == 40
    assert set(one.labels.tolist()) == {-1, 0, 1}
    assert int((one.labels >= 0).sum()) <= 21
    assert one.x.equal(same.x)
    assert not one.x.equal(other.x)
    assert one.num_photos == 900
    rows = [features.rows(shard)[row] for shard, row in one.places]
    assert np.array_equal(np.stack(rows), one.x.numpy())
    assert len(drawn(features, 10_000).x) == 900


def test_labels_by_name_take_the_place_of_others(features, model, tmp_path):
    name = features.records(3)[0]["name"]
    sample = drawn(features, 40, labels={name: "mine"})
    assert (sample.class_names, sample.num_labeled) == (("mine",), 1)
    assert sample.places[int(sample.labels.argmax())] == (3, 0)
    with pytest.raises(DataError, match="names no photo"):
        drawn(features, 40, labels={"other.jpg": "mine"})
    assign(features, model, tmp_path, labels={name: "mine"})
    assert [row["file"] for row in read(tmp_path) if row["given"]] == [name]


def test_a_stopped_run_goes_on(features, model, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    counts = assign(features, model, whole)

    def stop(stage, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assign(features, model, out, progress=stop)
    before = (out / "00000.csv").stat().st_mtime_ns
    assert len(list(out.glob("*.csv"))) < 5
    assert assign(features, model, out) == counts
    assert (out / "00000.csv").stat().st_mtime_ns == before
    assert read(out) == read(whole)


def test_processes_write_the_same_tables(features, model, tmp_path, monkeypatch):
    one = assign(features, model, tmp_path / "one")
    sample = opencon.photos.sample
    started = []
    monkeypatch.setattr(sample, "MANY", 900)
    monkeypatch.setattr(sample, "usable_cores", lambda: FEWEST_CORES)
    monkeypatch.setattr(sample, "Processes", lambda n: started.append(n) or Processes(2))
    assert assign(features, model, tmp_path / "two") == one
    assert read(tmp_path / "two") == read(tmp_path / "one")
    assert started == [FEWEST_CORES]


def test_what_does_not_fit_is_said(features, model, tmp_path):
    assign(features, model, tmp_path / "out")
    other = model.renamed({"new-1": "c"})
    with pytest.raises(ConfigError, match="tables of other features or another model"):
        assign(features, other, tmp_path / "out")
    assert assign(features, other, tmp_path / "out", starts_over=True)["groups"][2]["name"] == "c"
    assert {row["predicted"] for row in read(tmp_path / "out")} >= {"c"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(RunError, match="is not empty and holds no tables"):
        assign(features, model, tmp_path / "mine")
    features.plan.record["encoder"]["weights"] = "g"
    try:
        with pytest.raises(ConfigError, match="another encoder"):
            assign(features, model, tmp_path / "new")
    finally:
        features.plan.record["encoder"]["weights"] = "f"


# --- a whole way, from photos on --------------------------------------------------------------------------------------

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 40, 220)}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """Three colors of 24 photos each in a tar and in a folder; a few reds have a label in the tar."""
    root, rng = tmp_path_factory.mktemp("colors"), np.random.default_rng(0)
    (root / "photos").mkdir()
    (root / "tars").mkdir()
    with tarfile.open(root / "tars/0.tar", "w") as tar:
        for i, name in itertools.product(range(24), COLORS):
            noise = rng.normal(0, 25, (32, 32, 3)) + COLORS[name]
            content = io.BytesIO()
            Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(content, "PNG")
            (root / "photos" / f"{name}{i:02}.png").write_bytes(content.getvalue())
            files = [(f"../{name}{i:02}.png", content.getvalue())]
            files += [(f"../{name}{i:02}.cls", b"red")] if name == "red" and i < 5 else []
            for member, data in files:
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    extractor = Extractor.open(FeatureSettings(image_size=32), torch.device("cpu"))
    for source in ("photos", "tars"):
        work(make_plan(str(root / source), extractor, root / f"of-{source}", size=30), extractor)
    return root


def test_a_discovery_of_a_sample_from_a_tar_can_be_reviewed(embedded, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["discover", "--features", embedded / "of-tars", "--sample", "60", "--novel", "2", "--out", out]
    assert "a sample of 72" in works(capsys, *words, "--dry-run").out
    assert not out.exists()
    said = works(capsys, *words, "--device", "cpu").out
    assert "72 photos" in said
    assert "of a sample of 60" in said
    run = open_run(out)  # what the review opens
    assert len(run.files) == 60
    assert run.title == "photos, a sample of 72 photos"
    assert all(
        (run.root / name).is_file() and (run.root / name).resolve().parent == out / "photos" for name in run.files
    )
    assert not (embedded / "red00.png").exists()  # a name in a tar leads nowhere
    record = json.loads((out / "result.json").read_text())
    assert (record["photos"], record["sampled_from"]) == (60, 72)
    assert "60 of 72 photos" in (out / "report.html").read_text()
    assert len(read(out / "everything")) == 72
    works(capsys, "name", out, "--guesses")
    again = works(capsys, "predict", out, "--features", embedded / "of-tars", "--out", tmp_path / "sorted").out
    assert "72 photos" in again
    model = OpenConModel.from_pretrained(out)
    assert {row["predicted"] for row in read(tmp_path / "sorted")} <= {*model.names, ""}


def test_python_reads_features_too(embedded, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n" + "".join(f"red{i:02}.png,red\n" for i in range(4)))
    found = opencon.discover(features=embedded / "of-photos", labels=table, novel=2, out=tmp_path / "run", device="cpu")
    assert len(found.table) == 72
    assert not (tmp_path / "run/everything").exists()  # the sample is all
    assert sum(row.given == "red" for row in found.table) == 4
    reds = [row.predicted for row in found.table if row.file.startswith("red")]
    assert reds.count("red") >= 20
    count = opencon.count(features=embedded / "of-photos", labels=table)
    assert 2 <= count.num_classes <= 5
    for wrong in ({"finetune": True}, {"size": 64}, {"encoder": "timm:other"}):
        with pytest.raises(ConfigError, match="computed already"):
            opencon.discover(features=embedded / "of-photos", out=tmp_path / "no", **wrong)
    with pytest.raises(ConfigError, match="Leave out other folders"):
        opencon.discover(features=embedded / "of-photos", unlabeled=embedded / "photos", out=tmp_path / "no")


def test_an_estimator_reads_shards_as_they_lie(embedded):
    shards = Embedded.open(embedded / "of-tars")
    x, y = sample_rows(shards, 60)
    assert (x.shape, y.tolist().count("red"), y.tolist().count(None)) == ((60, 1280), 5, 55)
    estimator = opencon.OpenWorldClassifier(n_novel=2).fit(x, y)
    for photos, rows in shards:
        assert isinstance(rows, np.memmap)
        assert len(estimator.predict(rows)) == len(photos)


def test_a_table_that_is_damaged_or_gone_is_written_again(features, model, tmp_path):
    counts = assign(features, model, tmp_path)
    tables = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "00001.json").write_text("[")
    (tmp_path / "00002.json").write_text('{"a": null}')
    (tmp_path / "00003.csv").unlink()
    assert assign(features, model, tmp_path) == counts
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == tables


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("embed.json", '{"shards": "5", "features": 24}', "does not say what was embedded"),
        ("embed.json", '{"shards": 5, "features": 24, "encoder": {}}', "does not say what was embedded"),
        (
            "embed.json",
            '{"shards": 5, "features": 24, "asked_for": [], "encoder": {"encoder": "", "weights": "f", "image_size": 1}}',
            "does not say what was embedded",
        ),
        ("shards/00002.jsonl", b"\xff", r"00002.jsonl is damaged .*Delete 00002.done"),
        ("shards/00002.jsonl", b'{"nome": "a"}', r"00002.jsonl is damaged \(it holds something else"),
        ("shards/00002.jsonl", b'{"name": "a", "label": 3}', r"00002.jsonl is damaged \(it holds something else"),
        ("shards/00002.jsonl", b'{"name": "a"}', r"it has 1 photos that can be read, and not as many features"),
        ("shards/00002.npy", b"\x93NUMPY", r"00002.npy is damaged"),
        ("shards/00002.npy", np.zeros((181, 3), np.float32), "not rows of 24 features"),
        ("shards/00002.npy", np.zeros((181, 24), np.int32), "not rows of 24 features"),
    ],
)
def test_damaged_features_are_said(features, model, tmp_path, file, content, why):
    shutil.copytree(features.plan.out, tmp_path / "features")
    path = tmp_path / "features" / file
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    done = tmp_path / "features/shards/00002.done"
    record = json.loads(done.read_text())
    record["bytes"] = {kind: done.with_suffix(f".{kind}").stat().st_size for kind in ("npy", "jsonl")}
    done.write_text(json.dumps(record))
    with pytest.raises(RunError, match=why):
        drawn(Embedded.open(tmp_path / "features"), 400)
    with pytest.raises(RunError, match=why):
        assign(Embedded.open(tmp_path / "features"), model, tmp_path / "out")


def test_a_marker_that_is_damaged_is_none(features, tmp_path):
    shutil.copytree(features.plan.out, tmp_path / "features")
    done = tmp_path / "features/shards/00002.done"
    done.write_text(json.dumps(json.loads(done.read_text()) | {"photos": [3]}))
    with pytest.raises(RunError, match="1 of 5 shards"):
        Embedded.open(tmp_path / "features")
