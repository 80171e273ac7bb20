"""How good the groups are: accuracy by protocol, agreement of partitions, detection of novelty, neighborhoods.

Letters: M images, D embedding size, S = num_seen. True classes below S are seen, the others novel. Accuracies and all
other shares are fractions in [0, 1]. A number that does not exist (no image in the subset) is nan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from opencon.config import Protocol
from opencon.errors import ConfigError, DataError

Ids = NDArray[np.int64]
NAN = float("nan")
MOST_NUMBERS = 10_000  # ours: classes and groups are numbered from 0 in the released code, and a square of these fits
BLOCK_SCORES = 2**24  # similarities held at a time, 64 MiB in float32 (ours, because it fits everywhere)


@dataclass(frozen=True)
class OpenWorldAccuracy:
    """Share of the images that are in the right class or group, and by which protocol."""

    all: float
    novel: float
    seen: float
    protocol: Protocol


@dataclass(frozen=True)
class ClusteringScores:
    """Agreement of the groups with the classes, whatever their names; 1 is perfect."""

    nmi_all: float
    nmi_novel: float
    ari_all: float
    ari_novel: float


@dataclass(frozen=True)
class NoveltyDetection:
    """How well a score tells novel images from seen ones."""

    auroc: float  # chance that a novel image scores above a seen one; a tie counts half
    aupr: float  # average precision, novel is positive
    fpr95: float  # share of the novel taken for seen where 95 % of the seen are accepted; smaller is better


def match(predicted: ArrayLike, truth: ArrayLike) -> dict[int, int]:
    """The one-to-one naming of groups by classes that makes the most rows right.

    Groups and classes may be any non-negative numbers and differ in how many there are. A group that shares no row with
    any class that is left over gets no name.
    """
    from scipy.optimize import linear_sum_assignment  # late: slow to import

    predicted, truth = _as_ids(predicted, truth)
    groups, group = np.unique(predicted, return_inverse=True)
    classes, kind = np.unique(truth, return_inverse=True)
    shared = np.zeros((len(groups), len(classes)), dtype=np.int64)
    np.add.at(shared, (group, kind), 1)
    rows, columns = linear_sum_assignment(shared, maximize=True)
    return {int(groups[r]): int(classes[c]) for r, c in zip(rows, columns, strict=True) if shared[r, c] > 0}


def open_world_accuracy(
    predicted: ArrayLike, truth: ArrayLike, *, num_seen: int, protocol: Protocol
) -> OpenWorldAccuracy:
    """Accuracy on all images, on those of novel classes and on those of seen classes.

    Two protocols are in use, and their numbers cannot be compared:

        orca  seen: predictions compared as they are; novel: a matching of its own over the novel images only, which may
              use the groups of seen classes; all: one matching over everything (tables of ORCA and OpenCon, as in
              the code released with OpenCon).
        gcd   one matching over everything, read off for each subset (tables of GCD).

    "all" is the same in both. Under orca it is not the weighted mean of the other two.
    """
    if protocol not in get_args(Protocol):
        raise ConfigError(f"protocol = {protocol!r} must be one of {', '.join(map(repr, get_args(Protocol)))}.")
    predicted, truth = _as_ids(predicted, truth)
    is_seen = truth < num_seen
    right = _right_when_matched(predicted, truth)
    if protocol == "gcd":
        novel, seen = right[~is_seen], right[is_seen]
    else:
        novel = _right_when_matched(predicted[~is_seen], truth[~is_seen])
        seen = predicted[is_seen] == truth[is_seen]
    return OpenWorldAccuracy(all=_share(right), novel=_share(novel), seen=_share(seen), protocol=protocol)


def clustering_scores(predicted: ArrayLike, truth: ArrayLike, *, num_seen: int) -> ClusteringScores:
    """Normalized mutual information (arithmetic mean of the entropies) and adjusted Rand index, all and novel rows."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score  # late: slow to import

    predicted, truth = _as_ids(predicted, truth)
    is_novel = truth >= num_seen

    def both(rows: NDArray[np.bool_]) -> tuple[float, float]:
        if not rows.any():
            return NAN, NAN
        pair = truth[rows], predicted[rows]
        return float(normalized_mutual_info_score(*pair)), float(adjusted_rand_score(*pair))

    nmi_all, ari_all = both(np.ones_like(is_novel))
    nmi_novel, ari_novel = both(is_novel)
    return ClusteringScores(nmi_all=nmi_all, nmi_novel=nmi_novel, ari_all=ari_all, ari_novel=ari_novel)


