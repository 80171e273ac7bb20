"""Every figure of the README and of the pages stands in a committed results file."""

import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import page

    return page


def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")


def readme_row(start):
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith(f"| {start}")]
    assert len(rows) == 1, f"the README has {len(rows)} rows that start with {start!r}"
    return [cell.strip() for cell in rows[0].strip("|").split("|")][1:]


def percent(row, *keys):
    return [f"{100 * row[key]['mean']:.1f} ± {100 * row[key]['std']:.1f}" for key in keys]


def test_digits(page):
    got = page.run("digits")
    assert got["n"] == 5
    assert (got["protocol"], got["on"]) == ("orca", "unlabeled")
    assert readme_row("OpenCon, 5 seeds") == percent(got["opencon"], "all", "novel", "seen")
    assert f"{got['opencon']['total_seconds']['mean']:.0f} s each on two CPU cores" in readme()
    pixels = got["kmeans_on_pixels"]
    assert readme_row("k-means on the pixels") == [f"{100 * pixels[key]:.1f}" for key in ("all", "novel", "seen")]


def test_photos(page):
    got = page.run("photos", unlabeled=600)
    assert (got["n"], got["protocol"]) == (5, "gcd")
    starts = {"number unknown": "number of classes unknown", "number known": "number of classes given"}
    for way, start in (starts | {"number doubled": "twice"}).items():
        assert readme_row(f"`opencon discover`, {start}") == percent(got[way], "all", "novel", "seen")
    assert readme_row("k-means on the same features")[:1] == percent(got["k-means, number known"], "all")
    estimates = ", ".join(str(row["estimate"]) for row in got["rows"]["number unknown"])
    seconds = f"the first run took {got['first_run_seconds']:.0f} s on two CPU cores"
    assert f"estimated as {estimates}; {seconds}" in readme()


def test_cifar100(page):
    runs = [run["numbers"] for run in page.runs("fast_against_plain")]
    plain = "opencon, batch statistics as released, every trick off but compilation, 8 seeds"
    rows = (("opencon, the recipe, 5 seeds", "fast", runs[2:], 5), (plain, "plain", runs, 8))
    for start, form, some, n in rows:
        seeds = [seed for run in some for seed in run[form]["runs"]]
        assert sorted(seed["seed"] for seed in seeds) == list(range(n))
        values = [[100 * seed[key] for seed in seeds] for key in ("all", "novel", "seen")]
        assert readme_row(start) == [f"{statistics.mean(v):.1f} ± {statistics.stdev(v):.1f}" for v in values]
    published = page.load("cifar100")["published"]
    assert readme_row("published") == [f"{100 * published[key]:.1f}" for key in ("all", "novel", "seen")]
    whole = page.run("wall_clock")
    assert f"{whole['warm']['seconds_per_epoch']['median']:.2f} s an epoch" in readme()
    assert f"{whole['cold']['wall_seconds']:.0f} s for the whole experiment" in readme()
    assert f"{whole['warm']['wall_seconds']:.0f} s afterwards" in readme()


def test_other_methods(page):
    rows = {row["name"]: row for row in page.method_rows("methods-cifar100")}
    assert all(row["n"] == 1 for row in rows.values())
    names = ("uno", "simgcd", "orca", "gcd", "kmeans")
    shown = ", ".join(f"{rows[name]['method']} {rows[name]['all']['mean']:.1f}" for name in names)
    assert f"All: {shown}." in readme()


def test_the_pages_are_made_from_the_results(page):
    made = page.pages()
    assert {path.name for path in made} == {
        "comparison.md",
        "estimator.md",
        "large.md",
        "methods.md",
        "performance.md",
        "strangers.md",
        "worlds.md",
    }
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python benchmarks/page.py"


def test_no_run_of_the_recipe_is_above_its_row_as_the_comparison_says(page):
    first = page.method_rows("methods-cifar100")[0]
    assert first["name"] == "opencon"
    assert max(*page.recipe_runs(False), *page.recipe_runs(True)) <= first["all"]["mean"] + 1e-9


def test_few_photos(page):
    text = (ROOT / "docs/discover.md").read_text(encoding="utf-8").replace("\n", " ")
    few, fewer = (percent(page.run("photos", unlabeled=n)["number unknown"], "all")[0] for n in (160, 80))
    assert f"160 are enough (13 of a class): {few} % All" in text
    assert f"with 80 it is {fewer} %" in text
