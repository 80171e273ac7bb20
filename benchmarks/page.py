"""Write the pages and tables of docs that are made from results/*.json, so that no number there is typed by hand.

python benchmarks/page.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/performance.md"
ESTIMATOR = HERE.parent / "docs/estimator.md"
COMPARISON = HERE.parent / "docs/comparison.md"
METHODS = HERE.parent / "docs/methods.md"
RELEASED_FORM = "batch statistics, each view in its own pass (the recipe)"  # one of the first runs
# Kinds of kernels whose names in a results file are no longer right: crops are made by the kernel of the views.
KINDS = {
    "matrix products (crops, heads, losses)": "matrix products",
    "other compiled (views, losses)": "views, and what else is compiled",
    "batch norm, ReLU and additions (compiled)": "batch norm, ReLU and additions",
}


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(row: dict[str, Any], key: str) -> str:
    return f"{100 * row[key]['mean']:.1f} ± {100 * row[key]['std']:.1f}"


def goals() -> str:
    """The goals; what is reached is bold."""
    runs, simclr = load("wall_clock")["result"], load("epoch-simclr")["result"]
    losses = {row["rows"]: row for row in load("loss_memory-h200")["result"]["table"]}[16384]
    kmeans_gpu, kmeans_cpu = (
        [r for r in load(name)["result"]["rows"] if "semi" in r["contender"] and "mixture" in r["data"]]
        for name in ("kmeans-h200", "kmeans")
    )
    views = 2 * simclr["images_per_step"] * simclr["steps_per_epoch"] / simclr["steady_seconds"]
    fast, plain = alls("fast", *MEASURED), alls("plain", *RUNNING, *MEASURED)
    all_fast, all_plain = measured_runs(), [*plain, 100 * early_run(RELEASED_FORM)]
    epoch, before = runs["warm"]["seconds_per_epoch"]["median"], load("released-h200")["result"]
    walls = [runs[key]["wall_seconds"] for key in ("cold", "warm")]
    slow, quick = max(r["seconds"] for r in kmeans_gpu), min(r["seconds"] for r in kmeans_gpu)
    pillow = load("cpu_step")["result"]["views"]["batched, compiled"]["times_faster"]
    scikit = min(r["times_faster"] for r in kmeans_cpu)
    photos = {
        row["image_size"]: row["all"]["images_per_second"]["median"]
        for row in load("features")["result"]["measures"]
        if not row["num_views"]
    }
    rows = [
        (
            "an epoch of CIFAR-100, steady",
            f"{before['released_epoch_seconds']:.1f} s / {before['plain_epoch_seconds']:.2f} s",
            "0.45 s",
            [(f"{epoch:.2f} s", epoch <= 0.45)],
        ),
        (
            "200 epochs, everything included, one run each",
            f"{before['released_run_minutes']} min / {before['plain_run_seconds']} s",
            "120 s",
            [
                (f"{wall:.0f} s {when}", wall <= 120)
                for wall, when in zip(walls, ("at first", "once compiled"), strict=True)
            ],
        ),
        (
            f"All, fast against plain, {len(fast)} and {len(plain)} seeds",
            "",
            "within 0.3",
            [(f"{spread(fast)} against {spread(plain)}: {difference(fast, plain)}", near(fast, plain))],
        ),
        (
            "the same, with every run on record",
            "",
            "within 0.3",
            [
                (
                    f"{len(all_fast)} against {len(all_plain)}: {difference(all_fast, all_plain)}",
                    near(all_fast, all_plain),
                )
            ],
        ),
        (
            "SimCLR pre-training",
            f"{before['plain_simclr_views_per_second']:,} views/s",
            "130,000 views/s",
            [(f"{views:,.0f} views/s", views >= 130_000)],
        ),
        (
            "InfoNCE, forward and backward, 16,384 rows",
            f"{losses['plain_mb'] / 1e3:.1f} GB, {losses['plain_ms']:.1f} ms",
            "200 MB, no slower",
            [
                (f"{losses['blocked_mb']:.0f} MB", losses["blocked_mb"] < 200),
                (f"{losses['blocked_ms']:.1f} ms", losses["blocked_ms"] <= losses["plain_ms"]),
            ],
        ),
        (
            "semi-supervised k-means, 50,000 x 512, 100 clusters, 10 starts",
            "",
            "1 s",
            [(f"{quick:.2f} to {slow:.2f} s", slow < 1)],
        ),
        ("the same on two cores, against scikit-learn's k-means", "", "5 x", [(f"{scikit:.1f} x", scikit >= 5)]),
        ("views on two cores, against Pillow", "", "10 x", [(f"{pillow:.1f} x", pillow > 10)]),
        *(
            (
                f"photos to features on two cores, {side} px",
                "",
                f"{goal}/s",
                [(f"{photos[side]:.0f}/s", photos[side] >= goal)],
            )
            for side, goal in ((224, 80), (128, 250))
        ),
    ]
    head = ["what", "released / plain", "goal", "measured"]
    return table(
        head, [[*row, "; ".join(f"**{text}**" if met else text for text, met in parts)] for *row, parts in rows]
    )


def norm_passes() -> str:
    """What batch norms cost SimCLR, and what they would at the memory's full speed."""
    floor = load("conv_floor-h200")["result"]
    runs = [load(name)["result"] for name in ("epoch-simclr", "epoch-simclr-plain")]
    norms, before = (run["profile_ms"]["batch norm, ReLU and additions"] / 1e3 for run in runs)
    slower = 2 * runs[1]["images_per_step"] * runs[1]["steps_per_epoch"] / runs[1]["steady_seconds"]
    # Outputs of the 20 batch norms of ResNet-18 at 32 pixels, in bfloat16, five of each size; two of five end a block.
    numbers = sum(channels * side**2 for channels, side in ((64, 32), (128, 16), (256, 8), (512, 4)))
    gigabytes = 2 * 5 * numbers * floor["views"] / 1e9
    passes = 8 + 4 * 2 / 5
    seconds = passes * gigabytes / 4800 * 100_000 / floor["views"]
    best = 100_000 / (floor["epoch_seconds_all_learn"] + seconds)
    return "\n".join(
        [
            f"At {floor['views']:,} views a pass over all of them is",
            f"{gigabytes:.1f} GB; at the memory's 4.8 TB/s all passes are {seconds:.2f} s of an epoch on top of",
            f"the convolutions (measured: {norms:.2f} s), so with cuDNN's convolutions and batch norms apart from them",
            f"{best:,.0f} views/s would be perfect. Without these kernels, compiled, they are {before:.2f} s, and it is",
            f"{slower:,.0f} views/s ([epoch-simclr-plain](../benchmarks/results/epoch-simclr-plain.json), same hour).",
        ]
    )


