"""Every figure of the README stands in a committed results file."""

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def results(name):
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())["result"]


def readme_row(start):
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {start}")]
    assert len(rows) == 1, f"the README has {len(rows)} rows that start with {start!r}"
    return [cell.strip() for cell in rows[0].strip("|").split("|")][1:]


def test_digits():
    got = results("digits")
    assert got["n"] == 5
    assert (got["protocol"], got["on"]) == ("orca", "unlabeled")

    def shown(key):
        return f"{100 * got['opencon'][key]['mean']:.1f} ± {100 * got['opencon'][key]['std']:.1f}"

    assert readme_row("OpenCon, 5 seeds") == [shown("all"), shown("novel"), shown("seen")]
    seconds = got["opencon"]["total_seconds"]["mean"]
    assert f"{seconds:.0f} s each on two CPU cores" in (ROOT / "README.md").read_text()
    pixels = got["kmeans_on_pixels"]
    assert readme_row("k-means on the pixels") == [f"{100 * pixels[key]:.1f}" for key in ("all", "novel", "seen")]


def test_photos():
    got = results("photos")
    assert (got["n"], got["protocol"]) == (5, "gcd")
    ways = {"unknown": "number unknown", "given": "number known"}
    for start, way in ways.items():
        shown = [f"{100 * got[way][k]['mean']:.1f} ± {100 * got[way][k]['std']:.1f}" for k in ("all", "novel", "seen")]
        assert readme_row(f"`opencon discover`, number of classes {start}") == shown
    doubled = got["number doubled"]
    shown = [f"{100 * doubled[k]['mean']:.1f} ± {100 * doubled[k]['std']:.1f}" for k in ("all", "novel", "seen")]
    assert readme_row("`opencon discover`, twice") == shown
    means = got["k-means, number known"]["all"]
    shown = f"{100 * means['mean']:.1f} ± {100 * means['std']:.1f}"
    assert readme_row("k-means on the same features")[0] == shown
    estimates = ", ".join(str(row["estimate"]) for row in got["rows"]["number unknown"])
    text = (ROOT / "README.md").read_text()
    assert f"estimated as {estimates}; the first run took {got['first_run_seconds']:.0f} s on two CPU cores" in text


def test_cifar100():
    names = ("fast_against_plain", "fast_against_plain-2", "fast_against_plain-3")
    plain = "opencon, batch statistics as released, every trick off but compilation, 8 seeds"
    rows = (("opencon, the recipe, 5 seeds", "fast", names[2:], 5), (plain, "plain", names, 8))
    for start, form, some, n in rows:
        runs = [run for name in some for run in results(name)[form]["runs"]]
        assert sorted(run["seed"] for run in runs) == list(range(n))
        values = [[100 * run[key] for run in runs] for key in ("all", "novel", "seen")]
        assert readme_row(start) == [f"{statistics.mean(v):.1f} ± {statistics.stdev(v):.1f}" for v in values]
    published = results("cifar100")["published"]
    assert readme_row("published") == [f"{100 * published[key]:.1f}" for key in ("all", "novel", "seen")]
    runs, text = results("wall_clock"), (ROOT / "README.md").read_text().replace("\n", " ")
    assert f"{runs['warm']['seconds_per_epoch']['median']:.2f} s an epoch" in text
    assert f"{runs['cold']['wall_seconds']:.0f} s for the whole experiment" in text
    assert f"{runs['warm']['wall_seconds']:.0f} s afterwards" in text


def test_other_methods():
    rows = {row["name"]: row for row in results("methods-cifar100")["table"][0]["rows"]}
    assert all(row["n"] == 1 for row in rows.values())
    names = ("uno", "simgcd", "orca", "gcd", "kmeans")
    shown = ", ".join(f"{rows[name]['method']} {rows[name]['all']['mean']:.1f}" for name in names)
    assert f"All: {shown}." in (ROOT / "README.md").read_text().replace("\n", " ")


def test_the_pages_are_made_from_the_results():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import page
    finally:
        sys.path.pop(0)
    for path, text in page.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python benchmarks/page.py"


def test_few_photos():
    text = (ROOT / "docs/discover.md").read_text()
    for name in ("photos-160", "photos-80"):
        got = results(name)["number unknown"]["all"]
        shown = f"{100 * got['mean']:.1f} ± {100 * got['std']:.1f} %"
        assert shown in text[: text.index(f"results/{name}.json")][-120:]
