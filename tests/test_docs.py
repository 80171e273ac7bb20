"""The documentation tells the truth about names: links, commands, settings, examples, tables and trees."""

import ast
import dataclasses
import html
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import types
import typing
import urllib.parse
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image

import opencon
import opencon.methods as methods_module
from opencon.cli import app, main
from opencon.config import RunConfig, to_dict, with_settings
from opencon.errors import ConfigError
from opencon.experiments.recipes import get_recipe, read_config, recipe_names
from opencon.experiments.train import train
from opencon.experiments.workbench import prepare
from opencon.methods import METHODS, OpenConConfig
from opencon.photos.discover import Discovery
from opencon.report.table import COLUMNS
from opencon.training.optimizer import build_optimizer
from tests.methods import test_every_method as checks
from tests.test_architecture import FLOORS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SECTIONS = {f.name for f in dataclasses.fields(RunConfig)}
FILES = {"cff", "json", "jsonl", "md", "pt", "py", "safetensors", "toml", "txt"}  # `encoder.safetensors` is no setting
CPU = torch.device("cpu")


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def named(pages):
    return pytest.mark.parametrize("path", pages, ids=lambda path: path.name)


# --- reading Markdown -------------------------------------------------------------------------------------------------


def fenced(text, language):
    """The contents of ```language blocks."""
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind == language]


def prose(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def commands(text):
    """Every `opencon ...` line of a block (fenced or indented) or between backticks, as arguments."""
    blocks = "\n".join(body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S))
    lines = [*blocks.splitlines(), *re.findall(r"^    (.+)$", prose(text), re.M)]
    lines += re.findall(r"`([^`\n]+)`", prose(text))
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("opencon ")]


def settings(text):
    """`section.key` and `section.key=value` between backticks, as (section, key, value or '')."""
    spans = re.findall(r"`([^`\n]+)`", prose(text))
    found = [re.fullmatch(r"(?:--set )?([a-z]+)\.([a-z_0-9]+)(?: ?= ?(\S+))?", span) for span in spans]
    return [(m[1], m[2], m[3] or "") for m in found if m and m[1] in SECTIONS and m[2] not in FILES]


