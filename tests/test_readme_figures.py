"""Every figure of the README stands in a committed results file."""

import json
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


def test_cifar100():
    runs = {run["what"]: run for run in results("cifar100")["runs"]}
    table = {
        "batch statistics, each view": "batch statistics, each view in its own pass (the recipe)",
        "batch statistics, both views": "batch norm of the frozen part over the batch, both views in one pass",
        "running statistics, both views": "running statistics, both views in one pass",
        "running statistics, each view in its own pass |": "running statistics, each view in its own pass",
        "running statistics, each view in its own pass, seed 1": "running statistics, each view in its own pass, seed 1",
        "variant `paper`": "variant paper, running statistics, each view in its own pass",
    }
    for start, what in table.items():
        run = runs[what]
        want = [f"{100 * run[key]:.1f}" for key in ("all", "novel", "seen")]
        assert readme_row(start) == [*want, f"{run['seconds_per_epoch']['median']:.2f}"], what
    longer = next(run for what, run in runs.items() if "150 more epochs of SimCLR" in what)
    assert f"lowered All to {100 * longer['all']:.1f} in one run" in (ROOT / "README.md").read_text().replace("\n", " ")
    published = results("cifar100")["published"]
    assert readme_row("published")[:3] == [f"{100 * published[key]:.1f}" for key in ("all", "novel", "seen")]
