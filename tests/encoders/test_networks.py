"""Shapes, sizes and arithmetic of the networks, and which part of them learns."""

import copy

import pytest
import torch
from torch import nn

from opencon.config import EncoderConfig
from opencon.encoders import ENCODERS, build_embedder
from opencon.encoders.convnet import ConvNet
from opencon.encoders.resnet import BasicBlock, Bottleneck, ResNet
from opencon.encoders.vit import VisionTransformer, resize_positions
from opencon.errors import ConfigError, DataError
from tests.naive import encoders as naive

SIZES = {"convnet": 8}  # pixels; every other encoder is tried at 32, the smallest they all take


def build(name, seed=0):
    torch.manual_seed(seed)
    return ENCODERS[name].build(3, SIZES.get(name, 32))


def images(name, batch=3, seed=1):
    size = SIZES.get(name, 32)
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def shake(net, seed=0):
    """Give every tensor, batch statistics too, values that a forgotten term would show in."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=g) + 0.5)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=g), alpha=0.1)
    return net


# --- every registered encoder -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ENCODERS.names())
def named(request):
    """A name and its network, built once for all tests."""
    return request.param, build(request.param)


class TestEveryEncoder:
    @pytest.fixture
    def name(self, named):
        return named[0]

    @pytest.fixture
    def net(self, named):
        net = named[1]
        net.freeze("all")
        return net.train()

    def test_gives_one_row_of_features_per_image(self, name, net):
        out = net(images(name))
        assert out.shape == (3, net.num_features)
        assert net.num_features == ENCODERS[name].num_features
        assert torch.isfinite(out).all()

    def test_stages_hold_every_parameter(self, name, net):
        assert {n.split(".")[0] for n, _ in net.named_parameters()} == set(net.stages)

    def test_only_what_learns_gets_a_gradient(self, name, net):
        starts = list(net.named_starts())
        if name == "vit_b16":  # large, and but for the width the same class as vit_s16, which tries them all
            starts = ["embed", "last_block", "all", "head"]
        for train_from in starts:
            net.freeze(train_from, "batch")
            net.zero_grad(set_to_none=True)
            out = net(images(name))
            learning = {n for n, p in net.named_parameters() if p.requires_grad}
            stages = list(net.stages)
            start = {"all": 0, "head": len(stages), "last_block": len(stages) - 2}.get(train_from)
            expected = set(stages[stages.index(train_from) if start is None else start :])
            assert {n.split(".")[0] for n in learning} == expected
            assert out.requires_grad == bool(learning)
            if learning:
                (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
            for n, p in net.named_parameters():
                if n in learning:
                    assert p.grad is not None, f"{n} got no gradient with train_from = {train_from}"
                    assert p.grad.abs().sum() > 0, f"{n} got a zero gradient with train_from = {train_from}"
                else:
                    assert p.grad is None, f"{n} got a gradient with train_from = {train_from}"

    def test_freezing_changes_no_output(self, name, net):
        net.eval()
        with torch.no_grad():
            before = net(images(name))
            for train_from in ("head", net.stages[-1], "all"):
                net.freeze(train_from, "running")
                torch.testing.assert_close(net(images(name)), before)

    def test_unknown_stage_is_refused_with_the_allowed_names(self, name, net):
        wrong = net.stages[-1][:-1] + "x"
        with pytest.raises(ConfigError, match=f"encoder.train_from = '{wrong}'") as err:
            net.freeze(wrong, "batch")
        assert "Did you mean '" in str(err.value)
        assert all(stage in str(err.value) for stage in (*net.stages, "all", "head"))
        assert net.num_frozen == 0  # as before

    def test_documents_its_paper_and_size(self, name, net):
        entry = ENCODERS[name]
        assert entry.paper
        assert entry.image_size >= 8


def test_last_block_is_offered_by_a_vit_alone():
    with pytest.raises(ConfigError, match="Allowed: stem, layer1, layer2, layer3, layer4, all, head"):
        build("resnet18_cifar").freeze("last_block")
    with pytest.raises(ConfigError, match=r"Did you mean 'last_block'\?"):
        VisionTransformer(width=16, depth=2, num_heads=2, image_size=32).freeze("last_bloc")


def test_unknown_encoder_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown encoder 'resnet81'. Did you mean 'resnet18'\?"):
        ENCODERS["resnet81"]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_176_512),
        ("resnet18_cifar", 11_176_512 - 64 * 3 * (7 * 7 - 3 * 3)),
        ("resnet50", 23_508_032),
        ("vit_s16", 21_665_664),
        ("vit_b16", 85_798_656),
    ],
)
def test_parameter_counts_are_the_published_ones(name, count):
    with torch.device("meta"):
        net = ENCODERS[name].build(3, 224)
    assert sum(p.numel() for p in net.parameters()) == count


def test_stems_shrink_as_they_should():
    x = torch.randn(1, 3, 64, 64)
    assert build("resnet18_cifar").stem(x).shape == (1, 64, 64, 64)
    assert build("resnet18").stem(x).shape == (1, 64, 16, 16)


# --- sizes and channels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "num_stages"), [(8, 3), (16, 4), (28, 5), (32, 5), (33, 6), (64, 6)])
def test_convnet_takes_small_images_of_any_channels(size, num_stages):
    for channels in (1, 2, 3):
        net = ConvNet(channels, size)
        assert len(net.stages) == num_stages
        assert net(torch.randn(2, channels, size, size)).shape == (2, 128)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_last_stage_of_convnet_sees_the_whole_image(size):
    """The middle feature before pooling depends on every pixel."""
    net = ConvNet(1, size).eval()
    x = torch.randn(1, 1, size, size, requires_grad=True)
    out = x
    for name in net.stages:
        stage = getattr(net, name)
        out = stage.bn(stage.conv(out))  # without ReLU, so that no path is cut by chance
    out[:, :, out.shape[2] // 2, out.shape[3] // 2].sum().backward()
    assert (x.grad != 0).all()


@pytest.mark.parametrize("size", [7, 65, 224])
def test_convnet_refuses_other_sizes(size):
    with pytest.raises(ConfigError, match=rf"8 to 64 pixels, but these have {size}\. Resize .* 'resnet18'"):
        ConvNet(1, size)


def test_convnet_refuses_no_channels():
    with pytest.raises(ConfigError, match="at least one channel, got 0"):
        ConvNet(0, 8)


@pytest.mark.parametrize("name", [n for n in ENCODERS.names() if n != "convnet"])
def test_color_networks_refuse_gray_images(name):
    with pytest.raises(ConfigError, match=rf"'{name}' takes color images .* these have 1\..* RGB.*'convnet'"):
        build_embedder(EncoderConfig(name=name), in_channels=1, image_size=32)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_imagenet_stem_refuses_tiny_images(name):
    with pytest.raises(ConfigError, match=rf"'{name}' takes images of at least 32 pixels, but these have 16"):
        ENCODERS[name].build(3, 16)


@pytest.mark.parametrize(("size", "instead"), [(8, 16), (100, 96), (225, 224)])
def test_vit_refuses_a_side_that_no_patch_divides(size, instead):
    with pytest.raises(ConfigError, match=rf"multiple of 16 pixels, but these have {size}\. Use {instead}\."):
        ENCODERS["vit_s16"].build(3, size)


def test_vit_refuses_such_an_image_later_too():
    net = VisionTransformer(width=16, depth=1, num_heads=2, image_size=32)
    with pytest.raises(DataError, match="multiples of 16 pixels, got 32 x 40"):
        net(torch.zeros(1, 3, 32, 40))


def test_vit_takes_images_of_another_size():
    net = VisionTransformer(width=16, depth=1, num_heads=2, image_size=64)
    assert net(torch.randn(2, 3, 48, 80)).shape == (2, 16)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("kind", "reference"), [(BasicBlock, naive.basic_block), (Bottleneck, naive.bottleneck)])
def test_residual_blocks_match_the_loops(kind, reference, stride, training):
    torch.manual_seed(0)
    for before in (4, 4 * kind.expansion):  # with and (at stride 1) without a projection on the shortcut
        block = shake(kind(before, 4, stride).double()).train(training)
        x = torch.randn(3, before, 5, 5, dtype=torch.float64)
        want = reference(x, block, stride, training)
        torch.testing.assert_close(block(x.clone()), want)
    assert (block.downsample is None) == (stride == 1)


def test_vit_matches_the_loops():
    torch.manual_seed(0)
    net = shake(VisionTransformer(width=12, depth=2, num_heads=3, image_size=32).double())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), naive.vit(x, net, patch=16, num_heads=3, eps=1e-6))


def test_registered_vits_have_heads_of_64():
    with torch.device("meta"):
        for name in ("vit_s16", "vit_b16"):
            net = ENCODERS[name].build(3, 224)
            assert net.block0.attn.num_heads * 64 == net.num_features


def test_resnet_is_its_stages_and_an_average():
    net = ResNet(BasicBlock, (1, 1, 1, 1), small_images=True).eval()
    x = torch.randn(2, 3, 16, 16)
    want = net.layer4(net.layer3(net.layer2(net.layer1(net.stem(x))))).flatten(2).sum(dim=2) / 4
    torch.testing.assert_close(net(x), want)


def test_resized_positions_keep_the_class_token_and_a_constant():
    positions = torch.cat([torch.full((1, 1, 3), 7.0), torch.full((1, 16, 3), 2.0)], dim=1)
    out = resize_positions(positions, (2, 6))
    assert out.shape == (1, 13, 3)
    assert (out[:, 0] == 7).all()
    torch.testing.assert_close(out[:, 1:], torch.full((1, 12, 3), 2.0))


def test_resized_positions_keep_the_directions():
    """A value that grows downward still does, in row-major order, and nothing moves to the same grid."""
    ramp = torch.arange(4.0).repeat_interleave(4)
    positions = torch.cat([torch.zeros(1), ramp])[None, :, None]
    grown = resize_positions(positions, (8, 8))[0, 1:, 0].view(8, 8)
    assert (grown.diff(dim=0).mean(dim=1) > 0).all()
    torch.testing.assert_close(grown, grown[:, :1].expand(8, 8))
    assert resize_positions(positions, (4, 4)) is positions


def test_shrinking_positions_average_a_checkerboard_away():
    """Without antialiasing, single cells would be picked out and their sign kept."""
    board = (torch.arange(8)[:, None] + torch.arange(8)[None, :]) % 2 * 2.0 - 1.0
    positions = torch.cat([torch.zeros(1), board.flatten()])[None, :, None]
    assert resize_positions(positions, (3, 3))[:, 1:].abs().max() < 0.05


# --- frozen parts -----------------------------------------------------------------------------------------------------


def tiny_resnet(seed=0):
    torch.manual_seed(seed)
    return ResNet(BasicBlock, (1, 1, 1, 1), small_images=True, width=4)


def stats(module):
    return {n: b.clone() for n, b in module.named_buffers()}


def moved(module, before):
    return {n for n, b in module.named_buffers() if not torch.equal(b, before[n])}


def test_frozen_norms_use_and_update_the_batch_statistics():
    net, free = tiny_resnet(), tiny_resnet()
    net.freeze("layer4", "batch")
    x = images("resnet18_cifar")
    before = stats(net)
    torch.testing.assert_close(net.train()(x), free.train()(x))
    assert moved(net, before) == set(before)
    net.eval()
    before = stats(net)
    net(x)
    assert not moved(net, before)


def test_frozen_norms_use_their_running_statistics_and_keep_them():
    net, free = shake(tiny_resnet()), shake(tiny_resnet())
    net.freeze("layer4", "running")
    x = images("resnet18_cifar")
    before = stats(net)
    out = net.train()(x)
    assert moved(net, before) == {n for n in before if n.startswith("layer4.")}
    free.eval()
    free.layer4.train()
    torch.testing.assert_close(out, free(x))


@pytest.mark.parametrize("norm", ["running", "measured"])
def test_running_statistics_survive_train_and_eval(norm):
    net = tiny_resnet()
    net.freeze("layer3", norm)
    for call in (lambda: net.train(), lambda: net.eval(), lambda: net.train(True), lambda: nn.Sequential(net).train()):
        call()
        assert not any(m.training for s in ("stem", "layer1", "layer2") for m in getattr(net, s).modules())
        assert all(m.training == net.training for s in ("layer3", "layer4") for m in getattr(net, s).modules())


def batches(number=3):
    return [(i + 1) * images("resnet18_cifar", seed=i) - i for i in range(number)]


def test_measured_statistics_are_the_mean_of_those_of_the_batches():
    net, free = shake(tiny_resnet()), shake(tiny_resnet()).train()
    net.freeze("layer2", "measured")
    net.stem.bn1.num_batches_tracked.fill_(100)  # what was seen before does not count
    net.train().measure(iter(batches()))
    seen = [free.stem.conv1(x) for x in batches()]
    for got, want in ((net.stem.bn1.running_mean, torch.mean), (net.stem.bn1.running_var, torch.var)):
        torch.testing.assert_close(got, torch.stack([want(x, dim=(0, 2, 3)) for x in seen]).mean(dim=0))
    # Deeper ones see what batch statistics before them give.
    deep = torch.stack([free.layer1[0].conv1(free.stem(x)).mean(dim=(0, 2, 3)) for x in batches()])
    torch.testing.assert_close(net.layer1[0].bn1.running_mean, deep.mean(dim=0))


def test_what_was_measured_on_one_batch_equals_its_batch_statistics():
    net, free = shake(tiny_resnet()), shake(tiny_resnet()).train()
    net.freeze("head", "measured")
    x = images("resnet18_cifar", batch=64)
    assert not torch.allclose(net(x), free(x), rtol=0.1, atol=0.1)
    net.measure([x])
    torch.testing.assert_close(net(x), free(x), rtol=0.02, atol=0.02)  # but for n / (n - 1) in the variances


@pytest.mark.parametrize("training", [True, False])
def test_measuring_changes_the_frozen_statistics_and_nothing_else(training):
    net = shake(tiny_resnet())
    net.freeze("layer3", "measured")
    net.train(training).fold(torch.float32)
    before, weights = stats(net), copy.deepcopy(dict(net.named_parameters()))
    modes = [m.training for m in net.modules()]
    net.measure(batches())
    assert moved(net, before) == {n for n in before if not n.startswith(("layer3.", "layer4."))}
    assert all(torch.equal(p, weights[n]) for n, p in net.named_parameters())
    assert [m.training for m in net.modules()] == modes
    assert {m.momentum for m in net.modules() if isinstance(m, nn.BatchNorm2d)} == {0.1}
    assert net.folded is None


def test_nothing_frozen_nothing_measured():
    net = tiny_resnet()
    before = stats(net)
    left = iter(batches())
    net.measure(left)
    assert not moved(net, before)
    assert len(list(left)) == 3


@pytest.mark.parametrize("train_from", ["layer2", "head"])
def test_frozen_stages_build_no_graph(train_from):
    net = tiny_resnet()
    net.freeze(train_from)
    x = images("resnet18_cifar").requires_grad_()
    out = net(x)
    assert out.requires_grad == (train_from != "head")
    if out.requires_grad:
        out.sum().backward()
    assert x.grad is None


def test_freezing_can_be_taken_back():
    net = tiny_resnet()
    net.freeze("head", "running")
    net.freeze("all", "running")
    assert all(p.requires_grad for p in net.parameters())
    assert all(m.training for m in net.modules())


@pytest.mark.parametrize("norm", ["batch", "running"])
def test_a_step_moves_what_learns_and_nothing_else(norm):
    net = tiny_resnet()
    net.freeze("layer3", norm)
    before = copy.deepcopy(dict(net.named_parameters()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    net(images("resnet18_cifar")).square().sum().backward()
    optimizer.step()
    changed = {n for n, p in net.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if n.startswith(("layer3.", "layer4."))}
