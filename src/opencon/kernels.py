"""Triton kernels: imported only on a machine with a GPU. Each has its plain form, and a test that they agree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


# Triton compiles the signature too: its arguments cannot carry type hints.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _ema_update(mu_ptr, z_ptr, labels_ptr, out_ptr, rows, dim, m, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    own = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    mu = tl.load(mu_ptr + own * dim + d, mask=d < dim, other=0.0)
    for i in range(rows):
        if tl.load(labels_ptr + i) == own:
            z = tl.load(z_ptr + i * dim + d, mask=d < dim, other=0.0)
            mu = m * mu + (1.0 - m) * z
            mu = mu / tl.maximum(tl.sqrt(tl.sum(mu * mu)), 1e-12)
    tl.store(out_ptr + own * dim + d, mu, mask=d < dim)


def ema_update_kernel(prototypes: Tensor, z: Tensor, labels: Tensor, momentum: float) -> Tensor:
    """`prototypes.ema_update` with one program per class that walks all rows and takes its own, in order.

    Equal to the plain form because classes do not touch each other; a row with label -1 is nobody's.
    """
    out = torch.empty_like(prototypes)
    rows, dim = z.shape
    _ema_update[(len(prototypes),)](
        prototypes, z.contiguous(), labels, out, rows, dim, momentum, BLOCK=triton.next_power_of_2(dim), num_warps=1
    )
    return out