def slug(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def broken_links(text, folder):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = (folder / file) if file else None
        if place is not None and not place.exists():
            wrong.append(target)
        elif anchor:
            other = place.read_text(encoding="utf-8") if place else text
            if anchor not in {slug(h) for h in re.findall(r"^#+ (.+)$", prose(other), re.M)}:
                wrong.append(target)
    return wrong


def fields_of(section):
    if section == "method":
        configs = [METHODS[name].config for name in METHODS.names()]
        return {"name", *(f.name for config in configs for f in dataclasses.fields(config))}
    return {f.name for f in dataclasses.fields(typing.get_type_hints(RunConfig)[section])}


def check_command(args):
    """Parse as the command line would, without running anything; `--set` must fit the recipe."""
    group = typer.main.get_command(app)
    context = group.make_context("opencon", list(args))
    rest = [*getattr(context, "_protected_args", []), *context.args]
    if not rest:  # opencon --version
        return
    name, command, arguments = group.resolve_command(context, rest)
    if not arguments or "--help" in arguments:  # only mentioned
        return
    given = command.make_context(name, arguments, parent=context).params
    if name in ("train", "pretrain") and given["recipe"] not in (None, "RECIPE", "METHOD/DATASET"):
        method = given["method"] or "simclr" if name == "pretrain" else "opencon"
        base = get_recipe(given["recipe"], method=method, variant=given.get("variant") or "released")
        with_settings(base, given["settings"] or [])


# --- every page -------------------------------------------------------------------------------------------------------


@named(PAGES)
def test_links_lead_somewhere(path):
    assert broken_links(path.read_text(encoding="utf-8"), path.parent) == []


@named(PAGES)
def test_commands_exist_with_these_options(path, request):
    if path.name == "add-a-method.md":
        request.getfixturevalue("contrast")  # the method that the page adds
    for args in commands(path.read_text(encoding="utf-8")):
        try:
            check_command(args)
        except Exception as err:
            pytest.fail(f"opencon {shlex.join(args)}: {err}")


@named(PAGES)
def test_settings_exist_and_take_these_values(path):
    for section, key, value in settings(path.read_text(encoding="utf-8")):
        assert key in fields_of(section), f"{section}.{key}"
        if value:
            recipes = (get_recipe(name) for name in recipe_names())
            owner = next(recipe for recipe in recipes if key in to_dict(recipe)[section])
            with_settings(owner, [f"{section}.{key}={value}"])


def test_pages_are_found_and_hold_what_is_looked_for():
    assert {"CONTRIBUTING.md", "quickstart.md", "methods.md", "metrics.md"} <= {path.name for path in PAGES}
    assert len(commands(page("docs/quickstart.md"))) > 15
    assert ("method", "labeled_loss", "known") in settings(page("docs/methods.md"))


@pytest.mark.parametrize(
    "line",
    ["opencon trian digits", "opencon train digits --epochs 3", "opencon train digit", "opencon evaluate --json"],
)
def test_a_wrong_command_is_found(line):
    (args,) = commands(f"text\n\n    {line}\n")
    with pytest.raises(Exception, match=r"(?i)no such|unknown recipe|missing"):
        check_command(args)


def test_a_wrong_setting_in_a_command_is_found():
    (args,) = commands("`opencon train digits --set train.epoch=3`")
    with pytest.raises(ConfigError, match=r"unknown setting 'train\.epoch'"):
        check_command(args)


def test_a_wrong_setting_in_prose_is_found():
    assert settings("see `train.epoch` and `data.md`, `method.prior = uniform`") == [
        ("train", "epoch", ""),
        ("method", "prior", "uniform"),
    ]
    assert "epoch" not in fields_of("train")


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# One `two`\n")
    text = "[a](there.md) [b](gone.md) [c](there.md#one-two) [d](there.md#three) [e](https://x.org/y) ![f](no.png)"
    assert broken_links(text, tmp_path) == ["gone.md", "there.md#three", "no.png"]


# --- single pages -----------------------------------------------------------------------------------------------------


def test_the_worked_examples_of_the_metrics():
    blocks = fenced(page("docs/metrics.md"), "python")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "metrics.md", "exec"), {})


def test_the_table_of_variants():
    """Each row names a setting and its value in either variant; the rows of `method` are all there are."""
    rows = re.findall(r"^\|.*\| `(\w+)\.(\w+)` \| `(.+?)` \| `(.+?)` \|$", page("docs/methods.md"), re.M)
    shown = {(section, key): values for section, key, *values in rows}
    variants = OpenConConfig.paper(), OpenConConfig()
    different = {f.name for f in dataclasses.fields(OpenConConfig) if len({getattr(v, f.name) for v in variants}) == 2}
    assert {key for section, key in shown if section == "method"} == different

    def value(recipe, variant, section, key):
        found = to_dict(get_recipe(recipe, variant=variant))[section][key]
        return found if isinstance(found, str) else json.dumps(found)

    for (section, key), values in shown.items():
        recipe = "imagenet100" if key == "lr" else "cifar100"
        assert [float(v) if re.fullmatch(r"[\d.e-]+", v) else v for v in values] == [
            float(v) if re.fullmatch(r"[\d.e-]+", v) else v
            for v in (value(recipe, variant, section, key) for variant in ("paper", "released"))
        ], key


def test_tests_that_are_named_exist():
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for path in PAGES:
        for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8")):
            assert f"def {name}(" in written, f"{path.name}: {name}"


