"""What a kernel is used for, and the kernels themselves where Triton is installed, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from opencon.config import AugmentConfig, with_settings
from opencon.data import augment as module
from opencon.data.augment import Augment
from opencon.encoders.base import Encoder
from opencon.experiments.recipes import get_recipe
from opencon.experiments.workbench import build_loader, prepare


def test_kernels_equal_their_plain_forms_on_the_interpreter():
    pytest.importorskip("triton")
    command, root = [sys.executable, "-m", "tests.kernel_check"], Path(__file__).parents[1]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert "kernels equal their plain forms" in done.stdout, done.stderr


def chosen(
    monkeypatch, *, settings=None, size=32, source=(32, 32), channels=3, kernels=True, is_cuda=True, triton=True
):
    monkeypatch.setattr(module, "has_triton", lambda: triton)
    augment = Augment(AugmentConfig(**(settings or {})), image_size=size, channels=channels)
    augment.kernels = kernels
    params = augment.draw(2, source, torch.Generator().manual_seed(0))
    return augment.has_kernel(SimpleNamespace(shape=(2, channels, *source), is_cuda=is_cuda), params)


def test_small_color_views_on_a_gpu_have_a_kernel(monkeypatch):
    assert chosen(monkeypatch)
    assert chosen(monkeypatch, size=20)  # of no power of two
    assert chosen(monkeypatch, size=16, source=(64, 32), settings={"jitter_p": 0.0, "gray_p": 0.0, "flip_p": 0.0})


@pytest.mark.parametrize(
    "other",
    [
        {"settings": {"blur_p": 0.5}},
        {"settings": {"rotate": 10.0}},
        {"settings": {"crop_scale": None}},
        {"channels": 1},
        {"size": 128},
        {"size": 15},
        {"source": (36, 32)},
        {"kernels": False},
        {"is_cuda": False},
        {"triton": False},
    ],
)
def test_others_have_none(monkeypatch, other):
    assert not chosen(monkeypatch, **other)


@pytest.mark.parametrize(("kernels", "compiles"), [(True, False), (False, True)])
def test_settings_reach_the_views(monkeypatch, kernels, compiles):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function.__name__) or function)
    settings = [f"train.kernels={str(kernels).lower()}", f"train.compile={str(compiles).lower()}"]
    loader = build_loader(prepare(with_settings(get_recipe("digits"), settings), torch.device("cpu")))
    assert [augment.kernels for augment in loader.augments] == [kernels, kernels]
    assert compiled == ["plain"] * compiles


@pytest.mark.parametrize(
    ("method", "kernels", "fuses"), [("simclr", "true", True), ("simclr", "false", False), ("ds3l", "true", False)]
)
def test_settings_reach_the_encoder(monkeypatch, method, kernels, fuses):
    """DS3L differentiates twice, which a backward pass by hand does not allow."""
    asked = []
    monkeypatch.setattr(Encoder, "fuse", lambda encoder: asked.append(encoder))
    config = with_settings(get_recipe(f"{method}/digits"), [f"train.kernels={kernels}"])
    bench = prepare(config, torch.device("cpu"))
    assert asked == [bench.method.embedder.encoder] * fuses
