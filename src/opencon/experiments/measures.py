"""What `evaluate` adds on request: every novelty score, a count of the classes, look-alikes of the paper's figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opencon.config import EvaluationSet
from opencon.counting import COUNTERS
from opencon.errors import ConfigError
from opencon.methods import Assignment, FeatureBank
from opencon.novelty import novelty_table
from opencon.report.paper_figures import class_figure, confusion_figure, novelty_figure

if TYPE_CHECKING:
    from opencon.experiments.run import Workbench


def novelty_scores(
    bench: Workbench, bank: FeatureBank, assignment: Assignment, on: EvaluationSet
) -> dict[str, dict[str, float]]:
    """{score: {auroc, aupr, fpr95}} on the images that are judged; "own" is what the method itself uses."""
    if not bench.config.method.uses_labels:
        raise ConfigError(
            f"{bench.config.method.name} looks at no label, so no class is seen or novel to it. "
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
    """How many classes the features of the training images show, by one of `COUNTERS`."""
    num_images, num_seen = len(bench.labels), bench.split.num_seen if bench.config.method.uses_labels else 0
    seed = bench.config.train.seed
    return asdict(COUNTERS[by](bank.z[:num_images], bench.labels, num_seen=num_seen, seed=seed))


def draw_paper_figures(bench: Workbench, bank: FeatureBank, assignment: Assignment, folder: Path) -> None:
    """Look-alikes of the paper's figures: ten classes in two dimensions, the novelty score, the confusion matrix."""
    if assignment.novelty is None or assignment.novelty_threshold is None:
        raise ConfigError(f"{bench.config.method.name} has no novelty score of its own, with a threshold, to draw.")
    rows, names, title = bench.split.unlabeled, bench.dataset.train.class_names, bench.dataset.info.title
    truth = bench.dataset.train.classes[rows].numpy()
    folder.mkdir(parents=True, exist_ok=True)
    every: dict[str, Any] = {"num_seen": bench.split.num_seen, "title": title}
    class_figure(bank.z.cpu()[rows].numpy(), truth, class_names=names, path=folder / "classes.png", **every)
    novelty, threshold = assignment.novelty.cpu()[rows].numpy(), float(assignment.novelty_threshold)
    novelty_figure(novelty, truth, threshold=threshold, path=folder / "novelty.png", **every)
    predicted = assignment.classes.cpu()[rows].numpy()
    confusion_figure(predicted, truth, class_names=names, path=folder / "confusion.png", **every)
