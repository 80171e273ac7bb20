"""Rows of numbers instead of images: center, scale and rotate them with numbers that are fitted once, then project.

Letters: M rows, F features, D kept directions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.config import EncoderConfig
from opencon.encoders.base import Encoder
from opencon.encoders.embedder import Embedder

FAR = 10.0  # ours: a row counts as wild from this many times the usual distance to the middle
LOOKED_AT = 1000  # rows from which the middle is taken


class RowEncoder(Encoder):
    """(B, F) features -> (B, D) in two fixed steps; nothing here learns by gradient.

    rotate: minus the mean, onto the directions in which the rows differ most, to unit length
    whiten: an affine map that turns classes into balls (from `mixture.fit_gaussians`); the identity until then
    """

    channels_last = False
    stages = ("rotate", "whiten")
    mean: Tensor  # (F,)

    def __init__(self, num_inputs: int, dim: int) -> None:
        super().__init__()
        self.in_channels = 1
        self.num_features = dim
        self.register_buffer("mean", torch.zeros(num_inputs))
        self.rotate = nn.Linear(num_inputs, dim, bias=False)
        self.whiten = nn.Linear(dim, dim)
        set_affine(self.whiten, torch.zeros(dim), torch.eye(dim))
        self.freeze("head")

    @torch.no_grad()
    def fit(self, x: Tensor, *, power: float) -> None:
        """Take mean and directions from rows (M, F).

        Direction d, in which the rows have standard deviation s_d, is divided by s_d^power: 0 leaves distances as they
        are, 1 makes all directions count the same. All are divided by the size of the numbers, too; unit length undoes that.
        """
        # Of numbers around one, squares neither overflow nor vanish; dividing by a power of two rounds nothing.
        scale = 2.0 ** math.frexp(float(x.abs().max()))[1]
        x = tamed(x.float() / scale)
        mean = x.double().mean(dim=0)
        self.mean.copy_(mean * scale)
        centered, dim = x - mean.float(), self.num_features
        # A few more directions than asked for, and four rounds, make the randomized ones exact to a few digits.
        q = min(dim + 16, *centered.shape)
        _, spread, directions = torch.svd_lowrank(centered, q=q, niter=4)  # (q,), (F, q)
        spread, directions = spread[:dim] / len(x) ** 0.5, directions[:, :dim]
        least = max(1e-3 * float(spread.max()), 1e-12)  # ours: below this share of the largest, a direction is rounding
        weight = directions.T / spread.clamp(min=least)[:, None] ** power * (spread > least)[:, None]
        self.rotate.weight.zero_()
        self.rotate.weight[: len(weight)] = weight / scale

    def rotated(self, x: Tensor) -> Tensor:
        """(..., F) -> (..., D) unit rows; a row at the mean stays at zero."""
        return F.normalize(self.rotate(x - self.mean), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """(..., F) -> (..., D)."""
        whitened: Tensor = self.whiten(self.rotated(x))
        return whitened


def tamed(x: Tensor) -> Tensor:
    """Rows (M, F) with wild ones pulled toward the middle, so that a few rows do not decide the directions of all."""
    middle = x[:: -(-len(x) // LOOKED_AT)].median(dim=0).values
    away = x - middle
    length = away.norm(dim=1, keepdim=True)
    most = FAR * length.median()
    return x if most == 0 or length.max() <= most else middle + away * (most / length).clamp(max=1)


def unit(z: Tensor) -> Tensor:
    """(M, D) -> unit rows. A row of zeros has no direction, and gets that of the first axis."""
    first = torch.eye(1, z.shape[1], dtype=z.dtype, device=z.device)
    return F.normalize(torch.where((z == 0).all(dim=1, keepdim=True), first, z), dim=1)


@torch.no_grad()
def set_affine(layer: nn.Linear, center: Tensor, matrix: Tensor) -> None:
    """Make a linear layer compute (z - center) matrix."""
    layer.weight.copy_(matrix.T)
    layer.bias.copy_(-center @ matrix)


class Rows(Encoder):
    """Rows that are encoded already: (B, D) -> (B, D), as they are."""

    channels_last = False
    stages = ()

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_channels = 1
        self.num_features = dim

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) -> (B, D)."""
        return x


class RowEmbedder(Embedder):
    """An `Embedder` for rows that are centered and scaled already."""

    def __init__(self, head: nn.Module, dim: int) -> None:
        super().__init__(Rows(dim), head, EncoderConfig(name="rows", mean=(0.0,), std=(1.0,), head_dim=dim))

    def _normalized(self, images: Tensor) -> Tensor:
        return images


class ResidualHead(nn.Module):
    """x + W2 relu(W1 x). It begins as the identity (W2 = 0), so that training starts from the features as they are."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, hidden)
        self.second = nn.Linear(hidden, dim)
        self.reset()

    def reset(self) -> None:
        """Back to the identity, with new random numbers inside, from torch's default generator: seed it first."""
        nn.init.kaiming_uniform_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) -> (B, D)."""
        moved: Tensor = x + self.second(F.relu(self.first(x)))
        return moved
