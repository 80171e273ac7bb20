"""Weights that are judged instead of the learning ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opencon.config import EvalConfig
from opencon.errors import ConfigError
from opencon.methods.parts import WeightAverage
from opencon.training.embedding import embed_images
from opencon.training.judged import judged_weights


class Small(nn.Module):
    """What `judged_weights` needs of a method: an embedder, `embed` and a twin."""

    def __init__(self):
        super().__init__()
        self.embedder = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
        self.twin = None

    def embed(self, images):
        return self.embedder(images).mean(dim=(2, 3))


@pytest.fixture
def method():
    torch.manual_seed(0)
    method = Small()
    method.twin = WeightAverage(method, 0.9)
    with torch.no_grad():
        for p in method.parameters():
            p += 1.0
    method.twin.update()
    return method


def test_averages_are_there_within_the_block_only(method):
    now = method.embedder[0].weight.detach().clone()
    with judged_weights(method):
        # The average started one below and has moved a tenth of the way.
        torch.testing.assert_close(method.embedder[0].weight.detach(), now - 0.9)
    assert torch.equal(method.embedder[0].weight, now)


def test_the_learning_weights_come_back_after_an_error(method):
    now = method.embedder[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="stop"), judged_weights(method):
        raise RuntimeError("stop")
    assert torch.equal(method.embedder[0].weight, now)


def test_without_averages_nothing_changes(method):
    method.twin = None
    before = {name: value.clone() for name, value in method.state_dict().items()}
    with judged_weights(method, iter([torch.randn(8, 1, 4, 4)])):
        pass
    assert all(torch.equal(value, before[name]) for name, value in method.state_dict().items())


def test_norms_take_the_mean_of_all_batches_and_the_run_keeps_its_own(method):
    batches = [torch.randn(8, 1, 4, 4) + shift for shift in (0.0, 2.0, 7.0)]
    norm = method.embedder[1]
    own, momentum = norm.running_mean.clone(), norm.momentum
    method.eval()
    with judged_weights(method, batches):
        seen = torch.stack([method.embedder[0](images).mean(dim=(0, 2, 3)) for images in batches])
        torch.testing.assert_close(norm.running_mean, seen.mean(dim=0).detach())
        assert not method.training
    assert torch.equal(norm.running_mean, own)
    assert norm.momentum == momentum


def test_what_was_measured_is_what_is_kept(method):
    """The checkpoint holds the judged statistics, so that a trained run can be used without its images."""
    with judged_weights(method, [torch.randn(8, 1, 4, 4) + 3]):
        measured = method.embedder[1].running_mean.clone()
    method.twin.exchange()
    assert torch.equal(method.embedder[1].running_mean, measured)


def test_mirrored_rows_are_those_of_both_images(method):
    images = torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8)
    weight = torch.arange(1.0, 17.0)

    def embed(x):
        return F.normalize(torch.stack([(x.flatten(1) * weight).sum(dim=1), x.flatten(1)[:, 0]], dim=1), dim=1)

    def view(x):
        return x / 255

    both = embed(view(images)) + embed(view(images).flip(-1))
    got = embed_images(method, embed, images, view, mirror=True)
    torch.testing.assert_close(got, F.normalize(both, dim=1))


def test_fresh_norms_need_averages():
    with pytest.raises(ConfigError, match=r"Set eval\.average, to 0\.999"):
        EvalConfig(fresh_norms=True)
    with pytest.raises(ConfigError, match=r"eval\.average = 1\.0 must lie in"):
        EvalConfig(average=1.0)
