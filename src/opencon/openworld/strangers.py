"""How odd a row is: its distance to the nearest rows that the fit knew, beside what is usual there.

Letters: M rows, F features, N reference rows, K = 5 nearest of them, C classes and groups.

    u(x)     = x / |x| and |x| / (4 * mean length), around their mean       direction first, but length counts too
    oddness  = mean distance of u(x) to its K nearest reference rows / usual distance there
    usual    = sqrt(mean distance in the class of a reference row * mean distance of all)

Rows that are odder than all but 5 % of those that the fit knew are unlike everything. The fit's own rows are compared
without themselves, so that a new row of a known class is flagged about as often as they are: that is the false-alarm rate.

Measured (benchmarks/strangers.py, development part): the encoder's own features tell strangers best. Every space in which
the classes have been pulled apart is worse, because directions that tell nothing of the known classes are gone, and
strangers lie in them. Dividing by what is usual finds more strangers than the distance alone. Without the root it finds a
few more in the mean, and far fewer in texts, where one loose class takes all that fits nowhere.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.errors import require

NEAREST = 5  # K; 3 and 8 find about as many strangers (measured)
MOST = 2048  # reference rows, ours: 10 MB with 1,280 features
LENGTH = (
    0.25  # weight of the length beside the direction; 0 finds as many strangers in photos, but none by length alone
)
LONGEST = 100.0  # times the mean length; ours, so that a wild row stays a number
LEAST = 1e-3  # of the spread of all rows, ours: no usual distance is less, so that rounding is not odd among copies
EXTRA = 40.0  # rows of usual distance added to each class, so that a class of few rows has a usual distance; measured
QUANTILES = 1001  # of the oddness of the fit's rows that are kept, ours: false-alarm rates down to 0.1 %
FALSE_ALARMS = 0.05  # share of rows of known classes that may be called strangers
CHUNK = 4096  # rows compared at a time


class Strangers(nn.Module):
    """Reference rows, and what is usual among them. Everything is in buffers."""

    middle: Tensor  # (F + 1,) mean of u
    unit: Tensor  # scalar: the size of the numbers, a power of two
    length: Tensor  # scalar: mean length of a row, in units
    rows: Tensor  # (N, F + 1) u of the reference rows
    classes: Tensor  # (N,) their classes
    usual: Tensor  # (N,) usual distance in the class of each
    oddness: Tensor  # (1001,) quantiles of the oddness of the fit's rows, rising

    def __init__(self, num_features: int, num_rows: int) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(num_features + 1))
        self.register_buffer("unit", torch.tensor(1.0))
        self.register_buffer("length", torch.tensor(1.0))
        self.register_buffer("rows", torch.zeros(num_rows, num_features + 1))
        self.register_buffer("classes", torch.zeros(num_rows, dtype=torch.long))
        self.register_buffer("usual", torch.ones(num_rows))
        self.register_buffer("oddness", torch.linspace(0, 1, QUANTILES))

    @staticmethod
    @torch.no_grad()
    def fit(x: Tensor, classes: Tensor, num_classes: int) -> tuple[Strangers, Tensor, Tensor]:
        """Keep a sample of the fit's rows (M, F) and their classes (M,).

        Returns:
            It, and the oddness (M,) and the nearest reference rows (M, K) of the rows themselves.
        """
        every = -(-len(x) // MOST)
        chosen = torch.arange(0, len(x), every, device=x.device)
        made = Strangers(x.shape[1], len(chosen)).to(x.device)
        made.unit.fill_(2.0 ** math.frexp(float(x.abs().max()))[1])  # so that squares neither overflow nor vanish
        made.length.copy_((x / made.unit).norm(dim=1).mean().clamp(min=1e-30))
        made.rows.copy_(made.place(x[chosen]))
        made.middle.copy_(made.rows.mean(dim=0))
        made.rows.sub_(made.middle)
        made.classes.copy_(classes[chosen])
        own = torch.full((len(x),), -1, device=x.device)
        own[chosen] = torch.arange(len(chosen), device=x.device)
        parts = [made.nearest(*part) for part in zip(torch.split(x, CHUNK), torch.split(own, CHUNK), strict=True)]
        distance, nearest = (torch.cat(part) for part in zip(*parts, strict=True))
        size = torch.bincount(classes, minlength=num_classes)
        total = torch.zeros(num_classes, device=x.device).index_add_(0, classes, distance)
        mean = distance.mean()
        usual = ((total + EXTRA * mean) / (size + EXTRA) * mean).sqrt()  # (C,)
        spread = made.rows.square().sum(dim=1).mean().sqrt()
        made.usual.copy_(usual.clamp(min=max(LEAST * float(spread), 1e-6))[made.classes])
        odd = distance / made.usual[nearest].mean(dim=1)
        at = torch.linspace(0, 1, QUANTILES, device=x.device).mul(len(odd) - 1).ceil().long()
        made.oddness.copy_(odd.sort().values[at])
        return made, odd, nearest

    def place(self, x: Tensor) -> Tensor:
        """u of rows (M, F): (M, F + 1)."""
        x = x / self.unit
        length = (x.norm(dim=1, keepdim=True) / self.length).clamp(max=LONGEST)
        return torch.cat([F.normalize(x, dim=1), LENGTH * length], dim=1) - self.middle

    def nearest(self, x: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean distance (M,) to the nearest reference rows, and which these are (M, K).

        Args:
            x: (M, F).
            own: (M,) the reference row that each row is itself, and which does not count; -1: none.
        """
        u = self.place(x)
        square = u.square().sum(dim=1, keepdim=True) + self.rows.square().sum(dim=1) - 2 * u @ self.rows.T  # (M, N)
        num = len(self.rows)
        if own is not None and num > 1:
            is_own = own >= 0
            square[is_own, own[is_own]] = torch.inf
            num -= 1
        nearest = square.topk(min(NEAREST, num), dim=1, largest=False).indices
        # Measured again, one by one: the root of a small difference of large squares would be mostly rounding.
        apart = [(u - self.rows[nearest[:, k]]).square().sum(dim=1).sqrt() for k in range(nearest.shape[1])]
        return torch.stack(apart, dim=1).mean(dim=1), nearest

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Oddness (M,) of rows (M, F), and the classes of the nearest reference rows (M, K)."""
        distance, nearest = self.nearest(x)
        return distance / self.usual[nearest].mean(dim=1), self.classes[nearest]

    def threshold(self, false_alarms: float = FALSE_ALARMS) -> Tensor:
        """The oddness that this share of the fit's rows exceed; a row beyond it is unlike everything."""
        at = (1 - false_alarms) * (QUANTILES - 1)
        return self.oddness[min(max(-int(-at // 1), 0), QUANTILES - 1)]


def check_false_alarms(share: float) -> None:
    """Refuse a rate that is none."""
    require(0 <= share < 1, f"false_alarms = {share} must be at least 0 and less than 1.")
