"""The public functions, as a program calls them."""

import csv
import json
import shutil

import numpy as np
import pytest

import opencon
from opencon.api import Run, discover_config
from opencon.errors import ConfigError, DataError
from opencon.experiments.recipes import get_recipe
from opencon.photos.features import VIEWS_FOR_STEPS
from tests.small_model import COLORS, NUM_LABELED, PER_COLOR, make_photos, make_run


def test_every_public_name_is_there():
    for name in opencon.__all__:
        assert getattr(opencon, name) is not None
        assert name in dir(opencon)


# --- discover ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """photos/ with labeled/ (some of the first two colors) and unlabeled/, one of them torn; a run; the truth."""
    root = tmp_path_factory.mktemp("place")
    paths = make_photos(root / "photos/unlabeled")
    for color in list(COLORS)[:2]:
        (root / "photos/labeled" / color).mkdir(parents=True)
        for i in range(NUM_LABELED):
            (root / f"photos/unlabeled/{color}{i}.png").rename(root / f"photos/labeled/{color}/{i}.png")
    (root / "photos/unlabeled/torn.png").write_bytes(b"")
    truth = [f"{path.name},{path.stem.rstrip('0123456789')}" for path in paths if path.exists()]
    (root / "truth.csv").write_text("\n".join(["file,class", *truth]))
    make_run(root / "encoder")
    return root


UNLABELED = PER_COLOR * len(COLORS) - 2 * NUM_LABELED


