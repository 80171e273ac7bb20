"""The prototypes' moving average as a Triton kernel: imported only on a machine with a GPU. Plain form: `ema_update`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 256  # labels loaded together: eight for each thread of a program


# Triton compiles the signature too: its arguments cannot carry type hints.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _ema_update(  # type: ignore[no-untyped-def]
    mu_ptr, z_ptr, labels_ptr, out_ptr, rows, dim, m, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    own = tl.program_id(0)
    d, i = tl.arange(0, BLOCK), tl.arange(0, AT_ONCE)
    mu = tl.load(mu_ptr + own * dim + d, mask=d < dim, other=0.0)
    for first in range(0, rows, AT_ONCE):
        labels = tl.load(labels_ptr + first + i, mask=first + i < rows, other=-1)
        mine = tl.where(labels == own, first + i, rows)  # indices of the own rows; `rows` for all others
        row = tl.min(mine)
        while row < rows:
            z = tl.load(z_ptr + row * dim + d, mask=d < dim, other=0.0)
            mu = m * mu + (1.0 - m) * z
            mu = mu / tl.maximum(tl.sqrt(tl.sum(mu * mu)), 1e-12)
            row = tl.min(tl.where(mine > row, mine, rows))
    tl.store(out_ptr + own * dim + d, mu, mask=d < dim)


def ema_update_kernel(prototypes: Tensor, z: Tensor, labels: Tensor, momentum: float) -> Tensor:
    """`prototypes.ema_update` with one program per class, which finds its own rows and takes them in order.

    Equal to the plain form because classes do not touch each other; a row with label -1 belongs to no class.
    """
    prototypes, z, labels = prototypes.contiguous(), z.contiguous(), labels.contiguous()
    out = torch.empty_like(prototypes)
    rows, dim = z.shape
    _ema_update[(len(prototypes),)](
        prototypes, z, labels, out, rows, dim, momentum, triton.next_power_of_2(dim), AT_ONCE, num_warps=1
    )
    return out
