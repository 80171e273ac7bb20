"""The optimizer and its schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from opencon.config import TrainConfig
from opencon.errors import ConfigError


def build_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.SGD:
    """SGD over the parameters that learn; weight decay on all of them, as in the released code."""
    learning = [p for p in module.parameters() if p.requires_grad]
    if not learning:
        raise ConfigError("nothing learns: every parameter is frozen. Set encoder.train_from to a stage or to 'all'.")
    on_gpu = learning[0].is_cuda
    # On a GPU one fused kernel updates everything and reads its rate from the device.
    lr = torch.tensor(config.lr, device=learning[0].device) if on_gpu else config.lr
    return torch.optim.SGD(
        learning,
        lr=lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=on_gpu or None,
    )


def learning_rate(config: TrainConfig, epoch: int) -> float:
    """The learning rate of an epoch: a function of its index, so that resuming needs no scheduler state.

    step: divided by ten at every milestone. cosine: half a cosine from lr to lr_end over all epochs. Either is multiplied by
    (epoch + 1) / warmup_epochs during warm-up.
    """
    lr = config.lr
    if config.schedule == "step":
        lr *= 0.1 ** sum(epoch >= m for m in config.milestones)
    elif config.schedule == "cosine":
        lr = config.lr_end + (lr - config.lr_end) * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))
    if epoch < config.warmup_epochs:
        lr *= (epoch + 1) / config.warmup_epochs
    return lr


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what the optimizer has gathered (momentum), and keep its own rates and switches.

    Those belong to the configuration and to this machine: a saved rate would come back as a tensor on the CPU, which a
    recorded step reads once and never again.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set it for all parameters; a rate that lives on the device is changed in place, where a recorded step reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