def profile() -> str:
    found = [load(name)["result"]["profile_ms"] for name in ("epoch-cifar100", "epoch-simclr")]
    both = [{KINDS.get(kind, kind): ms for kind, ms in kinds.items()} for kinds in found]
    totals = [sum(kinds.values()) for kinds in both]
    rows = []
    for kind in dict.fromkeys([*both[0], *both[1]]):
        shares = [(kinds.get(kind, 0.0), total) for kinds, total in zip(both, totals, strict=True)]
        rows.append([kind, *(f"{ms:.0f} ({ms / total:.0%})" for ms, total in shares)])
    head = ["kernels", "OpenCon, ms of an epoch", "SimCLR, ms of an epoch"]
    return table(head, [*rows, ["all", *(f"{total:.0f}" for total in totals)]])


def floors() -> str:
    floor = load("conv_floor-h200")["result"]
    epoch, simclr = load("epoch-cifar100")["result"], load("epoch-simclr")["result"]
    rows = []
    for what, measured, key in (
        ("OpenCon, `layer4` learns", epoch["steady_seconds"], "epoch_seconds_layer4_learns"),
        ("SimCLR, everything learns", simclr["steady_seconds"], "epoch_seconds_all_learn"),
    ):
        rows.append([what, f"{measured:.2f} s", f"{floor[key]:.2f} s", f"{measured / floor[key]:.2f}"])
    return table(["an epoch of CIFAR-100", "measured", "its convolutions alone", "ratio"], rows)


def growth(name: str) -> str:
    rows = []
    for row in load(name)["result"]["table"]:
        what = row["grows"]
        rows.append([what, f"{row[what]:,}", f"{row['ms']:.1f}", f"{row['ms_min']:.1f} to {row['ms_max']:.1f}"])
    return table(["what grows", "to", "ms a step", "range"], rows)


def losses(name: str) -> str:
    rows = []
    for row in load(name)["result"]["table"]:
        cells = [
            "" if row.get(key) is None else f"{row[key]:,.1f}"
            for key in ("plain_ms", "blocked_ms", "plain_mb", "blocked_mb")
        ]
        rows.append([f"{row['rows']:,}", *cells])
    return table(["rows", "plain, ms", "blocked, ms", "plain, MB", "blocked, MB"], rows)


