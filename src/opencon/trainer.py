"""fit(): the bare loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opencon.config import TrainConfig
from opencon.data.loader import TwoStreamLoader
from opencon.errors import DivergedError
from opencon.methods.base import Epoch, FeatureBank, Method
from opencon.optim import learning_rate

OnStep = Callable[[int, int], None]  # (epoch, finished steps)
OnEpoch = Callable[[int, dict[str, float]], None]  # (epoch, mean of each logged term)


def fit(
    method: Method[Any],
    optimizer: torch.optim.Optimizer,
    loader: TwoStreamLoader,
    config: TrainConfig,
    *,
    features: Callable[[], FeatureBank],
    scaler: torch.amp.GradScaler,
    first_epoch: int = 0,
    on_step: OnStep = lambda epoch, steps: None,
    on_epoch: OnEpoch = lambda epoch, means: None,
) -> None:
    """Train `method` in place, from `first_epoch` to the end. Everything slow or optional happens in the callbacks."""
    step = torch.compile(method.step) if config.compile else method.step
    for epoch in range(first_epoch, config.epochs):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, epoch)
        method.train()
        method.before_epoch(Epoch(epoch, config.epochs, features))
        log = EpochLog(epoch)
        for index, batch in enumerate(loader.epoch(epoch)):
            out = step(batch)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(out.loss).backward()
            scaler.step(optimizer)
            scaler.update()
            method.after_step(*out.carry)
            log.add(index, {"loss": out.loss.detach(), **out.logs})
            if (index + 1) % config.log_every == 0:
                log.check()
                on_step(epoch, index + 1)
        log.check()
        on_epoch(epoch, log.means())


@dataclass
class EpochLog:
    """Sums of every logged term, kept on the device; the host looks only in `check` and `means`."""

    epoch: int
    steps: int = 0
    names: list[str] = field(default_factory=list)
    total: Tensor | None = None  # (terms,)
    first_bad: Tensor | None = None  # (terms,) the first step at which a term was not finite, -1 if it never was

    def add(self, step: int, terms: dict[str, Tensor]) -> None:
        """Take in the terms of one step."""
        values = torch.stack([value.float() for value in terms.values()])
        if self.total is None or self.first_bad is None:
            self.names = list(terms)
            self.total = torch.zeros_like(values)
            self.first_bad = torch.full_like(values, -1)
        self.total += values
        self.first_bad = torch.where((self.first_bad < 0) & ~values.isfinite(), float(step), self.first_bad)
        self.steps += 1

    def check(self) -> None:
        """Stop the run if a term was not finite (host sync)."""
        if self.first_bad is None:
            return
        bad = {name: int(step) for name, step in zip(self.names, self.first_bad.tolist(), strict=True) if step >= 0}
        # The sum is not finite whenever a part of it is not: name the parts.
        parts = {name: step for name, step in bad.items() if name != "loss"} or bad
        if parts:
            name, step = min(parts.items(), key=lambda item: item[1])
            raise DivergedError(
                f"{name} was not a finite number at epoch {self.epoch}, step {step}. The run is stopped; its last "
                f"checkpoint is from before. Lower train.lr, or use train.precision=fp32 if it was lower."
            )

    def means(self) -> dict[str, float]:
        """Mean of each term over the epoch (host sync)."""
        if self.total is None:
            return {}
        return {name: value / self.steps for name, value in zip(self.names, self.total.tolist(), strict=True)}
