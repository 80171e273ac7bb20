"""The optimizer and its schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from opencon.config import TrainConfig
from opencon.errors import ConfigError


def build_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """SGD over the parameters that learn; weight decay on all of them, as in the released code."""
    learning = [p for p in module.parameters() if p.requires_grad]
    if not learning:
        raise ConfigError("nothing learns: every parameter is frozen. Set encoder.train_from to a stage or to 'all'.")
    return torch.optim.SGD(learning, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def learning_rate(config: TrainConfig, epoch: int) -> float:
    """The learning rate of an epoch: a function of its index, so that resuming needs no scheduler state.

    step: divided by ten at every milestone. cosine: half a cosine from lr to 0 over all epochs. Either is multiplied by
    (epoch + 1) / warmup_epochs during warm-up.
    """
    lr = config.lr
    if config.schedule == "step":
        lr *= 0.1 ** sum(epoch >= m for m in config.milestones)
    elif config.schedule == "cosine":
        lr *= 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))
    if epoch < config.warmup_epochs:
        lr *= (epoch + 1) / config.warmup_epochs
    return lr
