"""From a folder to a report, with good and bad photos, through the command line."""

import csv
import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from opencon import cli
from opencon.photos.listing import shown_name
from opencon.photos.model import OpenConModel, identity
from opencon.training.run_folder import RunFolder

SEEN, NOVEL, EACH = ("amber", "blue", "green"), ("stripes", "rings"), 10
FAST = ("--size", "48", "--device", "cpu", "--no-cache")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def opencon(capsys, *args):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in args])
    said = capsys.readouterr()
    return Ran(stop.value.code or 0, said.out, " ".join(said.err.split()))


def works(capsys, *args):
    ran = opencon(capsys, *args)
    assert ran.code == 0, ran.err
    return ran


def refused(capsys, *args):
    ran = opencon(capsys, *args)
    assert ran.code == 2, ran
    assert "Traceback" not in ran.err
    return ran.err


def picture(kind, rng, side=40):
    grid = np.linspace(0, 6.28, side)
    colors = {"amber": (230, 170, 20), "blue": (20, 60, 220), "green": (20, 170, 60)}
    if kind in colors:
        base = np.ones((side, side, 3)) * colors[kind]
    elif kind == "stripes":
        base = np.repeat((127 + 127 * np.sin(6 * grid + rng.uniform(0, 6.28)))[None, :, None], side, 0) * np.ones(3)
    else:
        x, y = rng.uniform(2, 4, 2)
        base = (127 + 127 * np.sin(3 * np.hypot(grid[:, None] - x, grid[None] - y)))[..., None] * np.ones(3)
    # Each has light and shade of its own: without, all of a kind would be twins, and those of one color show nothing.
    shade = Image.fromarray(rng.uniform(0.75, 1.0, (6, 6)).astype(np.float32)).resize((side, side))
    lit = base * np.asarray(shade)[..., None]
    return Image.fromarray(np.clip(lit + rng.normal(0, 5, (side, side, 3)), 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for folder in [*(f"known/{name}" for name in SEEN), "pile"]:
        (root / folder).mkdir(parents=True)
    truth = ["file,class"]
    for kind in (*SEEN, *NOVEL):
        for i in range(EACH):
            is_labeled = kind in SEEN and i < 4
            path = root / (f"known/{kind}/{i}.png" if is_labeled else f"pile/{kind[0]}{i}.png")
            picture(kind, rng).save(path)
            if not is_labeled:
                truth.append(f"{path.name},{kind}")
    (root / "truth.csv").write_text("\n".join(truth) + "\n")
    return root


@pytest.fixture
def photos(originals, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(originals, tmp_path / "photos")


def where(root):
    return "--labeled", root / "known", "--unlabeled", root / "pile"


@pytest.fixture(scope="session")
def finished(originals, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(SystemExit) as stop:
        cli.main(
            [str(a) for a in ("discover", *where(originals), "--truth", originals / "truth.csv", "--novel", 2, *FAST)]
            + ["--out", str(out)]
        )
    assert not stop.value.code
    return out


def rows_of(out):
    with (out / "assignments.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


# --- what it does ------------------------------------------------------------------------------------------------------


def test_every_photo_has_a_row_and_most_are_right(finished):
    rows = rows_of(finished)
    assert len(rows) == EACH * (len(SEEN) + len(NOVEL))
    assert {row["predicted"] for row in rows} <= {*SEEN, "new-1", "new-2", ""}
    assert sum(row["unlike_everything"] == "yes" for row in rows) <= 0.05 * len(rows)
    assert all((row["predicted"] == "") == (row["unlike_everything"] == "yes") for row in rows)
    kinds = {"": "", **dict.fromkeys(SEEN, "seen"), "new-1": "new", "new-2": "new"}
    assert all(row["kind"] == kinds[row["predicted"]] for row in rows)
    assert all(0 <= float(row["confidence"]) <= 1 for row in rows)
    given = {row["file"]: row["given"] for row in rows if row["given"]}
    assert given == {f"known/{name}/{i}.png": name for name in SEEN for i in range(4)}
    names = {row["file"] for row in rows}
    for row in rows:
        nearest = row["nearest"].split("|")
        assert set(nearest) <= names
        assert row["file"] not in nearest
    result = json.loads((finished / "result.json").read_text())
    assert result["protocol"] == "gcd"
    assert result["num_images"] == len(rows) - len(given)
    assert result["all"] > 0.85


def test_the_folder_holds_what_is_promised(finished):
    z = np.load(finished / "embeddings.npy", allow_pickle=False)
    assert z.shape[0] == len(rows_of(finished))
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-4)
    assert json.loads((finished / "environment.json").read_text())["torch"]
    assert json.loads((finished / "config.json").read_text())["fit"]["num_novel"] == 2
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert json.loads((finished / "result.json").read_text())["headline"] in page
    assert not list(finished.glob("*.partial"))
    assert len({path.stat().st_mode for path in finished.iterdir()}) == 1  # whoever may read one may read all


def test_the_number_of_groups_can_be_left_open(capsys, originals, tmp_path):
    ran = works(capsys, "discover", *where(originals), *FAST, "--out", tmp_path / "run")
    assert "About " in ran.out
    estimate = json.loads((tmp_path / "run/result.json").read_text())["count"]
    assert estimate["low"] <= estimate["num_classes"] <= estimate["high"]


def test_dry_run_plans_and_writes_nothing(capsys, originals, tmp_path):
    out = works(capsys, "discover", *where(originals), *FAST, "--out", tmp_path / "run", "--dry-run").out
    assert "50: 12 labeled in 3 classes (amber, blue, green), 38 unlabeled" in out
    assert "where nothing is cached" in out
    assert not (tmp_path / "run").exists()


def test_same_seed_same_assignments_from_a_table_and_from_the_cache(capsys, originals, finished, tmp_path):
    lines = [
        f"{p.relative_to(originals).as_posix()},{p.parent.name}" for p in sorted((originals / "known").rglob("*.png"))
    ]
    (tmp_path / "labels.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    given = (originals, "--labels", tmp_path / "labels.csv", "--novel", 2, "--cache", tmp_path / "cache", *FAST[:-1])
    works(capsys, "discover", *given, "--out", tmp_path / "a")
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    works(capsys, "discover", *given, "--out", tmp_path / "b")
    assert (tmp_path / "a/assignments.csv").read_bytes() == (tmp_path / "b/assignments.csv").read_bytes()
    predicted = {row["file"]: row["predicted"] for row in rows_of(tmp_path / "a")}
    assert set(predicted) == {row["file"] for row in rows_of(finished)}


def test_predict_on_new_photos(capsys, finished, originals, tmp_path):
    rng = np.random.default_rng(5)
    picture("blue", rng).save(tmp_path / "new blue.png")
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    ran = works(capsys, "predict", finished, tmp_path / "new blue.png", tmp_path / "torn.jpg", "--device", "cpu")
    good, bad = (json.loads(line) for line in ran.out.splitlines())
    assert (good["predicted"], good["kind"]) == ("blue", "seen")
    assert len(good["nearest"]) == 3
    assert bad["predicted"] is None
    assert bad["error"]
    assert "there is no folder" in refused(capsys, "predict", finished, tmp_path, "--csv", tmp_path / "no" / "said.csv")
    assert "nowhere does not exist" in refused(capsys, "predict", finished, tmp_path / "nowhere")
    works(capsys, "predict", finished, tmp_path, "--csv", tmp_path / "said.csv", "--device", "cpu")
    with (tmp_path / "said.csv").open(newline="") as file:
        assert [row["file"] for row in csv.DictReader(file)] == [
            str(tmp_path / n) for n in ("new blue.png", "torn.jpg")
        ]


def test_groups_get_names_that_predict_and_the_table_use(capsys, finished, originals, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "names.csv").write_text('"group","name"\n"new-1","zebra, maybe"\n')
    out = works(capsys, "name", run, tmp_path / "names.csv").out
    assert "new-1 is now zebra, maybe" in out
    assert OpenConModel.from_pretrained(run).class_names == (*SEEN, "zebra, maybe", "new-2")
    before, after = rows_of(finished), rows_of(run)
    assert [r["predicted"] for r in after] == [r["predicted"].replace("new-1", "zebra, maybe") for r in before]
    assert "nothing was changed" in works(capsys, "name", run, tmp_path / "names.csv").out
    (tmp_path / "names.csv").write_text("group,name\nnew-1,new-2\nnew-2,zebra\n")  # corrected: by the first names
    works(capsys, "name", run, tmp_path / "names.csv")
    assert OpenConModel.from_pretrained(run).class_names == (*SEEN, "new-2", "zebra")
    (tmp_path / "names.csv").write_text("group,name\nzebra,horse\nnew-1,zebra\n")  # and by the names of now
    works(capsys, "name", run, tmp_path / "names.csv")
    assert OpenConModel.from_pretrained(run).class_names == (*SEEN, "zebra", "horse")
    swapped = {"new-1": "zebra", "new-2": "horse"}
    assert [r["predicted"] for r in rows_of(run)] == [swapped.get(r["predicted"], r["predicted"]) for r in before]
    message = refused(capsys, "name", run, tmp_path / "nowhere.csv")
    assert "nowhere.csv" in message
    (tmp_path / "names.csv").write_text("group,name\nnew-9,zebra\n")
    assert "there is no group 'new-9'" in refused(capsys, "name", run, tmp_path / "names.csv")


def test_groups_of_one_name_are_one_until_they_are_named_apart(capsys, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "assignments.csv").read_bytes()
    (tmp_path / "names.csv").write_text("group,name\nnew-1,wild\nnew-2,wild\n")
    out = works(capsys, "name", run, tmp_path / "names.csv").out
    assert "wild: several groups of this name, which count as one" in out
    for row, old in zip(rows_of(run), rows_of(finished), strict=True):
        assert row["predicted"] == ("wild" if old["kind"] == "new" else old["predicted"])
        assert row["kind"] == old["kind"]
        assert float(row["confidence"]) >= float(old["confidence"])
    (tmp_path / "names.csv").write_text("group,name\nnew-1,new-1\nnew-2,new-2\n")
    works(capsys, "name", run, tmp_path / "names.csv")
    assert (run / "assignments.csv").read_bytes() == before
    rows = rows_of(run)
    at = next(i for i, row in enumerate(rows) if row["unlike_everything"] == "no" and not row["given"])
    rows[at]["unlike_everything"] = "yes"  # as a picture of nothing is, whatever its distance
    with (run / "assignments.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    (tmp_path / "names.csv").write_text("group,name\nnew-1,other\n")
    works(capsys, "name", run, tmp_path / "names.csv")
    assert (rows_of(run)[at]["unlike_everything"], rows_of(run)[at]["predicted"]) == ("yes", "")
    (tmp_path / "names.csv").write_text("group,name\nnew-1,new-1\n")
    works(capsys, "name", run, tmp_path / "names.csv")
    lines = before.splitlines(keepends=True)
    (run / "assignments.csv").write_bytes(b"".join(lines[:-1]))
    (tmp_path / "names.csv").write_text("group,name\nnew-1,wild\n")
    assert "one of them was changed" in refused(capsys, "name", run, tmp_path / "names.csv")
    assert OpenConModel.from_pretrained(run).class_names[-2:] == ("new-1", "new-2")


def test_names_for_another_discovery_are_refused(capsys, finished, originals, tmp_path):
    """A page's names.csv says of which discovery it is: after another one, new-1 is another group."""
    run, table = shutil.copytree(finished, tmp_path / "run"), tmp_path / "names.csv"
    own = identity(RunFolder(run))
    assert json.dumps(own) in (run / "report.html").read_text()
    table.write_text(f"group,name,discovery\nnew-1,zebra,{own}\n")
    works(capsys, "name", run, table)
    table.write_text(f"group,name,discovery\nnew-2,okapi,{own}\n")  # a name changes nothing of what it is
    works(capsys, "name", run, table)
    said = works(capsys, "discover", *where(originals), "--novel", 1, *FAST, "--out", run).err
    assert "names you gave in this folder before (zebra, okapi) are gone" in said
    assert "for another discovery" in refused(capsys, "name", run, table)
    table.write_text("group,name\nnew-1,zebra\n")
    works(capsys, "name", run, table)
    assert "are gone" not in works(capsys, "discover", *where(originals), *FAST, "--out", tmp_path / "other").err


def test_names_for_a_folder_without_a_model_are_refused_for_that(capsys, tmp_path):
    table, run = tmp_path / "names.csv", tmp_path / "run"
    table.write_text("group,name,discovery\nnew-1,zebra,0123456789ab\n")
    assert "holds no model" in refused(capsys, "name", run, table)
    run.mkdir()
    (run / "model.json").write_text("{}")
    assert "is not a model of opencon" in refused(capsys, "name", run, table)


def test_a_second_discovery_beside_the_first_is_refused(capsys, finished, originals, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "model.json").read_bytes()
    with RunFolder(run).held():
        message = refused(capsys, "discover", *where(originals), "--novel", 1, *FAST, "--out", run)
    assert "another process" in message
    assert (run / "model.json").read_bytes() == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("group,name\nnew-1,\n", "gives no name"),
        ("name\nnew-1\n", "must name the columns: group,name"),
        ("group,name\nnew-1,lamp\nnew-1,chair\n", "gives 'new-1' two names, 'lamp' and 'chair'"),
    ],
)
def test_tables_without_names(capsys, finished, tmp_path, table, message):
    (tmp_path / "names.csv").write_text(table)
    assert message in refused(capsys, "name", finished, tmp_path / "names.csv")


def test_names_may_stand_between_semicolons_and_go_to_labels_too(capsys, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "names.csv").write_text("group;name\nblue;azure\n")
    works(capsys, "name", run, tmp_path / "names.csv")
    names = {"blue": "azure"}
    for row, old in zip(rows_of(run), rows_of(finished), strict=True):
        assert row == old | {key: names.get(old[key], old[key]) for key in ("predicted", "given")}


def test_both_tables_have_the_same_columns(capsys, finished, originals, tmp_path):
    works(capsys, "predict", finished, originals / "pile", "--csv", tmp_path / "said.csv", "--device", "cpu")
    with (tmp_path / "said.csv").open(newline="") as file:
        said = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    columns = ("predicted", "kind", "unlike_everything", "given")
    for row in rows_of(finished):
        assert list(row) == list(next(iter(said.values())))
        if not row["given"] and row["unlike_everything"] == "no":  # now each has itself for a neighbor, and none is odd
            assert [said[Path(row["file"]).name][key] for key in columns] == [row[key] for key in columns]


def test_export_writes_a_folder_that_predicts_alone(capsys, finished, tmp_path):
    ran = works(capsys, "export", finished, "--no-onnx", "--out", tmp_path / "model")
    assert "OpenConModel.from_pretrained" in ran.out
    assert {"model.json", "model.safetensors", "encoder.safetensors", "README.md"} == {
        p.name for p in (tmp_path / "model").iterdir()
    }
    assert OpenConModel.from_pretrained(tmp_path / "model").class_names[: len(SEEN)] == SEEN


def test_a_graph_of_another_model_does_not_stay_behind(capsys, finished, tmp_path):
    works(capsys, "export", finished, "--no-onnx", "--out", tmp_path / "model")
    (tmp_path / "model/model.onnx").write_bytes(b"of another model")
    works(capsys, "export", finished, "--no-onnx", "--out", tmp_path / "model")
    assert not (tmp_path / "model/model.onnx").exists()


def test_what_cannot_be_finetuned_is_said_before_any_work(capsys, originals, tmp_path, monkeypatch):
    monkeypatch.setattr("opencon.photos.finetune.MAX_GB", 1e-6)
    said = refused(capsys, "discover", *where(originals), *FAST, "--finetune", "--dry-run", "--out", tmp_path / "run")
    assert "--finetune holds all photos in memory" in said


def test_a_photo_that_goes_while_the_encoder_learns_takes_its_label_with_it(capsys, photos, tmp_path, monkeypatch):
    def tuned(paths, labels, classes, features, **how):
        assert len(paths) == len(labels) == len(classes)
        assert 0 <= int(classes.min()) <= int(classes.max()) < how["num_classes"]
        paths[0].unlink()
        return features

    monkeypatch.setattr("opencon.photos.discover.finetune", tuned)
    works(capsys, "discover", *where(photos), *FAST, "--novel", 2, "--finetune", "--out", tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert [row["file"] for row in rows if row["error"]] == ["known/amber/0.png"]
    for row in rows:
        parts = Path(row["file"]).parts
        assert row["given"] == (parts[1] if parts[0] == "known" and not row["error"] else "")


def test_thirty_photos(capsys, originals, tmp_path):
    """As many as t-SNE's perplexity, one fewer than it can draw."""
    for name in SEEN:
        shutil.copytree(originals / "known" / name, tmp_path / "known" / name)
    (tmp_path / "pile").mkdir()
    for path in sorted((originals / "pile").iterdir())[: 30 - 4 * len(SEEN)]:
        shutil.copy(path, tmp_path / "pile")
    works(capsys, "discover", *where(tmp_path), *FAST, "--novel", 1, "--out", tmp_path / "run")
    assert len(rows_of(tmp_path / "run")) == 30


def test_export_without_the_extra_leaves_out_onnx_unless_asked_for(capsys, finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    ran = works(capsys, "export", finished, "--out", tmp_path / "model")
    assert "No model.onnx" in ran.out
    assert "opencon[onnx]" in ran.out
    assert (tmp_path / "model" / "encoder.safetensors").is_file()
    assert "opencon[onnx]" in refused(capsys, "export", finished, "--onnx", "--out", tmp_path / "other")


def test_predict_fails_where_nothing_can_be_read(capsys, finished, tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    for more in ((), ("--csv", tmp_path / "said.csv")):
        assert opencon(capsys, "predict", finished, tmp_path / "empty.png", "--device", "cpu", *more).code == 1


def test_count(capsys, originals):
    out = works(capsys, "count", *where(originals), "--size", "48", "--no-cache", "--device", "cpu", "--json").out
    found = json.loads(out)
    assert found["num_classes"] in [k for k, _ in found["curve"]]
    assert found["num_classes"] >= len(SEEN)


@pytest.mark.parametrize("by", ["gcd", "dtc"])
def test_count_as_the_papers_do(capsys, originals, by):
    args = ("count", *where(originals), "--size", "48", "--no-cache", "--device", "cpu", "--by", by)
    found = json.loads(works(capsys, *args, "--json").out)
    assert found["num_classes"] >= len(SEEN)
    assert f"About {found['num_classes']} classes" in works(capsys, *args).out
    assert "unknown way to count 'gdc'" in refused(capsys, "count", *where(originals), "--by", "gdc")


# --- odd and bad photos ------------------------------------------------------------------------------------------------


def test_photos_of_every_kind_and_broken_ones(capsys, photos, tmp_path):
    pile, rng = photos / "pile", np.random.default_rng(1)
    blue = picture("blue", rng)
    Image.fromarray(np.asarray(blue.convert("L")).astype(np.uint16) * 257).save(pile / "sixteen bits.png")
    blue.convert("CMYK").save(pile / "cmyk.jpg")
    blue.convert("P").save(pile / "palette.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    blue.save(pile / "turned.jpg", exif=exif)
    blue.save(pile / "moving.gif", save_all=True, append_images=[blue.rotate(90)])
    shutil.copy(pile / "b5.png", pile / "copy of b5.png")
    blue.save(pile / "torn.jpg", quality=95)
    (pile / "torn.jpg").write_bytes((pile / "torn.jpg").read_bytes()[:300])
    (pile / "nothing.png").write_bytes(b"")
    Image.new("1", (20_000, 20_000)).save(pile / "huge.png")
    (pile / "camera.DNG").write_bytes(b"II*\0 of a camera")
    ran = works(capsys, "discover", *where(photos), "--novel", 2, *FAST, "--out", tmp_path / "run")
    rows = {row["file"].removeprefix("pile/"): row for row in rows_of(tmp_path / "run")}
    errors = {name: row["error"] for name, row in rows.items() if row["error"]}
    assert set(errors) == {"torn.jpg", "nothing.png", "huge.png", "camera.DNG"}
    assert errors["camera.DNG"] == "is in a format that cannot be read (.dng). Convert it to JPEG."
    assert "is empty" in errors["nothing.png"]
    assert "too many pixels" in errors["huge.png"]
    assert all(name in ran.err for name in errors)
    assert rows["palette.png"]["predicted"] in ("blue", "")  # or odd beside the others
    assert rows["copy of b5.png"]["twin_of"] == "pile/b5.png"
    assert len(np.load(tmp_path / "run/embeddings.npy")) == len(rows) - 4


def test_hostile_names_are_text_everywhere(capsys, photos, tmp_path):
    odd = ["a b.png", 'o\'neill "q".png', "<script>alert(1)<", "żółw 亀.png"]
    os.rename(photos / "known/green", photos / "known/<b>grün & 'x'")
    for at, name in enumerate(odd):
        target = photos / "pile" / (name if name.endswith(".png") else f"{name}.png")
        os.rename(photos / "pile" / f"b{5 + at}.png", target)
    os.rename(photos / "pile/s0.png", os.fsencode(photos / "pile") + b"/caf\xe9.png")  # Latin-1: no UTF-8
    works(capsys, "discover", *where(photos), "--novel", 2, *FAST, "--out", tmp_path / "a run's")
    names = [os.fsencode(row["file"]) for row in rows_of(tmp_path / "a run's")]
    assert b"pile/caf\xe9.png" in names
    page = (tmp_path / "a run's/report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "<b>grün" not in page
    works(capsys, "predict", tmp_path / "a run's", photos / "pile", "--device", "cpu")


def test_few_photos_and_few_classes(capsys, photos, tmp_path):
    for name in ("blue", "green"):
        shutil.rmtree(photos / "known" / name)
    works(capsys, "discover", *where(photos), "--novel", 2, *FAST, "--out", tmp_path / "one class")
    small = tmp_path / "small"
    for name in ("known/amber/0.png", "pile/b5.png"):
        (small / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / name, small / name)
    assert "2 photos are too few" in refused(capsys, "discover", *where(small), *FAST, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_all_labeled(capsys, photos, tmp_path):
    (tmp_path / "labels.csv").write_text(
        "path,label\n" + "".join(f"{p},{p.parent.name}\n" for p in (photos / "known").rglob("*.png"))
    )
    message = refused(capsys, "discover", "--manifest", tmp_path / "labels.csv", *FAST, "--out", tmp_path / "run")
    assert "all 12 photos carry a label (amber, blue, green): nothing is left to discover" in message
    assert not (tmp_path / "run").exists()


def test_none_labeled(capsys, photos, tmp_path):
    """A pile that nobody has looked at: every photo falls into a group."""
    told = works(capsys, "discover", "--unlabeled", photos / "pile", *FAST, "--out", tmp_path / "run").out
    assert "38: none is labeled" in told
    assert "looks for  as many new groups as there seem to be" in told
    assert "38 photos: " in told
    assert "are things you know" not in told
    kinds = {row["kind"] for row in csv.DictReader((tmp_path / "run/assignments.csv").open())}
    assert kinds <= {"new", ""}
    (line, *_) = works(capsys, "predict", tmp_path / "run", photos / "pile", "--device", "cpu").out.splitlines()
    assert json.loads(line)["predicted"] in (None, *(f"new-{i}" for i in range(1, 20)))
    estimate = json.loads(works(capsys, "count", "--unlabeled", photos / "pile", *FAST, "--json").out)
    assert estimate["num_classes"] == json.loads((tmp_path / "run/result.json").read_text())["count"]["num_classes"]


def test_steps_learn_nothing_from_no_label(capsys, photos, tmp_path):
    message = refused(
        capsys, "discover", "--unlabeled", photos / "pile", "--steps", 5, *FAST, "--out", tmp_path / "run"
    )
    assert "--steps learns from labels, and no photo has one" in message
    assert not (tmp_path / "run").exists()


def test_an_encoder_learns_from_photos_without_a_label(capsys, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("opencon.photos.finetune.STEPS", 1)
    asked = ("--unlabeled", photos / "pile", "--novel", 4, "--finetune", *FAST)
    told = works(capsys, "discover", *asked, "--out", tmp_path / "run").out
    assert "the encoder's last stages learn too" in told
    assert not list((tmp_path / "run").glob("checkpoint*")), "nothing is left that only a stopped run needs"
    assert {row["kind"] for row in rows_of(tmp_path / "run")} <= {"new", ""}
    works(capsys, "predict", tmp_path / "run", photos / "pile", "--device", "cpu")


def test_a_class_whose_photos_are_all_broken(capsys, photos, tmp_path):
    for path in (photos / "known/green").iterdir():
        path.write_bytes(b"broken")
    message = refused(capsys, "discover", *where(photos), *FAST, "--out", tmp_path / "run")
    assert "class 'green' has no photo that can be read" in message


@pytest.mark.parametrize(
    "given",
    [(), ("--labeled", "a"), ("--labeled", "a", "--unlabeled", "b", "--manifest", "c"), ("--labels", "a.csv")],
)
def test_ways_to_give_photos_that_are_not_one_way(capsys, given):
    assert "say where the photos are in one of these ways" in refused(capsys, "discover", *given)


def test_a_folder_alone(capsys, originals, tmp_path):
    """Its parts can have the names of the options; else it takes a word about what is known."""
    message = refused(capsys, "discover", originals)
    assert f"{originals} alone does not say which classes you know" in message
    assert f"--labeled known/ --unlabeled {originals}" in message
    assert "nowhere does not exist" in refused(capsys, "discover", tmp_path / "nowhere")
    shutil.copytree(originals / "known", tmp_path / "labeled")
    assert "alone does not say" in refused(capsys, "discover", tmp_path)
    shutil.copytree(originals / "pile", tmp_path / "unlabeled")
    told = works(capsys, "discover", tmp_path, "--dry-run").out
    assert "50: 12 labeled in 3 classes" in told
    assert "38 unlabeled" in told


@pytest.mark.parametrize("novel", ["some", "-1", "2.5"])
def test_a_number_of_groups_that_is_none(capsys, originals, novel):
    assert "must be auto, a whole number" in refused(capsys, "discover", *where(originals), f"--novel={novel}")


# --- where it cannot write ---------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_ours_is_left_alone(capsys, originals, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    message = refused(capsys, "discover", *where(originals), *FAST, "--out", tmp_path)
    assert "is not empty and holds no discovery" in message
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made(capsys, originals, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write to" in refused(capsys, "discover", *where(originals), *FAST, "--out", tmp_path / "file/run")


def test_a_full_disk_loses_nothing_that_was_written(capsys, originals, finished, tmp_path, monkeypatch):
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "assignments.csv").read_bytes()
    real = os.replace

    def full(source, target):
        if str(target).endswith("assignments.csv"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    message = refused(capsys, "discover", *where(originals), "--novel", 1, *FAST, "--out", run)
    assert "the disk is full" in message
    assert "What assignments.csv held before is intact." in message
    assert (run / "assignments.csv").read_bytes() == before
    assert not list(run.glob("*.partial"))


def test_a_discovery_is_not_a_run_of_train(capsys, finished):
    for words in (("evaluate", finished), ("train", "digits", "--out", finished)):
        assert "holds a discovery" in refused(capsys, *words)


def test_photos_under_no_common_folder_keep_their_whole_names():
    assert shown_name(Path("/a/b.jpg"), Path("/a")) == "b.jpg"
    assert shown_name(Path("/a/b.jpg"), Path("/")) == "/a/b.jpg"
    assert shown_name(Path("c/b.jpg"), Path("/")) == "c/b.jpg"


def test_a_run_folder_of_something_else_cannot_predict(capsys, originals, tmp_path):
    assert "holds no model" in refused(capsys, "predict", tmp_path, originals / "pile", "--device", "cpu")
