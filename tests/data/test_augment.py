import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.config import AugmentConfig
from opencon.data import color
from opencon.data.augment import Augment, ViewParams, blur, crop_box, plain_view, resized_crop, warp
from tests.naive import augment as naive

OFF = {"crop_scale": None, "flip_p": 0.0, "jitter_p": 0.0, "gray_p": 0.0, "blur_p": 0.0}
EVERYTHING = AugmentConfig(jitter=(0.4, 0.4, 0.4, 0.1), blur_p=0.5, rotate=20.0, shift=0.1, zoom=(0.8, 1.25))
CLOSE = {"rtol": 0, "atol": 2e-6}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def images(num=6, channels=3, height=12, width=12, seed=0):
    """Noise, with one black, one white and one gray image: the corners of the color operations."""
    x = torch.randint(0, 256, (num, channels, height, width), dtype=torch.uint8, generator=rng(seed))
    x[0], x[1], x[2] = 0, 255, x[2, :1]
    return x


def floats(num=6, channels=3, size=9, seed=0):
    return images(num, channels, size, size, seed).float() / 255


def pick(params, b):
    return ViewParams(*(None if p is None else p[b] for p in params))


def draw(num=20_000, source_size=(224, 224), channels=3, seed=0, **settings):
    return Augment(AugmentConfig(**settings), image_size=32, channels=channels).draw(num, source_size, rng(seed))


def pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pillow(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


# --- each operation against its one-image reference -------------------------------------------------------------------

BOXES = torch.tensor([[0, 0, 13, 17], [0, 0, 1, 1], [12, 16, 1, 1], [3, 2, 7, 15], [5, 9, 8, 8], [0, 16, 13, 1]])


@pytest.mark.parametrize("size", [1, 7, 8, 13, 32])
@pytest.mark.parametrize("channels", [1, 3])
def test_resized_crop_is_interpolate_of_the_crop(size, channels):
    x = images(6, channels, 13, 17)
    is_flipped = torch.tensor([False, True, False, True, True, False])
    got = resized_crop(x, BOXES, size, is_flipped)
    for b in range(6):
        want = naive.resized_crop(x[b], BOXES[b].tolist(), size)
        torch.testing.assert_close(got[b], naive.flip(want) if is_flipped[b] else want, **CLOSE)


@pytest.mark.parametrize("size", [7, 32])
def test_resized_crop_is_pillow_s_bilinear(size):
    x = images(6, 3, 13, 17)
    got = resized_crop(x, BOXES, size)
    for b, (top, left, height, width) in enumerate(BOXES.tolist()):
        crop = pillow(x[b]).crop((left, top, left + width, top + height))
        want = from_pillow(crop.resize((size, size), Image.Resampling.BILINEAR))
        torch.testing.assert_close(got[b], want, rtol=0, atol=1.01 / 255)  # Pillow rounds after each axis


def test_a_crop_of_everything_at_the_same_size_is_the_image():
    x = images()
    box = torch.tensor([[0, 0, 12, 12]]).expand(6, 4)
    torch.testing.assert_close(resized_crop(x, box, 12), plain_view(x, 12), rtol=0, atol=1e-7)


@pytest.mark.parametrize("size", [8, 9])
def test_warp_is_the_loop(size):
    x = floats(5, 3, size)
    angle = torch.tensor([0.3, -2.0, 0.0, math.pi / 2, 0.1])
    shift = torch.tensor([[0.1, -0.2], [0.0, 0.3], [0.25, 0.0], [0.0, 0.0], [-0.6, 0.6]])
    zoom = torch.tensor([1.0, 0.7, 1.3, 1.0, 2.0])
    got = warp(x, angle, shift, zoom)
    for b in range(5):
        want = naive.warp(x[b], angle[b].item(), shift[b].tolist(), zoom[b].item())
        torch.testing.assert_close(got[b], want, rtol=0, atol=1e-5)


def test_warp_knows_its_directions():
    x = torch.zeros(3, 1, 8, 8)
    x[:, :, 1, 6] = 1.0  # upper right
    quarter, none = math.pi / 2, 0.0
    shift = torch.tensor([[0.0, 0.0], [0.125, 0.0], [0.0, 0.25]])
    got = warp(x, torch.tensor([quarter, none, none]), shift, torch.ones(3))
    want = torch.zeros_like(x)
    want[0, 0, 1, 1] = want[1, 0, 1, 7] = want[2, 0, 3, 6] = 1.0  # counter-clockwise; right by one; down by two
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_warp_by_nothing_is_the_image():
    x = floats()
    torch.testing.assert_close(warp(x, torch.zeros(6), torch.zeros(6, 2), torch.ones(6)), x, **CLOSE)


@pytest.mark.parametrize(("size", "width"), [(8, 3), (9, 3), (32, 3), (41, 5), (52, 5)])
def test_blur_is_the_loop(size, width):
    x = floats(4, 1, size)
    sigma = torch.tensor([0.1, 0.5, 2.0, 1.0])
    got = blur(x, sigma)
    for b in range(4):
        torch.testing.assert_close(got[b], naive.blur(x[b], sigma[b].item()), **CLOSE)
    point = torch.zeros(1, 1, size, size)
    point[0, 0, size // 2, size // 2] = 1.0
    assert (blur(point, torch.tensor([2.0])) > 0).sum() == width**2


def test_blur_keeps_a_plain_image_and_each_channel_apart():
    x = torch.tensor([0.2, 0.5, 1.0])[None, :, None, None].expand(1, 3, 9, 9)
    torch.testing.assert_close(blur(x, torch.tensor([1.5])), x, **CLOSE)


@pytest.mark.parametrize("source_size", [(32, 32), (20, 60), (60, 7)])
def test_crop_box_is_the_first_try_that_fits(source_size):
    allowed = (3 / 4, 4 / 3)
    share = torch.rand(200, 10, generator=rng(1)).double() * 0.9 + 0.1
    ratio = torch.rand(200, 10, generator=rng(2)).double() * (allowed[1] - allowed[0]) + allowed[0]
    corner = torch.rand(200, 2, generator=rng(3)).double()
    got = crop_box(share, ratio, corner, source_size, allowed)
    for b in range(200):
        want = naive.crop_box(share[b].tolist(), ratio[b].tolist(), corner[b].tolist(), source_size, allowed)
        assert got[b].tolist() == want


def test_crop_box_falls_back_to_the_center():
    share, ratio, corner = torch.ones(2, 10), torch.ones(2, 10), torch.rand(2, 2, generator=rng())
    assert crop_box(share, ratio, corner, (10, 40), (0.5, 2.0)).tolist() == [[0, 10, 10, 20]] * 2
    assert crop_box(share, ratio, corner, (41, 10), (0.5, 2.0)).tolist() == [[10, 0, 20, 10]] * 2


def test_crop_box_never_passes_the_edge():
    corner = torch.full((1, 2), 1 - 2**-24)  # the largest float32 below 1
    for side in range(1, 600):
        box = crop_box(torch.full((1, 10), 1 / side**2), torch.ones(1, 10), corner, (side, side), (1.0, 1.0))
        assert box.tolist() == [[side - 1, side - 1, 1, 1]]


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("source_size", "size"), [((12, 12), 12), ((15, 11), 8), ((9, 9), 13)])
def test_a_view_is_the_operations_in_order(channels, source_size, size):
    x = images(12, channels, *source_size)
    augment = Augment(EVERYTHING, image_size=size, channels=channels)
    params = augment.draw(len(x), source_size, rng(4))
    got = augment.apply(x, params)
    assert got.shape == (12, channels, size, size)
    assert got.dtype == torch.float32
    assert got.min() >= 0
    assert got.max() <= 1
    for b in range(len(x)):
        want = naive.view(x[b], pick(params, b), augment.operations, size)
        torch.testing.assert_close(got[b], want, rtol=0, atol=2e-5)


def test_without_a_crop_the_image_is_resized_and_flipped():
    x = images(12, 3, 10, 14)
    augment = Augment(AugmentConfig(**OFF | {"flip_p": 0.5}), image_size=8, channels=3)
    params = augment.draw(12, (10, 14), rng())
    assert 0 < params.is_flipped.sum() < 12
    got = augment.apply(x, params)
    for b in range(12):
        torch.testing.assert_close(got[b], naive.view(x[b], pick(params, b), (), 8), **CLOSE)


def test_call_is_draw_then_apply():
    x = images()
    augment = Augment(EVERYTHING, image_size=12, channels=3)
    assert torch.equal(augment(x, rng(5)), augment.apply(x, augment.draw(6, (12, 12), rng(5))))


def test_the_seed_decides():
    x = images()
    augment = Augment(EVERYTHING, image_size=12, channels=3)
    assert torch.equal(augment(x, rng(1)), augment(x, rng(1)))
    assert not torch.allclose(augment(x, rng(1)), augment(x, rng(2)), atol=0.1)
    generator = rng()
    assert not torch.allclose(augment(x, generator), augment(x, generator), atol=0.1)  # two views in a row


def test_the_input_is_not_modified():
    x = images()
    before = x.clone()
    Augment(EVERYTHING, image_size=12, channels=3)(x, rng())
    plain_view(x, 8)
    assert torch.equal(x, before)


def test_an_image_s_view_does_not_depend_on_its_neighbors():
    x = images(8)
    augment = Augment(EVERYTHING, image_size=12, channels=3)
    params = augment.draw(8, (12, 12), rng())
    alone = augment.apply(x[5:6], ViewParams(*(None if p is None else p[5:6] for p in params)))
    torch.testing.assert_close(augment.apply(x, params)[5:6], alone, **CLOSE)


@pytest.mark.parametrize("channels", [1, 3])
def test_everything_off_is_the_plain_view(channels):
    x = images(channels=channels)
    augment = Augment(AugmentConfig(**OFF), image_size=12, channels=channels)
    assert augment.draw(6, (12, 12), rng()) == ViewParams()
    assert torch.equal(augment(x, rng()), plain_view(x, 12))


@pytest.mark.parametrize(
    ("on", "off"),
    [
        ({"flip_p": 1.0}, {"flip_p": 0.0}),
        ({"rotate": 30.0}, {"rotate": 0.0}),
        ({"shift": 0.3}, {"shift": 0.0}),
        ({"zoom": (1.5, 1.5)}, {"zoom": (1.0, 1.0)}),
        ({"jitter_p": 1.0}, {"jitter_p": 0.0}),
        ({"jitter_p": 1.0}, {"jitter_p": 1.0, "jitter": (0.0, 0.0, 0.0, 0.0)}),
        ({"gray_p": 1.0}, {"gray_p": 0.0}),
        ({"blur_p": 1.0}, {"blur_p": 0.0}),
        ({"crop_scale": (0.3, 0.3)}, {"crop_scale": None}),
    ],
)
def test_each_operation_can_be_switched(on, off):
    x = images(8)
    plain = plain_view(x, 12)
    without = Augment(AugmentConfig(**OFF | off), image_size=12, channels=3)
    assert without.draw(8, (12, 12), rng()) == ViewParams()
    assert torch.equal(without(x, rng()), plain)
    assert not torch.allclose(Augment(AugmentConfig(**OFF | on), image_size=12, channels=3)(x, rng()), plain, atol=0.05)


@pytest.mark.parametrize(
    "strengths", [(0.4, 0, 0, 0), (0, 0.4, 0, 0), (0, 0, 0.4, 0), (0, 0, 0, 0.4), (0, 0.4, 0, 0.4)]
)
def test_a_jitter_of_some_operations_only(strengths):
    x = images(8)
    augment = Augment(AugmentConfig(**OFF | {"jitter_p": 0.7, "jitter": strengths}), image_size=12, channels=3)
    assert augment.operations == tuple(k for k in range(4) if strengths[k])
    params = augment.draw(8, (12, 12), rng(1))
    assert 0 < params.is_jittered.sum() < 8
    got = augment.apply(x, params)
    for b in range(8):
        torch.testing.assert_close(got[b], naive.view(x[b], pick(params, b), augment.operations, 12), **CLOSE)


def test_one_channel_has_no_color():
    augment = Augment(AugmentConfig(gray_p=1.0, jitter=(0.4, 0.4, 0.4, 0.1)), image_size=8, channels=1)
    assert augment.operations == (color.BRIGHTNESS, color.CONTRAST)
    params = augment.draw(5, (8, 8), rng())
    assert params.is_gray is None
    assert params.factors.shape == params.turns.shape == (5, 2)


def test_apply_is_one_graph():
    """No host sync and no shape that depends on values: the whole function can be captured."""
    x = images()
    augment = Augment(EVERYTHING, image_size=12, channels=3)
    params = augment.draw(6, (12, 12), rng())
    captured = torch.compile(augment.plain, fullgraph=True, backend="eager")
    torch.testing.assert_close(captured(x, params), augment.apply(x, params), **CLOSE)


@pytest.mark.slow
def test_compiled_is_eager():
    x = images()
    augment = Augment(EVERYTHING, image_size=12, channels=3)
    params = augment.draw(6, (12, 12), rng())
    compiled = torch.compile(augment.plain, fullgraph=True)
    torch.testing.assert_close(compiled(x, params), augment.apply(x, params), rtol=0, atol=2e-5)


@pytest.mark.gpu
def test_the_gpu_agrees_and_never_makes_the_host_wait():
    x = images(64, 3, 36, 36)
    augment = Augment(EVERYTHING, image_size=32, channels=3)
    params = augment.draw(64, (36, 36), rng())
    want = augment.apply(x, params)
    on_gpu, params = x.cuda(), ViewParams(*(p.cuda() for p in params))
    generator = torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = augment.apply(on_gpu, params)
        augment(on_gpu, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=5e-5)


def test_plain_view_resizes_with_antialias():
    x = images(3, 3, 13, 17)
    got = plain_view(x, 7)
    for b in range(3):
        want = from_pillow(pillow(x[b]).resize((7, 7), Image.Resampling.BILINEAR))
        torch.testing.assert_close(got[b], want, rtol=0, atol=1.01 / 255)
    assert got.min() >= 0
    assert got.max() <= 1


def test_wrong_images_are_refused():
    with pytest.raises(AssertionError, match="1 or 3 channels"):
        Augment(AugmentConfig(), image_size=8, channels=4)
    augment = Augment(AugmentConfig(), image_size=8, channels=3)
    with pytest.raises(AssertionError, match="uint8"):
        augment(torch.rand(2, 3, 8, 8), rng())
    with pytest.raises(AssertionError, match="1 channels, not 3"):
        augment(images(3, 1, 8, 8), rng())


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_crops_keep_the_share_and_ratio_asked_for():
    top, left, height, width = draw(crop_scale=(0.2, 0.5)).box.unbind(1)  # every such box fits: no second try
    share, ratio = height * width / 224**2, width / height
    assert share.min() > 0.195  # within the rounding to whole pixels
    assert share.max() < 0.505
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    assert share.mean().item() == pytest.approx(0.35, abs=0.003)
    assert share.std().item() == pytest.approx(0.3 / math.sqrt(12), abs=0.003)
    assert ratio.log().mean().item() == pytest.approx(0.0, abs=0.006)  # log-uniform: wide as often as tall
    assert ratio.log().std().item() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.004)
    assert (top >= 0).all()
    assert (top + height <= 224).all()
    assert (left >= 0).all()
    assert (left + width <= 224).all()


