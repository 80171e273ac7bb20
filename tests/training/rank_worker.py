"""What the ranks of test_ranks.py run: some steps of methods on the digits, or a run in which a rank is killed."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from opencon.config import with_settings
from opencon.data.benchmarks import load_dataset
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import Callbacks, train
from opencon.experiments.workbench import assemble, build_loader
from opencon.losses import blocked
from opencon.losses.blocked import info_nce_within, shared_by
from opencon.methods import METHODS
from opencon.methods.base import Epoch
from opencon.training.optimizer import build_optimizer
from opencon.training.ranks import joined, num_ranks, rank, take_over
from opencon.training.trainer import TrainStep

CPU = torch.device("cpu")
# At a small rate, rounding stays rounding: at 0.1, five steps make twenty times as much of it.
SMALL = ("train.batch_size=30", "train.seed=3", "train.lr_end=0")
KILLED = ("train.batch_size=256", "train.epochs=4", "train.save_seconds=0")
STEPS = 5
TRAINED = [name for name in METHODS.names() if METHODS[name].config.trains]


def some_steps(name, steps, *settings):
    """The method after some steps from its start, its state before them, and its loss at each."""
    # UNO's heads normalize units that hardly vary, and a unit of Crops and one of SimGCD are at the edge of their ReLU: they
    # amplify rounding.
    rate = "0.001" if name in ("uno", "crops", "simgcd") else "0.01"
    config = with_settings(get_recipe(f"{name}/digits"), [*SMALL, f"train.lr={rate}", *settings])
    bench = assemble(config, load_dataset(config.data), CPU)
    loader, method = build_loader(bench), bench.method
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = TrainStep(method, build_optimizer(method, config.train), loader, scaler, config.train)
    method.train()
    method.before_epoch(Epoch(60, 100, bench.bank))  # an epoch in which every loss counts
    take_over(method)
    start = {key: value.clone() for key, value in method.state_dict().items()}
    step.start_epoch(0, loader.draw(60))
    losses = []
    for _ in range(steps):
        before = step.total.clone() if len(step.total) else 0.0
        step()
        losses.append(float((step.total - before)[0]))
    return method, start, losses


def are_equal(method):
    """Whether parameters and buffers are the same on all ranks, bit for bit."""
    flat = torch.cat([t.detach().double().flatten() for t in [*method.parameters(), *method.buffers()]])
    everyone = [torch.empty_like(flat) for _ in range(num_ranks())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)


class MeteredBlocks:
    """Counts the blocks of pairs that this process computes."""

    def __enter__(self):
        self.blocks, self.whole = 0, blocked._logits
        blocked._logits = self.count
        return self

    def __exit__(self, *error):
        blocked._logits = self.whole

    def count(self, *args):
        self.blocks += 1
        return self.whole(*args)


def compare(out, names):
    """Some steps of some methods."""
    results = {}
    for name in names:
        method, _, losses = some_steps(name, STEPS)
        state = {key: value.clone() for key, value in method.state_dict().items()}
        results[name] = {"state": state, "losses": losses, "equal": are_equal(method)}
    # More ranks than labeled rows in a batch: some rank has none of them, and CGDL encodes nothing else.
    for norms in ("true", "false"):
        method, _, losses = some_steps("cgdl", 2, "train.labeled_share=0.05", f"train.sync_norms={norms}")
        results[f"few labeled, {norms}"] = {"losses": losses, "labeled": method.task.num_seen}
    z = torch.nn.functional.normalize(torch.randn(101, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    for what, among in (("pairs shared", num_ranks()), ("pairs alone", 1)):
        with shared_by(rank() if among > 1 else 0, among), MeteredBlocks() as met:
            own = z.clone().requires_grad_()
            loss = info_nce_within(own, torch.arange(101) % 7 != 0, torch.arange(101) % 5, temperature=0.3, block=4)
            loss.backward()
        results[what] = {"loss": loss.detach(), "gradient": own.grad, "blocks": met.blocks}
    if rank() == 0:
        torch.save(results, out)


def train_twice(out):
    """A run, and the same one in which one rank kills itself once, as the system might."""
    config = with_settings(get_recipe("opencon/digits"), KILLED)
    train(config, out / "whole", CPU)

    def kill_once(record):
        if record["epoch"] == 1 and rank() == num_ranks() - 1 and not (out / "was killed").exists():
            (out / "was killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, out / "killed", CPU, callbacks=Callbacks(epoch_done=kill_once))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(CPU):
        what, folder, *methods = sys.argv[1:]
        compare(Path(folder), methods) if what == "compare" else train_twice(Path(folder))
