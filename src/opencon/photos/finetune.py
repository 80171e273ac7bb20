"""Train the last stages of a pretrained encoder on photos, with or without labels: what `opencon discover --finetune` adds.

Letters: n photos, S seen classes, C classes and groups together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from opencon.config import EncoderConfig, Precision
from opencon.data.augment import Augment, plain_view
from opencon.data.sources import read_images
from opencon.encoders import ENCODERS, Embedder
from opencon.encoders.heads import projection_head
from opencon.encoders.pretrained import RUN_FILE, PretrainedEncoder, open_encoder
from opencon.errors import ConfigError
from opencon.methods import Concord, ConcordConfig, FeatureBank, Task
from opencon.methods.parts import WeightAverage
from opencon.photos.features import VIEWS, FeatureSettings
from opencon.runtime import seeded
from opencon.training.embedding import embed_images
from opencon.training.judged import judged_weights
from opencon.training.run_folder import RunFolder
from opencon.training.short_run import short_run

STEPS = 600  # ours: minutes on a GPU, and the last stages of a good encoder have little to learn
BATCH = 256  # ours: what a GPU of a laptop holds at 224 pixels
LR = 0.02  # ours, a fifth of Concord's: the start is a trained network
AVERAGE = 0.99  # of the weights that are kept; ours: over a sixth of the steps
# The first stage that learns, where it is not the last one. Ours: stages 6 and 7 have 5 of 16 blocks; the last is one layer.
LAST = {"efficientnet_lite0": "stage6"}
CROP = replace(VIEWS, crop_scale=(0.15, 0.5))  # ours: smaller than SwAV's, because photos show more around a thing
CROP_SIDE, CROPS = 0.43, 2  # SwAV: 96 of 224 pixels; ours: two, which cost a third of a view
MAX_GB = 8.0  # of decoded photos held in memory


def check_finetune(encoder: PretrainedEncoder, num_photos: int) -> None:
    """Refuse an encoder that cannot be trained, before any work."""
    if encoder.name not in ENCODERS:
        raise ConfigError(f"--finetune works with {', '.join(ENCODERS.names())}, not with {encoder.name}.")
    if encoder.net.in_channels != 3:
        raise ConfigError(
            f"--finetune works with encoders of color images, but {encoder.name} was trained on gray ones."
        )
    needed = num_photos * 3 * encoder.image_size**2 / 1e9
    if needed > MAX_GB:
        raise ConfigError(
            f"--finetune holds all photos in memory: {num_photos:,} at {encoder.image_size} px are {needed:.1f} GB, the "
            f"limit is {MAX_GB:g}. Use fewer photos, a smaller --size, or leave --finetune out."
        )


def finetune(
    paths: Sequence[Path],
    labels: Tensor,
    classes: Tensor,
    features: FeatureSettings,
    *,
    num_classes: int,
    out: RunFolder,
    device: torch.device,
    steps: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FeatureSettings:
    """Train with Concord's losses and write the encoder. Returns settings for it, at the size at which it learned.

    Args:
        paths: n photos that can be read.
        labels: (n,) class in [0, S), or -1.
        classes: (n,) the class or group of each in [0, C), from the fit before; training starts from it.
        features: which encoder, at which size.
        num_classes: C.
        out: where the encoder goes.
        device: where it is trained; on a CPU this takes hours.
        steps: of training; None: `STEPS`.
        progress: called as progress(finished steps, all steps).
    """
    encoder = open_encoder(features.encoder, features.image_size)
    check_finetune(encoder, len(paths))
    size, net = encoder.image_size, encoder.net
    num_seen = int(labels.max()) + 1
    images, kept, _ = read_images(paths, size)
    images, labels, classes = images.to(device), labels[kept], classes[kept]  # a photo may be gone by now
    classes = torch.where(labels >= 0, labels, classes)  # what the user says is right
    ratio = int((labels >= 0).sum()) / max(int((classes < num_seen).sum()), 1)
    net.freeze(LAST.get(encoder.name, net.stages[-1]), "running")
    config = EncoderConfig(name=encoder.name, frozen_norm="running", mean=encoder.mean, std=encoder.std)
    precision: Precision = "bf16" if device.type == "cuda" else "fp32"
    with seeded(features.seed):
        embedder = Embedder(net, projection_head(net.num_features, config.head_dim), config, precision)
        config_of = ConcordConfig(shares="start")
        method = Concord(config_of, Task(num_seen, num_classes, ratio, len(images)), embedder).to(device)
    method.twin = WeightAverage(method, AVERAGE, warms_up=True)
    embedder.fold_frozen()

    def bank() -> FeatureBank:
        rows = embed_images(method, method.embed, images, lambda chunk: plain_view(chunk, size))
        return FeatureBank(rows, labels.to(device))

    method.start_from(bank(), classes.to(device))
    full = Augment(VIEWS, image_size=size, channels=3)
    crop = Augment(CROP, image_size=max(round(CROP_SIDE * size), 1), channels=3)
    short_run(
        method,
        images,
        labels.to(device),
        augments=(full, full, *[crop] * CROPS),
        steps=STEPS if steps is None else steps,
        batch_size=BATCH,
        lr=LR,
        seed=features.seed,
        features=bank,
        progress=progress,
        kept=out,
        identity=f"{encoder.fingerprint}, {size} px, {fingerprint_of(images, labels, classes)}",
    )
    # `open_encoder` reads the mean and std of images from the configuration beside the weights.
    statistics = {"mean": encoder.mean, "std": encoder.std}
    out.write_json("config.json", {**out.read_json("config.json"), "encoder": statistics})
    with judged_weights(method):
        out.save_tensors(RUN_FILE, net.state_dict(), {"encoder": encoder.name})
    return replace(features, encoder=str(out.path / RUN_FILE), image_size=size)


def fingerprint_of(images: Tensor, labels: Tensor, classes: Tensor) -> str:
    """What the photos, their labels and their first classes add up to: enough to know a stopped run again."""
    digest = hashlib.sha256(images.sum(dim=(1, 2, 3)).cpu().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    digest.update(classes.cpu().numpy().tobytes())
    return digest.hexdigest()
