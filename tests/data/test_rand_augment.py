import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from opencon.config import AugmentConfig
from opencon.data import rand_augment as module
from opencon.data.augment import Augment, ViewParams
from opencon.data.rand_augment import NUM_OPERATIONS, auto_contrast, equalize, rand_augment
from tests.naive import augment as naive

NAMES = {
    getattr(module, name): name for name in dir(module) if isinstance(getattr(module, name), int) and name.isupper()
}
OFF = {"crop_scale": None, "flip_p": 0.0, "jitter_p": 0.0, "gray_p": 0.0}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def images(num=6, channels=3, size=12, seed=0):
    """Noise, with one black, one white, one of few levels and one gray image."""
    x = torch.randint(0, 256, (num, channels, size, size), dtype=torch.uint8, generator=rng(seed))
    x[0], x[1], x[2], x[3] = 0, 255, x[2] // 64 * 20 + 30, x[3, :1]
    return x


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", range(NUM_OPERATIONS))
@pytest.mark.parametrize(("sign", "magnitude"), [(1.0, 9.0), (-1.0, 30.0)])
def test_each_operation_is_its_loop(operation, sign, magnitude, channels):
    size = 17 if operation == module.EQUALIZE else 9  # from 16 pixels on there is something to spread
    x = images(6, channels, size).float() / 255
    numbers = torch.full((6, 1), operation)
    got = rand_augment(x, numbers, torch.full((6, 1), sign), magnitude)
    for b in range(6):
        want = naive.rand_operation(x[b], operation, sign, magnitude)
        torch.testing.assert_close(got[b], want, rtol=0, atol=2e-5, msg=NAMES.get(operation))


def pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pillow(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (equalize, ImageOps.equalize, 1e-6),
        (auto_contrast, ImageOps.autocontrast, 1.01 / 255),  # Pillow rounds down to whole levels
        (lambda x: one(x, module.POSTERIZE, 30.0), lambda x: ImageOps.posterize(x, 4), 1e-6),
        (lambda x: one(x, module.SOLARIZE, 15.0), lambda x: ImageOps.solarize(x, 128), 1e-6),
    ],
)
def test_levels_are_pillow_s(ours, theirs, tolerance):
    x = images(6, 3, 32)
    got = ours(x.float() / 255)
    for b in range(6):
        torch.testing.assert_close(got[b], from_pillow(theirs(pillow(x[b]))), rtol=0, atol=tolerance)


def one(x, operation, magnitude):
    shape = (len(x), 1)
    return rand_augment(x, torch.full(shape, operation), torch.ones(shape), magnitude)


def test_a_view_ends_with_its_operations_in_order():
    x = images(24, 3, 12)
    config = AugmentConfig(jitter=(0.4, 0.4, 0.4, 0.1), rand_ops=3, rand_magnitude=20.0)
    augment = Augment(config, image_size=12, channels=3)
    params = augment.draw(24, (12, 12), rng(4))
    got = augment.apply(x, params)
    assert got.min() >= 0
    assert got.max() <= 1
    for b in range(24):
        own = ViewParams(*(None if p is None else p[b] for p in params))
        want = naive.view(x[b], own, augment.operations, 12, 20.0)
        # A gray level that rounding moves over an edge of posterize, solarize or equalize becomes another one.
        assert (got[b] - want).abs().gt(5e-5).float().mean() < 0.02


def test_an_image_s_operations_do_not_depend_on_its_neighbors():
    x = images(8).float() / 255
    operations = torch.arange(8)[:, None] + torch.tensor([0, 5])
    signs = torch.ones(8, 2)
    alone = rand_augment(x[5:6], operations[5:6], signs[5:6], 9.0)
    torch.testing.assert_close(rand_augment(x, operations, signs, 9.0)[5:6], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_groups_give_the_same_pixels(channels):
    x = images(40, channels, 17, seed=3).float() / 255
    operations = torch.randint(0, NUM_OPERATIONS, (40, 3), generator=rng(1))
    signs = torch.where(torch.rand(40, 3, generator=rng(2)) < 0.5, -1.0, 1.0)
    before = x.clone()
    assert torch.equal(
        rand_augment(x, operations, signs, 12.0, in_groups=True), rand_augment(x, operations, signs, 12.0)
    )
    assert torch.equal(x, before)


def test_the_identity_changes_nothing():
    x = images().float() / 255
    nothing = torch.zeros(6, 4, dtype=torch.long)
    assert torch.equal(rand_augment(x, nothing, torch.ones(6, 4), 30.0), x)


def test_operations_and_signs_are_uniform():
    params = Augment(AugmentConfig(**OFF, rand_ops=2), image_size=8, channels=3).draw(14_000, (8, 8), rng())
    counts = torch.bincount(params.rand_operations.flatten())
    assert len(counts) == NUM_OPERATIONS
    assert (counts - 2000).abs().max() < 5 * math.sqrt(2000)
    assert set(params.rand_signs.flatten().tolist()) == {-1.0, 1.0}
    assert abs(params.rand_signs.mean()) < 5 / math.sqrt(28_000)


def test_it_is_one_graph():
    """No host sync and no shape that depends on values."""
    x, operations, signs = images().float() / 255, torch.arange(12).view(6, 2), torch.ones(6, 2)
    captured = torch.compile(rand_augment, fullgraph=True, backend="eager")
    torch.testing.assert_close(captured(x, operations, signs, 9.0), rand_augment(x, operations, signs, 9.0))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32, 96])
def test_the_gpu_agrees_and_never_makes_the_host_wait(size):
    x = images(64, 3, size)
    augment = Augment(AugmentConfig(**OFF, rand_ops=2), image_size=size, channels=3)
    params = augment.draw(64, (size, size), rng())
    want = augment.apply(x, params)
    on_gpu, moved = x.cuda(), ViewParams(*(None if p is None else p.cuda() for p in params))
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = augment.apply(on_gpu, moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (got.cpu() - want).abs().gt(1e-4).float().mean() < 0.02