def test_crop_places_are_uniform_whole_pixels():
    top, left, height, width = draw(source_size=(8, 10), crop_scale=(0.2, 0.2), crop_ratio=(1.0, 1.0)).box.unbind(1)
    assert set(height.tolist()) == set(width.tolist()) == {4}
    counts = torch.bincount(top * 7 + left)  # each of 5 x 7 places alike
    assert len(counts) == 35
    assert (counts - 20_000 / 35).abs().max() < 5 * math.sqrt(20_000 / 35)


def test_shifts_by_whole_pixels_are_uniform_and_leave_the_image_sharp():
    config = AugmentConfig(crop_scale=None, flip_p=0, jitter_p=0, gray_p=0, shift=2 / 8, whole_pixels=True)
    view = Augment(config, image_size=8, channels=3)
    params = view.draw(5000, (8, 8), torch.Generator().manual_seed(0))
    down_and_right = (params.shift * 8).round()
    torch.testing.assert_close(params.shift * 8, down_and_right)
    counts = torch.bincount((down_and_right + 2).long() @ torch.tensor([5, 1]))  # each of 5 x 5 alike
    assert len(counts) == 25
    assert (counts - 200).abs().max() < 5 * math.sqrt(200)
    images = torch.randint(256, (5000, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    middle = view.apply(images, params)[:, :, 2:6, 2:6] * 255
    patches = images.unfold(2, 4, 1).unfold(3, 4, 1).float()  # (B, 3, 5, 5, 4, 4)
    away = (patches - middle[:, :, None, None]).abs().amax(dim=(1, 4, 5)).flatten(1)  # (B, 25)
    assert away.amin(dim=1).max() < 0.01  # the middle of a view is a piece of the image, to rounding


def test_orders_are_uniform_over_all_24():
    turns = draw(24_000).turns
    counts = Counter(map(tuple, turns.tolist()))
    assert set(counts) == set(itertools.permutations(range(4)))
    assert max(abs(n - 1000) for n in counts.values()) < 5 * math.sqrt(1000)


def test_factors_fill_their_ranges():
    low, high = torch.tensor([0.5, 0.2, 0.0, -0.3]), torch.tensor([1.5, 1.8, 2.2, 0.3])  # never below zero
    factors = draw(jitter=(0.5, 0.8, 1.2, 0.3)).factors
    assert (factors >= low).all()
    assert (factors <= high).all()
    torch.testing.assert_close(factors.mean(dim=0), (low + high) / 2, rtol=0, atol=0.02)
    torch.testing.assert_close(factors.amin(dim=0), low, rtol=0, atol=0.005)
    torch.testing.assert_close(factors.amax(dim=0), high, rtol=0, atol=0.005)


def test_warps_and_blurs_fill_their_ranges():
    p = draw(rotate=30.0, shift=0.1, zoom=(0.8, 1.3), blur_p=0.5, blur_sigma=(0.1, 2.0))
    for values, low, high in (
        (p.angle, -math.pi / 6, math.pi / 6),
        (p.shift[:, 0], -0.1, 0.1),
        (p.shift[:, 1], -0.1, 0.1),
        (p.zoom, 0.8, 1.3),
        (p.sigma, 0.1, 2.0),
    ):
        slack = 0.002 * (high - low)
        assert low - 1e-6 <= values.min() < low + slack
        assert high - slack < values.max() <= high + 1e-6
        assert values.mean().item() == pytest.approx((low + high) / 2, abs=0.01 * (high - low))


@pytest.mark.parametrize(
    ("setting", "name"),
    [("flip_p", "is_flipped"), ("jitter_p", "is_jittered"), ("gray_p", "is_gray"), ("blur_p", "is_blurred")],
)
def test_probabilities_are_kept(setting, name):
    for p in (0.25, 0.8):
        rate = getattr(draw(**{setting: p}), name).float().mean().item()
        assert rate == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / 20_000))
    assert getattr(draw(**{setting: 1.0}), name).all()
    assert getattr(draw(**{setting: 0.0}), name) is None


def test_draws_are_independent():
    p = draw(blur_p=0.5, gray_p=0.5, jitter_p=0.5)
    columns = [p.is_flipped, p.is_jittered, p.is_gray, p.is_blurred, p.box[:, 0], p.sigma, *p.factors.unbind(1)]
    related = torch.corrcoef(torch.stack([c.double() for c in columns])) - torch.eye(len(columns), dtype=torch.double)
    assert related.abs().max() < 5 / math.sqrt(20_000)