def test_paths_that_are_named_exist():
    for path in PAGES:
        for name in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w./]+)`", path.read_text(encoding="utf-8")):
            if "contrast.py" not in name:  # the example of CONTRIBUTING.md
                assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_the_collapse_of_the_literal_paper_variant_is_the_measured_one():
    runs = json.loads((ROOT / "benchmarks/results/cifar100.json").read_text())["runs"]
    (one,) = [r for r in runs if "--variant paper" in r["command"] and "novel_reduction" not in r["command"]]
    run = one["numbers"]
    text = page("docs/methods.md")
    assert f"{100 * run['all']:.1f} % All after {run['epochs']} epochs (protocol `{run['protocol']}`" in text
    assert "encoder.frozen_norm=running" in one["command"]
    assert run["seed"] == 0


def test_the_tree_shows_every_module():
    text = page("docs/design.md")
    tree = next(body for body in fenced(text, "") if body.startswith("src/opencon/"))
    folder, shown = "", set()
    for line in tree.split("tests/")[0].splitlines()[1:]:
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        if name.endswith("/"):
            folder = name
        else:
            shown.add(name if depth == 2 else folder + name)
    shown.remove("methods/<method>.py")
    shown |= {f"methods/{name}.py" for name in METHODS if name not in METHODS.origins}
    source = ROOT / "src/opencon"
    built = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if path.name != "__init__.py"}
    assert shown == built


def tables(text, head):
    """The rows of every table that begins with these columns, each a list of its cells."""
    found = re.findall(rf"^\| {re.escape(head)} \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.M)
    return [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows.splitlines()] for rows in found]


def defined(file):
    """Every function and class of a module, methods by `Class.method`."""
    body = ast.parse((ROOT / "src/opencon" / file).read_text(encoding="utf-8")).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    inside = {f"{c.name}.{f.name}" for c in body if isinstance(c, ast.ClassDef) for f in c.body if isinstance(f, kinds)}
    return inside | {node.name for node in body if isinstance(node, kinds)}


def test_the_floors_are_those_of_the_house():
    (rows,) = tables(page("docs/design.md"), "floor | rooms | what it knows")
    assert [set(re.findall(r"`(\w+)`", rooms)) for _, rooms, _ in reversed(rows)] == FLOORS
    assert [int(floor[0]) for floor, _, _ in rows] == [6, 5, 4, 3, 2, 1]


def test_the_walks_name_functions_that_exist_each_once():
    walks = tables(page("docs/design.md"), "| file | function | what happens")
    assert len(walks) == 2
    for rows in walks:
        assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
        steps = [(file.strip("`"), name) for _, file, names, _ in rows for name in re.findall(r"`([\w.]+)`", names)]
        assert [f"{file}: {name}" for file, name in steps if name not in defined(file)] == []
        assert len(set(steps)) == len(steps)


def test_the_steps_of_a_discovery_are_where_the_page_says():
    (rows,) = tables(page("docs/how-discover-works.md"), "step | function | file")
    for _, function, file in rows:
        assert function.split("`")[1] in defined(file.strip("`"))


def test_twenty_questions_have_twenty_answers():
    text = page("docs/design.md")
    asked = re.findall(r"^\d+\. (.+\?|.+\. .+\?)$", text.partition("## Twenty questions")[2], re.M)
    (answers,) = tables(text, "| file | where in it")
    assert [int(number) for number, *_ in answers] == list(range(1, 21))
    assert len(asked) == 20
    for _, file, where in answers:
        assert (ROOT / "src/opencon" / file.strip("`")).is_file(), file
        (name, *_) = re.findall(r"`([\w.]+)", where)
        assert name.split(".")[0] in (ROOT / "src/opencon" / file.strip("`")).read_text(encoding="utf-8"), where


def test_the_worth_of_the_steps_is_the_measured_one():
    rows = {}  # of each data set the last run
    for run in json.loads(page("benchmarks/results/openworld.json"))["runs"]:
        for data in {row["data"] for row in run["numbers"]["table"]}:
            own = [row for row in run["numbers"]["table"] if (row["data"], row["number"]) == (data, "known")]
            rows[data] = {row["name"]: row for row in own}
    (shown,) = tables(
        page("docs/how-discover-works.md"),
        "features | All, no steps | All, 100 steps | seconds, no steps | seconds, 100 steps",
    )
    assert {data for data, *_ in shown} == set(rows)
    for data, *cells in shown:
        # Before steps became a choice, the plain name meant 100 of them.
        without = rows[data].get("opencon without training", rows[data]["opencon"])
        steps = rows[data].get("opencon, 100 steps", rows[data]["opencon"])
        assert without != steps
        alls = [f"{100 * row['all']['mean']:.1f}" for row in (without, steps)]
        assert cells == [*alls, *(f"{row['cpu_seconds']['mean']:.1f}" for row in (without, steps))]


