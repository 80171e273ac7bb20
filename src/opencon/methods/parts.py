"""Pieces that several methods are made of.

Letters: N rows, F features, K outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from opencon.config import MethodConfig, require


def ramp_up(epoch: int, length: int) -> float:
    """exp(-5 (1 - t)^2) with t = epoch / length, 1 from `length` on (Laine and Aila, arXiv:1610.02242)."""
    t = min(1.0, epoch / length) if length else 1.0
    return math.exp(-5.0 * (1.0 - t) ** 2)


def positive(config: MethodConfig, *names: str) -> None:
    """Require settings to be above zero."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"method.{name} = {value} must be above zero.")


def not_negative(config: MethodConfig, *names: str) -> None:
    """Require settings to be zero or more."""
    for name in names:
        value = getattr(config, name)
        require(value >= 0, f"method.{name} = {value} must not be negative.")


class CosineClassifier(nn.Module):
    """Rows to cosines with K learned directions: no bias, no length, so that no class wins by its size."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(num_outputs, num_features), dim=1))

    def forward(self, rows: Tensor) -> Tensor:
        """(N, F), of any length -> (N, K) in [-1, 1]."""
        return F.normalize(rows, dim=1) @ F.normalize(self.weight, dim=1).T


class WeightAverage(nn.Module):
    """A module's slower twin: each learning parameter follows as an exponential average, the rest is shared.

    Call it as one would the module. Buffers (running statistics) are copies, so that the twin's passes leave the
    module's own alone; `update` averages those of floating point, too.
    """

    def __init__(self, module: nn.Module, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self._of = [module]  # in a list: not a child, its state is saved where it belongs
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._names += [name for name, b in module.named_buffers() if b.is_floating_point()]
        for name, tensor in self._own().items():
            self.register_buffer(name.replace(".", "__"), tensor.detach().clone())

    def forward(self, *args: Any, call: str = "forward") -> Tensor:
        """What the module's method `call` would give with averaged weights."""
        averaged = {name: getattr(self, name.replace(".", "__")) for name in self._names}
        module = self._of[0]
        result: Tensor = functional_call(_Call(module, call), {f"module.{k}": v for k, v in averaged.items()}, args)
        return result

    @torch.no_grad()
    def update(self) -> None:
        """average <- momentum * average + (1 - momentum) * now; call it after the optimizer's step."""
        own = self._own()
        averaged = [getattr(self, name.replace(".", "__")) for name in self._names]
        torch._foreach_lerp_(averaged, [own[name].detach() for name in self._names], 1.0 - self.momentum)  # type: ignore[attr-defined, unused-ignore]

    def _own(self) -> dict[str, Tensor]:
        every = dict(self._of[0].named_parameters()) | dict(self._of[0].named_buffers())
        return {name: every[name] for name in self._names}


class _Call(nn.Module):
    """Another method of a module as its forward, for `functional_call`."""

    def __init__(self, module: nn.Module, call: str) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: Any) -> Any:
        """The method's result."""
        return getattr(self.module, self.call)(*args)
