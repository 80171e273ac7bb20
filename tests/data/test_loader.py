from typing import NamedTuple

import pytest
import torch

from opencon.data.loader import TwoStreamLoader


def images(n):
    """Image i is filled with the number i, so that a view says which image it is."""
    return torch.arange(n, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()


class Noise(NamedTuple):
    amount: torch.Tensor  # (num_images,)
    unused: torch.Tensor | None = None


class AddNoise:
    """Adds less than one to every pixel of an image, a number of its own for each view."""

    def __init__(self, strength):
        self.strength = strength

    def draw(self, num_images, source_size, generator):
        assert source_size == (2, 2)
        return Noise(self.strength * torch.rand(num_images, generator=generator))

    def apply(self, images, params):
        assert params.amount.shape == images.shape[:1]
        return images.float() + params.amount.view(-1, 1, 1, 1)


def batches(source, epoch):
    draws = source.draw(epoch)
    return [source.batch(draws, torch.tensor([step])) for step in range(len(source))]


def loader(n=50, labeled=12, shares=(4, 8), seed=0, strength=0.0):
    labels = torch.full((n,), -1)
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(3))[:labeled]
    labels[chosen] = torch.arange(labeled) % 3
    return TwoStreamLoader(images(n), labels, batch_shares=shares, augments=(AddNoise(strength),) * 2, seed=seed)


def test_labeled_come_first_and_carry_their_labels():
    source = loader()
    for batch in batches(source, 0):
        which = batch.views[0][:, 0, 0, 0].long()
        assert batch.num_labeled == 4
        assert (batch.labels[:4] >= 0).all()
        assert (batch.labels[4:] == -1).all()
        assert torch.equal(source.labels[which], batch.labels)
        assert torch.equal(batch.rows, which)  # the places of these very images
        assert torch.equal(batch.views[0], batch.views[1])


def test_each_view_has_its_own_augmentation_in_order():
    labels = torch.tensor([0, 1] * 3 + [-1] * 20)
    weak, strong = AddNoise(0.0), AddNoise(0.9)
    source = TwoStreamLoader(images(26), labels, batch_shares=(2, 4), augments=(weak, strong), seed=0)
    for batch in batches(source, 0):
        first, second = (view[:, 0, 0, 0] for view in batch.views)
        assert torch.equal(first, batch.rows.float())
        assert (second > first).all()
        assert torch.equal(second.long(), batch.rows)


@pytest.mark.parametrize(("most", "steps"), [(2, 2), (9, 3)])
def test_first_views_are_those_of_the_first_steps(most, steps):
    source = loader(strength=0.9)
    want = [view for batch in batches(source, 0)[:steps] for view in batch.views]
    got = list(source.first_views(most))
    assert len(got) == 2 * steps
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_one_epoch_is_one_pass_over_the_labeled():
    source = loader(labeled=13)
    rows = source.indices(0)
    assert len(source) == len(rows) == 3  # the incomplete batch is dropped
    labeled = rows[:, :4].flatten()
    assert len(labeled.unique()) == 12


def test_the_unlabeled_are_cycled_evenly():
    source = loader(n=30, labeled=12, shares=(2, 12))  # 6 steps of 12 unlabeled out of 18: four passes
    rows = source.indices(0)[:, 2:].flatten()
    counts = torch.bincount(rows, minlength=30)[source.unlabeled]
    assert counts.tolist() == [4] * 18
    assert len(rows[:18].unique()) == 18  # every pass is a permutation


def test_without_labels_an_epoch_is_a_pass_over_everything():
    labels = torch.full((20,), -1)
    source = TwoStreamLoader(images(20), labels, batch_shares=(0, 6), augments=(AddNoise(0),), seed=0)
    got = batches(source, 0)
    assert len(got) == 3
    assert all(b.num_labeled == 0 for b in got)


def test_epochs_repeat_by_seed_and_differ_otherwise():
    def first(seed, epoch):
        batch = batches(loader(seed=seed, strength=0.5), epoch)[0]
        return batch.views[0]

    assert torch.equal(first(0, 5), first(0, 5))
    assert not torch.equal(first(0, 5), first(0, 6))
    assert not torch.equal(first(0, 5), first(1, 5))


def test_the_two_views_are_drawn_apart():
    batch = batches(loader(strength=0.5), 0)[0]
    assert not torch.equal(batch.views[0], batch.views[1])
    assert torch.equal(batch.views[0].long(), batch.views[1].long())  # of the same images


@pytest.mark.parametrize("epoch", [0, 7])
def test_an_epoch_does_not_depend_on_those_before(epoch):
    source = loader()
    for e in range(epoch):
        source.draw(e)
    a = torch.cat([b.views[0] for b in batches(source, epoch)])
    b = torch.cat([b.views[0] for b in batches(loader(), epoch)])
    assert torch.equal(a, b)