def kmeans(name: str) -> str:
    rows = []
    for row in load(name)["result"]["rows"]:
        times = f"{row['times_faster']:.1f} x" if "scikit" not in row["contender"] else ""
        if "GPU" in row["contender"]:
            times = ""
        rows.append([row["data"], row["contender"], f"{row['seconds']:.2f} s", times, f"{row['inertia']:,.0f}"])
    return table(["data", "by", "seconds", "against scikit-learn", "inertia"], rows)


def cpu_step() -> str:
    found = load("cpu_step")["result"]
    rows = []
    for what in ("views", "step"):
        for form, row in found[what].items():
            rows.append(
                [what, form, f"{row['ms']:.1f}", f"{row['images_per_second']:,.0f}", f"{row['times_faster']:.1f} x"]
            )
    return table(["", "form", "ms", "images/s", ""], rows)


def features() -> str:
    rows = []
    for row in load("features")["result"]["measures"]:
        rate = row["all"]["images_per_second"]
        views = f", {row['num_views']} views each" if row["num_views"] else ""
        parts = [f"{row[key]['images_per_second']['median']:,.0f}" for key in ("reading", "network")]
        span = f"{rate['worst']:,.0f} to {rate['best']:,.0f}"
        rows.append([f"{row['image_size']} px{views}", f"{rate['median']:,.0f}", span, *parts])
    return table(["", "photos/s, from JPEG to features", "range", "reading alone", "network alone"], rows)


def scale() -> str:
    found = load("photos_scale")["result"]
    rows = [[f"{r['rows']:,}", *(f"{r[k]:.1f}" for k in r if k != "rows")] for r in found["features"]]
    head = ["rows of features", *(f"{k}, s" for k in found["features"][0] if k != "rows")]
    return (
        f"{found['photos']:,} photos of {found['side']} pixels, with the number of classes to find, take "
        f"{found['seconds']:.0f} s and {found['gigabytes']:.2f} GB on two cores. Learning from features alone hardly grows "
        f"with their number:\n\n{table(head, rows)}"
    )


def worker(name: str) -> str:
    found = load(name)["result"]
    rows = []
    for row in found["decode"]:
        draft = "small" if row["draft"] else "whole"
        workers = row["kind"] if row["workers"] > 1 else row["kind"].removesuffix("s").removesuffix("e")
        rows.append([f"decode {row['shape']}, {draft}, {row['workers']} {workers}", f"{row['median']:,.0f}"])
    limits = found["verdict"]["limits"]
    rows.append(["copy to the GPU from page-locked memory", f"{limits['copy']:,.0f}"])
    rows += [[f"train from {kind}", f"{row['median']:,.0f}"] for kind, row in found["step"].items()]
    return table([f"JPEGs to {found['image_size']} pixels", "images/s"], rows)


def worker_words(name: str) -> str:
    verdict = load(name)["result"]["verdict"]
    return (
        f"Training from files is limited by {verdict['limited_by']}: {verdict['cores_to_feed']:.0f} cores that do nothing "
        f"else would feed the step at its speed from memory. One pass over the images of ImageNet-1k from files would take "
        f"{verdict['imagenet_pass_minutes']:.0f} minutes."
    )


def estimator() -> str:
    """The table of docs/estimator.md, between its two marks."""
    rows = []
    large = [row for row in load("openworld")["result"]["table"] if "CIFAR" in row["data"]]
    for row in [*load("openworld-photos")["result"]["table"], *large]:
        name = f"**{row['name']}**" if row["name"] == "opencon" else row["name"]
        rows.append(
            [row["data"], row["number"], name, *(percent(row, k) for k in ("all", "novel", "seen")), str(row["n"])]
        )
    return table(["data", "number of classes", "", "all", "novel", "seen", "seeds"], rows)


def with_table(text: str, made: str) -> str:
    """A page with the table between its two marks made anew."""
    start, end = "<!-- made by benchmarks/page.py -->\n", "<!-- end -->"
    before, _, rest = text.partition(start)
    return before + start + made + "\n" + end + rest.partition(end)[2]


# --- the methods ------------------------------------------------------------------------------------------------------


def method_rows(*names: str) -> list[dict[str, Any]]:
    """Rows of finished runs, best first."""
    rows = [row for name in names for section in load(name)["result"]["table"] for row in section["rows"]]
    return sorted(rows, key=lambda row: -row["all"]["mean"])


