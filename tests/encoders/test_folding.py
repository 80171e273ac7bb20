import pytest
import torch
from torch import nn

from opencon.encoders import ENCODERS
from opencon.encoders.folding import padded
from opencon.runtime import seeded


def lively(encoder):
    """Batch norms as they are after training: no statistic is 0 or 1."""
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return encoder


@pytest.mark.parametrize(
    ("name", "size", "train_from"),
    [
        ("resnet18_cifar", 16, "layer1"),  # the stem alone
        ("resnet18_cifar", 16, "layer2"),
        ("resnet18_cifar", 16, "layer4"),
        ("resnet18", 32, "head"),  # its stem pools
        ("resnet50", 32, "head"),  # blocks of three
    ],
)
def test_folded_stages_equal_the_plain_ones(name, size, train_from):
    with seeded(0):
        encoder = lively(ENCODERS[name].build(3, size)).double()
        x = torch.randn(4, 3, size, size, dtype=torch.float64)
    encoder.freeze(train_from, "running")
    encoder.train()
    # In training mode the stages that learn use batch statistics, the frozen ones never do.
    plain = encoder(x)
    encoder.fold(torch.float64)
    assert encoder.folded is not None
    torch.testing.assert_close(encoder(x), plain, rtol=1e-9, atol=1e-9)


def test_gradients_are_the_same():
    with seeded(0):
        encoder = lively(ENCODERS["resnet18_cifar"].build(3, 16)).double()
        x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    encoder.freeze("layer4", "running")
    encoder.train()
    gradients = []
    for fold in (False, True):
        if fold:
            encoder.fold(torch.float64)
        encoder.zero_grad()
        encoder(x).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in encoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key in gradients[0]:
        torch.testing.assert_close(gradients[0][key], gradients[1][key], rtol=1e-8, atol=1e-8)


def test_nothing_is_folded_with_batch_statistics_or_when_all_learns():
    encoder = ENCODERS["resnet18_cifar"].build(3, 16)
    encoder.freeze("layer4", "batch")
    encoder.fold(torch.float32)
    assert encoder.folded is None
    encoder.freeze("all", "running")
    encoder.fold(torch.float32)
    assert encoder.folded is None


def test_freezing_anew_forgets_the_folded_form():
    encoder = ENCODERS["resnet18_cifar"].build(3, 16)
    encoder.freeze("layer4", "running")
    encoder.fold(torch.float32)
    encoder.freeze("layer3", "running")
    assert encoder.folded is None


@pytest.mark.parametrize("change", [lambda e: e.load_state_dict(e.state_dict()), lambda e: e.double()])
def test_new_or_moved_weights_forget_the_folded_form(change):
    encoder = ENCODERS["resnet18_cifar"].build(3, 16)
    encoder.freeze("layer4", "running")
    encoder.fold(torch.float32)
    change(encoder)
    assert encoder.folded is None


def test_channels_are_filled_up_to_whole_groups():
    """Results are the same without: tensor cores would only be left idle."""
    image, wide = torch.randn(2, 3, 4, 4), torch.randn(2, 64, 4, 4)
    filled = padded(image)
    assert filled.shape == (2, 8, 4, 4)
    assert torch.equal(filled[:, :3], image)
    assert not filled[:, 3:].any()
    assert torch.equal(padded(wide), wide)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (filled, padded(wide)))