def test_rooms_name_what_they_offer():
    for path in sorted((ROOT / "src/opencon").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert text, path.parent.name
        for module, name in re.findall(r"`(\w+)\.(\w+)`", text):
            assert name in defined(f"{path.parent.name}/{module}.py"), f"{path.parent.name}: {module}.{name}"


def test_the_attributes_of_results_are_explained():
    discovery, photo = tables(page("docs/api/python.md"), "attribute | what it is")
    assert tuple(name.strip("`") for name, _ in photo) == COLUMNS
    fields = {field.name for field in dataclasses.fields(Discovery)}
    properties = {name for name, value in vars(Discovery).items() if isinstance(value, property)}
    assert {name for names, _ in discovery for name in re.findall(r"`(\w+)`", names)} == fields | properties


def test_own_images_as_the_quickstart_has_it(tmp_path, monkeypatch, capsys):
    """Its TOML file, its list file and its Python lines, on made-up photos."""
    text = page("docs/quickstart.md")
    monkeypatch.chdir(tmp_path)
    for c, name in enumerate(["apple", "bread", "cherry", "date", "egg", "fig"]):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (40, 36), (40 * c, 20 * i, 90)).save(f"photos/{name}/{i:04d}.jpg")
    (toml,) = fenced(text, "toml")
    Path("photos.toml").write_text(toml)
    assert read_config(Path("photos.toml")).data.name == "folder"
    small = ["--set", "train.epochs=1", "--set", "train.batch_size=16", "--device", "cpu"]

    def run(*args):
        with pytest.raises(SystemExit) as stop:
            main([*args, *small])
        assert stop.value.code in (0, None)

    run("train", "--config", "photos.toml", "--out", "runs/photos")
    capsys.readouterr()
    (block,) = fenced(text, "python")
    exec(compile(block, "quickstart.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    split = json.loads(Path("runs/photos/split.json").read_text())
    assert len(lines) == split["num_images"] - len(split["labeled"])
    assert re.fullmatch(r"\w+/\d+\.jpg [\w-]+ novelty -?\d+\.\d{3}", lines[0])

    (listed,) = [body for body in fenced(text, "") if body.startswith("# classes:")]
    head, *_ = listed.splitlines()
    rows = [f"{path.as_posix()} {path.parent.name}" for path in sorted(Path("photos").rglob("*.jpg"))]
    assert set(listed.splitlines()[1:]) <= set(rows)
    Path("photos.txt").write_text("\n".join([head, *rows]) + "\n")
    run("train", "--config", "photos.toml", "--set", "data.name=list", "--data", "photos.txt", "--dry-run")


# --- the method of add-a-method.md ------------------------------------------------------------------------------------


@pytest.fixture
def contrast(monkeypatch):
    """Its file and its line, as if they were in the package; put back afterwards."""
    file, line, tests = fenced(page("docs/add-a-method.md"), "python")
    module = types.ModuleType("opencon.methods.contrast")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(file, "contrast.py", "exec"), module.__dict__)
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    exec(compile(line, "methods/__init__.py", "exec"), {**vars(methods_module), "Contrast": module.Contrast})
    return module, get_recipe("contrast/digits"), tests


def test_the_example_of_a_method_passes_its_own_tests(contrast):
    module, _, tests = contrast
    names = {"__name__": "test_contrast"}
    exec(compile(tests, "test_contrast.py", "exec"), names)
    found = [value for name, value in names.items() if name.startswith("test_") and inspect.isfunction(value)]
    assert len(found) == 3
    for test in found:
        test()
    assert all(member.__doc__ for member in (module, module.Contrast, module.ContrastConfig))
    checks.TestEveryMethod().test_docstring_names_the_paper("contrast")
    checks.TestEveryMethod().test_every_kind_of_images_has_a_schedule("contrast")
    checks.TestEveryMethod().test_hidden_labels_cannot_matter("contrast")


def test_the_example_of_a_method_trains(contrast, tmp_path):
    _, config, _ = contrast
    result = train(with_settings(config, ["train.epochs=2"]), tmp_path / "run", CPU)
    assert result["protocol"] == "orca"
    assert result["all"] > 0.3  # ten classes
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records[1]["loss_l"] < records[0]["loss_l"]


@pytest.mark.usefixtures("own_plugins")
def test_the_example_of_a_method_is_a_plugin(tmp_path, capsys):
    """The file with its last line, and the commands of the page."""
    text = page("docs/add-a-method.md")
    file, line, _ = fenced(text, "python")
    (tmp_path / "contrast.py").write_text(f"{file}\n\n{line}")
    quick = {
        "contrast.py": str(tmp_path / "contrast.py"),
        "runs/contrast": str(tmp_path / "run"),
        "train.epochs=5": "train.epochs=2",
    }
    train_it, evaluate_it = [
        args for args in commands(text) if args[:2] in (["train", "contrast/digits"], ["evaluate", "runs/contrast"])
    ]
    for args in (train_it, evaluate_it):
        with pytest.raises(SystemExit) as stop:
            main([*(quick.get(word, word) for word in args), "--device", "cpu"])
        assert stop.value.code in (0, None)
    assert json.loads((tmp_path / "run/plugins.json").read_text())["plugins"][0]["brings"] == ["method contrast"]


def test_the_groups_of_the_training_page_are_read(tmp_path):
    (text,) = [body for body in fenced(page("docs/training.md"), "") if "train.groups" in body]
    (tmp_path / "run.toml").write_text(text)
    config = read_config(tmp_path / "run.toml")
    method = prepare(config, CPU).method
    rates = {(round(float(g["lr"]), 6), g["weight_decay"]) for g in build_optimizer(method, config.train).param_groups}
    decay = config.train.weight_decay
    assert rates == {(0.001, decay), (0.001, 0.0), (0.01, decay), (0.01, 0.0)}


# --- the site ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def addresses(text):
    """What a page of the site links to, and what it loads."""
    tags = re.findall(r"<(\w+)[^>]*? (?:href|src)=\"?([^\" >]+)", text)
    return [(name, html.unescape(target)) for name, target in tags]


def test_every_link_of_the_site_leads_to_a_file_of_it(site):
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "discover.html", "contributing.html"} <= {path.name for path in pages}
    for path in pages:
        if path.name == "404.html":  # it is shown in place of any page, so its links start at the server's root
            continue
        for _, target in addresses(path.read_text(encoding="utf-8")):
            file = urllib.parse.unquote(target.partition("#")[0])
            if file and not re.match(r"[a-z]+:", file):
                assert (path.parent / file).exists(), f"{path.name}: {target}"
    assert (site / "files/benchmarks/results/digits.json").exists()


