"""Any of timm's networks as an encoder, by the name `timm:NAME`. timm is imported only when one is asked for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from opencon.encoders.base import Encoder
from opencon.errors import ConfigError, MissingExtraError
from opencon.registry import did_you_mean

PREFIX = "timm:"


class TimmEncoder(Encoder):
    """A network of timm without its classifier; one stage, "body", which learns as a whole or not at all."""

    def __init__(self, body: nn.Module, data: dict[str, Any]) -> None:
        super().__init__()
        self.stages = ("body",)
        self.body = body
        self.in_channels, self.image_size = int(data["input_size"][0]), int(data["input_size"][-1])
        self.mean, self.std = tuple(map(float, data["mean"])), tuple(map(float, data["std"]))
        # We try it out: which attribute holds the width depends on the kind of network and on timm's version.
        was_training = body.training
        body.eval()
        with torch.no_grad():
            shape = body(torch.zeros(1, self.in_channels, self.image_size, self.image_size)).shape
        body.train(was_training)
        if len(shape) != 2:
            raise ConfigError(
                f"encoder '{PREFIX}{type(body).__name__}' gives an output of shape {tuple(shape)} for one image, not one "
                f"row of features. Choose an image classifier of timm."
            )
        self.num_features = int(shape[1])

    def pool(self, x: Tensor) -> Tensor:
        """The body has pooled already."""
        return x  # (B, F)


def timm_encoder(
    name: str, *, image_size: int | None = None, in_channels: int = 3, pretrained: bool = True
) -> TimmEncoder:
    """The network that timm has under this name. Mean, std and image size are its own.

    Args:
        name: without `timm:`, such as "vit_small_patch14_dinov2"; timm fetches the weights and keeps them.
        image_size: another side than the network's own, where it can be built for one.
        in_channels: of the images; timm sums or repeats the first weights where they are not three.
        pretrained: False starts it at random, without a download.
    """
    timm = _timm(name)
    size = {} if image_size is None else {"img_size": image_size}
    channels = {} if in_channels == 3 else {"in_chans": in_channels}
    try:
        try:
            body = timm.create_model(name, pretrained=pretrained, num_classes=0, **channels, **size)
        except TypeError:  # a convolutional network takes any size, and no such argument
            body = timm.create_model(name, pretrained=pretrained, num_classes=0, **channels)
    except Exception as err:  # timm, the hub's client and the connection fail in many ways
        known = timm.list_models()
        if ":" not in name and name.partition(".")[0] not in known:
            raise ConfigError(
                f"timm has no network {name!r}.{did_you_mean(name, known)} `timm.list_models()` names all {len(known)}."
            ) from err
        raise ConfigError(
            f"timm cannot load the network {name!r} ({type(err).__name__}: {_first_line(err)}). Its weights are fetched "
            f"once, which needs a connection; encoder 'efficientnet_lite0' needs none."
        ) from err
    data = dict(timm.data.resolve_model_data_config(body))
    side = image_size if image_size is not None else data["input_size"][-1]
    data["input_size"] = (in_channels, side, side)
    return TimmEncoder(body, data)


def _timm(name: str) -> ModuleType:
    try:
        import timm
        import timm.data
    except Exception as err:  # a timm that does not fit the installed torch fails in many ways, not only ImportError
        raise MissingExtraError("timm", "timm", f"encoder {PREFIX + name!r}", err) from err
    return timm  # type: ignore[no-any-return, unused-ignore]


def _first_line(err: Exception) -> str:
    return next(iter(str(err).splitlines()), "")
