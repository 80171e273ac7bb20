"""A trained run measured again: its accuracy, and on request novelty scores, a count of the classes, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opencon.config import EvaluationSet
from opencon.errors import ConfigError, require
from opencon.experiments.classes import class_names
from opencon.experiments.workbench import Workbench, data_settings, open_run
from opencon.methods import Assignment, FeatureBank
from opencon.novelty import novelty_table
from opencon.openworld.engine import COUNTERS
from opencon.report.figures import embedding_figure
from opencon.report.paper_figures import choose_classes, class_figure, confusion_figure, novelty_figure
from opencon.report.side_by_side import Panel, confusions_figure, maps_figure
from opencon.report.sweep_chart import sweep_chart
from opencon.training.run_folder import RunFolder

COUNT = "count:"
FURTHER = ("embedding", "novelty", *(COUNT + name for name in COUNTERS.names()))
DRAWN_CLASSES, DRAWN_IMAGES = 20, 50  # of the paper's larger figure; images of each class, ours
BINS = 100  # of the histogram of the score, ours
THRESHOLD_SHARE = 0.7  # of the labeled images lie above the threshold: the paper's p
MOST_DRAWN = 1000  # images in a picture: more hide each other, and t-SNE takes its time


def evaluate_run(
    out: Path,
    device: torch.device,
    *,
    protocol: str | None = None,
    on: str | None = None,
    data_root: str | None = None,
    truth: str | None = None,
    test: str | None = None,
    picture: Path | None = None,
    figures: Path | None = None,
    num_drawn: int = 10,
    novelty: bool = False,
    count: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure a trained run again; protocol, images and what is known of their classes default to the run's own.

    Held-out images that are given (`test`) are those that are judged.
    `picture` and `figures` say where to draw, `num_drawn` how many classes a map shows; `say` is told which figure is left
    out, and why. `novelty` adds every novelty score; `count`, a name in COUNTERS, an estimate of the number of classes.
    """
    if count is not None:
        COUNTERS[count]  # raises with a hint
    on = on or ("test" if test is not None else None)
    changes = {"eval.protocol": protocol, "eval.on": on}
    settings = [*(f"{k}={v}" for k, v in changes.items() if v), *data_settings(truth=truth, test=test)]
    bench = open_run(out, device, data_root=data_root, settings=settings)
    how = bench.config.eval
    if (picture or figures) is not None and how.on == "test":
        raise ConfigError("--picture and --figures show the unlabeled training images. Use them with --on unlabeled.")
    check_drawn(num_drawn)
    if (protocol or on) and not bench.config.method.uses_labels:
        raise ConfigError(
            f"{bench.config.method.name} uses no labels: it is measured by its 20-NN accuracy, on all training images. "
            f"Leave out --protocol and --on."
        )
    if protocol and not bench.knows_novel(how.on):
        raise ConfigError(
            "a protocol is a way to count what is right, and nobody knows the classes of the unlabeled images. Leave out "
            "--protocol, or say what is known (--truth, --test)."
        )
    record, bank, assignment = bench.score(how.on, how.protocol)
    if novelty:
        record["novelty"] = novelty_scores(bench, bank, assignment, how.on)
    if count is not None:
        record["count"] = class_count(bench, bank, count)
    if picture is not None:
        draw(bench, bank, assignment, picture)
    if figures is not None:
        for note in draw_paper_figures(bench, bank, assignment, figures, num_drawn):
            say(note)
        draw_numbers(RunFolder.open_for_reading(out).read_metrics(), figures)
    return record