def test_the_site_loads_nothing_from_elsewhere(site):
    for path in sorted(site.rglob("*.html")):
        found = addresses(path.read_text(encoding="utf-8"))
        assert len(found) > 20
        assert [target for name, target in found if name != "a" and re.match(r"(https?:)?//", target)] == []


def test_the_site_shows_the_public_names(site):
    text = (site / "api/python.html").read_text(encoding="utf-8")
    for name in set(opencon.__all__) - {"__version__"}:
        assert re.search(rf'<h3 id="opencon\.{name}"', text), name
    for name in ("Discovery", "PhotoTable", "PhotoRow", "Group", "Run", "Comparison"):
        assert re.search(rf'<h3 id="{name.lower()}"', text), name


# --- license and citation ---------------------------------------------------------------------------------------------


def test_license_and_citation_agree_with_the_package():
    metadata, citation, license_text = page("pyproject.toml"), page("CITATION.cff"), page("LICENSE")
    assert 'license = "Apache-2.0"' in metadata
    assert "license: Apache-2.0" in citation
    assert license_text.lstrip().startswith("Apache License")
    assert "Copyright 2026 The opencon authors" in license_text
    version = re.search(r"^version: (.+)$", citation, re.M)[1]
    assert f'"{version}"' in page("src/opencon/version.py")
    assert f"## [{version}]" in page("CHANGELOG.md")
    assert "arXiv:2208.02764" in citation
