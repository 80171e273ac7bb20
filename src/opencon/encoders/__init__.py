"""Encoders by name, and how an `Embedder` is built from its settings.

    `base.Encoder`              what every encoder is
    `embedder.Embedder`         images to unit rows: normalize, encode, project
    `pretrained.open_encoder`   an encoder with its weights, from one word
    `weights.load_weights`      weights from a file, whatever the names in it

To add an encoder: a file here, and a line for `ENCODERS` below. `encoder_entry` also knows those of timm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opencon.config import EncoderConfig, Precision
from opencon.encoders.base import Encoder
from opencon.encoders.convnet import ConvNet
from opencon.encoders.efficientnet_lite import MEAN, STD, efficientnet_lite0, load_installed
from opencon.encoders.embedder import Embedder
from opencon.encoders.heads import projection_head
from opencon.encoders.resnet import resnet18, resnet18_cifar, resnet50
from opencon.encoders.timm import PREFIX, TimmEncoder, timm_encoder
from opencon.encoders.vit import vit_b16, vit_s16
from opencon.encoders.weights import LoadReport, load_weights
from opencon.registry import Registry

__all__ = [
    "ENCODERS",
    "INSTALLED",
    "Embedder",
    "Encoder",
    "EncoderEntry",
    "LoadReport",
    "build_embedder",
    "encoder_entry",
    "load_weights",
]

INSTALLED = "installed"  # as encoder.weights: those that come with a package


@dataclass(frozen=True)
class EncoderEntry:
    """How to build an encoder, and what to know before choosing it."""

    build: Callable[[int, int], Encoder]  # channels and side of the images
    image_size: int  # usual side of its images in pixels
    num_features: int
    paper: str
    load_installed: Callable[[Encoder], LoadReport] | None = None  # weights that come with a package
    mean: tuple[float, ...] = (0.5,)  # of pixels in [0, 1], as those weights expect
    std: tuple[float, ...] = (0.5,)
    builds_on: str = "meta"  # where it can be built without memory, to try settings out


ENCODERS: Registry[EncoderEntry] = Registry("encoder")
ENCODERS.add("convnet", EncoderEntry(ConvNet, 8, 128, "ours: three to six convolutions for images of 8 to 64 pixels"))
ENCODERS.add("resnet18_cifar", EncoderEntry(resnet18_cifar, 32, 512, "He et al. 2016; stem: SimCLR, Chen et al. 2020"))
ENCODERS.add("resnet18", EncoderEntry(resnet18, 224, 512, "He et al. 2016, arXiv:1512.03385"))
ENCODERS.add("resnet50", EncoderEntry(resnet50, 224, 2048, "He et al. 2016, arXiv:1512.03385"))
ENCODERS.add(
    "efficientnet_lite0",
    EncoderEntry(efficientnet_lite0, 224, 1280, "Tan and Le 2019, arXiv:1905.11946", load_installed, MEAN, STD),
)
ENCODERS.add("vit_s16", EncoderEntry(vit_s16, 224, 384, "Dosovitskiy et al. 2021; size of DeiT, Touvron et al. 2021"))
ENCODERS.add("vit_b16", EncoderEntry(vit_b16, 224, 768, "Dosovitskiy et al. 2021, arXiv:2010.11929"))


def encoder_entry(name: str) -> EncoderEntry:
    """The encoder of this name; `timm:NAME` is one of timm's, whose "installed" weights timm fetches."""
    if not name.startswith(PREFIX):
        return ENCODERS[name]
    its_name = name.removeprefix(PREFIX)

    def build(in_channels: int, image_size: int) -> Encoder:
        return timm_encoder(its_name, image_size=image_size, in_channels=in_channels, pretrained=False)

    def load_fetched(encoder: Encoder) -> LoadReport:
        assert isinstance(encoder, TimmEncoder)
        source = timm_encoder(its_name, image_size=encoder.image_size, in_channels=encoder.in_channels)
        encoder.load_state_dict(source.state_dict())
        return LoadReport("timm", "", tuple(source.state_dict()), missing=(), unexpected=(), wrong_shape=())

    # Some of timm's networks compute numbers from tensors while they are built, which a meta device does not have.
    return EncoderEntry(build, 224, 0, "see timm", load_fetched, builds_on="cpu")


def build_embedder(
    config: EncoderConfig, *, in_channels: int, image_size: int, precision: Precision = "fp32", projects: bool = True
) -> Embedder:
    """The encoder with its weights loaded and frozen as asked, under a projection head (or none) that starts at random.

    Random weights come from torch's default generator: seed it first.
    """
    entry = encoder_entry(config.name)
    encoder = entry.build(in_channels, image_size)
    report = None
    if config.weights == INSTALLED and entry.load_installed is not None:
        report = entry.load_installed(encoder)
    elif config.weights is not None:
        report = load_weights(encoder, config.weights)
    encoder.freeze(config.train_from, config.frozen_norm)
    head = projection_head(encoder.num_features, config.head_dim, config.head_hidden) if projects else None
    embedder = Embedder(encoder, head, config, precision)
    embedder.load_report = report
    return embedder
