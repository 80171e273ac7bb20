"""From images in [0, 1] to float32 unit rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opencon.config import EncoderConfig
from opencon.encoders import ENCODERS, Embedder, build_embedder
from opencon.encoders import embedder as embedder_module
from opencon.encoders.convnet import ConvNet
from opencon.encoders.heads import projection_head
from opencon.encoders.vit import VisionTransformer
from opencon.errors import ConfigError


def make(*, channels=1, size=8, precision="fp32", **settings):
    torch.manual_seed(0)
    config = EncoderConfig(name="convnet", **settings)
    return build_embedder(config, in_channels=channels, image_size=size, precision=precision)


def pictures(batch=5, channels=1, size=8, seed=1):
    return torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_rows_are_float32_and_of_unit_length(precision):
    embedder = make(precision=precision)
    z = embedder(pictures())
    assert z.shape == (5, 128)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z.norm(dim=1), torch.ones(5), rtol=0, atol=1e-6)


# vit_b16 is vit_s16, but for its width.
@pytest.mark.parametrize("name", sorted({*ENCODERS.names()} - {"vit_b16"}))
def test_every_encoder_learns_in_bfloat16(name, monkeypatch):
    monkeypatch.setattr(embedder_module, "fast_dtype", lambda device: torch.bfloat16)
    torch.manual_seed(0)
    size = 8 if name == "convnet" else 32
    embedder = build_embedder(EncoderConfig(name=name), in_channels=3, image_size=size, precision="bf16")
    z = embedder(pictures(3, 3, size))
    assert z.dtype == torch.float32
    torch.testing.assert_close(z.norm(dim=1), torch.ones(3), rtol=0, atol=1e-6)
    (z @ torch.randn(128)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in embedder.parameters())


@pytest.mark.parametrize("able", [torch.bfloat16, torch.float32])
def test_bf16_is_reduced_where_the_cpu_has_it_and_fp32_is_not(able, monkeypatch):
    monkeypatch.setattr(embedder_module, "fast_dtype", lambda device: able)
    seen = []
    for precision in ("fp32", "bf16"):
        embedder = make(precision=precision).eval()
        embedder.head[2].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):  # the embedder's own precision holds, not the caller's
            assert embedder(pictures()).dtype == torch.float32
            assert embedder.features(pictures()).dtype == torch.float32
    assert seen == [torch.float32, able]


@pytest.mark.parametrize("able", [torch.bfloat16, torch.float32])
def test_frozen_stages_are_folded_in_what_is_computed_in(able, monkeypatch):
    monkeypatch.setattr(embedder_module, "fast_dtype", lambda device: able)
    settings = EncoderConfig(name="resnet18_cifar", train_from="layer4", frozen_norm="running")
    embedder = build_embedder(settings, in_channels=3, image_size=32, precision="bf16")
    embedder.fold_frozen()
    assert embedder.encoder.folded.dtype == able
    assert embedder(pictures(2, 3, 32)).dtype == torch.float32


def test_is_normalize_encode_project_scale():
    embedder = make(channels=2, mean=(0.3, 0.6), std=(0.2, 0.5)).eval()
    x = pictures(channels=2)
    by_hand = torch.stack([(x[:, 0] - 0.3) / 0.2, (x[:, 1] - 0.6) / 0.5], dim=1)
    features = embedder.encoder(by_hand)
    torch.testing.assert_close(embedder.features(x), features)
    out = embedder.head(features)
    torch.testing.assert_close(embedder(x), out / out.norm(dim=1, keepdim=True))


def test_one_mean_serves_all_channels():
    one = make(channels=3, mean=(0.4,), std=(0.2,)).eval()
    three = make(channels=3, mean=(0.4,) * 3, std=(0.2,) * 3).eval()
    torch.testing.assert_close(one(pictures(channels=3)), three(pictures(channels=3)))


def test_wrong_number_of_means_is_refused():
    with pytest.raises(ConfigError, match=r"encoder.mean = .* has 2 values for images of 3 channels. Give one value"):
        make(channels=3, mean=(0.5, 0.5), std=(0.5, 0.5))


def test_a_checkpoint_does_not_bring_its_own_normalization():
    assert not {"mean", "std"} & set(make().state_dict())


def test_a_zero_row_stays_finite_forward_and_backward():
    embedder = make()
    for p in embedder.head[2].parameters():
        nn.init.zeros_(p)
    z = embedder(pictures())
    z.sum().backward()
    assert (z == 0).all()
    assert all(torch.isfinite(p.grad).all() for p in embedder.parameters())


def test_images_must_be_float():
    with pytest.raises(AssertionError, match="float"):
        make()(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))


def test_head_is_two_layers():
    head = projection_head(6, 4)
    assert [type(m) for m in head] == [nn.Linear, nn.ReLU, nn.Linear]
    assert head[0].weight.shape == (6, 6)
    assert head[2].weight.shape == (4, 6)
    assert projection_head(6, 4, hidden=9)[0].weight.shape == (9, 6)
    embedder = make(head_dim=7, head_hidden=11)
    assert embedder.dim == 7
    assert embedder.head[0].weight.shape == (11, embedder.num_features)
    assert embedder(pictures()).shape == (5, 7)


# --- views ------------------------------------------------------------------------------------------------------------


def both_ways(training, make_one):
    views = (pictures(4, 3, 32, seed=1), pictures(4, 3, 32, seed=2) ** 3)
    together, apart = (make_one(flag).train(training).embed_views(views) for flag in (True, False))
    assert together.shape == (8, 128)
    return together, apart


def test_views_together_or_apart_are_the_same_in_evaluation():
    together, apart = both_ways(False, lambda flag: make(channels=3, size=32, views_together=flag))
    torch.testing.assert_close(together, apart)


def test_views_together_or_apart_are_the_same_without_batch_norm():
    def vit(flag):
        torch.manual_seed(0)
        config = EncoderConfig(name="vit_s16", views_together=flag)
        encoder = VisionTransformer(width=16, depth=2, num_heads=2, image_size=32)
        return Embedder(encoder, projection_head(16, 128), config)

    together, apart = both_ways(True, vit)
    torch.testing.assert_close(together, apart)


def test_views_together_share_their_batch_statistics():
    together, apart = both_ways(True, lambda flag: make(channels=3, size=32, views_together=flag))
    assert (together - apart).abs().max() > 1e-3


def test_views_come_out_view_by_view():
    embedder = make().eval()
    a, b = pictures(seed=1), pictures(seed=2)
    torch.testing.assert_close(embedder.embed_views((a, b)), torch.cat([embedder(a), embedder(b)]))


def test_views_of_another_size_have_a_pass_of_their_own_that_leaves_the_statistics_alone():
    views = tuple(pictures(4, size=size, seed=seed) for seed, size in enumerate((8, 8, 6, 7, 6)))
    together, apart = make(), make()
    found = together.features_of_views(views)
    want = [apart.features(torch.cat(views[:2]))]
    statistics = {name: value.clone() for name, value in apart.named_buffers() if "running" in name}
    third, fifth = apart.features(torch.cat((views[2], views[4]))).chunk(2)
    assert torch.equal(found, torch.cat([*want, third, apart.features(views[3]), fifth]))
    assert all(torch.equal(dict(together.named_buffers())[name], value) for name, value in statistics.items())
    assert all(norm.momentum == 0.1 for norm in together.modules() if isinstance(norm, nn.BatchNorm2d))  # torch's own


# --- building ---------------------------------------------------------------------------------------------------------


def test_building_freezes_as_asked():
    embedder = make(train_from="conv3", frozen_norm="running").train()
    assert {n for n, p in embedder.named_parameters() if not p.requires_grad} == {
        f"encoder.{stage}.{part}" for stage in ("conv1", "conv2") for part in ("conv.weight", "bn.weight", "bn.bias")
    }
    assert not embedder.encoder.conv1.bn.training
    assert embedder.encoder.conv3.bn.training
    assert embedder.load_report is None


def test_only_the_head_learns():
    embedder = make(train_from="head")
    embedder(pictures())[:, 0].sum().backward()
    assert all(p.grad is None for p in embedder.encoder.parameters())
    assert all(p.grad is not None for p in embedder.head.parameters())


def test_same_seed_same_network():
    torch.testing.assert_close(make().state_dict(), make().state_dict())


def test_memory_format_changes_no_result():
    torch.manual_seed(0)
    plain = ConvNet(3, 16).eval()
    x = pictures(4, 3, 16)
    want = plain(x)  # rows first
    config = EncoderConfig(name="convnet", mean=(0.0,), std=(1.0,), head_dim=8)
    embedder = Embedder(plain, projection_head(128, 8), config)
    assert embedder.encoder.conv2.conv.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(embedder.features(x), want)
    torch.testing.assert_close(embedder(x).norm(dim=1), torch.ones(4))
    torch.testing.assert_close(F.normalize(embedder.head(want), dim=1), embedder(x))
