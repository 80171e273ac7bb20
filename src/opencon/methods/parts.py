"""Pieces that several methods are made of.

Letters: N rows, F features, K outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from opencon.config import MethodConfig
from opencon.errors import require


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


def at_least_one(config: MethodConfig, *names: str) -> None:
    """Require settings to be one or more."""
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"method.{name} = {value} must be at least 1.")


class CosineClassifier(nn.Module):
    """Rows to cosines with K learned directions: no bias, no length, so that no class wins by its size."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(num_outputs, num_features), dim=1))

    def forward(self, rows: Tensor) -> Tensor:
        """(N, F), of any length -> (N, K) in [-1, 1]."""
        return F.normalize(rows, dim=1) @ F.normalize(self.weight, dim=1).T


class Swapped(nn.Module):
    """Calls a module's methods with other tensors instead of some of its parameters and buffers.

    The module itself does not change, and is no child of this one: its state is saved where it belongs.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of = [_Methods(module)]

    @property
    def module(self) -> nn.Module:
        """The module whose methods are called."""
        return self._of[0].module

    def forward(self, tensors: Mapping[str, Tensor], call: str, *args: Any) -> Any:
        """The result of method `call`; `tensors` are by name, as in `named_parameters` and `named_buffers`."""
        return functional_call(self._of[0], {f"module.{name}": t for name, t in tensors.items()}, (call, *args))


class _Methods(nn.Module):
    """Any method of a module as a forward pass, the only method that `functional_call` can call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: str, *args: Any) -> Any:
        """The method's result."""
        return getattr(self.module, call)(*args)


class WeightAverage(nn.Module):
    """A module's slower twin: every learning parameter follows as an exponential average, fixed ones are shared.

        average <- m average + (1 - m) now,   m = momentum, or with `warms_up` min(momentum, (1 + n) / (10 + n))

    n counts the updates: with `warms_up` the start is forgotten within tens of steps instead of 1 / (1 - momentum), as
    the documentation of TensorFlow's ExponentialMovingAverage proposes.

    Running statistics that move are averaged, too. The twin has copies of them, so that its passes do not change those
    of the module.
    """

    num_updates: Tensor  # n

    def __init__(self, module: nn.Module, momentum: float, *, warms_up: bool = False) -> None:
        super().__init__()
        self.momentum, self.warms_up = momentum, warms_up
        self.swapped = Swapped(module)
        learning = {name for name, p in module.named_parameters() if p.requires_grad}
        still = {
            f"{path}.{name}"
            for path, part in module.named_modules()
            if module.training and not part.training
            for name, _ in part.named_buffers(recurse=False)
        }
        buffers = {name for name, _ in module.named_buffers()} - still
        # Buffers that state_dict leaves out belong to the configuration, not to what was learned.
        saved = [name for name in module.state_dict() if name in learning | buffers]
        self._names = {
            name: name.replace(".", "__") for name in saved
        }  # name in the module: name of our buffer, without dots
        for name, tensor in self._own().items():
            self.register_buffer(self._names[name], tensor.detach().clone())
        self.register_buffer("num_updates", torch.tensor(0.0))

    def forward(self, *args: Any, call: str = "forward") -> Tensor:
        """What the module's method `call` would give with averaged weights, which no gradient reaches."""
        result: Tensor = self.swapped(self._averages(), call, *args)
        return result

    @torch.no_grad()
    def update(self) -> None:
        """Move toward the module; call it after the optimizer's step."""
        averages, own = self._averages(), self._own()
        names = [name for name, tensor in averages.items() if tensor.is_floating_point()]
        followers, leaders = [averages[name] for name in names], [own[name] for name in names]
        self.num_updates += 1
        momentum = torch.full_like(self.num_updates, self.momentum)
        if self.warms_up:
            momentum = momentum.minimum((1 + self.num_updates) / (10 + self.num_updates))
        # As a difference, so that a tensor that does not change keeps every bit.
        steps = torch._foreach_sub(leaders, followers)  # type: ignore[attr-defined, unused-ignore]
        torch._foreach_mul_(steps, 1 - momentum)  # type: ignore[attr-defined, unused-ignore]
        torch._foreach_add_(followers, steps)  # type: ignore[attr-defined, unused-ignore]

    @torch.no_grad()
    def restart(self) -> None:
        """Be what the module is now."""
        own = self._own()
        for name, average in self._averages().items():
            average.copy_(own[name])
        self.num_updates.zero_()

    @torch.no_grad()
    def exchange(self) -> None:
        """The averages move into the module, and what the module was moves here. A second call undoes the first."""
        own = self._own()
        for name, average in self._averages().items():
            if average.is_floating_point():
                before = own[name].clone()
                own[name].copy_(average)
                average.copy_(before)

    def _averages(self) -> dict[str, Tensor]:
        return {name: getattr(self, here) for name, here in self._names.items()}

    def _own(self) -> dict[str, Tensor]:
        every = dict(self.swapped.module.named_parameters()) | dict(self.swapped.module.named_buffers())
        return {name: every[name] for name in self._names}
