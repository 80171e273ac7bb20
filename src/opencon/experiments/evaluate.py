"""A trained run measured again: its accuracy, and on request novelty scores, a count of the classes, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opencon.config import EvaluationSet
from opencon.counting import COUNTERS
from opencon.errors import ConfigError, require
from opencon.experiments.workbench import Workbench, open_run
from opencon.methods import Assignment, FeatureBank
from opencon.novelty import novelty_table
from opencon.report.figures import embedding_figure
from opencon.report.paper_figures import class_figure, confusion_figure, novelty_figure

COUNT = "count:"
FURTHER = ("novelty", *(COUNT + name for name in COUNTERS.names()))
MOST_DRAWN = 1000  # images in a picture: more hide each other, and t-SNE takes its time


def evaluate_run(
    out: Path,
    device: torch.device,
    *,
    protocol: str | None = None,
    on: str | None = None,
    data_root: str | None = None,
    picture: Path | None = None,
    figures: Path | None = None,
    novelty: bool = False,
    count: str | None = None,
) -> dict[str, Any]:
    """Measure a trained run again; protocol and images default to the run's own.

    `picture` and `figures` say where to draw. `novelty` adds every novelty score; `count`, a name in COUNTERS, an estimate
    of the number of classes.
    """
    if count is not None:
        COUNTERS[count]  # raises with a hint
    changes = {"eval.protocol": protocol, "eval.on": on}
    bench = open_run(out, device, data_root=data_root, settings=[f"{k}={v}" for k, v in changes.items() if v])
    how = bench.config.eval
    if (picture or figures) is not None and how.on == "test":
        raise ConfigError("--picture and --figures show the unlabeled training images. Use them with --on unlabeled.")
    if (protocol or on) and not bench.config.method.uses_labels:
        raise ConfigError(
            f"{bench.config.method.name} uses no labels: it is measured by its 20-NN accuracy, on all training images. "
            f"Leave out --protocol and --on."
        )
    record, bank, assignment = bench.score(how.on, how.protocol)
    if novelty:
        record["novelty"] = novelty_scores(bench, bank, assignment, how.on)
    if count is not None:
        record["count"] = class_count(bench, bank, count)
    if picture is not None:
        draw(bench, bank, assignment, picture)
    if figures is not None:
        draw_paper_figures(bench, bank, assignment, figures)
    return record


def further_measures(bench: Workbench, names: Sequence[str]) -> dict[str, Any]:
    """Further measures of a trained run, by name: "novelty", or "count:" and one of COUNTERS."""
    unknown = [name for name in names if name not in FURTHER]
    require(not unknown, f"unknown measure {', '.join(unknown)}. Known: {', '.join(FURTHER)}.")
    if not names:
        return {}
    how = bench.config.eval
    _, bank, assignment = bench.score(how.on, how.protocol)
    record: dict[str, Any] = {}
    if "novelty" in names:
        record["novelty"] = novelty_scores(bench, bank, assignment, how.on)
    for name in names:
        if name.startswith(COUNT):
            record[name] = class_count(bench, bank, name.removeprefix(COUNT))["num_classes"]
    return record


def novelty_scores(
    bench: Workbench, bank: FeatureBank, assignment: Assignment, on: EvaluationSet
) -> dict[str, dict[str, float]]:
    """{score: {auroc, aupr, fpr95}} on the images that are judged; "own" is the score that the method itself uses."""
    if not bench.config.method.uses_labels:
        raise ConfigError(
            f"{bench.config.method.name} uses no labels, so no class is seen or novel to it. "
            f"Leave out --novelty, or take a method that uses labels."
        )
    rows, truth = bench.judged(on)
    table = novelty_table(
        bank.z,
        bank.labels,
        rows=rows,
        is_novel=(truth >= bench.split.num_seen).numpy(),
        logits=assignment.seen_logits,
        own_novelty=assignment.novelty,
    )
    return {name: asdict(result) for name, result in table.items()}


def class_count(bench: Workbench, bank: FeatureBank, by: str) -> dict[str, Any]:
    """An estimate of the number of classes from the features of the training images, by one of `COUNTERS`."""
    num_images, num_seen = len(bench.labels), bench.split.num_seen if bench.config.method.uses_labels else 0
    seed = bench.config.train.seed
    return asdict(COUNTERS[by](bank.z[:num_images], bench.labels, num_seen=num_seen, seed=seed))


def draw(bench: Workbench, bank: FeatureBank, assignment: Assignment, path: Path) -> Path:
    """The embedding of the unlabeled training images and their novelty scores, as a PNG."""
    every = -(-len(bench.split.unlabeled) // MOST_DRAWN)
    rows = bench.split.unlabeled[::every]
    novelty, threshold = own_novelty(bench, assignment, rows)
    return embedding_figure(
        bank.z.cpu()[rows].numpy(),
        bench.dataset.train.classes[rows].numpy(),
        assignment.classes.cpu()[rows].numpy(),
        novelty,
        num_seen=bench.split.num_seen,
        threshold=threshold,
        class_names=bench.dataset.train.class_names,
        title=f"{bench.dataset.info.title}: {len(rows):,} of the unlabeled images",
        path=path,
    )


def draw_paper_figures(bench: Workbench, bank: FeatureBank, assignment: Assignment, folder: Path) -> None:
    """Look-alikes of the paper's figures: ten classes in two dimensions, the novelty score, the confusion matrix."""
    rows, names, title = bench.split.unlabeled, bench.dataset.train.class_names, bench.dataset.info.title
    novelty, threshold = own_novelty(bench, assignment, rows)
    truth = bench.dataset.train.classes[rows].numpy()
    folder.mkdir(parents=True, exist_ok=True)
    every: dict[str, Any] = {"num_seen": bench.split.num_seen, "title": title}
    class_figure(bank.z.cpu()[rows].numpy(), truth, class_names=names, path=folder / "classes.png", **every)
    novelty_figure(novelty, truth, threshold=threshold, path=folder / "novelty.png", **every)
    predicted = assignment.classes.cpu()[rows].numpy()
    confusion_figure(predicted, truth, class_names=names, path=folder / "confusion.png", **every)


def own_novelty(bench: Workbench, assignment: Assignment, rows: Tensor) -> tuple[NDArray[np.floating[Any]], float]:
    """The method's own novelty score of some rows, and its threshold; refuses a method that has none."""
    if assignment.novelty is None or assignment.novelty_threshold is None:
        raise ConfigError(
            f"{bench.config.method.name} has no novelty score of its own with a threshold, which the pictures show. "
            f"Leave out --picture and --figures."
        )
    return assignment.novelty.cpu()[rows].numpy(), float(assignment.novelty_threshold)
