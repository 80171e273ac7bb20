"""Features and some labels in; seen classes and new groups out.

Letters: M rows, F features, D embedding size, V cached views, S seen classes, C classes and groups together.

    rows --> main directions, unit length                  RowEncoder.rotate
         --> semi-supervised k-means, many starts          cluster.kmeans
         --> groups that are halves of one class are one   mixture.merge_alike
         --> classes become balls                          mixture.settle, RowEncoder.whiten
         --> the head learns with the method's own losses  trainer.fit
         --> once more balls, unit length: z               mixture.settle, OpenWorldModel.settle
         --> a prototype and a share for each              mixture.fit_mixture

Each step but training is a few passes over the rows, and the whole is linear in M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.cluster import kmeans
from opencon.config import TrainConfig, require
from opencon.data.feature_views import FeatureViews
from opencon.data.loader import TwoStreamLoader
from opencon.encoders.rows import ResidualHead, RowEmbedder, RowEncoder, set_affine
from opencon.errors import DataError
from opencon.methods import METHODS, FeatureBank, Method, OpenCon, OpenConConfig, Task
from opencon.mixture import by_size, can_merge, fit_mixture, held_out_accuracy, merge_alike, settle, softness
from opencon.optim import build_optimizer
from opencon.runtime import generator, seeded
from opencon.trainer import fit

if TYPE_CHECKING:
    from opencon.class_count import CountEstimate

CPU = torch.device("cpu")
CHUNK = 8192  # rows embedded at a time
NETWORK, VIEWS, CLUSTERS = 1, 2, 3  # purposes of the random streams of a fit
ON_ROWS = ("opencon", "simclr")  # methods that assign by the projection; others want features that learn

# Numbers of ours, each tried on photo features, digits and CIFAR-100 features (benchmarks/openworld.py).
HIDDEN = 256  # width of the head
POWER = 0.5  # 0: directions as they are, 1: all alike; k-means loses 4 points with 0 (digits) and 3 with 1 (photos)
DIMS = (32, 128)  # directions kept: twice the classes, within these; more is noise, fewer lose classes
MOST_STARTS, START_WORK = 100, 5e8  # of k-means: many, for the best one is also the most accurate; fewer for many rows
ROUNDS_BEFORE, ROUNDS_AFTER = 10, 5  # of settling before and after training
PLENTY = 2  # groups looked for, to one that was estimated: 10 points better than 1 on CIFAR-100, alike on the others
ENOUGH = 50  # rows for each of them; with fewer, halves of a class are not made one: 10 points worse on 280 photos
ACCURACY = 0.9  # assumed where every class has one labeled row, so that it cannot be measured
SAMPLE = 10_000  # rows that the confidence is set on
OUTLIER_QUANTILE, OUTLIER_MARGIN = 0.005, 0.1  # a row may be a tenth farther than all but 0.5 % of the training rows


@dataclass(frozen=True, kw_only=True)
class OpenWorldConfig:
    """How features become classes and groups."""

    num_novel: int | None = None  # new groups to look for, at most; None: estimate
    method: str = "opencon"  # one of ON_ROWS
    seed: int = 0
    steps: int = 100  # of training the head, in whole epochs; more gain nothing (measured); 0: none
    batch_size: int = 512  # OpenCon's
    lr: float = 0.02  # OpenCon's
    noise: float = 1.5  # of a view, in standard deviations within a class; 1 to 1.5 are alike (measured)

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        n = self.num_novel
        require(n is None or n >= 0, f"num_novel = {n} must be 0 or more, or None to have it estimated.")
        METHODS[self.method]  # raises with a hint
        hint = f"it needs an encoder to train. Use {' or '.join(ON_ROWS)}, or train it on images."
        require(self.method in ON_ROWS, f"method = {self.method!r} cannot learn from rows of features: {hint}")
        require(self.seed >= 0, f"seed = {self.seed} must not be negative.")
        require(self.steps >= 0, f"steps = {self.steps} must not be negative.")
        require(self.batch_size >= 4, f"batch_size = {self.batch_size} must be at least 4.")
        require(self.lr > 0, f"lr = {self.lr} must be above zero.")
        require(self.noise >= 0, f"noise = {self.noise} must not be negative.")


@dataclass(frozen=True)
class Prediction:
    """What the model says of M rows."""

    classes: Tensor  # (M,) in [0, C); S and above are new groups, largest first as of the rows trained on
    p: Tensor  # (M, C) rows sum to one
    confidence: Tensor  # (M,) in [0, 1]: p of the class given
    novelty: Tensor  # (M,) larger is newer; compare with model.novelty_threshold
    is_outlier: Tensor  # (M,) bool: unlike every class and group


@dataclass(frozen=True)
class Fitted:
    """A trained model and what it says of the rows it was trained on."""

    model: OpenWorldModel
    z: Tensor  # (M, D) unit rows
    prediction: Prediction
    count: CountEstimate | None  # None: the number of groups was given
    history: list[dict[str, float]]  # mean of each term of the loss, by epoch


class OpenWorldModel(nn.Module):
    """Rows to classes and groups. Everything it knows is in parameters and buffers."""

    prototypes: Tensor  # (C, D) unit rows
    log_share: Tensor  # (C,) logarithm of each class's share among the rows, softened like the cosines
    sharpness: Tensor  # scalar: logits are this times the cosine
    novelty_threshold: Tensor  # scalar
    outlier_threshold: Tensor  # scalar: the least cosine to the nearest prototype that still belongs

    def __init__(self, *, num_features: int, dim: int, num_seen: int, num_classes: int) -> None:
        super().__init__()
        self.num_features, self.dim, self.num_seen, self.num_classes = num_features, dim, num_seen, num_classes
        with seeded(0):  # what is drawn here does not stay
            self.encoder = RowEncoder(num_features, dim)
            self.head = ResidualHead(dim, HIDDEN)
            self.settle = nn.Linear(dim, dim).requires_grad_(False)
        self.register_buffer("prototypes", torch.zeros(num_classes, dim))
        self.register_buffer("log_share", torch.zeros(num_classes))
        self.register_buffer("sharpness", torch.tensor(10.0))
        self.register_buffer("novelty_threshold", torch.tensor(0.0))
        self.register_buffer("outlier_threshold", torch.tensor(-1.0))

    def settings(self) -> dict[str, Any]:
        """Plain data from which `from_settings` builds the same model, before its tensors are loaded."""
        names = ("num_features", "dim", "num_seen", "num_classes")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> OpenWorldModel:
        """An empty model of these sizes; `load_state_dict` fills it."""
        return cls(**settings)

    def embed(self, x: Tensor) -> Tensor:
        """(M, F) -> (M, D) unit rows."""
        return F.normalize(self.settle(self.learned(x)), dim=1)

    def learned(self, x: Tensor) -> Tensor:
        """(M, F) -> (M, D) unit rows as the method has left them, before they are settled."""
        return F.normalize(self.head(self.encoder(x)), dim=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(M, F) -> p (M, C), novelty (M,), cosine to the nearest prototype (M,): plain tensors, for export."""
        return self.judge(self.embed(x))

    def judge(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for rows that are embedded already.

            novelty = max( log [ weight of the new groups / weight of the seen classes ],
                           sharpness * (outlier_threshold - cosine to the nearest seen class) )

        where class c weighs share_c exp(sharpness * cosine_c). Above 0 where a new group is the likelier one, and where a
        row lies beyond the edge of every seen class.
        """
        cosine = z @ self.prototypes.T  # (M, C)
        logits = self.sharpness * cosine + self.log_share
        seen = self.num_seen
        novelty = self.sharpness * (self.outlier_threshold - cosine[:, :seen].amax(dim=1))
        if self.num_classes > seen:
            odds = logits[:, seen:].logsumexp(dim=1) - logits[:, :seen].logsumexp(dim=1)
            novelty = torch.maximum(novelty, odds)
        return logits.softmax(dim=1), novelty, cosine.amax(dim=1)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        """A class or group for every row (M, F)."""
        check_rows(x, self.num_features)
        return self.predict_embedded(_in_parts(self.embed, x))

    @torch.no_grad()
    def predict_embedded(self, z: Tensor) -> Prediction:
        """The same for unit rows (M, D) from `embed`."""
        p, novelty, nearest = self.judge(z)
        confidence, classes = p.max(dim=1)
        return Prediction(classes, p, confidence, novelty, nearest < self.outlier_threshold)


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
        views: (M, V, F) features of augmented views of the same images; float16 will do.
        progress: told (finished steps, all steps).
    """
    check_rows(x, None)
    num_seen = check_labels(labels, x)
    if views is not None and (views.ndim != 3 or views.shape[::2] != x.shape):
        shape, want = tuple(views.shape), f"({len(x)}, V, {x.shape[1]})"
        raise DataError(f"views has shape {shape}, but x has shape {tuple(x.shape)}. Give views of each row: {want}.")
    x, labels = x.detach().to(CPU, torch.float32), labels.to(CPU, torch.long)
    count, num_novel, least = None, config.num_novel, None
    if num_novel is None:
        from opencon.class_count import estimate_classes

        count = estimate_classes(x, labels, num_seen=num_seen, seed=config.seed)
        # Where halves of the data disagree, classes overlap and the estimate tends to be low: look for more than that, and
        # let merging decide, if there are rows to decide by.
        sure = count.low == count.high or count.num_classes == num_seen
        least, many = count.num_classes - num_seen, PLENTY * count.num_classes
        num_novel = least if sure or len(x) < ENOUGH * many else many - num_seen
    num_novel = min(num_novel, int((labels < 0).sum()))  # a group needs a row of its own

    encoder, start, accuracy = _start(x, labels, num_seen, num_novel, config.seed, least)
    num_classes, dim = max(num_seen, int(start.max()) + 1), encoder.num_features
    model = OpenWorldModel(num_features=x.shape[1], dim=dim, num_seen=num_seen, num_classes=num_classes)
    model.encoder = encoder
    with seeded(config.seed, NETWORK):
        model.head.reset()
    history: list[dict[str, float]] = []
    if config.steps and model.num_classes > 1:  # a single class has nothing to be told from
        method = _train(model, x, labels, views, start, config, history, progress)
        start = method.assign(FeatureBank(_in_parts(model.learned, x), labels)).classes
    return _finish(model, x, labels, start, accuracy, count, history)


def _start(
    x: Tensor, labels: Tensor, num_seen: int, num_novel: int, seed: int, least: int | None = None
) -> tuple[RowEncoder, Tensor, float]:
    """The fixed part of the model, a class for every row (M,), and how often such a class is right.

    That is measured before training: afterwards labeled rows look better than others, for the head has learned them.
    Where too few rows are labeled to say which of many groups are one, `least` new groups are looked for instead.
    """
    num_classes = num_seen + num_novel
    dim = min(max(2 * num_classes, DIMS[0]), DIMS[1], max(x.shape[1], 2))
    with seeded(seed, NETWORK):
        encoder = RowEncoder(x.shape[1], dim)
        encoder.fit(x, power=POWER)
    z = _in_parts(encoder.rotated, x)
    starts = int(min(max(START_WORK / (len(x) * dim * num_classes), 4), MOST_STARTS))
    stream = generator(CPU, seed, CLUSTERS)
    found = kmeans(z, num_classes, labels=labels, num_seen=num_seen, num_starts=starts, generator=stream)
    if least is not None and least < num_novel and not can_merge(labels[labels >= 0], num_seen):
        return _start(x, labels, num_seen, least, seed)
    start = by_size(merge_alike(z, found.assignment, num_seen=num_seen), num_seen)
    whitening, start = settle(z, start, labels, num_seen=num_seen, rounds=ROUNDS_BEFORE)
    set_affine(encoder.whiten, whitening.center, whitening.matrix)
    start = by_size(start, num_seen)
    accuracy = held_out_accuracy(F.normalize(whitening(z), dim=1), start, labels)
    return encoder, start, ACCURACY if accuracy is None else accuracy


def _train(
    model: OpenWorldModel,
    x: Tensor,
    labels: Tensor,
    views: Tensor | None,
    start: Tensor,
    config: OpenWorldConfig,
    history: list[dict[str, float]],
    progress: Callable[[int, int], None],
) -> Method[Any]:
    """Train the head in place with the method's own losses."""
    rows = _in_parts(model.encoder, x)  # (M, D)
    source = (
        rows[:, None] if views is None else torch.cat([rows[:, None], _in_parts(model.encoder, views.to(CPU))], dim=1)
    )
    known = labels
    if bool((labels >= 0).all()):  # a method wants both streams: without unlabeled rows, the labeled ones play them
        source, labels = torch.cat([source, source]), torch.cat([labels, torch.full_like(labels, -1)])
        start = torch.cat([start, start])
    num_labeled, num_unlabeled = int((labels >= 0).sum()), int((labels < 0).sum())
    batch = min(config.batch_size, len(labels))
    # In proportion, but an eighth of the batch at least where there are so many labeled rows.
    share = max(batch * num_labeled // len(labels), min(num_labeled, batch // 8), 1)
    shares = (share, min(batch - share, num_unlabeled))
    # The encoder has made classes balls of standard deviation 1, so the noise is the same in every direction.
    noise = FeatureViews(torch.full((model.dim,), config.noise), generator=generator(CPU, config.seed, VIEWS))
    loader = TwoStreamLoader(source, labels, batch_shares=shares, augments=(noise, noise), seed=config.seed)
    epochs = max(1, round(config.steps / len(loader)))
    train = TrainConfig(epochs=epochs, batch_size=batch, lr=config.lr, schedule="cosine", seed=config.seed)

    entry = METHODS[config.method]
    settings = entry.config()
    size = torch.bincount(start[labels < 0], minlength=model.num_classes) + 1.0  # (C,) of the unlabeled
    if isinstance(settings, OpenConConfig):
        # The start is good, so the novel loss counts from the first step, and the shares are those that were found.
        settings = replace(settings, ramp_epochs=0, prior=tuple((size / size.sum()).tolist()))
    ratio = num_labeled / max(int((start < model.num_seen).sum()), 1)
    task = Task(model.num_seen, model.num_classes, ratio, len(labels))
    with seeded(config.seed, NETWORK):
        method = entry.build(settings, task, RowEmbedder(model.head, model.dim))
    if isinstance(method, OpenCon):
        total = torch.zeros_like(method.prototypes).index_add_(0, start[: len(rows)], F.normalize(rows, dim=1))
        method.prototypes.copy_(F.normalize(total, dim=1))

    def on_epoch(epoch: int, means: dict[str, float]) -> None:
        history.append(means)
        progress((epoch + 1) * len(loader), epochs * len(loader))

    fit(
        method,
        build_optimizer(method, train),
        loader,
        train,
        features=lambda: FeatureBank(_in_parts(model.learned, x), known),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        on_epoch=on_epoch,
    )
    return method.eval()


@torch.no_grad()
def _finish(
    model: OpenWorldModel,
    x: Tensor,
    labels: Tensor,
    start: Tensor,
    accuracy: float,
    count: CountEstimate | None,
    history: list[dict[str, float]],
) -> Fitted:
    """Settle what has been learned, number the groups by size, and set the thresholds."""
    num_seen = model.num_seen
    z = _in_parts(model.learned, x)
    whitening, start = settle(z, by_size(start, num_seen), labels, num_seen=num_seen, rounds=ROUNDS_AFTER)
    z = F.normalize(whitening(z), dim=1)
    start = fit_mixture(z, start, labels, num_seen=num_seen, rounds=ROUNDS_AFTER).assignment
    mixture = fit_mixture(z, by_size(start, num_seen), labels, num_seen=num_seen, rounds=1)

    done = OpenWorldModel.from_settings(model.settings() | {"num_classes": len(mixture.prototypes)})
    done.encoder.load_state_dict(model.encoder.state_dict())
    done.head.load_state_dict(model.head.state_dict())
    set_affine(done.settle, whitening.center, whitening.matrix)
    done.prototypes.copy_(mixture.prototypes)
    every = -(-len(z) // SAMPLE)
    soft = softness(mixture.logits(z[::every]), accuracy)
    done.log_share.copy_(soft * mixture.share.log())
    done.sharpness.copy_(soft * mixture.sharpness)
    nearest = (z @ mixture.prototypes.T).amax(dim=1)  # (M,)
    low, middle = (float(nearest.kthvalue(1 + int(q * (len(z) - 1))).values) for q in (OUTLIER_QUANTILE, 0.5))
    done.outlier_threshold.fill_(low - OUTLIER_MARGIN * (middle - low) - 1e-4)
    done.eval().requires_grad_(False)
    said = done.predict_embedded(z)
    found = said.classes[(labels < 0) & ~said.is_outlier]
    size = torch.bincount(found, minlength=done.num_classes)  # what has moved last may have changed which is larger
    order = torch.cat([torch.arange(num_seen), num_seen + size[num_seen:].argsort(descending=True, stable=True)])
    done.prototypes.copy_(done.prototypes[order])
    done.log_share.copy_(done.log_share[order])
    if count is not None and count.num_classes != done.num_classes:
        count = count.merged(done.num_classes, PLENTY)
    return Fitted(done, z, done.predict_embedded(z), count, history)


@torch.no_grad()
def _in_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function of float32 rows, some thousand at a time."""
    return torch.cat([function(part.float()) for part in torch.split(x, CHUNK)])


def check_rows(x: Tensor, num_features: int | None) -> None:
    """Refuse what is not rows of finite numbers."""
    if x.ndim != 2 or x.numel() == 0:
        raise DataError(f"x has shape {tuple(x.shape)}; give one row of features for each sample: (M, F).")
    if num_features is not None and x.shape[1] != num_features:
        raise DataError(
            f"x has {x.shape[1]} features, but the model was trained with {num_features}. Use the same ones."
        )
    bad = (~torch.isfinite(x.float()).all(dim=1)).nonzero()[:, 0]
    if len(bad):
        raise DataError(
            f"{len(bad)} of {len(x)} rows hold NaN, infinity or more than float32 can, the first is row {int(bad[0])}. "
            f"Drop or repair them."
        )


def check_labels(labels: Tensor, x: Tensor) -> int:
    """The number of seen classes; refuses labels that leave one out."""
    if labels.shape != (len(x),):
        raise DataError(
            f"labels has shape {tuple(labels.shape)}, x has {len(x)} rows. Give one label per row, -1 for none."
        )
    if bool((labels < -1).any()):
        raise DataError(f"label {int(labels.min())} is neither a class (0 or more) nor -1 for unlabeled.")
    num_seen = int(labels.max()) + 1
    if num_seen == 0:
        raise DataError("no row is labeled: all labels are -1. Label some rows of one class at least, or use k-means.")
    counts = torch.bincount(labels[labels >= 0].long(), minlength=num_seen)
    missing = (counts == 0).nonzero()[:, 0].tolist()
    if missing:
        raise DataError(
            f"classes {missing} of {num_seen} have no labeled row. Number the seen classes 0 to S - 1 without a gap."
        )
    return num_seen
