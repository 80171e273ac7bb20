"""A short run of a method on images or rows that lie in memory: what open-world fits and fine-tuning share.

Letters: M images.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opencon.config import TrainConfig, to_dict
from opencon.data.loader import Augmentation, TwoStreamLoader
from opencon.data.split import labeled_in_batch
from opencon.errors import ConfigError, RunError
from opencon.methods import FeatureBank, Method
from opencon.training.optimizer import build_optimizer, restore
from opencon.training.run_folder import RunFolder
from opencon.training.trainer import fit

# Ours: at least an eighth of a batch is labeled, if there are that many; in proportion, a few would hardly be seen.
LEAST_LABELED = 8


def short_run(
    method: Method[Any],
    images: Tensor,
    labels: Tensor,
    *,
    augments: tuple[Augmentation, ...],
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    features: Callable[[], FeatureBank],
    progress: Callable[[int, int], None] = lambda done, total: None,
    kept: RunFolder | None = None,
    identity: str = "",
) -> list[dict[str, float]]:
    """Train `method` in place for about `steps` steps, in whole epochs. Returns the mean of each loss term by epoch.

    Args:
        method: on the device of the images.
        images: (M, ...) what the augmentations take.
        labels: (M,) class of a labeled image, -1 elsewhere; some must be -1.
        augments: of the views, two or more.
        steps: of the optimizer.
        batch_size: at most; smaller where there are fewer images.
        lr: at the start; it falls along a cosine.
        seed: of batches and views.
        features: embeds the images, for methods that look at all of them before an epoch.
        progress: called as progress(finished steps, all steps).
        kept: a folder that holds the state after each epoch, so that a stopped run goes on. The caller removes the state
            once what the run was for is written.
        identity: what the run depends on besides the arguments here; a state that was kept for another run is not taken.
    """
    num_labeled = int((labels >= 0).sum())
    batch = min(batch_size, len(labels))
    share = labeled_in_batch(batch, num_labeled, len(labels), least=max(batch // LEAST_LABELED, 1))
    shares = (share, max(1, min(batch - share, len(labels) - num_labeled)))
    loader = TwoStreamLoader(images, labels, batch_shares=shares, augments=augments, seed=seed)
    epochs = max(1, round(steps / len(loader)))
    config = TrainConfig(epochs=epochs, batch_size=batch, lr=lr, schedule="cosine", seed=seed)
    history: list[dict[str, float]] = []
    optimizer = build_optimizer(method, config)
    own = {"short run": identity, "train": to_dict(config), "num_images": len(labels)}
    if kept is not None and kept.has_checkpoint:
        with contextlib.suppress(RunError, ConfigError):  # of another run, or damaged: start over
            state = kept.load_checkpoint(own)
            method.load_state_dict(state["method"])
            restore(optimizer, state["optimizer"])
            history = state["history"]

    def on_epoch(epoch: int, means: dict[str, float]) -> None:
        history.append(means)
        if kept is not None:
            state = {"method": method.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
            kept.save_checkpoint({"config": own, "epochs_done": epoch + 1, **state})
        progress((epoch + 1) * len(loader), epochs * len(loader))

    fit(
        method,
        optimizer,
        loader,
        config,
        features=features,
        scaler=torch.amp.GradScaler(images.device.type, enabled=False),
        first_epoch=len(history),
        on_epoch=on_epoch,
    )
    return history
