"""What one would type instead, for worlds.py: told the true number of classes, or knowing nothing.

Each gets the rows at unit length, and in their 50 main directions; the better of the two counts, chosen by the truth, which
no user could do.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.cluster import HDBSCAN, AgglomerativeClustering, KMeans
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import silhouette_score
from torch import Tensor

from opencon.cluster.kmeans import kmeans
from opencon.runtime import generator

Rows = NDArray[np.float32]
DIMS = 50  # of PCA
MOST = 60  # groups that silhouette k-means tries; thinned out above 20
SURE = 0.75  # probability from which logistic regression is believed; scikit-learn's number for self-training
LOOKED_AT = 2000  # rows that a silhouette is taken of


class Given(Protocol):
    """The parts of a pile that a baseline may see; the number of classes only if it is told."""

    x: Tensor
    labels: Tensor
    num_seen: int
    num_classes: int
    seed: int

    def accuracy(self, classes: Tensor) -> float: ...


Baseline = Callable[[Rows, Given], NDArray[Any] | None]


def plain_kmeans(x: Rows, p: Given) -> NDArray[Any]:
    return KMeans(p.num_classes, n_init=10, random_state=p.seed).fit_predict(x)


def ward(x: Rows, p: Given) -> NDArray[Any]:
    return AgglomerativeClustering(p.num_classes).fit_predict(x)


def semi_supervised(x: Rows, p: Given) -> NDArray[Any] | None:
    if p.num_seen == 0:
        return None
    stream, rows = generator(torch.device("cpu"), p.seed), torch.from_numpy(x)
    return kmeans(rows, p.num_classes, labels=p.labels, num_seen=p.num_seen, generator=stream).assignment.numpy()


def logistic(x: Rows, p: Given) -> NDArray[Any] | None:
    """Seen classes by logistic regression; the rows it is not sure of go to k-means."""
    if p.num_seen < 2:
        return None
    labels = p.labels.numpy()
    probability = LogisticRegression(max_iter=200, C=10.0).fit(x[labels >= 0], labels[labels >= 0]).predict_proba(x)
    classes, unsure = probability.argmax(axis=1), (probability.max(axis=1) < SURE) & (labels < 0)
    num_novel = min(p.num_classes - p.num_seen, int(unsure.sum()))
    if num_novel:
        classes[unsure] = p.num_seen + KMeans(num_novel, n_init=10, random_state=p.seed).fit_predict(x[unsure])
    return classes


def hdbscan(least: int) -> Baseline:
    """Noise counts as one group."""

    def run(x: Rows, p: Given) -> NDArray[Any]:
        return HDBSCAN(min_cluster_size=least, copy=True).fit_predict(x) + 1

    return run


def silhouette_kmeans(x: Rows, p: Given) -> NDArray[Any]:
    tries = [*range(2, 21), *range(22, 31, 2), *range(35, MOST + 1, 5)]
    found = [KMeans(k, n_init=3, random_state=p.seed).fit_predict(x) for k in tries if k < len(x)]
    scores = [silhouette_score(x, of, sample_size=min(LOOKED_AT, len(x)), random_state=0) for of in found]
    return found[int(np.argmax(scores))]


def umap_hdbscan(x: Rows, p: Given) -> NDArray[Any]:
    from umap import UMAP

    flat = UMAP(n_components=10, min_dist=0.0, random_state=p.seed, n_jobs=1).fit_transform(x)
    return HDBSCAN(min_cluster_size=10, copy=True).fit_predict(flat) + 1


BASELINES: dict[str, Baseline] = {
    "k-means, told": plain_kmeans,
    "Ward, told": ward,
    "semi-supervised, told": semi_supervised,
    "logistic, told": logistic,
    "HDBSCAN 5": hdbscan(5),
    "HDBSCAN 10": hdbscan(10),
    "silhouette k-means": silhouette_kmeans,
}
UMAP_NAME = "UMAP + HDBSCAN"
if importlib.util.find_spec("umap") is not None:
    BASELINES[UMAP_NAME] = umap_hdbscan


def best_of(run: Baseline, p: Given) -> float | None:
    """All in percent, on raw or on PCA features, whichever is better; None where it cannot work."""
    raw = F.normalize(p.x, dim=1).numpy()
    turned = PCA(min(DIMS, *raw.shape), random_state=0).fit_transform(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # convergence
        found = [run(x, p) for x in (raw, turned)]
    return max((p.accuracy(torch.from_numpy(of).long()) for of in found if of is not None), default=None)
