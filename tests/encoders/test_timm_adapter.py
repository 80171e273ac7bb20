"""timm's networks by name, with a made-up timm; one test, on the GPU machine, has the real one."""

import sys
import types

import pytest
import torch
from torch import nn

from opencon.encoders.pretrained import open_encoder
from opencon.encoders.timm import timm_encoder
from opencon.errors import ConfigError, MissingExtraError


class Tiny(nn.Module):
    """Mean color, and its double: six features."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        mean = self.norm(x).mean(dim=(2, 3)) * self.scale
        return torch.cat([mean, 2 * mean], dim=1)


class Unpooled(Tiny):
    def forward(self, x):
        return x


@pytest.fixture
def calls(monkeypatch):
    """A module `timm` with three networks; the list of what was asked of it."""
    calls = []

    def create_model(name, *, pretrained, num_classes, **more):
        calls.append((name, pretrained, num_classes, more))
        if name == "resnet_tiny" and more:
            raise TypeError("unexpected keyword argument 'img_size'")
        if name == "far_away":
            raise OSError("no route to host\nand many lines more")
        if name not in timm.list_models():
            raise RuntimeError(f"Unknown model ({name})")
        return Unpooled() if name == "unpooled" else Tiny()

    timm, data = types.ModuleType("timm"), types.ModuleType("timm.data")
    timm.create_model = create_model
    timm.list_models = lambda: ["far_away", "resnet_tiny", "unpooled", "vit_tiny"]
    timm.data = data
    data.resolve_model_data_config = lambda net: {
        "input_size": (3, 40, 40),
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "crop_pct": 0.9,
    }
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    return calls


def test_it_is_an_encoder_like_ours(calls):
    net = timm_encoder("vit_tiny").eval()
    assert calls == [("vit_tiny", True, 0, {})]
    assert (net.in_channels, net.num_features, net.image_size) == (3, 6, 40)
    x = torch.rand(2, 3, 40, 40)
    torch.testing.assert_close(net(x)[:, :3], x.mean(dim=(2, 3)) / (1 + 1e-5) ** 0.5)
    net.freeze("head", "running")
    assert not any(p.requires_grad for p in net.parameters())
    assert not net.train().body.norm.training
    net.freeze("body")
    assert all(p.requires_grad for p in net.parameters())


def test_looking_at_its_width_leaves_the_network_as_it_was(calls):
    net = timm_encoder("vit_tiny")
    assert net.body.training
    assert net.body.norm.num_batches_tracked == 0


def test_by_word_with_its_own_normalization(calls):
    encoder = open_encoder("timm:vit_tiny")
    assert (encoder.name, encoder.image_size) == ("timm:vit_tiny", 40)
    assert (encoder.mean, encoder.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert not encoder.net.training


def test_another_size(calls):
    assert open_encoder("timm:vit_tiny", 64).image_size == 64
    assert calls == [("vit_tiny", True, 0, {"img_size": 64})]
    calls.clear()
    assert open_encoder("timm:resnet_tiny", 64).image_size == 64  # refuses the argument, takes any image
    assert calls[-1] == ("resnet_tiny", True, 0, {})


def test_without_a_download(calls):
    timm_encoder("vit_tiny", pretrained=False)
    assert calls == [("vit_tiny", False, 0, {})]


def test_an_unknown_name_is_refused_with_the_nearest(calls):
    with pytest.raises(ConfigError, match=r"timm has no network 'vit_tini'. Did you mean 'vit_tiny'\? .* all 4\."):
        timm_encoder("vit_tini")


def test_weights_that_cannot_be_fetched(calls):
    with pytest.raises(
        ConfigError, match=r"'far_away' \(OSError: no route to host\).*connection.*'efficientnet_lite0'"
    ):
        timm_encoder("far_away")


def test_a_network_without_rows_is_refused(calls):
    with pytest.raises(ConfigError, match=r"output of shape \(1, 3, 40, 40\) .* image classifier"):
        timm_encoder("unpooled")


@pytest.mark.parametrize("failure", [ImportError("no timm"), RuntimeError("operator torchvision::nms does not exist")])
def test_a_timm_that_cannot_be_imported_names_the_command(monkeypatch, failure):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "timm":
                raise failure

    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(
        MissingExtraError, match=r"encoder 'timm:vit_tiny' needs timm.*pip install 'opencon\[timm\]'"
    ) as err:
        open_encoder("timm:vit_tiny")
    assert str(failure) in str(err.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "features"), [("resnet18", 512), ("vit_tiny_patch16_224", 192), ("mobilenetv3_small_050", 1024)]
)
def test_the_real_timm(name, features):
    try:
        import timm
    except Exception as err:
        pytest.skip(f"timm cannot be imported ({type(err).__name__}: {err})")
    net = timm_encoder(name, pretrained=False, image_size=96).eval()
    assert (net.in_channels, net.num_features, net.image_size, len(net.mean)) == (3, features, 96, 3)
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(net(x), net.body(x))
    with pytest.raises(ConfigError, match=r"timm has no network 'resnet81'\. Did you mean 'resnet"):
        timm_encoder("resnet81", pretrained=False)
    assert timm.__version__