def draw_numbers(records: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """numbers.png: how many prototypes there were after each epoch, and how many were chosen; where that was decided."""
    kept = [record for record in records if "prototypes" in record]
    if not kept:
        return
    series = {
        name: [(str(record["epoch"]), record[key], None) for record in kept]
        for name, key in (("prototypes", "prototypes"), ("in use, the epoch before", "prototypes_in_use"))
        if key in kept[0]
    }
    words = {"x_title": "epoch", "y_title": "number", "title": "Prototypes in training"}
    sweep_chart(series, path=folder / "numbers.png", y_zero=True, **words)


def check_drawn(number: int) -> None:
    """Refuse a number of classes that a picture cannot show."""
    require(number in (10, 20), f"--classes {number} must be 10 or 20: more colors cannot be told apart.")


def further_measures(
    names: Sequence[str], bench: Workbench, bank: FeatureBank, assignment: Assignment
) -> dict[str, Any]:
    """Further measures of a trained run, by name: "novelty", "embedding", or "count:" and one of COUNTERS."""
    record: dict[str, Any] = {}
    if "embedding" in names:
        record["embedding"] = drawn_embedding(bench, bank, assignment)
    if "novelty" in names:
        record["novelty"] = novelty_scores(bench, bank, assignment, bench.config.eval.on)
    for name in names:
        if name.startswith(COUNT):
            record[name] = class_count(bench, bank, name.removeprefix(COUNT))["num_classes"]
    return record


def drawn_embedding(bench: Workbench, bank: FeatureBank, assignment: Assignment) -> dict[str, Any]:
    """What the paper's figures are drawn from, small: rows of twenty classes, and how the seen score is distributed.

    The score is the cosine with the nearest seen prototype, where the method has learned some, on the axis of the paper.
    """
    rows, truth = bench.judged("unlabeled")
    classes = choose_classes(truth.numpy(), bench.split.num_seen, number=DRAWN_CLASSES)
    some = torch.cat([(truth == c).nonzero()[:DRAWN_IMAGES, 0] for c in classes])
    found: dict[str, Any] = {
        "num_seen": bench.split.num_seen,
        "names": {str(c): bench.dataset.train.class_names[c] for c in classes},
        "truth": truth[some].tolist(),
        "z": [[round(value, 3) for value in row] for row in bank.z.cpu()[rows[some]].tolist()],
    }
    if assignment.seen_prototypes is not None:
        score = (bank.z @ assignment.seen_prototypes.T).amax(dim=1).cpu()
        threshold = score[bench.labels.cpu() >= 0].quantile(1 - THRESHOLD_SHARE) if len(bench.labels) < 2**24 else None
        edges = torch.linspace(-1, 1, BINS + 1)
        is_novel = truth >= bench.split.num_seen
        counts = [torch.histogram(score[rows[which]].float(), edges).hist.tolist() for which in (~is_novel, is_novel)]
        found |= {"edges": BINS, "seen": counts[0], "novel": counts[1]}
        found["threshold"] = None if threshold is None else float(threshold)
    return found


def check_measures(names: Sequence[str]) -> None:
    """Refuse names that `further_measures` does not know."""
    unknown = [name for name in names if name not in FURTHER]
    require(not unknown, f"unknown measure {', '.join(unknown)}. Known: {', '.join(FURTHER)}.")


def novelty_scores(
    bench: Workbench, bank: FeatureBank, assignment: Assignment, on: EvaluationSet
) -> dict[str, dict[str, float]]:
    """{score: {auroc, aupr, fpr95}} on the images that are judged; "own" is the score that the method itself uses."""
    if not bench.config.method.uses_labels:
        raise ConfigError(
            f"{bench.config.method.name} uses no labels, so no class is seen or novel to it. "
            f"Leave out --novelty, or take a method that uses labels."
        )
    if not bench.knows_novel(on):
        raise ConfigError(
            "novelty scores are judged by the classes of unlabeled images, and nobody knows them. Leave out --novelty, or "
            "say what is known (--truth, --test)."
        )
    rows, truth = bench.judged(on)
    table = novelty_table(
        bank.z,
        bank.labels,
        rows=rows,
        is_novel=(truth >= bench.split.num_seen).numpy(),
        logits=assignment.seen_logits,
        own_novelty=assignment.novelty,
        prototypes=assignment.seen_prototypes,
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
    rows, truth, names = colors(bench, assignment)
    rows, truth = rows[::every], truth[::every]
    novelty, threshold = own_novelty(assignment, rows)
    return embedding_figure(
        bank.z.cpu()[rows].numpy(),
        truth.numpy(),
        clustered(bench, bank, assignment).cpu()[rows].numpy(),
        novelty,
        num_seen=bench.split.num_seen,
        threshold=threshold,
        class_names=names,
        title=f"{bench.dataset.info.title}: {len(rows):,} of the unlabeled images",
        path=path,
    )


def draw_paper_figures(
    bench: Workbench, bank: FeatureBank, assignment: Assignment, folder: Path, num_drawn: int = 10
) -> list[str]:
    """Look-alikes of the paper's figures: some classes in two dimensions, the novelty score, the confusion matrix.

    Returns a sentence for each figure that cannot be drawn.
    """
    rows, truth, names = colors(bench, assignment)
    knows, name = bench.knows_novel("unlabeled"), bench.config.method.name
    folder.mkdir(parents=True, exist_ok=True)
    every: dict[str, Any] = {"num_seen": bench.split.num_seen, "title": bench.dataset.info.title}
    class_figure(
        bank.z.cpu()[rows].numpy(),
        truth.numpy(),
        class_names=names,
        classes=choose_classes(truth.numpy(), every["num_seen"], number=num_drawn),
        colored_by="true class" if knows else "group",
        path=folder / "classes.png",
        **every,
    )
    if not knows:
        return ["no novelty.png and no confusion.png: nobody knows the classes of the unlabeled images."]
    predicted = clustered(bench, bank, assignment).cpu()[rows].numpy()
    confusion_figure(predicted, truth.numpy(), class_names=names, path=folder / "confusion.png", **every)
    novelty, threshold = own_novelty(assignment, rows)
    if novelty is None:
        return [f"no novelty.png: {name} has no novelty score of its own."]
    novelty_figure(novelty, truth.numpy(), threshold=threshold, path=folder / "novelty.png", **every)
    return []


def draw_side_by_side(benches: Mapping[str, Workbench], folder: Path, num_drawn: int = 10) -> list[Path]:
    """The embeddings and the confusion matrices of several runs, by their titles; each as one picture.

    Where nobody knows the classes, embeddings are colored by group, and there is nothing to confuse.
    """
    check_drawn(num_drawn)
    first = next(iter(benches.values()))
    knows, panels = first.knows_novel("unlabeled"), []
    for title, bench in benches.items():
        if bench.knows_novel("unlabeled") != knows:
            raise ConfigError(
                f"{title}: the classes of the unlabeled images are known to some of these runs and not to others. Show runs "
                f"that are told the same."
            )
        same = bench.dataset.train.class_names == first.dataset.train.class_names
        if not same or bench.split.num_seen != first.split.num_seen:
            raise ConfigError(f"{title} has other classes than the first run. Show runs of the same data and split.")
        _, bank, assignment = bench.score("unlabeled", bench.config.eval.protocol)
        rows, truth, every_name = colors(bench, assignment)
        predicted = clustered(bench, bank, assignment).cpu()[rows].numpy()
        names = dict(enumerate(every_name))
        z = bank.z.cpu()[rows].numpy()
        panels.append(Panel(title, z, truth.numpy(), bench.split.num_seen, names, predicted))
    folder.mkdir(parents=True, exist_ok=True)
    words = "" if knows else "Colored by group, because nobody knows the classes"
    maps = maps_figure(panels, path=folder / "maps.png", number=num_drawn, title=words)
    return [maps, confusions_figure(panels, path=folder / "confusions.png", number=num_drawn)] if knows else [maps]


def colors(bench: Workbench, assignment: Assignment) -> tuple[Tensor, Tensor, Sequence[str]]:
    """The rows that a picture shows, what colors them, and its names: true classes, or groups where nobody knows them."""
    if bench.knows_novel("unlabeled"):
        return *bench.judged("unlabeled"), bench.dataset.train.class_names
    rows, found = bench.split.unlabeled, assignment.classes.cpu()
    return rows, found[rows], class_names(bench, found)


def clustered(bench: Workbench, bank: FeatureBank, assignment: Assignment) -> Tensor:
    """The class of every row; a method without labels has assigned none so far."""
    if bench.config.method.uses_labels:
        return assignment.classes
    with bench.judged_weights():
        return bench.method.assign(bank).classes


def own_novelty(assignment: Assignment, rows: Tensor) -> tuple[NDArray[np.floating[Any]] | None, float | None]:
    """The method's own novelty score of some rows, and its threshold; None for what it does not have."""
    if assignment.novelty is None:
        return None, None
    threshold = assignment.novelty_threshold
    return assignment.novelty.cpu()[rows].numpy(), None if threshold is None else float(threshold)
