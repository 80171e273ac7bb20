"""Files of every name style go in; what does not fit is said."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from opencon.config import EncoderConfig
from opencon.encoders import build_embedder, load_weights
from opencon.encoders.resnet import BasicBlock, Bottleneck, ResNet
from opencon.encoders.vit import VisionTransformer
from opencon.errors import ConfigError

COUNTER = "num_batches_tracked"


def resnet(seed, block=BasicBlock, depths=(1, 1, 1, 1)):
    """A small ResNet whose batch statistics differ from the start too."""
    torch.manual_seed(seed)
    net = ResNet(block, depths, small_images=True, width=4).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return net


def vit(seed, size=32, width=12):
    torch.manual_seed(seed)
    return VisionTransformer(width=width, depth=2, num_heads=2, image_size=size).eval()


def pictures(size=32):
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(9))


def same_output(a, b, size=32):
    with torch.no_grad():
        torch.testing.assert_close(a(pictures(size)), b(pictures(size)))


def plain(state):
    return {name: tensor.contiguous() for name, tensor in state.items()}


def torchvision_names(state, prefix=""):
    return {prefix + name.removeprefix("stem."): tensor for name, tensor in plain(state).items()}


def simclr_names(state, prefix=""):
    return {n.replace("downsample", "shortcut"): t for n, t in torchvision_names(state, prefix).items()}


def dino_names(state, prefix=""):
    out = {}
    for name, tensor in plain(state).items():
        name = re.sub(r"^embed\.proj\.", "patch_embed.proj.", name)
        name = re.sub(r"^embed\.", "", name)
        out[prefix + re.sub(r"^block(\d+)\.", r"blocks.\1.", name)] = tensor
    return out


def without_counters(state):
    return {name: tensor for name, tensor in state.items() if not name.endswith(COUNTER)}


def extra(*names):
    return {name: torch.zeros(3, 3) for name in names}


def test_the_styles_are_really_other_names():
    """Else the tests below would test nothing."""
    assert {"conv1.weight", "layer2.0.downsample.0.weight"} <= set(torchvision_names(resnet(0).state_dict()))
    assert {"bn1.bias", "layer4.0.shortcut.1.running_var"} <= set(simclr_names(resnet(0).state_dict()))
    want = {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.bias", "blocks.1.mlp.fc2.weight"}
    assert want <= set(dino_names(vit(0).state_dict()))


# --- name styles ------------------------------------------------------------------------------------------------------

RESNET_STYLES = {
    "our encoder": lambda s: plain(s),
    "our embedder": lambda s: {**{f"encoder.{n}": t for n, t in s.items()}, **extra("head.0.weight", "head.2.weight")},
    "our checkpoint": lambda s: {
        "epoch": 3,
        "method": {
            **{f"embedder.encoder.{n}": t for n, t in s.items()},
            **extra("embedder.head.0.weight", "prototypes"),
        },
        "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(4, 3, 3, 3)}}},
    },
    "simclr": lambda s: simclr_names(s),
    "simclr module": lambda s: {"state_dict": {**simclr_names(s, "module."), **extra("module.head.0.weight")}},
    "simclr encoder": lambda s: {"model": simclr_names(s, "encoder."), "epoch": 1000},
    "simclr module encoder": lambda s: {"model": simclr_names(s, "module.encoder.")},
    "simclr backbone": lambda s: simclr_names(s, "backbone."),
    "moco encoder_q": lambda s: {"state_dict": simclr_names(s, "module.encoder_q.")},
    "torchvision": lambda s: {**torchvision_names(s), **extra("fc.weight", "fc.bias")},
    "without counters": lambda s: without_counters(torchvision_names(s)),
}


# Blocks of three have more names of the same form: one style shows that they fit.
@pytest.mark.parametrize(
    ("style", "block"), [*((style, BasicBlock) for style in RESNET_STYLES), ("simclr", Bottleneck)]
)
def test_resnet_names(style, block, tmp_path):
    source, target = resnet(0, block), resnet(1, block)
    torch.save(RESNET_STYLES[style](source.state_dict()), tmp_path / "a.pth.tar")
    report = load_weights(target, tmp_path / "a.pth.tar")
    same_output(source, target)
    assert set(report.loaded) == {n for n in source.state_dict() if not n.endswith(COUNTER)}
    assert report.missing == report.wrong_shape == report.resized == ()
    assert not any(COUNTER in name for name in report.unexpected)


VIT_STYLES = {
    "ours": lambda s: plain(s),
    "our embedder": lambda s: {f"embedder.encoder.{n}": t for n, t in s.items()},
    "dino": lambda s: dino_names(s),
    "timm": lambda s: {**dino_names(s), **extra("head.weight", "head.bias")},
    "dino backbone": lambda s: {**dino_names(s, "backbone."), **extra("head.mlp.0.weight")},
    "dino module": lambda s: {"student": {**dino_names(s, "module.backbone."), **extra("module.head.mlp.0.weight")}},
}


@pytest.mark.parametrize("style", VIT_STYLES)
def test_vit_names(style, tmp_path):
    source, target = vit(0), vit(1)
    torch.save(VIT_STYLES[style](source.state_dict()), tmp_path / "a.pth")
    report = load_weights(target, tmp_path / "a.pth")
    same_output(source, target)
    assert set(report.loaded) == set(source.state_dict())
    assert report.missing == report.wrong_shape == report.resized == ()


@pytest.mark.parametrize("student_first", [True, False])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_dinos_teacher_is_taken_before_its_student(wrapper, student_first, tmp_path):
    teacher, student, target = vit(0), vit(1), vit(2)
    halves = [
        ("student", dino_names(student.state_dict(), "backbone.")),
        ("teacher", {**dino_names(teacher.state_dict(), f"{wrapper}backbone."), **extra("head.mlp.0.weight")}),
    ]
    torch.save(dict(halves if student_first else reversed(halves)), tmp_path / "a.pth")
    report = load_weights(target, tmp_path / "a.pth")
    same_output(teacher, target)
    assert report.prefix == f"teacher.{wrapper}backbone."
    assert "teacher.head.mlp.0.weight" in report.unexpected
    assert "student.backbone.cls_token" in report.unexpected


@pytest.mark.parametrize(("wanted", "other"), [("encoder_q.", "encoder_k."), ("embedder.encoder.", "average.encoder.")])
def test_what_is_trained_is_taken_before_its_momentum_copy(wanted, other, tmp_path):
    trained, copy, target = resnet(0), resnet(1), resnet(2)
    state = {**torchvision_names(copy.state_dict(), other), **torchvision_names(trained.state_dict(), wanted)}
    torch.save(state, tmp_path / "a.pt")
    assert load_weights(target, tmp_path / "a.pt").prefix == wanted
    same_output(trained, target)


def test_of_two_networks_the_one_of_the_right_shape_is_taken(tmp_path):
    source, target = vit(0), vit(1)
    torch.save(
        {**dino_names(vit(2, width=24).state_dict(), "a."), **dino_names(source.state_dict(), "second.")},
        tmp_path / "a.pt",
    )
    assert load_weights(target, tmp_path / "a.pt").prefix == "second."
    same_output(source, target)


def test_a_whole_embedder_comes_back(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        return build_embedder(EncoderConfig(name="convnet"), in_channels=3, image_size=8).eval()

    source, target = make(0), make(1)
    save_file({f"embedder.{n}": t for n, t in plain(source.state_dict()).items()}, tmp_path / "a.safetensors")
    report = load_weights(target, tmp_path / "a.safetensors")
    assert "head.2.bias" in report.loaded
    same_output(source, target, size=8)


# --- formats and types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".pth.tar", ".ckpt"])
def test_file_formats(suffix, tmp_path):
    source, target = resnet(0), resnet(1)
    path = tmp_path / f"weights{suffix}"
    state = plain(source.state_dict())
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    load_weights(target, str(path))
    same_output(source, target)


def test_half_precision_is_cast(tmp_path):
    source, target = resnet(0), resnet(1)
    half = {n: t.half() if t.is_floating_point() else t for n, t in plain(source.state_dict()).items()}
    save_file(half, tmp_path / "a.safetensors")
    load_weights(target, tmp_path / "a.safetensors")
    assert all(t.dtype == torch.float32 for n, t in target.state_dict().items() if not n.endswith(COUNTER))
    torch.testing.assert_close(target.stem.conv1.weight, source.stem.conv1.weight.half().float(), rtol=0, atol=0)


def test_memory_format_of_the_module_stays(tmp_path):
    source, target = resnet(0), resnet(1).to(memory_format=torch.channels_last)
    torch.save(source.state_dict(), tmp_path / "a.pt")
    load_weights(target, tmp_path / "a.pt")
    assert target.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    same_output(source, target)


@pytest.mark.parametrize(("old", "new"), [(64, 32), (32, 64)])
def test_positions_of_another_grid_are_interpolated(old, new, tmp_path):
    source, target = vit(0, size=old), vit(1, size=new)
    torch.save(dino_names(source.state_dict()), tmp_path / "a.pth")
    report = load_weights(target, tmp_path / "a.pth")
    same_output(source, target, size=new)  # the source interpolates as it goes
    assert report.resized == (f"embed.pos_embed from {old // 16}x{old // 16} to {new // 16}x{new // 16}",)
    assert "position embedding interpolated: embed.pos_embed from" in str(report)
    assert set(report.loaded) == set(target.state_dict())


def test_building_loads_the_encoder_alone_and_keeps_the_report(tmp_path):
    def make(**settings):
        return build_embedder(EncoderConfig(name="convnet", **settings), in_channels=1, image_size=8)

    source = make()
    torch.save(source.state_dict(), tmp_path / "a.pt")
    built = make(weights=str(tmp_path / "a.pt"), train_from="conv2")
    torch.testing.assert_close(plain(built.encoder.state_dict()), plain(source.encoder.state_dict()))
    assert not torch.equal(built.head[0].weight, source.head[0].weight)
    assert built.load_report is not None
    assert built.load_report.prefix == "encoder."
    assert not built.encoder.conv1.conv.weight.requires_grad


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_report_names_what_is_missing_unused_and_misshapen(tmp_path):
    source, target = resnet(0), resnet(1)
    state = torchvision_names(source.state_dict(), "module.")
    del state["module.bn1.bias"]
    state["module.layer1.0.bn1.weight"] = torch.ones(5)
    torch.save({**state, **extra("module.fc.weight")}, tmp_path / "Mixed.pt")
    before = target.stem.bn1.bias.clone(), target.layer1[0].bn1.weight.clone()
    report = load_weights(target, tmp_path / "Mixed.pt")
    assert report.missing == ("stem.bn1.bias",)
    assert report.unexpected == ("module.fc.weight",)
    assert report.wrong_shape == (("layer1.0.bn1.weight", (5,), (4,)),)
    assert len(report.loaded) == len(without_counters(target.state_dict())) - 2
    assert torch.equal(target.stem.bn1.bias, before[0])
    assert torch.equal(target.layer1[0].bn1.weight, before[1])
    total = len(report.loaded) + 2
    assert str(report) == (
        f"Loaded {total - 2} of {total} tensors from {tmp_path / 'Mixed.pt'} (under 'module.'). "
        "Note: missing and left as they were: stem.bn1.bias; "
        "of another shape: layer1.0.bn1.weight is (5,) in the file, (4,) here; not used: module.fc.weight."
    )


def test_a_perfect_fit_is_one_sentence(tmp_path):
    torch.save(resnet(0).state_dict(), tmp_path / "a.pt")
    report = load_weights(resnet(1), tmp_path / "a.pt")
    assert str(report) == f"Loaded {len(report.loaded)} of {len(report.loaded)} tensors from {tmp_path / 'a.pt'}."


def test_long_lists_of_names_are_cut(tmp_path):
    torch.save({**resnet(0).state_dict(), **extra(*(f"fc{i}" for i in range(9)))}, tmp_path / "a.pt")
    assert str(load_weights(resnet(1), tmp_path / "a.pt")).endswith("not used: fc0, fc1, fc2, fc3 and 5 more.")


def unchanged(net, before):
    return all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


def refused(state, target, path):
    """The message of the refusal; the target must not have moved."""
    torch.save(state, path)
    before = {n: t.clone() for n, t in target.state_dict().items()}
    with pytest.raises(ConfigError, match="do not fit the encoder") as err:
        load_weights(target, path)
    assert unchanged(target, before)
    assert "Choose the encoder they were trained with (encoder.name), or other weights" in str(err.value)
    return str(err.value)


def test_another_architecture_is_refused_with_names_of_both_sides(tmp_path):
    message = refused(dino_names(vit(0).state_dict()), resnet(1), tmp_path / "a.pt")
    assert "Only 0 of" in message
    assert "Not in the file: stem.conv1.weight" in message
    assert "Unused names in the file: cls_token" in message


def test_another_width_is_refused_with_both_shapes(tmp_path):
    message = refused(dino_names(vit(0, width=24).state_dict()), vit(1), tmp_path / "a.pt")
    assert "embed.cls_token is (1, 1, 24) in the file, (1, 1, 12) here" in message


def test_another_stem_is_refused(tmp_path):
    state = torchvision_names(resnet(0).state_dict())
    state["conv1.weight"] = torch.zeros(4, 3, 7, 7)
    message = refused(state, resnet(1), tmp_path / "a.pt")
    assert "stem.conv1.weight is (4, 3, 7, 7) in the file, (4, 3, 3, 3) here" in message


def test_one_missing_convolution_is_refused(tmp_path):
    state = torchvision_names(resnet(0).state_dict())
    del state["layer3.0.conv2.weight"]
    assert "Not in the file: layer3.0.conv2.weight." in refused(state, resnet(1), tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["blocks.1.attn.proj.weight", "cls_token", "pos_embed"])
def test_one_missing_matrix_of_a_vit_is_refused(name, tmp_path):
    state = dino_names(vit(0).state_dict())
    del state[name]
    assert "Not in the file: " in refused(state, vit(1), tmp_path / "a.pt")


def test_a_deeper_network_in_the_module_is_refused(tmp_path):
    message = refused(resnet(0).state_dict(), resnet(1, depths=(1, 2, 1, 1)), tmp_path / "a.pt")
    assert "Not in the file: layer2.1.conv1.weight" in message


def test_convolutions_without_their_norms_are_refused(tmp_path):
    """Every weight of two dimensions is there, but less than half of the tensors."""
    state = {n: t for n, t in resnet(0).state_dict().items() if t.ndim >= 2}
    assert "Not in the file: stem.bn1.weight" in refused(state, resnet(1), tmp_path / "a.pt")


def test_positions_that_are_no_square_are_refused(tmp_path):
    state = dino_names(vit(0).state_dict())
    state["pos_embed"] = torch.zeros(1, 1 + 8, 12)
    assert "embed.pos_embed is (1, 9, 12) in the file, (1, 5, 12) here" in refused(state, vit(1), tmp_path / "a.pt")
