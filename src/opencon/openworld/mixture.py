"""Classes and groups as a mixture: a prototype and a share for each, one shape for all.

Letters: M rows, D embedding size, C classes and groups, of which the first S are seen classes.

A class is rarely a ball: some directions vary within every class and tell nothing, others differ between classes only.
So there are two steps, each by expectation maximization in which a labeled row keeps its class:

    fit_gaussians  Gaussians with one covariance for all classes (linear discriminant analysis with hidden labels)
    fit_mixture    on the sphere, after that covariance has been made a ball: directions with one sharpness for all
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHRINKAGE = 0.1  # ours: share of the covariance that is a ball, so that few rows in many dimensions do no harm
EXTRA = 1.0  # ours: rows added to each class's share (Laplace), so that no class is impossible
SHARPEST = 1e4  # ours: where all rows of a class coincide, the sharpness would be infinite


@dataclass(frozen=True)
class Mixture:
    """p(class c | z) is proportional to share_c exp(sharpness * mu_c . z), for unit rows z."""

    prototypes: Tensor  # (C, D) unit rows
    share: Tensor  # (C,) sums to one
    sharpness: Tensor  # scalar
    assignment: Tensor  # (M,) of the rows it was fitted to

    def logits(self, z: Tensor) -> Tensor:
        """(M, D) -> (M, C)."""
        return self.sharpness * (z @ self.prototypes.T) + self.share.log()


@dataclass(frozen=True)
class Whitening:
    """z -> (z - center) matrix: classes become balls of radius about sqrt(D)."""

    center: Tensor  # (D,)
    matrix: Tensor  # (D, D)

    def __call__(self, z: Tensor) -> Tensor:
        """(M, D) -> (M, D), not of unit length."""
        return (z - self.center) @ self.matrix


@torch.no_grad()
def fit_gaussians(z: Tensor, start: Tensor, labels: Tensor, *, num_seen: int, rounds: int) -> tuple[Whitening, Tensor]:
    """Fit Gaussians with one covariance. Returns the whitening that makes it a ball, and the class of each row (M,).

        mean_c = sum_i q_ic z_i / n_c         cov = (1 - a) sum_ic q_ic (z_i - mean_c)(z_i - mean_c)^T / M + a ball
        q_ic  ~ share_c exp(-|W (z_i - mean_c)|^2 / 2)   with W^T W = cov^-1

    Args:
        z: (M, D).
        start: (M,) class of each row to begin with.
        labels: (M,) class of a labeled row, which it keeps, else -1.
        num_seen: S.
        rounds: of expectation maximization. Keep them few: where classes are many and small, they drift (measured).
    """
    num_rows, dim = z.shape
    center = z.mean(dim=0)
    z = z - center
    q = fixed = _one_hot(start, labels, num_seen)
    second = z.T @ z  # (D, D)
    ball = torch.eye(dim, dtype=z.dtype, device=z.device)
    for _ in range(rounds):
        size = q.sum(dim=0)  # (C,)
        mean = (q.T @ z) / size.clamp(min=1e-6)[:, None]  # (C, D)
        within = (second - (mean * size[:, None]).T @ mean) / num_rows
        spread = (within.trace() / dim).clamp(min=1e-8)
        values, axes = torch.linalg.eigh((((1 - SHRINKAGE) * within + SHRINKAGE * spread * ball) / spread).double())
        root = (axes * values.clamp(min=SHRINKAGE / 2).rsqrt()) @ axes.T  # symmetric: the axes stay where they are
        matrix = (root / spread.double().sqrt()).to(z.dtype)
        flat, flat_mean = z @ matrix, mean @ matrix
        q = (flat @ flat_mean.T - flat_mean.square().sum(dim=1) / 2 + _share(q).log()).softmax(dim=1)
        q = torch.where(labels[:, None] >= 0, fixed, q)
    return Whitening(center, matrix), q.argmax(dim=1)


@torch.no_grad()
def fit_mixture(z: Tensor, start: Tensor, labels: Tensor, *, num_seen: int, rounds: int) -> Mixture:
    """Fit directions with one sharpness (von Mises-Fisher distributions) to unit rows.

        mu_c = normalize(sum_i q_ic z_i)      r = sum_c |sum_i q_ic z_i| / M      sharpness = r (D - r^2) / (1 - r^2)

    (Banerjee et al., JMLR 2005, for the sharpness.) The arguments are those of `fit_gaussians`.
    """
    q = fixed = _one_hot(start, labels, num_seen)
    for _ in range(rounds):
        total = q.T @ z  # (C, D)
        prototypes = F.normalize(total, dim=1)
        r = (total.norm(dim=1).sum() / len(z)).clamp(max=1 - 1e-6)
        sharpness = (r * (z.shape[1] - r.square()) / (1 - r.square())).clamp(1.0, SHARPEST)
        mixture = Mixture(prototypes, _share(q), sharpness, start)
        q = torch.where(labels[:, None] >= 0, fixed, mixture.logits(z).softmax(dim=1))
    return Mixture(prototypes, mixture.share, sharpness, q.argmax(dim=1))


def _one_hot(start: Tensor, labels: Tensor, num_seen: int) -> Tensor:
    """(M, C): the start, with the labels in their rows."""
    num_classes = max(int(start.max()) + 1, num_seen)
    return F.one_hot(torch.where(labels >= 0, labels, start), num_classes).float()


def _share(q: Tensor) -> Tensor:
    size = q.sum(dim=0) + EXTRA
    return size / size.sum()
