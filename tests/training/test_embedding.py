"""Embedding a set of images in chunks."""

import pytest
import torch
from torch import nn

from opencon.training import embedding
from opencon.training.embedding import embed_images


class Net(nn.Module):
    """Batch norm and dropout, so that the mode matters; remembers the size of each chunk."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 5))
        self.chunks = []

    def embed(self, images):
        assert not torch.is_grad_enabled()
        self.chunks.append(len(images))
        return self.layers(images)


def view(images):
    return images.float() / 255


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    net.layers(torch.rand(64, 12))  # running statistics that differ from those of a batch
    return net


@pytest.fixture
def images():
    return torch.randint(256, (23, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("batch", "training"), [(1, True), (7, False), (23, True), (100, True)])
def test_chunks_equal_one_pass_in_evaluation_mode(net, images, monkeypatch, batch, training):
    monkeypatch.setattr(embedding, "BATCH", batch)
    want = net.eval().layers(view(images)).detach()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train(training)
    got = embed_images(net, net.embed, images, view)
    torch.testing.assert_close(got, want)
    assert not got.requires_grad
    assert max(net.chunks) <= batch
    assert sum(net.chunks) == 23
    assert net.training is training
    assert net.layers[2].training is training
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_put_back_when_embedding_fails(net, images, training):
    def fail(chunk):
        assert not net.training
        raise ValueError("no")

    net.train(training)
    with pytest.raises(ValueError, match="no"):
        embed_images(net, fail, images, view)
    assert net.training is training
    assert torch.is_grad_enabled()
