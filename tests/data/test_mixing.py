import math

import pytest
import torch

from opencon.config import AugmentConfig
from opencon.data.augment import Augment
from opencon.data.loader import TwoStreamLoader
from opencon.data.mixing import Mix, Mixer, cut_box
from tests.naive import augment as naive

PLAIN = {"crop_scale": None, "flip_p": 0.0, "jitter_p": 0.0, "gray_p": 0.0}
SIZE = 9


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(num_steps=2000, num_images=10, num_labeled=4, size=SIZE, **settings):
    mixer = Mixer(AugmentConfig(**settings), size=size)
    return mixer, mixer.draw(num_steps, num_images, num_labeled, rng())


@pytest.mark.parametrize("settings", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0, "mix_p": 0.7}])
def test_a_mix_is_two_images_by_the_loop(settings):
    mixer, params = drawn(num_steps=3, **settings)
    x = torch.rand(10, 3, SIZE, SIZE, generator=rng(1))
    kinds = set()
    for step in range(3):
        now = type(params)(*(None if p is None else p[step] for p in params))
        got, mix = mixer.apply(x, now)
        for b in range(10):
            other, share = x[int(mix.partner[b])], mix.share[b].item()
            is_cut = now.is_cut is not None and bool(now.is_cut[b])
            kinds.add(is_cut)
            want = naive.cutmix(x[b], other, now.box[b].tolist()) if is_cut else naive.mixup(x[b], other, share)
            torch.testing.assert_close(got[b], want, rtol=0, atol=1e-6)
            if is_cut:  # the share is that of the pixels that stayed
                top, left, bottom, right = now.box[b].tolist()
                assert share == pytest.approx(1 - (bottom - top) * (right - left) / SIZE**2)
    assert kinds == {"cutmix" in settings} | ({False} if "mixup" in settings else set())


def test_partners_are_a_permutation_of_their_own_stream():
    _, params = drawn(mixup=1.0)
    labeled, unlabeled = params.partner[:, :4], params.partner[:, 4:]
    assert torch.equal(labeled.sort(dim=1).values, torch.arange(4).expand(2000, 4))
    assert torch.equal(unlabeled.sort(dim=1).values, torch.arange(4, 10).expand(2000, 6))
    assert (labeled == torch.arange(4)).float().mean().item() == pytest.approx(0.25, abs=0.03)  # any order is as likely


@pytest.mark.parametrize("a", [0.05, 0.2, 1.0, 8.0])
def test_shares_follow_their_beta(a):
    _, params = drawn(mixup=a)
    share = params.share.flatten().double()
    assert ((share >= 0) & (share <= 1)).all()
    assert share.mean().item() == pytest.approx(0.5, abs=0.02)
    assert share.var().item() == pytest.approx(1 / (4 * (2 * a + 1)), rel=0.05)  # Beta(a, a)


def test_an_image_is_mixed_with_its_probability():
    for settings in ({"mixup": 1.0}, {"cutmix": 1.0}):
        _, params = drawn(mix_p=0.25, size=64, **settings)
        rate = (params.share < 1).float().mean().item()
        assert rate == pytest.approx(0.25, abs=0.02)


def test_boxes_keep_what_they_should_and_stay_inside():
    kept = torch.full((1000,), 0.75)
    box = cut_box(kept, torch.rand(1000, 2, generator=rng()), 32)
    assert (box >= 0).all()
    assert (box <= 32).all()
    sides = box[:, 2:] - box[:, :2]
    assert sides.max() == 16  # half of the side: a quarter of the area
    assert sides.min() >= 8  # the center is inside
    assert (box[:, 0] == 0).any()
    assert (box[:, 2] == 32).any()
    assert torch.equal(cut_box(torch.ones(1), torch.full((1, 2), 0.5), 32), torch.tensor([[16, 16, 16, 16]]))


def test_what_is_known_is_mixed_alike():
    mix = Mix(torch.tensor([1, 0, 2]), torch.tensor([0.25, 1.0, 0.5]))
    assert mix.of(torch.eye(3)).tolist() == [[0.25, 0.75, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_batches_say_how_their_images_were_mixed():
    images = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=rng())
    labels = torch.tensor([0, 1] * 8 + [-1] * 24)
    augment, mixed = Augment(AugmentConfig(**PLAIN), image_size=8, channels=1), AugmentConfig(**PLAIN, mixup=1.0)
    how = {"batch_shares": (4, 6), "augments": (augment, augment), "seed": 0}
    plain = TwoStreamLoader(images, labels, **how)
    loader = TwoStreamLoader(images, labels, **how, mixers=(None, Mixer(mixed, size=8)))
    for step in range(len(loader)):
        index = torch.tensor([step])
        batch, untouched = loader.batch(loader.draw(3), index), plain.batch(plain.draw(3), index)
        assert untouched.mixes == ()
        assert torch.equal(batch.rows, untouched.rows)  # mixing moves no other random number
        assert torch.equal(batch.views[0], untouched.views[0])
        assert batch.mixes[0] is None
        torch.testing.assert_close(batch.views[1], batch.mixes[1].of(untouched.views[1]))
        assert not torch.equal(batch.views[1], untouched.views[1])
    first, again, other = (loader.draw(epoch).mixes[1].share for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.gpu
def test_the_gpu_agrees_and_never_makes_the_host_wait():
    mixer, params = drawn(num_steps=1, mixup=0.4, cutmix=1.0)
    now = type(params)(*(p[0] for p in params))
    x = torch.rand(10, 3, SIZE, SIZE, generator=rng(1))
    on_gpu, moved = x.cuda(), type(now)(*(p.cuda() for p in now))
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, _ = mixer.apply(on_gpu, moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), mixer.apply(x, now)[0], rtol=0, atol=1e-6)
    drawn_there = mixer.draw(50, 10, 4, torch.Generator("cuda").manual_seed(0))
    assert drawn_there.share.is_cuda
    assert not math.isnan(drawn_there.share.sum().item())
