"""A short run of a method on images or rows that lie in memory: what open-world fits and fine-tuning share.

Letters: M images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opencon.config import TrainConfig
from opencon.data.loader import Augmentation, TwoStreamLoader
from opencon.data.split import labeled_in_batch
from opencon.methods import FeatureBank, Method
from opencon.training.optimizer import build_optimizer
from opencon.training.trainer import fit

LEAST_LABELED = (
    8  # ours: a batch is an eighth labeled at least, where so many are; in proportion, few would hardly be seen
)


def short_run(
    method: Method[Any],
    images: Tensor,
    labels: Tensor,
    *,
    augments: tuple[Augmentation, Augmentation],
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    features: Callable[[], FeatureBank],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, float]]:
    """Train `method` in place for about `steps` steps, in whole epochs; the mean of each term of the loss by epoch.

    Args:
        method: on the device of the images.
        images: (M, ...) what the augmentations take.
        labels: (M,) class of a labeled image, -1 elsewhere; there are both.
        augments: of the two views.
        steps: of the optimizer.
        batch_size: at most; smaller where there are fewer images.
        lr: at the start; it falls along a cosine.
        seed: of batches and views.
        features: embeds the images, for methods that look at all of them before an epoch.
        progress: told (finished steps, all steps).
    """
    num_labeled = int((labels >= 0).sum())
    batch = min(batch_size, len(labels))
    share = labeled_in_batch(batch, num_labeled, len(labels), least=max(batch // LEAST_LABELED, 1))
    shares = (share, max(1, min(batch - share, len(labels) - num_labeled)))
    loader = TwoStreamLoader(images, labels, batch_shares=shares, augments=augments, seed=seed)
    epochs = max(1, round(steps / len(loader)))
    config = TrainConfig(epochs=epochs, batch_size=batch, lr=lr, schedule="cosine", seed=seed)
    history: list[dict[str, float]] = []

    def on_epoch(epoch: int, means: dict[str, float]) -> None:
        history.append(means)
        progress((epoch + 1) * len(loader), epochs * len(loader))

    fit(
        method,
        build_optimizer(method, config),
        loader,
        config,
        features=features,
        scaler=torch.amp.GradScaler(images.device.type, enabled=False),
        on_epoch=on_epoch,
    )
    return history