def alone() -> dict[str, float]:
    """Seconds per epoch of each method with the GPU to itself."""
    found = {row["recipe"].partition("/")[0]: row["steady_seconds"] for row in load("epoch-methods")["result"]["rows"]}
    for name, run in load("clustering-epochs")["result"].items():  # those epochs came before any clustering
        found[name] = statistics.median(run["seconds"][-20:])
    return found


def methods(*names: str, seconds_of: dict[str, float] | None = None) -> str:
    rows = method_rows(*names)
    has_published = any(row["published"] for row in rows)
    head = [
        "",
        "all",
        "novel",
        "seen",
        "runs",
        "epochs",
        "s/epoch",
        *(["published: all / novel / seen"] if has_published else []),
    ]
    runs = {key: run for name in names for key, run in load(name)["result"]["runs"].items()}
    lines = []
    for row in rows:
        epochs = str(runs[f"{row['name']}-{row['seeds'][0]}"]["epochs_done"])
        scores = [
            f"{row[key]['mean']:.1f}" + (f" ± {row[key]['std']:.1f}" if row[key]["std"] is not None else "")
            for key in ("all", "novel", "seen")
        ]
        each = row["seconds_per_epoch"] if seconds_of is None else seconds_of.get(row["name"])
        seconds = "" if each is None else f"{each:.2f}"
        published = " / ".join(f"{value:.1f}" for value in row["published"] or ())
        lines.append([row["method"], *scores, str(row["n"]), epochs, seconds, *([published] if has_published else [])])
    return table(head, lines)


def lead(*names: str) -> str:
    first, second = method_rows(*names)[:2]
    return f"{first['all']['mean'] - second['all']['mean']:.1f} points above {second['method']}"


def early_run(what: str) -> float:
    """All of one of the first runs."""
    return float(next(run["all"] for run in load("cifar100")["result"]["runs"] if run["what"] == what))


# The fast form had statistics that came with the weights; later ones measured on the views. The plain form was the same.
RUNNING, MEASURED = ("fast_against_plain", "fast_against_plain-2"), ("fast_against_plain-3",)


def alls(form: str, *names: str) -> list[float]:
    """All in percent of one of the forms "fast" and "plain", seed by seed."""
    return [100 * run["all"] for name in names for run in load(name)["result"][form]["runs"]]


def whole_runs(*names: str) -> list[float]:
    """All in percent of the runs that were timed from outside."""
    return [100 * load(name)["result"][key]["all"] for name in names for key in ("cold", "warm")]


def measured_runs() -> list[float]:
    """All of every run of OpenCon's recipe on CIFAR-100 as it is, in percent."""
    return [*alls("fast", *MEASURED), *whole_runs("wall_clock", "wall_clock-earlier-4")]


def running_runs() -> list[float]:
    """The same with the statistics that came with the weights, as in the table of methods, whose run is the first."""
    own = next(row for row in method_rows(*CIFAR) if row["name"] == "opencon")["all"]["mean"]
    earlier = whole_runs("wall_clock-earlier-1", "wall_clock-earlier-2", "wall_clock-earlier-3")
    others = [*alls("fast", *RUNNING), *earlier, 100 * early_run("running statistics, both views in one pass")]
    assert own >= max(*others, *measured_runs()) - 1e-9, "the page says that no run is above the table's"
    return [own, *others]


def wall_before() -> str:
    """The last whole runs before the present ones."""
    runs = load("wall_clock-earlier-4")["result"]
    return " and ".join(f"{runs[key]['wall_seconds']:.0f} s" for key in ("cold", "warm"))


def frozen_norm() -> str:
    """What measuring the statistics is about, in words."""
    found = load("frozen_norm")["result"]["from_batch_statistics"]
    plain, running = [*alls("plain", *RUNNING, *MEASURED), 100 * early_run(RELEASED_FORM)], running_runs()
    until = load(RUNNING[-1])["date"]
    kept, measured = (f"{found[way]['mean']:.1%}".replace("%", " %") for way in ("running", "measured"))
    return "\n".join(
        [
            "with those that came with the weights the frozen part's output is",
            f"{kept} away from that with batch statistics, with measured ones {measured}",
            "([frozen_norm](../benchmarks/results/frozen_norm.json)).",
            f"Up to {until} the fast path had the former: {len(running)} runs on record have {spread(running)},",
            f"a difference to the plain ones of {difference(running, plain)}.",
        ]
    )


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def difference(some: list[float], others: list[float]) -> str:
    error = sum(statistics.variance(values) / len(values) for values in (some, others)) ** 0.5
    return f"{statistics.mean(some) - statistics.mean(others):+.2f}, standard error {error:.2f}"