@pytest.fixture(scope="module")
def found(place):
    told = []
    result = opencon.discover(
        place / "photos",
        out=place / "found",
        novel=2,
        encoder=str(place / "encoder"),
        device="cpu",
        truth=place / "truth.csv",
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    return result, told


def test_a_discovery_in_python(place, found):
    result, _ = found
    unlike = result.table.num_unlike_everything  # one in twenty is expected to be, whoever they are
    words = f"14 are things you know, {24 - unlike} fall into 2 new groups, {unlike} are unlike everything"
    assert result.headline == f"{UNLABELED} photos: {words}"
    assert [(group.name, group.kind) for group in result.groups] == [
        ("green", "seen"),
        ("red", "seen"),
        ("new-1", "new"),
        ("new-2", "new"),
    ]
    assert [group.size for group in result.groups[:2]] == [PER_COLOR - NUM_LABELED] * 2
    assert sum(group.size for group in result.groups[2:]) == 2 * PER_COLOR - unlike
    assert result.count is None  # the number was given
    assert result.replaced == []
    assert result.folder == place / "found"
    assert repr(result) == f"<Discovery in {place / 'found'}: {result.headline}>"
    assert result.headline in result._repr_html_()


def test_what_python_says_is_what_the_files_say(place, found):
    result, _ = found
    assert result.paths == {
        "report": place / "found/report.html",
        "table": place / "found/assignments.csv",
        "embeddings": place / "found/embeddings.npy",
    }
    assert result.report == result.paths["report"]
    assert result.paths["table"].read_text() == result.table.to_csv()
    assert json.loads((place / "found/result.json").read_text()) == json.loads(json.dumps(result.record))
    assert result.headline in result.report.read_text(encoding="utf-8")
    assert len(np.load(result.paths["embeddings"])) == len(result.table.readable) == len(result.table) - 1
    (torn,) = result.table.unreadable
    assert (torn.file, torn.error) == ("unlabeled/torn.png", "is empty")
    given = {row.file: row.given for row in result.table if row.given}
    assert given == {f"labeled/{color}/{i}.png": color for color in ("red", "green") for i in range(NUM_LABELED)}


def test_the_truth_is_measured_with(found):
    record = found[0].record
    assert (record["all"], record["protocol"], record["num_images"]) == (1.0, "gcd", UNLABELED)


def test_progress_goes_through_the_stages(found):
    _, told = found
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == ["looking", "writing"]  # no step is taken
    assert told[-1] == ("writing", 1, 1)
    photos = [(done, total) for stage, done, total in told if stage == "looking"]
    assert photos[-1] == (PER_COLOR * len(COLORS) + 1,) * 2


def test_the_model_of_a_discovery_predicts(place, found):
    model = opencon.OpenConModel.from_pretrained(str(place / "found"))
    rows = {row.file.removeprefix(f"{place}/photos/"): row for row in model.predict(place / "photos/unlabeled")}
    alike = [row for row in found[0].table.unlabeled if not row.unlike_everything]  # a photo is like itself, once known
    assert len(alike) > 30
    for row in alike:
        assert (rows[row.file].predicted, rows[row.file].kind) == (row.predicted, row.kind)


def test_a_table_of_labels_steps_a_cache_and_an_open_number(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # "~" is there for every path
    shutil.copytree(place / "photos/unlabeled", tmp_path / "pile")
    (tmp_path / "labels.csv").write_text("path,label\nred5.png,red\nred6.png,red\ngreen5.png,green\n")
    stages = []
    result = opencon.discover(
        "~/pile",
        out="~/found",
        labels="~/labels.csv",
        encoder=str(place / "encoder"),
        steps=2,
        device="cpu",
        cache="~/cache",
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert result.folder == tmp_path / "found"
    assert "learning" in stages
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    assert {row.file: row.given for row in result.table if row.given} == {
        "red5.png": "red",
        "red6.png": "red",
        "green5.png": "green",
    }
    assert result.count.num_classes == len(result.groups)
    assert "all" not in result.record  # nothing to measure with
    asked = json.loads((tmp_path / "found/config.json").read_text())
    assert asked["features"]["num_views"] == VIEWS_FOR_STEPS
    with (tmp_path / "found/assignments.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(result.table)


@pytest.mark.parametrize(("steps", "views", "want"), [(0, None, 0), (5, None, VIEWS_FOR_STEPS), (5, 1, 1)])
def test_views_are_for_steps(steps, views, want):
    how = {"novel": None, "encoder": "efficientnet_lite0", "size": None, "finetune": False, "seed": 7}
    config = discover_config(steps=steps, views=views, **how)
    assert config.features.num_views == want
    assert (config.fit.steps, config.fit.seed) == (steps, 7)


def test_a_discovery_that_cannot_be_is_refused_before_anything_is_written(place, tmp_path):
    with pytest.raises(ConfigError, match="say where the photos are in one of these ways"):
        opencon.discover(out=tmp_path / "run")
    with pytest.raises(DataError, match="alone does not say which classes you know"):
        opencon.discover(place / "photos/unlabeled", out=tmp_path / "run")
    with pytest.raises(ConfigError, match="num_novel = -1"):
        opencon.discover(place / "photos", out=tmp_path / "run", novel=-1)
    assert not (tmp_path / "run").exists()


def test_what_a_program_gets_wrong_is_said(place, tmp_path):
    how = {"encoder": "efficientnet_lite0", "size": None, "finetune": False, "seed": 0}
    with pytest.raises(ConfigError, match="views = 2 are for steps to learn from, and there are none"):
        discover_config(novel="auto", steps=0, views=2, **how)
    with pytest.raises(ConfigError, match="novel = 'many' must be auto, a whole number"):
        discover_config(novel="many", steps=0, views=None, **how)
    assert discover_config(novel="3", steps=0, views=None, **how).fit.num_novel == 3
    with pytest.raises(ConfigError, match="orca has one variant, which follows its released code"):
        opencon.train("orca/digits", out=tmp_path / "a", variant="paper")
    with pytest.raises(ConfigError, match="a variant belongs to a recipe"):
        opencon.train(get_recipe("digits"), out=tmp_path / "a", variant="paper")
    (tmp_path / "few.csv").write_text("path,label\nlabeled/red/0.png,red\nlabeled/nowhere.png,red\n")
    with pytest.warns(UserWarning, match=r"set aside: .*line 3: there is no file"):
        opencon.count(place / "photos", labels=tmp_path / "few.csv", encoder=place / "encoder", device="cpu")


def test_count_name_and_export_do_what_the_commands_do(place, found, tmp_path):
    estimate = opencon.count(place / "photos", encoder=str(place / "encoder"), device="cpu")
    assert estimate.low <= estimate.num_classes <= estimate.high
    run = tmp_path / "run"
    shutil.copytree(place / "found", run)
    assert opencon.name(run, {"new-1": "sky"}) == {"new-1": "sky"}
    (tmp_path / "names.csv").write_text("group,name\nnew-2,stone\n")
    assert opencon.name(str(run), tmp_path / "names.csv") == {"new-2": "stone"}
    assert opencon.OpenConModel.from_pretrained(run).class_names[2:] == ("sky", "stone")
    with (run / "assignments.csv").open() as file:
        assert {"sky", "stone"} <= {row["predicted"] for row in csv.DictReader(file)}
    with pytest.raises(DataError, match="there is no group 'new-9' to rename"):
        opencon.name(run, {"new-9": "x"})
    lines = opencon.export(run, tmp_path / "model", onnx=False)
    assert len(lines) == 1
    assert opencon.OpenConModel.from_pretrained(tmp_path / "model").names[2:] == ("sky", "stone")


# --- train, evaluate, compare -----------------------------------------------------------------------------------------

SMALL = {"train.epochs": 1, "train.batch_size": 256}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return opencon.train("digits", out=tmp_path_factory.mktemp("runs") / "a", settings=SMALL, device="cpu")


def test_a_run_says_what_was_measured(run):
    assert isinstance(run, Run)
    assert run.result == json.loads((run.folder / "result.json").read_text())
    scores = ", ".join(f"{key} {run.result[key]:.1%}" for key in ("all", "novel", "seen"))
    assert repr(run) == f"<Run in {run.folder}: {scores}>"
    config = json.loads((run.folder / "config.json").read_text())
    assert config["method"]["name"] == "opencon"  # a data set alone means OpenCon
    assert (config["train"]["epochs"], config["train"]["batch_size"]) == (1, 256)


def test_a_finished_run_is_shown_again(run):
    before = (run.folder / "checkpoint.pt").stat().st_mtime_ns
    again = opencon.train("digits", out=str(run.folder), settings=SMALL, device="cpu")
    assert again.result == run.result
    assert (run.folder / "checkpoint.pt").stat().st_mtime_ns == before


def test_settings_of_every_type_seeds_and_configurations(run, tmp_path):
    recipe = get_recipe("simclr/digits", variant="released")
    settings = {**SMALL, "encoder.name": "convnet", "augment.crop_scale": (0.5, 1.0), "encoder.weights": None}
    other = opencon.train(recipe, out=tmp_path / "b", settings=settings, seed=3, device="cpu")
    config = json.loads((other.folder / "config.json").read_text())
    assert (config["method"]["name"], config["train"]["seed"]) == ("simclr", 3)
    assert config["augment"]["crop_scale"] == [0.5, 1.0]
    assert config["encoder"]["weights"] is None
    with pytest.raises(ConfigError, match=r"did you mean train\.epochs"):
        opencon.train("digits", out=tmp_path / "c", settings={"epochs": 3})
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        opencon.train("digits", out=run.folder, settings=SMALL, seed=5, device="cpu")


def test_a_run_from_a_file(tmp_path):
    text = (
        'data.name = "digits"\nsplit.num_seen = 5\nencoder.name = "convnet"\nmethod.name = "kmeans"\ntrain.epochs = 0\n'
    )
    (tmp_path / "mine.toml").write_text(text)
    run = opencon.train(str(tmp_path / "mine.toml"), out=tmp_path / "run", device="cpu")
    assert 0.1 < run.result["all"] < 1


def test_evaluate_measures_again(run):
    as_trained = opencon.evaluate(run, device="cpu")
    assert {key: as_trained[key] for key in ("all", "novel", "seen", "protocol")} == {
        key: run.result[key] for key in ("all", "novel", "seen", "protocol")
    }
    other = opencon.evaluate(str(run.folder), protocol="gcd", novelty=True, count="gcd", device="cpu")
    assert other["protocol"] == "gcd"
    assert "knn" in other["novelty"]
    assert other["count"]["num_classes"] >= 5
    with pytest.raises(ConfigError, match="protocol"):
        opencon.evaluate(run, protocol="gdc", device="cpu")


def test_runs_side_by_side(run, tmp_path):
    other = opencon.train("digits", out=tmp_path / "b", settings=SMALL, seed=1, device="cpu")
    both = opencon.compare([run, str(other.folder)])
    ((row,),) = (section.rows for section in both.sections)
    assert {each.path for each in row.runs} == {run.folder, other.folder}
    (line,) = list(csv.DictReader(both.to("csv").splitlines()))
    assert line["method"] == "OpenCon"
    assert repr(both) == both.to("markdown") == both._repr_markdown_()
    assert json.loads(both.to("json"))
    with pytest.raises(ConfigError, match="form 'table' must be one of markdown, csv, latex, json"):
        both.to("table")
    for alone in (run, run.folder, str(run.folder)):  # a single one, not its letters
        ((row,),) = (section.rows for section in opencon.compare(alone).sections)
        assert [each.path for each in row.runs] == [run.folder]


def test_another_seed_finds_the_same_features():
    one, two = (
        discover_config(novel="auto", encoder="resnet18", size=None, steps=9, views=None, finetune=False, seed=seed)
        for seed in (1, 2)
    )
    assert one.features == two.features
    assert one.fit != two.fit


@pytest.mark.parametrize(
    ("novel", "number", "between"),
    [
        ("auto", None, None),
        (None, None, None),
        ("4", 4, None),
        (4, 4, None),
        ("3-8", None, (3, 8)),
        ((3, 8), None, (3, 8)),
    ],
)
def test_a_number_of_groups_a_range_or_neither(novel, number, between):
    rest = {"encoder": "resnet18", "size": None, "steps": 0, "views": None, "finetune": False, "seed": 0}
    fit = discover_config(novel=novel, max_classes=50, **rest).fit
    assert (fit.num_novel, fit.novel_range, fit.max_classes) == (number, between, 50)
    for wrong in ("3-", "3-8-9", "8-3", "-3"):
        with pytest.raises(ConfigError):
            discover_config(novel=wrong, **rest)
