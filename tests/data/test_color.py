import itertools

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from opencon.data import color
from tests.naive import augment as naive

CLOSE = {"rtol": 0, "atol": 2e-6}


def images(num=6, channels=3, size=9):
    """uint8 noise, with one black, one white and one gray image: the corners of the color operations."""
    x = torch.randint(
        0, 256, (num, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    x[0], x[1], x[2] = 0, 255, x[2, :1]
    return x


def jittered(x, operation, factor):
    """One operation on all images."""
    turns, is_on = torch.zeros(len(x), 1, dtype=torch.long), torch.ones(len(x), dtype=torch.bool)
    return color.jitter(x, [operation], factor[:, None], turns, is_on)


def turned(x, shift):
    return torch.stack(color.shift_hue(x.unbind(1), torch.full((len(x),), shift)), dim=1)


def floats(num=6, channels=3, size=9):
    return images(num, channels, size).float() / 255


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", [color.BRIGHTNESS, color.CONTRAST, color.SATURATION])
def test_blend_is_the_one_image_operation(operation, channels):
    x = floats(channels=channels)
    factor = torch.tensor([0.3, 1.7, 0.0, 1.0, 0.6, 1.4])
    got = jittered(x, operation, factor)
    for b in range(6):
        torch.testing.assert_close(got[b], naive.JITTER[operation](x[b], factor[b].item()), **CLOSE)
    assert torch.equal(got[3], x[3])


@pytest.mark.parametrize(
    ("operation", "enhance"),
    [
        (color.BRIGHTNESS, ImageEnhance.Brightness),
        (color.CONTRAST, ImageEnhance.Contrast),
        (color.SATURATION, ImageEnhance.Color),
    ],
)
def test_blend_is_pillow_s_enhancement(operation, enhance):
    x = images()
    factor = torch.tensor([0.3, 1.7, 0.0, 1.0, 0.6, 1.4])
    got = jittered(x.float() / 255, operation, factor)
    for b in range(6):
        enhanced = enhance(Image.fromarray(x[b].permute(1, 2, 0).numpy())).enhance(factor[b].item())
        want = torch.from_numpy(np.array(enhanced)).permute(2, 0, 1).float() / 255
        torch.testing.assert_close(got[b], want, rtol=0, atol=2.01 / 255)  # Pillow rounds the gray and the result


@pytest.mark.parametrize("shift", [-0.5, -0.1, 0.0, 0.07, 1 / 3, 0.5])
def test_hue_is_colorsys(shift):
    x = floats(8, 3, 7)
    x[4] = 0.5 + 1e-4 * x[4]  # nearly gray
    x[3] = torch.tensor(list(itertools.product([0.0, 0.5, 1.0], repeat=3))).T.repeat(1, 2)[:, :49].reshape(3, 7, 7)
    got = turned(x, shift)
    for b in range(8):
        torch.testing.assert_close(got[b], naive.hue(x[b], shift), **CLOSE)
    assert got.min() >= 0
    assert got.max() <= 1


def test_a_third_of_the_circle_swaps_the_channels():
    x = floats()
    torch.testing.assert_close(turned(x, 1 / 3), x.roll(1, dims=1), **CLOSE)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_jitter_keeps_each_image_s_order(order):
    x = floats(4, 3, 5)
    factors = torch.tensor([[1.4, 0.5, 1.6, 0.2], [0.6, 1.5, 0.4, -0.3], [1.3, 1.4, 1.5, 0.5], [0.6, 1.4, 0.6, 0.1]])
    orders = [order, order[::-1], tuple(range(4)), order]
    turns = torch.tensor([[o.index(operation) for operation in range(4)] for o in orders])
    got = color.jitter(x, range(4), factors, turns, torch.tensor([True, True, True, False]))
    for b in range(3):
        want = x[b]
        for operation in orders[b]:
            want = naive.JITTER[operation](want, factors[b, operation].item())
        torch.testing.assert_close(got[b], want, **CLOSE)
    assert torch.equal(got[3], x[3])


def test_one_channel_is_its_own_gray():
    x = floats(channels=1)
    assert torch.equal(color.to_gray(x), x)


def test_gray_is_the_weighted_sum():
    x = floats()
    got = color.to_gray(x)
    assert got.shape == (6, 1, 9, 9)
    for b in range(6):
        torch.testing.assert_close(got[b].expand(3, 9, 9), naive.gray(x[b]), **CLOSE)


def test_choose_is_exact():
    x, new = floats(), floats().flip(0) / 3
    is_new = torch.tensor([True, False, True, True, False, False])
    assert torch.equal(color.choose(is_new, new, x), torch.where(is_new[:, None, None, None], new, x))