def near(some: list[float], others: list[float]) -> bool:
    return abs(statistics.mean(some) - statistics.mean(others)) <= 0.3


def novelty() -> str:
    found = load("novelty-cifar100")["result"]
    rows = []
    for name, row in sorted(found["record"]["novelty"].items(), key=lambda item: item[1]["fpr95"]):
        known = found["published"].get(name)
        published = f"{100 * known['fpr95']:.1f} / {100 * known['auroc']:.1f}" if known else ""
        rows.append([name, f"{100 * row['fpr95']:.1f}", f"{100 * row['auroc']:.1f}", published])
    return table(["score", "FPR95", "AUROC", "published: FPR95 / AUROC"], rows)


def novelty_off() -> str:
    found = load("novelty-cifar100")["result"]
    off = {
        name: 100 * (found["record"]["novelty"][name]["fpr95"] - row["fpr95"])
        for name, row in found["published"].items()
    }
    words = ", ".join(f"{name} {value:+.1f}" for name, value in off.items())
    return f"Points of FPR95 above the published ones: {words}."


def gpu(name: str) -> str:
    about = load(name)["environment"]
    return f"One {about['device']}, torch {about['torch'].partition('+')[0]}."


def counts() -> str:
    """Classes found by each way to count, for the first three draws."""
    found = {by: load(name)["result"] for by, name in COUNTS.items()}
    rows = []
    for data in [row["data"] for row in found["gcd"]]:
        runs = {by: next(row["runs"] for row in result if row["data"] == data) for by, result in found.items()}
        cells = [", ".join(str(run["found"]) for run in some[:3]) for some in runs.values()]
        rows.append([data, str(runs["gcd"][0]["classes"]), *cells])
    return table(["data", "classes", *(f"`{by}`" for by in found)], rows)


COUNTS = {"tree": "class_count", "gcd": "class_count-gcd", "dtc": "class_count-dtc"}
CIFAR = ("methods-cifar100", "methods-cifar100-more", "methods-cifar100-rest")


def comparison() -> str:
    return fill(
        "comparison.md.in",
        {
            "cifar100": lambda: methods(*CIFAR, seconds_of=alone()),
            "lead": lambda: lead(*CIFAR),
            "gpu": lambda: gpu(CIFAR[0]),
            "num_runs": lambda: str(len(running_runs())),
            "mean_run": lambda: spread(running_runs()),
            "measured_runs": lambda: str(len(measured_runs())),
            "measured_mean": lambda: spread(measured_runs()),
            "slowest": lambda: f"{max(alone().values()):.2f}",
            "novelty": novelty,
            "novelty_off": novelty_off,
            "digits": lambda: methods("methods-digits"),
        },
    )


def render() -> str:
    parts: dict[str, Callable[[], str]] = {
        "goals": goals,
        "wall_before": wall_before,
        "frozen_norm": frozen_norm,
        "norm_passes": norm_passes,
        "profile": profile,
        "floors": floors,
        "growth_gpu": lambda: growth("growth-h200"),
        "growth_cpu": lambda: growth("growth"),
        "losses_gpu": lambda: losses("loss_memory-h200"),
        "kmeans_gpu": lambda: kmeans("kmeans-h200"),
        "kmeans_cpu": lambda: kmeans("kmeans"),
        "cpu_step": cpu_step,
        "features": features,
        "scale": scale,
        "worker_gpu": lambda: worker("worker_path-h200"),
        "worker_words": lambda: worker_words("worker_path-h200"),
    }
    return fill("performance.md.in", parts)


def fill(name: str, parts: dict[str, Callable[[], str]]) -> str:
    """A template with its places filled."""
    template = (HERE / name).read_text(encoding="utf-8")
    for key, part in parts.items():
        assert "{{" + key + "}}" in template, key
        template = template.replace("{{" + key + "}}", part())
    return template


def pages() -> dict[Path, str]:
    """Every page, as it should be."""
    out = {PAGE: render(), COMPARISON: comparison()}
    for page, made in ((ESTIMATOR, estimator), (METHODS, counts)):
        out[page] = with_table(page.read_text(encoding="utf-8"), made())
    return out


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(page)
