"""fit(): the bare loop, and the one step it repeats."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from opencon.config import TrainConfig
from opencon.data.loader import Draws, TwoStreamLoader, tree_map
from opencon.errors import DivergedError
from opencon.losses.blocked import shared_by
from opencon.methods.base import Epoch, FeatureBank, Method
from opencon.training.optimizer import OPTIMIZERS, adopt, is_ours, learning_rate, set_learning_rate
from opencon.training.ranks import add_gradients, is_recordable, num_ranks, rank, take_over

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
    # A gradient scaler decides on the host whether to step; nothing else of ours does.
    optimizer_reads = scaler.is_enabled() or not (is_ours(optimizer) and OPTIMIZERS[config.optimizer].captures)
    step = TrainStep(method, optimizer, loader, scaler, config)
    reads_nothing = method.reads_nothing and not optimizer_reads
    captured = config.capture and step.device.type == "cuda" and reads_nothing and is_recordable()
    advance: Callable[[], None] = Captured(step) if captured else step
    for epoch in range(first_epoch, config.epochs):
        method.train()
        method.before_epoch(Epoch(epoch, config.epochs, features))
        take_over(method)
        draws = loader.draw(epoch)
        step.start_epoch(epoch, draws)
        with closing(loader.feed(draws)) as feed:
            for index in feed:
                advance()
                if (index + 1) % config.log_every == 0:
                    step.check(epoch)
                    on_step(epoch, index + 1)
        step.check(epoch)
        check_weights(method, epoch)
        take_over(method)
        on_epoch(epoch, step.means())


class TrainStep:
    """One step, from drawn numbers to moved weights, with fixed shapes and nothing read by the host.

    Counters and logs are tensors on the device, so that the very same lines can be recorded as a CUDA graph.
    """

    def __init__(
        self,
        method: Method[Any],
        optimizer: torch.optim.Optimizer,
        loader: TwoStreamLoader,
        scaler: torch.amp.GradScaler,
        config: TrainConfig,
    ) -> None:
        self.method, self.optimizer, self.loader, self.scaler = method, optimizer, loader, scaler
        self.config, is_shared = config, loader.sharing is not None
        adopt(optimizer, config)
        self.learning = [p for group in optimizer.param_groups for p in group["params"]]
        self.loss_of = torch.compile(method.step) if config.compile and not is_shared else method.step
        if config.compile and is_shared:  # what ranks say to each other stays outside
            method.embedder.encoder.compile()
        self.device = loader.images.device
        self.index = torch.zeros(1, dtype=torch.long, device=self.device)  # of this step in its epoch
        self.draws: Draws | None = None
        self.rates = torch.zeros(len(loader), device=self.device)  # (T,) of the epoch's steps, with train.per_step
        self.names: list[str] = []
        self.total = self.first_bad = torch.empty(0)  # (terms,) sums; first step at which a term was not finite, or -1

    def start_epoch(self, epoch: int, draws: Draws) -> None:
        """Take the rates and the random numbers of an epoch into fixed tensors, and reset the counts and sums."""
        set_learning_rate(self.optimizer, learning_rate(self.config, epoch))
        if self.config.per_step:
            steps = range(len(self.rates))
            self.rates.copy_(torch.tensor([learning_rate(self.config, epoch, i, len(steps)) for i in steps]))
        if self.draws is None:
            self.draws = draws
        else:
            new = iter(leaves(draws))
            tree_map(lambda fixed: fixed.copy_(next(new)), self.draws)
        self.index.zero_()
        self.total.zero_()
        self.first_bad.fill_(-1.0)

    def __call__(self) -> None:
        """Batch, loss, backward, rate, optimizer, after_step, log."""
        assert self.draws is not None
        with shared_by(rank(), num_ranks()) if self.loader.sharing is not None else nullcontext():
            out = self.loss_of(self.loader.batch(self.draws, self.index))
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(out.loss).backward()  # type: ignore[no-untyped-call, unused-ignore]
        add_gradients(self.method, is_shared=self.loader.sharing is not None)
        if self.config.per_step:
            set_learning_rate(self.optimizer, self.rates.index_select(0, self.index)[0])
        if self.config.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.learning, self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.method.after_step(*out.carry)
        if self.method.twin is not None:
            self.method.twin.update()
        self._log({"loss": out.loss.detach(), **out.logs})
        self.index += 1

    def _log(self, terms: dict[str, Tensor]) -> None:
        values = torch.stack([value.float() for value in terms.values()])
        if not self.names:
            self.names = list(terms)
            self.total, self.first_bad = torch.zeros_like(values), torch.full_like(values, -1.0)
        self.total += values
        bad_now = (self.first_bad < 0) & ~values.isfinite()
        self.first_bad.copy_(torch.where(bad_now, self.index.float(), self.first_bad))

    def check(self, epoch: int) -> None:
        """Stop the run if a term was not finite (host sync)."""
        first_bad = self.first_bad.tolist()
        bad = {name: int(step) for name, step in zip(self.names, first_bad, strict=True) if step >= 0}
        if bad:
            # Name the earliest one. The sum is not finite whenever a part is not, so in the same step the part comes first.
            name, step = min(bad.items(), key=lambda item: (item[1], item[0] == "loss"))
            raise DivergedError(
                f"{name} was not a finite number at epoch {epoch}, step {step}. The run is stopped; a "
                f"checkpoint, if it has one, is from before. In a new folder, lower train.lr, or use train.precision=fp32."
            )

    def means(self) -> dict[str, float]:
        """Mean of each term over the epoch so far (host sync)."""
        steps = int(self.index)
        return {name: value / steps for name, value in zip(self.names, self.total.tolist(), strict=True)}


class Captured:
    """The same step as a CUDA graph: the host launches one thing instead of hundreds.

    The first calls run as they are, on the stream that will record, so that everything lazy (compilation, momentum
    buffers, library handles) has happened; then the step is recorded once and replayed. Every call is one training step,
    recorded or not, so the result is that of the plain step.
    """

    WARM_UP = 3

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.calls = 0
        self.stream = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call, unused-ignore]
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """One training step."""
        self.calls += 1
        if self.calls <= self.WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.step.optimizer.zero_grad(set_to_none=True)  # so that gradients live in the graph's own memory
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.step()
        self.graph.replay()


def check_weights(method: Method[Any], epoch: int) -> None:
    """Stop before weights that are not finite are saved: the last gradient shows in no loss yet (host sync)."""
    learning = [p.detach() for p in method.parameters() if p.requires_grad]
    if not bool(torch.stack(torch._foreach_norm(learning)).isfinite().all()):  # type: ignore[attr-defined, unused-ignore]
        raise DivergedError(
            f"the weights are not finite after epoch {epoch}. The run is stopped; a checkpoint, if it has one, is from "
            f"before. In a new folder, lower train.lr, or use train.precision=fp32."
        )


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, in order."""
    tensors: list[Tensor] = []
    tree_map(lambda t: tensors.append(t) or t, tree)  # type: ignore[func-returns-value]
    return tensors
