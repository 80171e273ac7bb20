"""The optimizer, which parameters it treats in their own way, and the learning rate.

Rates are tensors on the device of the parameters, one for each group: they change in place, where a recorded step reads
them. Each group keeps its ratio to the schedule, so that nothing overwrites a rate that somebody set.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from opencon.config import GroupConfig, TrainConfig
from opencon.errors import ConfigError
from opencon.registry import Registry
from opencon.training.lars import LARS

Groups = list[dict[str, Any]]  # each: params, lr (a scalar tensor), weight_decay, and what is ours

# --- optimizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer by name."""

    build: Callable[[Groups, TrainConfig], torch.optim.Optimizer]
    paper: str
    captures: bool = True  # whether its step reads nothing back to the host, so that a GPU can record it


def _sgd(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    # On a GPU one fused kernel updates everything.
    fused = groups[0]["lr"].is_cuda or None
    return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, fused=fused)


def _adamw(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    on_gpu = groups[0]["lr"].is_cuda
    return torch.optim.AdamW(groups, betas=config.betas, fused=on_gpu or None, capturable=on_gpu)


def _lars(groups: Groups, config: TrainConfig) -> torch.optim.Optimizer:
    lr, decay = groups[0]["lr"], config.weight_decay
    return LARS(groups, lr=lr, momentum=config.momentum, weight_decay=decay, trust=config.trust)


OPTIMIZERS: Registry[OptimizerEntry] = Registry("optimizer")
OPTIMIZERS.add("adamw", OptimizerEntry(_adamw, "arXiv:1711.05101"))
OPTIMIZERS.add("lars", OptimizerEntry(_lars, "arXiv:1708.03888"))
OPTIMIZERS.add("sgd", OptimizerEntry(_sgd, "doi:10.1214/aoms/1177729586"))


def build_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that the settings name, over the parameters that learn.

    Without rules (`train.groups`) all of them decay alike, as in the released code.
    """
    return OPTIMIZERS[config.optimizer].build(parameter_groups(module, config), config)


# --- groups -----------------------------------------------------------------------------------------------------------

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(module: nn.Module, config: TrainConfig) -> Groups:
    """The parameters that learn, in the order of the module; those of one rate and one decay are a group."""
    learning = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not learning:
        raise ConfigError("nothing learns: every parameter is frozen. Set encoder.train_from to a stage or to 'all'.")
    chosen = [(rule, _fitting(rule, module, learning)) for rule in config.groups]
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, p in learning.items():
        lr, decay = config.lr, config.weight_decay
        for rule, names in chosen:
            if name in names:
                lr = lr if rule.lr is None else rule.lr
                decay = decay if rule.weight_decay is None else rule.weight_decay
        if (lr, decay) not in groups:
            rate = torch.tensor(lr, device=p.device)
            groups[lr, decay] = {"params": [], "lr": rate, "weight_decay": decay, "lr_ratio": lr / config.lr}
        groups[lr, decay]["params"].append(p)
    return list(groups.values())


def _fitting(rule: GroupConfig, module: nn.Module, learning: dict[str, nn.Parameter]) -> set[str]:
    """Names of the learning parameters that a rule fits; a word that fits none is an error."""
    of_norms = {
        f"{at}.{name}" if at else name
        for at, part in module.named_modules()
        if isinstance(part, NORMS)
        for name, _ in part.named_parameters(recurse=False)
    }
    found: set[str] = set()
    for word in rule.match:
        if word == "norms":
            names = of_norms & set(learning)
        elif word == "biases":
            names = {name for name in learning if name.rpartition(".")[2] == "bias"}
        elif word == "head":
            names = {name for name in learning if not name.startswith("embedder.encoder.")}
        else:
            names = set(fnmatch.filter(learning, word))
        if not names:
            few = ", ".join(list(learning)[:3])
            raise ConfigError(
                f"train.groups: {word!r} fits no parameter that learns. Known: norms, biases, head, and names with "
                f"wildcards, such as {few}."
            )
        found |= names
    return found


# --- the rate ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule by name: the rate after some epochs, which may be a fraction."""

    rate: Callable[[TrainConfig, float], float]
    what: str


def _step(config: TrainConfig, epoch: float) -> float:
    return float(config.lr * 0.1 ** sum(epoch >= m for m in config.milestones))


def _cosine(config: TrainConfig, epoch: float) -> float:
    return config.lr_end + (config.lr - config.lr_end) * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))


SCHEDULES: Registry[ScheduleEntry] = Registry("schedule")
SCHEDULES.add("constant", ScheduleEntry(lambda config, epoch: config.lr, "train.lr throughout"))
SCHEDULES.add("cosine", ScheduleEntry(_cosine, "half a cosine from train.lr to train.lr_end"))
SCHEDULES.add("step", ScheduleEntry(_step, "divided by ten at each of train.milestones"))


def learning_rate(config: TrainConfig, epoch: int, step: int = 0, num_steps: int = 1) -> float:
    """The rate of a step of an epoch: a function of these numbers, so that resuming needs no scheduler state.

    With `train.per_step` it is the schedule's at the fraction of epochs that are done; otherwise the epoch's. During warm-up
    it is multiplied by (epoch + 1) / warmup_epochs; with `per_step` by the same ratio counted in steps.
    """
    done = epoch + step / num_steps if config.per_step else float(epoch)
    lr = SCHEDULES[config.schedule].rate(config, done)
    ahead = done + (1 / num_steps if config.per_step else 1)
    return lr * min(1.0, ahead / config.warmup_epochs) if config.warmup_epochs else lr


READ_BY = {  # settings that only some optimizers, or schedules, of ours read
    "momentum": ("sgd", "lars"),
    "nesterov": ("sgd",),
    "betas": ("adamw",),
    "trust": ("lars",),
    "milestones": ("step",),
}
OURS = {"adamw", "lars", "sgd", "constant", "cosine", "step"}  # what those of others read, we do not know


def unread(config: TrainConfig) -> list[str]:
    """Settings that are not at their default, and that neither the optimizer nor the schedule reads."""
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    chosen = {config.optimizer, config.schedule}
    return [
        f"train.{name}"
        for name, readers in READ_BY.items()
        if getattr(config, name) != defaults[name] and chosen <= OURS and not chosen & set(readers)
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """Set the rate of the schedule; each group has it times its own ratio. Rates change in place."""
    for group in optimizer.param_groups:
        rate = lr if group["lr_ratio"] == 1.0 else lr * group["lr_ratio"]
        group["lr"].copy_(rate) if isinstance(rate, Tensor) else group["lr"].fill_(rate)


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `build_optimizer` has made it."""
    return all("lr_ratio" in group for group in optimizer.param_groups)


def adopt(optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Make the rates of an optimizer from elsewhere such as ours: tensors that keep their ratio to `train.lr`."""
    for group in optimizer.param_groups:
        if "lr_ratio" not in group:
            group["lr_ratio"] = float(group["lr"]) / config.lr
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what the optimizer has gathered (momentum, say), and keep its own rates and switches.

    Those belong to the configuration and to this machine: a saved rate would come back as a tensor on the CPU, which a
    recorded step reads once and never again.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    saved = [{**settings, "params": g["params"]} for settings, g in zip(own, state["param_groups"], strict=True)]
    optimizer.load_state_dict({**state, "param_groups": saved})  # the switches say where counters are kept
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
