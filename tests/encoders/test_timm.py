"""timm's networks, through a file, give what timm gives."""

import pytest
import torch
from safetensors.torch import save_file

from opencon.encoders import ENCODERS, load_weights
from opencon.encoders.vit import resize_positions

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def timm():
    try:  # a timm that does not fit the installed torch or torchvision fails in many ways, not only ImportError
        import timm
    except Exception as err:
        pytest.skip(f"timm cannot be imported ({type(err).__name__}: {err})")
    return timm


@pytest.fixture(autouse=True)
def plain_float32():
    """Without TF32, whose ten-bit mantissa would hide or fake differences."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def shaken(net, seed):
    """timm starts some tensors at zero or one (the last norm of a block, say), where a mistake would not show."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=g) + 0.5)
            elif tensor.is_floating_point() and tensor.ndim != 4:
                tensor.add_(torch.randn(tensor.shape, generator=g), alpha=0.02)
    return net


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("resnet18", "resnet18"),
        ("resnet50", "resnet50"),
        ("vit_small_patch16_224", "vit_s16"),
        ("vit_base_patch16_224", "vit_b16"),
    ],
)
def test_timm_weights_give_timm_features(timm, theirs, ours, tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = tmp_path / "timm.safetensors"
    torch.manual_seed(0)
    reference = shaken(timm.create_model(theirs, pretrained=False, num_classes=0), seed=1)
    save_file({name: tensor.contiguous() for name, tensor in reference.state_dict().items()}, path)
    net = ENCODERS[ours].build(3, 224)
    report = load_weights(net, path)
    assert report.missing == report.wrong_shape == report.unexpected == report.resized == ()
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(2)).to(device)
    with torch.no_grad():
        want = reference.to(device).eval()(x)
        got = net.to(device).eval()(x)
    assert want.std() > 0.01  # not a constant that anything would match
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", [(2, 2), (7, 9), (14, 14), (20, 20)])
def test_positions_are_resized_as_timm_does(timm, grid):
    positions = torch.randn(1, 1 + 14 * 14, 6, generator=torch.Generator().manual_seed(0))
    want = timm.layers.resample_abs_pos_embed(positions, new_size=list(grid), num_prefix_tokens=1)
    torch.testing.assert_close(resize_positions(positions, grid), want)
