"""The demonstration: handwritten digits, of which five classes are named and five are not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from opencon.cluster.naming import cluster_and_name
from opencon.cluster.numbering import order_by_size
from opencon.errors import MissingExtraError
from opencon.experiments.callbacks import Callbacks
from opencon.experiments.evaluate import draw
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import train
from opencon.experiments.workbench import Workbench, open_run
from opencon.methods import Assignment, FeatureBank
from opencon.metrics import OpenWorldAccuracy, evaluate
from opencon.openworld.strangers import Strangers
from opencon.report.doubt import doubt_of
from opencon.report.html import ReportData, write_report
from opencon.report.map import map_positions
from opencon.report.table import PhotoRow, PhotoTable


@dataclass(frozen=True)
class Group:
    """One discovered group, and the true class that most of it belongs to."""

    name: str
    size: int
    mostly: str
    purity: float


@dataclass(frozen=True)
class Outcome:
    """What the demonstration shows."""

    result: dict[str, Any]
    rows: list[tuple[str, dict[str, Any]]]
    groups: list[Group]
    picture: Path | None  # None without matplotlib
    page: Path


def run_demo(out: Path, device: torch.device, *, seed: int = 0, callbacks: Callbacks = Callbacks()) -> Outcome:  # noqa: B008
    """Train on the digits from scratch, compare with k-means on pixels, draw the embedding, and write a report."""
    config = get_recipe("digits")
    config = replace(config, train=replace(config.train, seed=seed))
    result = train(config, out, device, callbacks=callbacks)
    bench = open_run(out, device)
    _, bank, assignment = bench.score(config.eval.on, config.eval.protocol)
    rows = [("k-means on pixels", pixel_kmeans(bench)), ("OpenCon", result)]
    groups = discovered(bench, assignment)
    picture = None
    with contextlib.suppress(MissingExtraError):
        picture = draw(bench, bank, assignment, out / "embedding.png")
    return Outcome(result, rows, groups, picture, write_page(bench, bank, assignment, result, out / "report.html"))


def write_page(bench: Workbench, bank: FeatureBank, assignment: Assignment, result: dict[str, Any], path: Path) -> Path:
    """The same page that `opencon discover` writes for photos."""
    assert assignment.p is not None
    assert assignment.novelty is not None
    assert assignment.novelty_threshold is not None
    S, C = bench.split.num_seen, bench.split.num_classes
    classes, labels = assignment.classes.cpu(), bench.labels.cpu()
    shown = (*bench.dataset.train.class_names[:S], *(f"new-{i}" for i in range(1, C - S + 1)))
    order = order_by_size(classes[labels < 0], S, C)
    names = dict(zip(order.tolist(), shown, strict=True))  # of each class, as the method numbers them
    z = bank.z.cpu().float()
    strangers, oddness, _ = Strangers.fit(z, torch.where(labels >= 0, labels, classes), C)
    columns = (
        classes.tolist(),
        labels.tolist(),
        assignment.p.amax(dim=1).tolist(),
        assignment.novelty.tolist(),
        (oddness > strangers.threshold()).tolist(),
    )
    rows = tuple(
        PhotoRow(
            file=f"digit {number}",
            closest=names[c],
            kind=None if is_odd else "seen" if c < S else "new",
            confidence=confidence,
            novelty=novelty,
            unlike_everything=is_odd,
            given=names[label] if label >= 0 else None,
        )
        for number, (c, label, confidence, novelty, is_odd) in enumerate(zip(*columns, strict=True))
    )
    table = PhotoTable(rows, shown, S)
    projection, xy = map_positions(z.numpy(), seed=0)

    images = bench.dataset.train.images
    assert isinstance(images, torch.Tensor)  # digits are never streamed

    def picture(row: int) -> Image.Image:
        return Image.fromarray(images[row, 0].numpy()).resize((96, 96), Image.Resampling.NEAREST)

    data = ReportData(
        title="Handwritten digits",
        table=table,
        picture=picture,
        novelty_threshold=float(assignment.novelty_threshold),
        xy=xy,
        projection=projection,
        next_steps=[("The same for photos of yours", "opencon discover --labeled known/ --unlabeled pile/")],
        doubt=doubt_of(table, None, {}),
        facts={"seconds": f"{result['total_seconds']:.0f}", "seed": bench.config.train.seed},
        accuracy=OpenWorldAccuracy(result["all"], result["novel"], result["seen"], result["protocol"]),
        accuracy_on="the unlabeled digits",
    )
    return write_report(data, path)


def pixel_kmeans(bench: Workbench) -> dict[str, Any]:
    """The record of k-means on the raw pixels, measured in the same way."""
    assert isinstance(bench.images, torch.Tensor)  # digits are never streamed
    pixels = bench.images.flatten(1).float().cpu()
    split, how, rows = bench.split, bench.config.eval, bench.split.unlabeled
    named = cluster_and_name(
        pixels, bench.labels.cpu(), num_clusters=split.num_classes, num_seen=split.num_seen, seed=0
    )
    truth = bench.dataset.train.classes[rows].numpy()
    return evaluate(
        named[rows].numpy(),
        truth,
        num_seen=split.num_seen,
        num_classes=split.num_classes,
        protocol=how.protocol,
        on=how.on,
    )


def discovered(bench: Workbench, assignment: Assignment) -> list[Group]:
    """The new groups, largest first, each with the class that most of its images belong to."""
    rows, names = bench.split.unlabeled, bench.dataset.train.class_names
    predicted = assignment.classes.cpu()[rows].numpy()
    truth = bench.dataset.train.classes[rows].numpy()
    sizes = np.bincount(predicted, minlength=bench.split.num_classes)
    order = order_by_size(torch.from_numpy(predicted), bench.split.num_seen, bench.split.num_classes).tolist()
    new = [c for c in order[bench.split.num_seen :] if sizes[c]]
    groups = []
    for number, group in enumerate(new, start=1):
        counts = np.bincount(truth[predicted == group])
        top = int(counts.argmax())
        groups.append(Group(f"new-{number}", int(sizes[group]), names[top], float(counts[top] / sizes[group])))
    return groups
