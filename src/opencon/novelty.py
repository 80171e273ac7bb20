"""How much an image looks like a seen class: scores that need only logits, or only features and some labels.

EVERY SCORE HERE IS LARGER FOR WHAT IS MORE LIKELY SEEN. `metrics.novelty_detection` wants the opposite, a number that is
larger for newer images; the sign changes in one place, `detection`.

    msp          max_c softmax(f)_c                              Hendrycks and Gimpel 2017, arXiv:1610.02136
    energy       T log sum_c exp(f_c / T)                        Liu et al. 2020, arXiv:2010.03759
    mahalanobis  -min_c (z - mu_c)' Sigma^-1 (z - mu_c)          Lee et al. 2018, arXiv:1807.03888
    prototype    max_c cos(z, mu_c)                              OpenCon, arXiv:2208.02764
    knn          -|z - (k-th nearest labeled row)|, unit rows    Sun et al. 2022, arXiv:2204.06507

Letters: M rows, f (M, S) logits of the seen classes, z (M, D) features, S seen classes, N labeled rows, B rows of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from opencon.errors import DataError, require
from opencon.metrics import NoveltyDetection, novelty_detection
from opencon.prototypes import SeenScore, seen_score
from opencon.registry import Registry
from opencon.rows import check_rows, check_shape

Array = Tensor | NDArray[Any]
ArrayT = TypeVar("ArrayT", Tensor, NDArray[Any])
ScoreT = TypeVar("ScoreT", bound="NoveltyScore")

BLOCK = 2**24  # numbers held at a time, 64 MiB in float32 (ours, because it fits everywhere)
# k of the nearest neighbors: the paper's for CIFAR-10, which has 50,000 rows. It takes 200 for CIFAR-100, 1000 for ImageNet.
NEIGHBORS = 50


class NoveltyScore(ABC):
    """One number for each row: LARGER IS MORE LIKELY SEEN.

    It takes tensors and arrays alike; `score` returns the kind it got, on the same device.
    """

    on: ClassVar[Literal["logits", "features"]]  # what `fit` and `score` take: (M, S) of the seen classes, or (M, D)

    def fit(self: ScoreT, x: Array, labels: Array) -> ScoreT:
        """Learn from the labeled rows; labels are (M,), -1 for unlabeled. Scores on logits learn nothing."""
        rows = _rows(x, self.on)
        classes = _tensor(labels).to(rows.device)
        if tuple(classes.shape) != (len(rows),) or classes.is_floating_point():
            raise DataError(
                f"labels must be {len(rows)} whole numbers, one for each row of x (-1 for unlabeled), "
                f"not {classes.dtype} of shape {tuple(classes.shape)}."
            )
        if self.on == "features":
            known = classes >= 0
            if not bool(known.any()):
                raise DataError(
                    f"none of {len(rows)} rows is labeled, and {type(self).__name__} learns from labeled rows. "
                    f"Label some, or take a score on logits."
                )
            self._learn(rows[known], torch.unique(classes[known], return_inverse=True)[1])
        return self

    def score(self, x: ArrayT) -> ArrayT:
        """(M,) larger is more likely seen."""
        rows = _rows(x, self.on)
        width = max(self._width(), rows.shape[1])
        blocks = torch.split(rows, max(1, BLOCK // width))  # one empty block when there are no rows
        scores = torch.cat([self._score(block) for block in blocks]).to(rows.device)
        return scores if isinstance(x, Tensor) else scores.numpy()

    def score_learned(self, x: ArrayT) -> ArrayT:
        """The same for rows that `fit` has learned from, as if each were new."""
        return self.score(x)

    def _learn(self, z: Tensor, classes: Tensor) -> None:
        """Learn from N labeled rows and their classes, numbered from 0 without gaps."""
        raise NotImplementedError  # only scores on features learn

    def _width(self) -> int:
        """How many numbers are computed for a row besides its own."""
        return 1

    @abstractmethod
    def _score(self, rows: Tensor) -> Tensor:
        """(B, S or D) -> (B,)."""


class MSP(NoveltyScore):
    """max_c softmax(f)_c, the largest class probability."""

    on = "logits"

    def _score(self, rows: Tensor) -> Tensor:
        # In float64: in float32 every margin above 17 would be the same probability of 1.
        return rows.double().softmax(dim=1).amax(dim=1)


class Energy(NoveltyScore):
    """T log sum_c exp(f_c / T), minus the free energy; T = 1 as in the paper."""

    on = "logits"

    def __init__(self, temperature: float = 1.0) -> None:
        require(temperature > 0, f"temperature = {temperature} must be above zero.")
        self.temperature = temperature

    def _score(self, rows: Tensor) -> Tensor:
        return self.temperature * (rows / self.temperature).logsumexp(dim=1)


class _OnFeatures(NoveltyScore):
    """A score on features: what it has learned, and the check that rows fit it."""

    on = "features"
    learned: Tensor | None = None  # (some, D)

    def _known(self, rows: Tensor | None = None) -> Tensor:
        """What was learned, after checking that the rows fit it."""
        name = type(self).__name__
        if self.learned is None:
            raise DataError(f"{name} has not learned anything yet. Call fit(features, labels) first.")
        if rows is not None and rows.shape[1] != self.learned.shape[1]:
            raise DataError(
                f"x has {rows.shape[1]} features, but {name} learned from {self.learned.shape[1]}. "
                f"Give rows of the same encoder."
            )
        return self.learned

    def _width(self) -> int:
        return len(self._known())


class Mahalanobis(_OnFeatures):
    """-min_c (z - mu_c)' Sigma^-1 (z - mu_c), with the covariance Sigma within the classes, one for all of them.

    Sigma is shrunk toward a multiple of the identity, by as much as Ledoit and Wolf (2004) say: next to nothing where there
    are many rows. So it can be inverted even with fewer labeled rows than features. A pseudo-inverse would be blind where
    labeled rows do not vary, and there a novel image may stand out most. The paper does neither; it has many more rows than
    features. A class with one row has a mean and adds nothing to Sigma.
    """

    def _learn(self, z: Tensor, classes: Tensor) -> None:
        from sklearn.covariance import ledoit_wolf_shrinkage  # late: slow to import

        z = z.double()
        counts = torch.bincount(classes)
        if int(counts.max()) < 2:
            raise DataError(
                f"each of {len(counts)} seen classes has one labeled row, so nothing is known of how a class varies. "
                f"Label two of some class, or take the score 'prototype'."
            )
        means = _class_means(z, classes)  # (S, D)
        apart = (z - means[classes]).cpu().numpy()  # (N, D)
        variance = float(np.square(apart).mean())
        if variance == 0:
            raise DataError(
                "the labeled rows of each class are all the same, so nothing is known of how a class varies."
            )
        share = float(ledoit_wolf_shrinkage(apart, assume_centered=True))
        sigma = (1 - share) * (apart.T @ apart) / len(apart) + share * variance * np.eye(apart.shape[1])
        # Sigma = L L', so the distance is the plain one between L^-1 z and L^-1 mu_c.
        root = torch.linalg.cholesky(torch.from_numpy(sigma)).to(z.device)
        self.whiten = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False).T  # (D, D)
        self.center = z.mean(dim=0)  # near the origin a difference of squares loses less
        self.learned = (means - self.center) @ self.whiten  # (S, D)

    def _score(self, rows: Tensor) -> Tensor:
        means = self._known(rows)
        white = (rows.to(means) - self.center) @ self.whiten  # (B, D)
        square = white.square().sum(dim=1, keepdim=True) - 2 * white @ means.T + means.square().sum(dim=1)  # (B, S)
        distance: Tensor = square.clamp(min=0).amin(dim=1)
        return -distance


class Prototype(_OnFeatures):
    """The similarity with the nearest seen prototype (`prototypes.seen_score`). Rows may have any length.

    Without `prototypes`, `fit` takes the direction of the mean of each class's labeled unit rows, and all of them are seen.
    A trained OpenCon has its own, seen classes first: Prototype("standardized", method.prototypes, num_seen=S) is minus the
    novelty that it reports.
    """

    def __init__(
        self, form: SeenScore = "cosine", prototypes: Array | None = None, num_seen: int | None = None
    ) -> None:
        forms = get_args(SeenScore)
        require(form in forms, f"form = {form!r} must be one of {', '.join(map(repr, forms))}.")
        require((prototypes is None) == (num_seen is None), "prototypes and num_seen come together: give both or none.")
        self.form: SeenScore = form
        self.given = prototypes is not None
        if prototypes is not None and num_seen is not None:
            self.learned = F.normalize(_rows(prototypes, "prototypes"), dim=1)
            most = len(self.learned)
            require(1 <= num_seen <= most, f"num_seen = {num_seen} must lie between 1 and the {most} prototypes.")
            self.num_seen = num_seen

    def _learn(self, z: Tensor, classes: Tensor) -> None:
        if not self.given:
            self.learned = F.normalize(_class_means(F.normalize(z, dim=1), classes), dim=1)
            self.num_seen = len(self.learned)

    def _score(self, rows: Tensor) -> Tensor:
        prototypes = self._known(rows)
        cosine = F.normalize(rows.to(prototypes), dim=1) @ prototypes.T  # (B, C)
        return seen_score(cosine, num_seen=self.num_seen, form=self.form)


class KNN(_OnFeatures):
    """Minus the distance to the k-th nearest labeled row, all of unit length.

    A row that `fit` has learned from is its own neighbor at distance 0, so score other rows.

    Args:
        k: None takes 50, or the median size of a seen class if that is less: a row cannot have more neighbors in its
            class (ours).
    """

    def __init__(self, k: int | None = None) -> None:
        require(k is None or k >= 1, f"k = {k} must be at least 1.")
        self.k = k

    def _learn(self, z: Tensor, classes: Tensor) -> None:
        self.neighbor = self.k or min(NEIGHBORS, int(torch.bincount(classes).median()))
        require(
            self.neighbor <= len(z), f"k = {self.k} is more than the {len(z)} labeled rows. Lower it, or label more."
        )
        self.learned = F.normalize(z, dim=1)

    def score_learned(self, x: ArrayT) -> ArrayT:
        """A row that was learned from is its own nearest neighbor, which does not count."""
        self.neighbor += 1
        try:
            return self.score(x)
        finally:
            self.neighbor -= 1

    def _score(self, rows: Tensor) -> Tensor:
        labeled = self._known(rows)
        unit = F.normalize(rows.to(labeled), dim=1)
        neighbor = (unit @ labeled.T).topk(min(self.neighbor, len(labeled)), dim=1).indices[:, -1]  # (B, N) -> (B,)
        # From the difference, because 2 - 2 cos would lose the digits of small distances.
        distance: Tensor = torch.linalg.vector_norm(unit - labeled[neighbor], dim=1)
        return -distance


SCORES: Registry[type[NoveltyScore]] = Registry("novelty score")
SCORES.add("energy", Energy)
SCORES.add("knn", KNN)
SCORES.add("mahalanobis", Mahalanobis)
SCORES.add("msp", MSP)
SCORES.add("prototype", Prototype)


def detection(seen_scores: Array, is_novel: ArrayLike, *, labeled: Array | None = None) -> NoveltyDetection:
    """How well a score tells novel rows from seen ones. Only here does larger-is-seen become larger-is-newer.

    With `labeled`, the scores of labeled rows, FPR95 has their 5th percentile for a threshold.
    """
    given = None if labeled is None else -_tensor(labeled).cpu().numpy()
    return novelty_detection(-_tensor(seen_scores).cpu().numpy(), is_novel, labeled=given)


def novelty_table(
    features: Array,
    labels: Array,
    *,
    rows: Array,
    is_novel: ArrayLike,
    logits: Array | None = None,
    own_novelty: Array | None = None,
    prototypes: Array | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, NoveltyDetection]:
    """FPR95, AUROC and AUPR of every score, with its defaults, on one trained run.

    The threshold of FPR95 accepts 95 % of the labeled rows (OpenCon, appendix "OOD Detection Comparison").

    Args:
        features: (M, D) all rows, labeled ones among them.
        labels: (M,) class of a labeled row, -1 elsewhere; the scores learn from these.
        rows: (R,) which rows are judged.
        is_novel: (R,) the truth about those.
        logits: (M, S) of the seen classes; None leaves out the scores that need them.
        own_novelty: (M,) the method's own score, LARGER FOR NEWER as in `Assignment.novelty`; it becomes the row "own".
        prototypes: (S, D) of the seen classes, where the method has learned some; None: directions of the labeled means.
        names: which scores; None: all.
    """
    given = {"features": _tensor(features)}
    if logits is not None:
        given["logits"] = _tensor(logits)
    place = _tensor(rows).cpu()
    known = (_tensor(labels).cpu() >= 0).nonzero()[:, 0]
    table = {}
    if own_novelty is not None:
        own = _tensor(own_novelty).cpu()
        table["own"] = novelty_detection(own[place].numpy(), is_novel, labeled=own[known].numpy())
    for name in SCORES.names() if names is None else names:
        kind = SCORES[name]
        if kind.on in given:
            x = given[kind.on]
            learned = Prototype("cosine", prototypes, len(prototypes)) if prototypes is not None else Prototype()
            score = (learned if kind is Prototype else kind()).fit(x, labels)
            judged, labeled = (x[which.to(x.device)] for which in (place, known))
            table[name] = detection(score.score(judged), is_novel, labeled=score.score_learned(labeled))
    return table


def _tensor(x: Array) -> Tensor:
    """An array as a tensor, on the same memory if that is in order and writable."""
    return x.detach() if isinstance(x, Tensor) else torch.from_numpy(np.require(x, requirements=["C", "W"]))


def _class_means(z: Tensor, classes: Tensor) -> Tensor:
    """(N, D) -> (S, D)."""
    counts = torch.bincount(classes)
    sums = z.new_zeros(len(counts), z.shape[1]).index_add_(0, classes, z)
    return sums / counts[:, None]


def _rows(x: Array, what: str) -> Tensor:
    """The rows as a (M, D) tensor of float32 or float64; refuses what is not finite."""
    rows = _tensor(x)
    check_shape(rows, what=what)
    if len(rows):
        check_rows(rows, what=what)
    return rows if rows.dtype == torch.float64 else rows.float()
