"""ImageNet's classifier, which comes with the weights of EfficientNet-Lite0: what photos look like, in words.

The 1,000 names are in imagenet_classes.txt, in the order of the weights: usual words for the classes of ILSVRC 2012.

Letters: n photos, F = 1,280 features of the encoder.
"""

from __future__ import annotations

import functools
from importlib.resources import files

import torch
from torch import Tensor

from opencon.encoders.efficientnet_lite import installed_weights
from opencon.encoders.weights import read_tensors

CHUNK = 8192  # rows at a time


@functools.cache
def imagenet_classes() -> tuple[str, ...]:
    """The names of the 1,000 classes."""
    return tuple((files("opencon.encoders") / "imagenet_classes.txt").read_text(encoding="utf-8").splitlines())


@functools.cache
def _classifier() -> tuple[Tensor, Tensor]:
    """(1000, F) and (1000,), from the file that has the encoder's weights."""
    tensors = read_tensors(installed_weights())
    return tensors["_fc.weight"], tensors["_fc.bias"]


@torch.no_grad()
def imagenet_mean(x: Tensor) -> Tensor:
    """The mean probability (1000,) of ImageNet's classes over features (n, F) of EfficientNet-Lite0 as it is installed."""
    weight, bias = _classifier()
    total = sum((part @ weight.T + bias).softmax(dim=1).sum(dim=0) for part in torch.split(x.float(), CHUNK))
    return torch.as_tensor(total) / max(len(x), 1)
