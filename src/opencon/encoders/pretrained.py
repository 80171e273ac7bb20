"""An encoder that is ready to use, from one word: a name with installed weights, a file of a run, or `timm:NAME`."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from opencon.encoders import ENCODERS, encoder_entry
from opencon.encoders.base import Encoder
from opencon.encoders.timm import PREFIX, timm_encoder
from opencon.encoders.weights import load_weights
from opencon.errors import ConfigError, DataError
from opencon.files import parse_json, read_file
from opencon.plugins import recall
from opencon.registry import did_you_mean

RUN_FILE = "encoder.safetensors"  # what a finished run leaves


@dataclass(frozen=True, eq=False)
class PretrainedEncoder:
    """A network with its weights, in evaluation mode, and what it expects of an image."""

    name: str  # of the network; `fingerprint` tells its weights apart
    net: Encoder
    image_size: int
    mean: tuple[float, ...]  # per channel, or one for all, of pixels in [0, 1]
    std: tuple[float, ...]
    fingerprint: str  # of the weights

    def as_module(self) -> nn.Module:
        """An ordinary module: (B, channels, S, S) in [0, 1] -> (B, F)."""
        return nn.Sequential(Normalize(self.mean, self.std), self.net).eval()


class Normalize(nn.Module):
    """Pixels in [0, 1] to what an encoder expects."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) -> the same shape."""
        return (images - self.mean) / self.std


def open_encoder(word: str, image_size: int | None = None) -> PretrainedEncoder:
    """The encoder that a word names.

    Args:
        word: "efficientnet_lite0" (its weights are installed), the path of a run folder or of its encoder.safetensors,
            or "timm:NAME".
        image_size: side of the images in pixels; None: the usual one of the network.
    """
    if word.startswith(PREFIX):
        timm_net = timm_encoder(word.removeprefix(PREFIX), image_size=image_size)
        return _ready(word, timm_net, timm_net.image_size, timm_net.mean, timm_net.std)
    path = Path(word).expanduser()
    if path.suffix == ".safetensors" or path.is_dir():
        return _from_run(path / RUN_FILE if path.is_dir() else path, image_size)
    return _installed(word, image_size)


def _installed(name: str, image_size: int | None) -> PretrainedEncoder:
    others = f"the folder of a finished run (it has {RUN_FILE}) or {PREFIX}NAME"
    installed = [known for known in ENCODERS.names() if ENCODERS[known].load_installed is not None]
    if name not in ENCODERS:
        hint = did_you_mean(name, installed)
        raise ConfigError(f"unknown encoder {name!r}.{hint} Allowed: {', '.join(installed)}, {others}.")
    entry = ENCODERS[name]
    if entry.load_installed is None:
        raise ConfigError(
            f"encoder {name!r} would start at random: no weights for it are installed. "
            f"Use {', '.join(installed)}, {others}."
        )
    size = image_size or entry.image_size
    net = entry.build(3, size)
    entry.load_installed(net)
    return _ready(name, net, size, entry.mean, entry.std)


def _from_run(path: Path, image_size: int | None) -> PretrainedEncoder:
    if not path.is_file():  # a pipe would wait forever
        raise DataError(f"the encoder {path} cannot be read (it is not a file). Give the folder of a finished run.")
    recall(path.parent)  # the run's encoder may be somebody's own
    try:
        with safetensors.safe_open(path, "pt") as file:
            name = (file.metadata() or {}).get("encoder", "")
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, safetensors.SafetensorError) as err:
        raise DataError(f"the encoder {path} cannot be read ({err}). Give the folder of a finished run.") from err
    if name not in ENCODERS and not name.startswith(PREFIX):
        raise DataError(
            f"{path} does not say which encoder it holds. Give the {RUN_FILE} that `opencon train` or `pretrain` wrote."
        )
    entry, config = encoder_entry(name), _config_beside(path)
    own, data, augment = (_section(config, name) for name in ("encoder", "data", "augment"))
    in_channels, size = 3, augment.get("size") or data.get("image_size") or entry.image_size
    if name == "convnet":  # the one network whose shape depends on the images: a stage for each doubling of the side
        in_channels, size = shapes["conv1.conv.weight"][1], 2 ** sum(key.endswith("conv.weight") for key in shapes)
    mean, std = own.get("mean", entry.mean), own.get("std", entry.std)
    if not (_are_numbers(mean, in_channels) and _are_numbers(std, in_channels) and isinstance(size, int)):
        raise DataError(
            f"{path.parent / 'config.json'} is damaged: it gives no size, mean and std of images as numbers."
        )
    net = entry.build(in_channels, image_size or size)
    load_weights(net, path)
    mean, std = tuple(mean), tuple(std)
    return _ready(name, net, image_size or size, mean, std)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _are_numbers(values: Any, channels: int) -> bool:
    is_list = isinstance(values, (list, tuple)) and len(values) in (1, channels)
    return is_list and all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)


def _config_beside(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(read_file(path.parent / "config.json"))
        return config if isinstance(config, dict) else {}
    except (OSError, ValueError):
        warnings.warn(
            f"there is no readable config.json beside {path}, so images are normalized as usual for its encoder. "
            f"This may not be how it was trained.",
            stacklevel=4,
        )
        return {}


def _ready(
    name: str, net: Encoder, image_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> PretrainedEncoder:
    net.eval()
    return PretrainedEncoder(name, net, image_size, mean, std, fingerprint(net))


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
