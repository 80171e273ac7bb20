"""LARS: a rate for every layer. You et al. 2017, arXiv:1708.03888, algorithm 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD whose step is, for each layer, in proportion to the norm of its weights.

        local = trust |w| / (|g| + weight_decay |w|)
        v     = momentum v + lr local (g + weight_decay w)
        w     = w - v

    Where |w| or |g| is zero, and for parameters of one dimension (biases and norms, which BYOL leaves out as well,
    arXiv:2006.07733), local is 1. Nothing is read by the host, so that a step can be recorded as a CUDA graph.
    """

    def __init__(self, params: Any, *, lr: Tensor, momentum: float, weight_decay: float, trust: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        assert closure is None, "LARS evaluates no closure"
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            if not learning:
                continue
            steps = list(torch._foreach_add([p.grad for p in learning], learning, alpha=group["weight_decay"]))
            torch._foreach_mul_(steps, self._rates(learning, group))
            for p in learning:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in learning]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, steps)
            torch._foreach_sub_(learning, momenta)

    def _rates(self, learning: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """lr times local, a scalar for each parameter."""
        lr: Tensor = group["lr"]
        layers = [p for p in learning if p.dim() > 1]
        if not layers:
            return [lr] * len(learning)
        slopes = [p.grad for p in layers if p.grad is not None]
        weight, slope = (torch.stack(torch._foreach_norm(x)) for x in (layers, slopes))  # (layers,)
        local = group["trust"] * weight / (slope + group["weight_decay"] * weight)
        own = iter((lr * torch.where((weight > 0) & (slope > 0), local, 1.0)).unbind())
        return [next(own) if p.dim() > 1 else lr for p in learning]