def novelty_detection(novelty: ArrayLike, is_novel: ArrayLike, *, labeled: ArrayLike | None = None) -> NoveltyDetection:
    """Detection of novel images by a score that is larger for newer ones.

    FPR95 follows the literature, which accepts an image as seen when its seen-score (-novelty) reaches a threshold:

        threshold  the largest seen-score that accepts at least 95 % of the seen images (their 5th percentile,
                   without interpolation)
        fpr95      share of the novel images that are accepted as well, i.e. taken for seen

    With `labeled`, the novelty of labeled images, the threshold accepts 95 % of those instead, as a user would set it.

    An image on the threshold is accepted, so a score that says nothing (constant) has FPR95 1, AUROC 1/2, and for AUPR
    the share of novel images. All three are nan when there is no seen or no novel image.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # late: slow to import

    score = np.asarray(novelty, dtype=np.float64)  # (M,)
    flags = np.asarray(is_novel)
    if not np.isin(flags, (0, 1)).all():
        raise DataError(
            f"is_novel holds {flags[~np.isin(flags, (0, 1))][0]}: say true or false, 1 or 0, for each image."
        )
    target = flags.astype(bool)  # (M,)
    if score.shape != target.shape or score.ndim != 1:
        raise DataError(f"novelty has shape {score.shape}, is_novel {target.shape}. Give one number for each image.")
    if not np.isfinite(score).all():
        raise DataError(f"novelty has {int((~np.isfinite(score)).sum())} entries that are not finite numbers.")
    if target.all() or not target.any():
        return NoveltyDetection(auroc=NAN, aupr=NAN, fpr95=NAN)
    accept_seen = np.sort(-score[~target] if labeled is None else -np.asarray(labeled, dtype=np.float64))
    threshold = accept_seen[len(accept_seen) // 20]  # at most 5 % of them lie strictly before it
    return NoveltyDetection(
        auroc=float(roc_auc_score(target, score)),
        aupr=float(average_precision_score(target, score)),
        fpr95=_share(-score[target] >= threshold),
    )


def classes_in_use(predicted: ArrayLike, num_classes: int) -> int:
    """How many of the classes got at least one image; a collapsed model uses few."""
    used = np.unique(np.asarray(predicted))
    if len(used) and not (used[0] >= 0 and used[-1] < num_classes):
        raise DataError(f"predicted classes reach from {used[0]} to {used[-1]}, but must lie in [0, {num_classes}).")
    return len(used)


def knn_accuracy(
    z: Tensor | NDArray[Any], truth: Tensor | NDArray[Any], *, k: int = 20, num_queries: int = 5000
) -> float:
    """Share of rows whose k nearest other rows vote for their class: what an embedding knows, without training.

    Neighbors are the rows with the largest dot product, so `z` should have unit rows. Each has one vote; among classes
    with equally many the one with the nearest row wins. The queries are every n-th row, at most `num_queries` of them
    (ours, because 5000 put the standard error at 0.7 points or less). Computed where `z` lives.

    Args:
        z: (M, D) unit rows.
        truth: (M,) classes.
        k: neighbors that vote, fewer than M. 20 is ours, in line with common practice for unit embeddings.
        num_queries: how many rows are judged at most.
    """
    z, truth = torch.as_tensor(z), torch.as_tensor(truth)
    M = len(z)
    if len(truth) != M:
        raise DataError(f"z has {M} rows but truth has {len(truth)}. Give truth one class per row.")
    if not 1 <= k < M:
        raise ConfigError(f"k = {k} neighbors must be at least 1 and fewer than the {M} rows.")
    if num_queries < 1:
        raise ConfigError(f"num_queries = {num_queries} must be at least 1.")
    queries = torch.arange(0, M, -(-M // num_queries), device=z.device)
    block = max(1, BLOCK_SCORES // M)
    votes = []
    for start in range(0, len(queries), block):
        rows = queries[start : start + block]
        scores = z[rows] @ z.T  # (block, M)
        scores[torch.arange(len(rows), device=z.device), rows] = -torch.inf  # a row is not its own neighbor
        votes.append(truth.to(z.device)[scores.topk(k, dim=1).indices].cpu())
    vote = torch.cat(votes).numpy()  # (queries, k), nearest first
    support = np.stack([(vote == vote[:, j : j + 1]).sum(axis=1) for j in range(k)], axis=1)  # votes for j's class
    winner = vote[np.arange(len(vote)), support.argmax(axis=1)]  # numpy's argmax takes the first, so the nearest
    return _share(winner == truth.cpu().numpy()[queries.cpu().numpy()])


def evaluate(
    predicted: ArrayLike,
    truth: ArrayLike,
    *,
    num_seen: int,
    num_classes: int,
    protocol: Protocol,
    on: str,
    novelty: ArrayLike | None = None,
) -> dict[str, float | str]:
    """Every number about one assignment, flat, with the protocol and the images (`on`) it was made by.

    With a novelty score per image, larger for newer, the detection numbers are in it too.
    """
    predicted, truth = _as_ids(predicted, truth)
    accuracy = open_world_accuracy(predicted, truth, num_seen=num_seen, protocol=protocol)
    record: dict[str, float | str] = {"protocol": protocol, "on": on, "num_images": len(truth)}
    record |= {"all": accuracy.all, "novel": accuracy.novel, "seen": accuracy.seen}
    record |= asdict(clustering_scores(predicted, truth, num_seen=num_seen))
    if novelty is not None:
        record |= asdict(novelty_detection(novelty, truth >= num_seen))
    record["classes_in_use"] = classes_in_use(predicted, num_classes)
    return record


def _as_ids(predicted: ArrayLike, truth: ArrayLike) -> tuple[Ids, Ids]:
    """Both as (M,) whole numbers from zero."""
    arrays = []
    for name, values in (("predicted", predicted), ("truth", truth)):
        array = np.asarray(values)
        if array.ndim != 1 or not (array.dtype.kind in "iu" or array.size == 0):
            raise DataError(f"{name} must be one row of whole numbers, not {array.dtype} of shape {array.shape}.")
        if array.size and array.min() < 0:
            raise DataError(f"{name} holds {array.min()}: classes are numbered from 0. Leave such rows out.")
        arrays.append(array.astype(np.int64))
    if len(arrays[0]) != len(arrays[1]):
        raise DataError(f"predicted has {len(arrays[0])} rows but truth has {len(arrays[1])}. Give both the same rows.")
    return arrays[0], arrays[1]


def _right_when_matched(predicted: Ids, truth: Ids) -> NDArray[np.bool_]:
    """(M,) whether the best naming gives a row's group the row's own class.

    Several namings can be equally good overall and differ in which rows are right. As in the code released with GCD and
    ORCA, a square matrix over all numbers from 0 decides, so that seen and novel under `gcd` are theirs in a tie, too.
    """
    from scipy.optimize import linear_sum_assignment  # late: slow to import

    if not len(predicted):
        return np.zeros(0, dtype=bool)
    if max(predicted.max(), truth.max()) >= MOST_NUMBERS:  # a square over all numbers would be too large
        predicted, truth = (np.unique(ids, return_inverse=True)[1] for ids in (predicted, truth))
    side = int(max(predicted.max(), truth.max())) + 1
    shared = np.zeros((side, side), dtype=np.int64)
    np.add.at(shared, (predicted, truth), 1)
    _, names = linear_sum_assignment(shared.max() - shared)
    right: NDArray[np.bool_] = names[predicted] == truth
    return right


def _share(right: NDArray[np.bool_]) -> float:
    return float(right.mean()) if right.size else NAN
