"""Features and some labels in; seen classes and new groups out.

Letters: M rows, F features, D embedding size, V cached views, S seen classes, C classes and groups together.

    rows --> main directions, unit length                  RowEncoder.rotate
         --> classes to begin with                         engine.explain, or where the number is given cluster.kmeans,
                                                           and groups that are halves of one class are one (cluster.merging)
         --> classes become balls                          mixture.fit_gaussians, RowEncoder.whiten
        (--> the head learns with the method's own losses  training.short_run, only where steps are asked for)
         --> classes become balls again, unit length: z    mixture.fit_gaussians, OpenWorldModel.whiten
         --> a prototype and a share for each              mixture.fit_mixture

Each part but training is a few passes over the rows, and the whole is linear in M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.cluster.merging import merge_alike
from opencon.cluster.numbering import by_size, order_by_size
from opencon.counting import CountEstimate
from opencon.errors import DataError, require, require_seed
from opencon.methods import METHODS, FeatureBank, Method, Task
from opencon.openworld.engine import explain, most_classes
from opencon.openworld.mixture import fit_gaussians, fit_mixture
from opencon.openworld.model import OpenWorldModel, Prediction, in_parts
from opencon.openworld.row_encoder import RowEmbedder, RowEncoder, set_affine, unit
from opencon.openworld.strangers import Strangers
from opencon.openworld.views import FeatureViews
from opencon.rows import check_labels, check_rows
from opencon.runtime import generator, seeded
from opencon.training.short_run import short_run

CPU = torch.device("cpu")
NETWORK, VIEWS, CLUSTERS = 1, 2, 3  # purposes of the random streams of a fit
ON_ROWS = ("opencon", "simclr")  # methods that assign by the projection; others want features that learn

# Numbers of ours, each tried on photo features, digits and CIFAR-100 features (benchmarks/openworld.py).
POWER = 0.5  # 0: directions as they are, 1: all alike; k-means loses 4 points with 0 (digits) and 3 with 1 (photos)
DIMS = (32, 128)  # directions kept: twice the classes, within these; more is noise, fewer lose classes
# Of k-means. Many, because the best one is also the most accurate; fewer for many rows.
MOST_STARTS, START_WORK = 100, 5e8
ROUNDS_BEFORE, ROUNDS_AFTER = 10, 5  # of making classes balls, before and after training


@dataclass(frozen=True, kw_only=True)
class OpenWorldConfig:
    """How features become classes and groups."""

    num_novel: int | None = None  # new groups to look for, at most; None: estimate
    novel_range: tuple[int, int] | None = None  # the fewest and the most to find, where they are estimated
    max_classes: int | None = None  # the most classes and groups together, likewise; None: `engine.most_classes`
    method: str = "opencon"  # one of ON_ROWS; it matters only with steps
    seed: int = 0
    steps: int = 0  # of training a head, in whole epochs; on fixed features they gain nothing (benchmarks/openworld.py)
    batch_size: int = 512  # OpenCon's
    lr: float = 0.02  # OpenCon's
    noise: float = 1.5  # of a view, in standard deviations within a class; 1 to 1.5 are alike (measured)

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        n = self.num_novel
        require(n is None or n >= 0, f"num_novel = {n} must be 0 or more, or None to have it estimated.")
        low, high = self.novel_range or (0, 0)
        require(0 <= low <= high, f"novel_range = {self.novel_range} must satisfy 0 <= low <= high.")
        most = self.max_classes
        require(most is None or most >= 1, f"max_classes = {most} must be at least 1.")
        METHODS[self.method]  # raises with a hint
        hint = f"it needs an encoder to train. Use {' or '.join(ON_ROWS)}, or train it on images."
        require(self.method in ON_ROWS, f"method = {self.method!r} cannot learn from rows of features: {hint}")
        require_seed(self.seed, "seed")
        require(self.steps >= 0, f"steps = {self.steps} must not be negative.")
        require(self.batch_size >= 4, f"batch_size = {self.batch_size} must be at least 4.")
        require(self.lr > 0, f"lr = {self.lr} must be above zero.")
        require(self.noise >= 0, f"noise = {self.noise} must not be negative.")


@dataclass(frozen=True)
class Fitted:
    """A fitted model and what it says of the rows it was fitted to."""

    model: OpenWorldModel
    z: Tensor  # (M, D) unit rows
    prediction: Prediction  # of each row as if the others alone were known
    near: Tensor  # (M, 5) classes of the nearest rows
    count: CountEstimate | None  # None: the user said how many groups
    history: list[dict[str, float]]  # mean of each term of the loss, by epoch; empty without steps


@dataclass(frozen=True)
class _Start:
    """Where a fit begins."""

    encoder: RowEncoder  # the fixed part of the model
    classes: Tensor  # (M,) a class for every row


def fit_features(
    x: Tensor,
    labels: Tensor,
    config: OpenWorldConfig,
    *,
    views: Tensor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fitted:
    """Learn seen classes and new groups from rows of features.

    Args:
        x: (M, F).
        labels: (M,) class in [0, S), every one with at least one row, or -1.
        config: what to look for and how.
        views: (M, V, F) features of augmented views of the same images; float16 will do. Used only with steps.
        progress: called as progress(finished steps, all steps).
    """
    check_rows(x)
    num_seen = check_labels(labels, len(x))
    if num_seen == 0 and config.steps:
        raise DataError(
            "no row is labeled: all labels are -1. Steps learn from labels; label some rows, or use steps = 0."
        )
    if views is not None and (views.ndim != 3 or views.shape[::2] != x.shape):
        shape, want = tuple(views.shape), f"({len(x)}, V, {x.shape[1]})"
        raise DataError(f"views has shape {shape}, but x has shape {tuple(x.shape)}. Give views of each row: {want}.")
    x, labels = x.detach().to(CPU, torch.float32), labels.to(CPU, torch.long)
    classes, count = None, None
    if config.num_novel is None:
        low, high = config.novel_range or (0, x.shape[0])
        most = min(num_seen + high, config.max_classes or most_classes(num_seen) + low)
        classes, count = explain(
            x, labels, num_seen=num_seen, seed=config.seed, min_classes=num_seen + low, max_classes=max(most, 1)
        )
    start = _start(x, labels, num_seen, config, classes)
    num_classes, dim = max(num_seen, int(start.classes.max()) + 1), start.encoder.num_features
    model = OpenWorldModel(num_features=x.shape[1], dim=dim, num_seen=num_seen, num_classes=num_classes)
    model.encoder = start.encoder
    with seeded(config.seed, NETWORK):
        model.head.reset()
    classes = start.classes
    history: list[dict[str, float]] = []
    if config.steps and model.num_classes > 1:  # a single class leaves nothing to tell apart
        method, history = _train(model, x, labels, views, start.classes, config, progress)
        classes = method.assign(FeatureBank(in_parts(model.learned, x), labels)).classes
    return _finish(model, x, labels, classes, count, history)


def _start(x: Tensor, labels: Tensor, num_seen: int, config: OpenWorldConfig, classes: Tensor | None) -> _Start:
    """Directions, and classes (from k-means unless they are given)."""
    if classes is None:
        assert config.num_novel is not None
        free = int((labels < 0).sum())  # a group needs a row of its own
        num_classes = max(num_seen + min(config.num_novel, free), 1)
    else:
        num_classes = max(int(classes.max()) + 1, num_seen)
    dim = min(max(2 * num_classes, DIMS[0]), DIMS[1], max(x.shape[1], 2))
    with seeded(config.seed, NETWORK):
        encoder = RowEncoder(x.shape[1], dim)
        encoder.fit(x, power=POWER)
    z = in_parts(encoder.rotated, x)
    if classes is None:
        starts = int(min(max(START_WORK / (len(x) * dim * num_classes), 4), MOST_STARTS))
        stream = generator(CPU, config.seed, CLUSTERS)
        clusters = kmeans(z, num_classes, labels=labels, num_seen=num_seen, num_starts=starts, generator=stream)
        classes = by_size(merge_alike(z, clusters.assignment, num_seen=num_seen), num_seen)
    whitening, classes = fit_gaussians(z, classes, labels, num_seen=num_seen, rounds=ROUNDS_BEFORE)
    set_affine(encoder.whiten, whitening.center, whitening.matrix)
    classes = by_size(classes, num_seen)
    return _Start(encoder, classes)


def _train(
    model: OpenWorldModel,
    x: Tensor,
    labels: Tensor,
    views: Tensor | None,
    classes: Tensor,
    config: OpenWorldConfig,
    progress: Callable[[int, int], None],
) -> tuple[Method[Any], list[dict[str, float]]]:
    """Train the head in place with the method's own losses. Returns the method, and the mean of each term by epoch."""
    rows = in_parts(model.encoder, x)  # (M, D)
    parts = [rows[:, None]] if views is None else [rows[:, None], in_parts(model.encoder, views.to(CPU))]
    source = torch.cat(parts, dim=1)  # (M, 1 + V, D)
    own_labels = labels
    if bool((labels >= 0).all()):  # a method needs both streams: labeled rows stand in for the unlabeled ones
        source, rows, classes = (torch.cat([values, values]) for values in (source, rows, classes))
        labels = torch.cat([labels, torch.full_like(labels, -1)])
    ratio = int((labels >= 0).sum()) / max(int((classes < model.num_seen).sum()), 1)
    task = Task(model.num_seen, model.num_classes, ratio, len(labels))
    entry = METHODS[config.method]
    with seeded(config.seed, NETWORK):
        method = entry.build(entry.config(), task, RowEmbedder(model.head, model.dim))
    method.start_from(FeatureBank(F.normalize(rows, dim=1), labels), classes)
    # The encoder has made classes balls of standard deviation 1, so the noise is the same in every direction.
    noise = FeatureViews(torch.full((model.dim,), config.noise), generator=generator(CPU, config.seed, VIEWS))
    history = short_run(
        method,
        source,
        labels,
        augments=(noise, noise),
        steps=config.steps,
        batch_size=config.batch_size,
        lr=config.lr,
        seed=config.seed,
        features=lambda: FeatureBank(in_parts(model.learned, x), own_labels),
        progress=progress,
    )
    return method.eval(), history


