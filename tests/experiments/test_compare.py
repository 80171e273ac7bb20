"""`opencon compare` on made-up runs whose numbers are known."""

import csv
import io
import json
import math
import statistics

import pytest
from typer.testing import CliRunner

from opencon.cli import app
from opencon.config import to_dict, with_settings
from opencon.errors import ConfigError, RunError
from opencon.experiments.compare import compare_runs, published_numbers, render
from opencon.experiments.measures import paired_p
from opencon.experiments.recipes import SETTINGS, get_recipe
from opencon.methods import METHODS


def make_run(folder, recipe="opencon/cifar100", settings=(), *, all=0.5, novel=0.4, seen=0.6, seconds=(), **result):
    folder.mkdir(parents=True)
    config = with_settings(get_recipe(recipe), settings)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    record = {"protocol": config.eval.protocol, "on": "unlabeled", "num_images": 37403} | result
    record |= {"all": all, "novel": novel, "seen": seen}
    (folder / "result.json").write_text(json.dumps({k: v for k, v in record.items() if v is not None}))
    lines = [json.dumps({"epoch": i, "seconds": s}) for i, s in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


NOTHING = {"all": None, "novel": None, "seen": None}  # no accuracy


@pytest.fixture
def runs(tmp_path):
    """OpenCon with three seeds, SimCLR's k-means once."""
    for seed, value in enumerate((0.50, 0.53, 0.51)):
        make_run(tmp_path / f"o{seed}", settings=[f"train.seed={seed}"], all=value, seconds=(30, 5, 0.4, 0.3, 0.5))
    make_run(tmp_path / "k", "kmeans/cifar100", all=0.25)
    return tmp_path


def test_runs_are_grouped_over_seeds_best_first(runs):
    (section,) = compare_runs([runs])
    assert "CIFAR-100, 50 seen classes, 50% labeled; protocol orca, 37,403 unlabeled training images" in section.title
    first, second = section.rows
    assert (first.label, second.label) == ("OpenCon", METHODS["kmeans"].title)
    mean, std = first.score("all")
    assert mean == pytest.approx(100 * statistics.mean((0.5, 0.53, 0.51)))
    assert std == pytest.approx(100 * statistics.stdev((0.5, 0.53, 0.51)))
    assert second.score("all") == (pytest.approx(25.0), None)
    assert first.seconds_per_epoch == pytest.approx(0.4)  # the first two epochs compile
    assert second.seconds_per_epoch is None


def test_published_numbers_stand_beside_what_was_measured_alike(runs, tmp_path):
    (section,) = compare_runs([runs])
    assert section.rows[0].published == (52.7, 47.8, 69.1)
    make_run(tmp_path / "more" / "other", settings=["split.num_seen=80"])
    make_run(tmp_path / "more" / "test", on="test")
    make_run(tmp_path / "more" / "gcd", protocol="gcd")
    sections = compare_runs([tmp_path / "more"])
    assert len(sections) == 3  # nothing of this can be compared with the rest
    assert [row.published for section in sections for row in section.rows] == [None, None, None]


@pytest.mark.parametrize(
    ("setting", "is_shown"),
    [
        ("method.weight_novel=0", False),
        ("train.epochs=20", False),
        ("split.labeled_ratio=0.1", False),
        ("train.capture=false", True),
        ("split.seed=3", True),
        ("encoder.weights=w.pt", True),
    ],
)
def test_a_number_of_the_main_table_does_not_stand_beside_an_ablation(tmp_path, setting, is_shown):
    (section,) = compare_runs([make_run(tmp_path / "a", settings=[setting])])
    assert (section.rows[0].published is not None) == is_shown


def test_the_csv_says_how_much_is_labeled_and_how_many_classes_are_looked_for(tmp_path):
    for name, settings in (("a", []), ("b", ["split.num_classes=124", "split.labeled_ratio=0.25"])):
        make_run(tmp_path / name, settings=settings)
    rows = list(csv.DictReader(io.StringIO(render(compare_runs([tmp_path]), "csv"))))
    assert sorted((row["num_classes"], row["labeled_ratio"]) for row in rows) == [("100", "0.5"), ("124", "0.25")]


def test_published_numbers_are_of_methods_and_data_sets_that_exist():
    for data, numbers in published_numbers().items():
        assert data in SETTINGS, data
        for method, triple in numbers.items():
            assert method in METHODS
            assert len(triple) == 3
            assert all(0 < value < 100 for value in triple)


def test_experiments_of_one_method_are_told_apart_by_their_settings(runs):
    make_run(runs / "s", settings=["method.percentile=50", "data.root=/elsewhere", "train.seed=4"], all=0.4)
    (section,) = compare_runs([runs])
    assert [row.label for row in section.rows][:2] == [
        "OpenCon, method.percentile=70.0",
        "OpenCon, method.percentile=50.0",
    ]
    assert [len(row.runs) for row in section.rows][:2] == [3, 1]


def test_where_files_lie_does_not_make_another_experiment(tmp_path):
    make_run(tmp_path / "a", settings=["data.root=/here", "encoder.weights=v.pt"])
    make_run(tmp_path / "b", settings=["data.root=/elsewhere", "encoder.weights=w.pt", "train.seed=1"])
    ((row,),) = (section.rows for section in compare_runs([tmp_path]))
    assert len(row.runs) == 2


def test_random_weights_are_another_experiment_than_given_ones(runs):
    make_run(runs / "o3", settings=["encoder.weights=w.pt", "train.seed=3"], all=0.6)
    (section,) = compare_runs([runs])
    assert [(row.label, len(row.runs)) for row in section.rows][:2] == [
        ("OpenCon, encoder.weights=given", 1),
        ("OpenCon, encoder.weights=none", 3),
    ]


def test_another_split_is_another_section(runs):
    make_run(runs / "seed", "orca/cifar100", ["split.seed=3"])
    make_run(runs / "told", "orca/cifar100", ["split.num_classes=124"])
    make_run(runs / "same", "orca/cifar100", ["split.num_classes=100"])
    for folder in "xy":
        make_run(runs / folder, "orca/cifar100", ["data.name=folder", f"data.root=/photos/{folder}"])
    sections = {section.title: section for section in compare_runs([runs])}
    rest = "; protocol orca, 37,403 unlabeled training images"
    assert list(sections) == [
        f"CIFAR-100, 50 seen classes, 50% labeled{rest}",
        f"CIFAR-100, 50 seen classes, 50% labeled, split seed 3{rest}",
        f"CIFAR-100, 50 seen classes, 124 to look for, 50% labeled{rest}",
        f"Your own folder /photos/x, 50 seen classes, 50% labeled{rest}",
        f"Your own folder /photos/y, 50 seen classes, 50% labeled{rest}",
    ]
    published = [section.rows[0].published is not None for section in sections.values()]
    assert published == [True, True, False, False, False]


def test_an_accuracy_over_no_images_is_left_empty(tmp_path):
    run = make_run(tmp_path / "a")
    result = json.loads((run / "result.json").read_text()) | {"seen": None}  # as a run writes what is not a number
    (run / "result.json").write_text(json.dumps(result))
    sections = compare_runs([run])
    assert "| OpenCon | 50.0 | 40.0 |  | 1 |" in render(sections, "markdown")
    assert json.loads(render(sections, "json"))[0]["rows"][0]["seen"] == {"mean": None, "std": None}
    assert next(csv.DictReader(io.StringIO(render(sections, "csv"))))["seen_mean"] == ""
    assert CliRunner().invoke(app, ["compare", str(run)]).exit_code == 0


@pytest.mark.parametrize("form", ["markdown", "latex", "csv", "json"])
def test_every_form_has_every_number(runs, form):
    text = render(compare_runs([runs]), form)
    if form == "json":
        (section,) = json.loads(text)
        assert section["rows"][0]["n"] == 3
        assert section["rows"][0]["all"]["mean"] == pytest.approx(51.333, abs=1e-3)
        assert section["rows"][0]["seeds"] == [0, 1, 2]
        assert section["rows"][1]["all"]["std"] is None
    elif form == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        assert float(rows[0]["all_mean"]) == pytest.approx(51.333, abs=1e-3)
        assert (rows[0]["runs"], rows[1]["all_std"], rows[0]["published_seen"]) == ("3", "", "69.1")
    elif form == "markdown":
        assert (
            "| OpenCon | **51.3 ± 1.5** | **40.0 ± 0.0** | **60.0 ± 0.0** | 3 | 200 | 0.40 | 52.7/47.8/69.1 |" in text
        )
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1
    else:
        assert r"OpenCon & \textbf{51.3 $\pm$ 1.5} &" in text
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1


def test_columns_are_chosen_and_the_best_of_each_is_bold(runs):
    make_run(runs / "c", "gcd/cifar100", all=0.3, nmi_all=0.7, fpr95=0.2, novelty={"own": {"auroc": 0.9}})
    make_run(runs / "d", "orca/cifar100", all=0.2, nmi_all=0.6, fpr95=0.1)
    sections, columns = compare_runs([runs]), ["nmi", "fpr95", "novelty.own.auroc", "seconds_per_epoch"]
    lines = render(sections, "markdown", columns).splitlines()[2:]
    assert lines[0].startswith("| method | nmi | fpr95 | novelty.own.auroc | seconds_per_epoch | runs |")
    assert "| GCD | **70.0** | 20.0 | 90.0 |  |" in lines[3]  # alone in its third column
    assert "| ORCA | 60.0 | **10.0** |  |  |" in lines[5]  # the share of false alarms: less is better
    assert json.loads(render(sections, "json", ["nmi"]))[0]["rows"][1]["nmi"]["mean"] == pytest.approx(70.0)
    with pytest.raises(ConfigError, match=r"no run has a measure 'nmj'\. Did you mean 'nmi'"):
        render(sections, "csv", ["nmj"])
    shown = CliRunner().invoke(app, ["compare", str(runs), "--columns", "nmi,ari"])
    assert isinstance(shown.exception, ConfigError)
    shown = CliRunner().invoke(app, ["compare", str(runs), "--columns", "nmi, all"])
    assert "70.0" in shown.output


def test_a_paired_test_over_the_seeds_that_both_have(runs):
    """By hand: differences 1, 3 and 2 have mean 2 and standard deviation 1, so t = 2 sqrt(3) with 2 degrees of freedom."""
    for seed, value in enumerate((0.49, 0.50, 0.49, 0.1)):  # the last seed is not among the others'
        make_run(runs / f"g{seed}", "gcd/cifar100", [f"train.seed={seed}"], all=value)
    (section,) = compare_runs([runs])
    t = 2 * math.sqrt(3)
    want = 1 - t / math.sqrt(t * t + 2)  # Student's distribution with 2 degrees of freedom has a closed form
    first, *others = section.p("all")
    assert first is None
    assert dict(zip([row.label for row in section.rows[1:]], others, strict=True)) == {
        "GCD": pytest.approx(want),
        METHODS["kmeans"].title: None,  # one seed
    }
    assert f"| GCD | 39.5 ± 19.7 | **40.0 ± 0.0** | **60.0 ± 0.0** | {want:.3f} | 4 |" in render([section], "markdown")
    assert next(csv.DictReader(io.StringIO(render([section], "csv"))))["p"] == ""
    assert paired_p({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0}) == 1.0
    assert paired_p({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}) == 0.0


def test_a_p_below_what_is_shown_is_not_shown_as_zero(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"o{seed}", settings=[f"train.seed={seed}"], all=0.6 + seed / 100)
        make_run(tmp_path / f"g{seed}", "gcd/cifar100", [f"train.seed={seed}", "eval.protocol=orca"], all=seed / 100)
    assert "| <0.001 | 3 |" in render(compare_runs([tmp_path]), "markdown")


def test_special_characters_survive_latex(runs):
    make_run(runs / "s", settings=["method.labeled_loss=known"], all=0.4)
    assert r"method.labeled\_loss=known" in render(compare_runs([runs]), "latex")


def test_what_cannot_be_compared(runs, tmp_path):
    with pytest.raises(RunError, match="nothing is not a run, and no run is in it"):
        compare_runs([tmp_path / "nothing"])
    before, said = compare_runs([runs]), []
    twin = make_run(runs / "twin", settings=["train.seed=1"])
    assert compare_runs([runs], said.append) == before  # listed, not named: one of the two counts
    assert "twin is the same experiment as" in said[0]
    with pytest.raises(ConfigError, match=r"with the same seed 1\. Leave out one of them"):
        compare_runs([twin, *sorted(runs.iterdir())])
    half = make_run(tmp_path / "half" / "a")
    (half / "result.json").unlink()
    with pytest.raises(RunError, match=r"is not finished\. Resume it"):
        compare_runs([half])
    pre = make_run(tmp_path / "pre" / "a", "simclr/cifar100", on="train", **NOTHING)
    with pytest.raises(
        ConfigError, match=r"simclr learns without labels .* Nobody knows these, so there is nothing to"
    ):
        compare_runs([pre])
    for record in (NOTHING, {"protocol": None}, {"on": "moon"}, {"all": "much"}, {"stability": "high", **NOTHING}):
        with pytest.raises(RunError, match=r"result\.json is damaged"):
            compare_runs([make_run(tmp_path / "bad" / str(record), **record)])
    with pytest.raises(ConfigError, match="--format 'html' must be one of table, markdown"):
        render([], "html")


def test_runs_without_truth_are_compared_by_what_can_be_said(tmp_path):
    here = ["data.name=folder", "data.root=named", "data.unlabeled=pile", "split.num_seen=none"]
    for seed in (0, 1):
        for method, right in (("orca", 0.8), ("gcd", 0.7)):
            record = {"held_out": right + seed / 10, "stability": 0.5, "classes_in_use": 9, "num_images": 300}
            folder = tmp_path / f"{method}{seed}"
            make_run(folder, f"{method}/cifar100", [*here, f"train.seed={seed}"], protocol=None, **record, **NOTHING)
            (folder / "split.json").write_text('{"num_seen": 4}')
    (section,) = compare_runs([tmp_path])
    assert section.title == (
        "Your own folder named and pile, 4 seen classes, a number that is estimated to look for, labeled as the files "
        "say; no truth, 300 unlabeled training images"
    )
    text = render([section], "markdown")
    assert "| method | held_out | stability | classes_in_use | runs |" in text
    assert "| ORCA | **85.0 ± 7.1** | 50.0 ± 0.0 | 9.0 ± 0.0 | 2 |" in text
    row = next(csv.DictReader(io.StringIO(render([section], "csv"))))
    assert (row["seen_classes"], row["held_out_mean"], row["protocol"]) == ("4", "85.0", "")


def test_pre_training_is_compared_by_its_neighbors(runs):
    for name, share in (("simclr", 0.3), ("moco", 0.4)):
        make_run(runs / name, f"{name}/cifar100", protocol=None, on="train", num_images=50000, knn20=share, **NOTHING)
    accuracy, neighbors = sorted(compare_runs([runs]), key=lambda section: section.title)
    assert (accuracy.measures, neighbors.measures) == (("all", "novel", "seen"), ("knn20",))
    assert neighbors.title == "CIFAR-100; 20-NN, 50,000 training images"
    assert [row.label for row in neighbors.rows] == ["MoCo v3", "SimCLR"]
    assert list(json.loads(render([neighbors], "json"))[0]["rows"][0])[5] == "knn20"


def test_what_is_only_found_in_a_folder_and_does_not_fit_is_left_out(runs):
    make_run(runs / "pre", "simclr/cifar100", on="train", **NOTHING)
    (make_run(runs / "half", settings=["train.seed=9"]) / "result.json").unlink()
    foreign = make_run(runs / "foreign")
    (foreign / "config.json").write_text("{}")
    said = []
    (section,) = compare_runs([runs], say=said.append)
    assert [len(row.runs) for row in section.rows] == [3, 1]
    assert [next(word for word in ("foreign", "half", "pre") if word in line) for line in said] == [
        "foreign",
        "half",
        "pre",
    ]
    assert "foreign/config.json is not the configuration of a run: method.name is missing" in said[0]
    with pytest.raises(RunError, match="is not finished"):
        compare_runs([runs, runs / "half"][1:])
    with pytest.raises(RunError, match="there is no finished run to compare"):
        compare_runs([_only(runs, "half")])


def _only(runs, name):
    """A folder that holds one run."""
    folder = runs.parent / f"only-{name}"
    folder.mkdir()
    (runs / name).rename(folder / name)
    return folder


def test_a_sweep_stands_for_its_cells(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"sweep/cells/seed{seed}", settings=[f"train.seed={seed}"])
    ((row,),) = (section.rows for section in compare_runs([tmp_path / "sweep"]))
    assert len(row.runs) == 2


def test_the_same_folder_twice_counts_once(runs):
    (section,) = compare_runs([runs / "k", runs / "o0" / ".." / "k"])
    assert len(section.rows[0].runs) == 1


@pytest.mark.parametrize(("suffix", "form"), [("md", "markdown"), ("tex", "latex"), ("csv", "csv"), ("json", "json")])
def test_the_form_follows_the_file(runs, tmp_path, suffix, form):
    out = tmp_path / f"table.{suffix}"
    assert CliRunner().invoke(app, ["compare", str(runs), "--out", str(out)]).exit_code == 0
    assert out.read_bytes().decode() == render(compare_runs([runs]), form)


def test_the_command(runs, tmp_path):
    shown = CliRunner().invoke(app, ["compare", str(runs)])
    assert shown.exit_code == 0
    assert "51.3 ± 1.5" in shown.output
    out = tmp_path / "table.md"
    assert CliRunner().invoke(app, ["compare", str(runs), "--out", str(out)]).exit_code == 0
    assert out.read_text() == render(compare_runs([runs]), "markdown")
    printed = CliRunner().invoke(app, ["compare", str(runs / "k"), "--format", "json"])
    assert json.loads(printed.output)[0]["rows"][0]["name"] == "kmeans"
    with pytest.raises(ConfigError, match=r"cannot write --out .* \(No such file or directory\)"):
        CliRunner().invoke(app, ["compare", str(runs), "--out", str(tmp_path / "no" / "t.md")], catch_exceptions=False)