@torch.no_grad()
def _finish(
    model: OpenWorldModel,
    x: Tensor,
    labels: Tensor,
    classes: Tensor,
    count: CountEstimate | None,
    history: list[dict[str, float]],
) -> Fitted:
    """Make the classes balls once more, number the groups by size, and keep what tells strangers."""
    num_seen = model.num_seen
    z = in_parts(model.learned, x)
    whitening, classes = fit_gaussians(z, by_size(classes, num_seen), labels, num_seen=num_seen, rounds=ROUNDS_AFTER)
    z = unit(whitening(z))
    classes = fit_mixture(z, classes, labels, num_seen=num_seen, rounds=ROUNDS_AFTER).assignment
    mixture = fit_mixture(z, by_size(classes, num_seen), labels, num_seen=num_seen, rounds=1)

    classes = mixture.assignment
    strangers, oddness, near = Strangers.fit(x, classes, len(mixture.prototypes))
    sizes = {"num_classes": len(mixture.prototypes), "num_references": len(strangers.rows)}
    done = OpenWorldModel.from_settings(model.settings() | sizes)
    done.encoder.load_state_dict(model.encoder.state_dict())
    done.head.load_state_dict(model.head.state_dict())
    set_affine(done.whiten, whitening.center, whitening.matrix)
    done.strangers = strangers
    done.prototypes.copy_(mixture.prototypes)
    done.log_share.copy_(mixture.share.log())
    done.sharpness.copy_(mixture.sharpness)
    done.eval().requires_grad_(False)
    # The last moves may have changed which group is larger, and strangers do not make one larger.
    members = done.logits(z).argmax(dim=1)[(labels < 0) & (oddness <= strangers.threshold())]
    order = order_by_size(members, num_seen, done.num_classes)
    done.prototypes.copy_(done.prototypes[order])
    done.log_share.copy_(done.log_share[order])
    strangers.classes.copy_(order.argsort()[strangers.classes])
    near = strangers.classes[near]
    prediction = done.said(*done.judge(z, oddness, near), oddness)
    if count is not None and count.num_classes != done.num_classes:
        count = count.left(done.num_classes)
    return Fitted(done, z, prediction, near, count, history)
