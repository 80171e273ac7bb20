import io
import os
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.data import sources
from opencon.data.sources import ImageSet, from_arrays, read_images
from opencon.errors import DataError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def paint(path, color=RED, size=(16, 16), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).convert(mode).save(path, **options)
    return path


def read_one(path, size=16):
    images, kept, problems = read_images([path], size)
    assert kept == [0], problems
    return images[0]


def problem(path, size=16):
    images, kept, problems = read_images([path], size)
    assert len(images) == 0
    assert kept == []
    (line,) = problems
    assert line.startswith(str(path))
    return line


def assert_color(image, color, within=3):
    middle = image[:, image.shape[1] // 2, image.shape[2] // 2].tolist()
    assert all(abs(a - b) <= within for a, b in zip(middle, color, strict=True)), middle


# --- image sets -------------------------------------------------------------------------------------------------------


def images(m=2, channels=3, dtype=torch.uint8):
    return torch.zeros(m, channels, 4, 5, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (images(dtype=torch.float32), torch.tensor([0, 1]), ("a", "b")),
            r"images are float32 of shape \(2, 3, 4, 5\)",
        ),
        ((images()[0], torch.tensor([0]), ("a",)), r"images are uint8 of shape \(3, 4, 5\)"),
        ((images(0), torch.tensor([], dtype=torch.int64), ()), "at least one image"),
        ((images(channels=4), torch.tensor([0, 1]), ("a", "b")), "images have 4 channels; expected 1"),
        ((images(), torch.tensor([0.0, 1.0]), ("a", "b")), "classes are float32 of shape"),
        ((images(), torch.tensor([[0, 1]]), ("a", "b")), "classes are int64 of shape"),
        ((images(), torch.tensor([0]), ("a", "b")), "2 images but 1 classes"),
        ((images(), torch.tensor([0, 2]), ("a", "b")), "lie between 0 and 2; with 2 class names .* 0 and 1"),
        ((images(), torch.tensor([-1, 1]), ("a", "b")), "lie between -1 and 1"),
        ((images(), torch.tensor([0, 1]), ("a", "a")), "class name 'a' is given twice"),
        ((images(), torch.tensor([0, 1]), ("a", "b"), ("x",)), "2 images but 1 file names"),
    ],
)
def test_image_set_refuses(arguments, message):
    with pytest.raises(DataError, match=message):
        ImageSet(*arguments)


def test_image_set_has_a_length():
    assert len(ImageSet(images(), torch.tensor([0, 1]), ("a", "b"))) == 2


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_channels_first_and_last_are_the_same_images(channels, as_tensor):
    last = np.random.default_rng(0).integers(0, 256, (5, 6, 7, channels), dtype=np.uint8)
    first = last.transpose(0, 3, 1, 2)
    wrap = torch.from_numpy if as_tensor else np.asarray
    a, b = (from_arrays(wrap(x), wrap(np.array([0, 1, 2, 0, 1]))) for x in (last, first))
    assert a.images.shape == (5, channels, 6, 7)
    assert torch.equal(a.images, b.images)
    assert a.images.numpy().tolist() == first.tolist()
    assert a.class_names == ("0", "1", "2")


def test_gray_without_channel_axis():
    got = from_arrays(np.full((2, 4, 4), 9, np.uint8), [0, 1], ["a", "b"])
    assert got.images.shape == (2, 1, 4, 4)
    assert got.class_names == ("a", "b")
    assert got.classes.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_rounded_to_bytes(dtype):
    values = np.array([0.0, 0.25, 0.5, 0.999, 1.0], dtype=dtype)
    got = from_arrays(np.tile(values, (1, 4, 1)), [0])
    assert got.images[0, 0, 0].tolist() == [0, 64, 128, 255, 255]


def test_the_given_array_is_neither_changed_nor_shared():
    array = np.zeros((2, 4, 4), np.uint8)
    got = from_arrays(array, [0, 1])
    array[:] = 7
    assert int(got.images.max()) == 0


FLAT = np.zeros((2, 4, 4))


def with_pixel(value):
    out = FLAT.copy()
    out[1, 2, 3] = value
    return out


@pytest.mark.parametrize(
    ("pixels", "classes", "message"),
    [
        (with_pixel(np.nan), [0, 1], "1 of 2 images hold NaN or infinite pixels"),
        (with_pixel(np.inf), [0, 1], "1 of 2 images hold NaN or infinite"),
        (with_pixel(1.5), [0, 1], r"must lie in \[0, 1\] but reach from 0 to 1.5"),
        (with_pixel(-0.5), [0, 1], "reach from -0.5 to 0"),
        (FLAT.astype(np.int64), [0, 1], r"images are int64 of shape .* give uint8"),
        (FLAT.astype(bool), [0, 1], "images are bool"),
        (FLAT[0], [0], r"images have shape \(4, 4\)"),
        (np.float64("nan"), [0], r"images have shape \(\)"),
        (np.zeros((2, 4, 4, 4)), [0, 1], r"shape \(2, 4, 4, 4\); expected .* with 1 or 3 channels"),
        (np.zeros((2, 3, 5, 3)), [0, 1], "could have their channels first or last"),
        (FLAT, [0], "2 images but 1 classes"),
        (FLAT, [0.0, 1.0], "classes are float64 of shape"),
        (FLAT, [True, False], "classes are bool"),
        (FLAT, [0, -1], "lie between -1 and 0"),
        (FLAT, ["a", "b"], "classes cannot be read as an array of numbers"),
        ([[1, 2], [3]], [0], "images cannot be read as an array of numbers"),
        (FLAT[:0], [], "classes are|at least one image"),
    ],
)
def test_from_arrays_refuses(pixels, classes, message):
    with pytest.raises(DataError, match=message):
        from_arrays(pixels, classes)


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif", ".tif", ".webp", ".ppm"])
def test_common_formats(tmp_path, suffix):
    assert_color(read_one(paint(tmp_path / f"a{suffix}", (200, 100, 50))), (200, 100, 50), within=6)


@pytest.mark.parametrize("mode", ["L", "1", "LA"])
def test_gray_becomes_three_equal_channels(tmp_path, mode):
    image = read_one(paint(tmp_path / "a.png", WHITE, mode=mode))
    assert image.shape == (3, 16, 16)
    assert bool((image == 255).all())


def test_cmyk(tmp_path):
    assert_color(read_one(paint(tmp_path / "a.jpg", RED, mode="CMYK", quality=95)), RED, within=6)
    assert_color(read_one(paint(tmp_path / "a.tif", GREEN, mode="CMYK")), GREEN)


def test_palette(tmp_path):
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "a.gif")
    for name in ("a.png", "a.gif"):
        assert read_one(tmp_path / name)[:, 8, 8].tolist() == [10, 200, 30]


def test_palette_with_transparency_is_seen_on_white(tmp_path):
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(0, (0, 0, 16, 4))
    image.save(tmp_path / "a.png", transparency=0)
    got = read_one(tmp_path / "a.png")
    assert got[:, 0, 0].tolist() == [255, 255, 255]
    assert got[:, 12, 8].tolist() == [255, 0, 0]


def test_alpha_is_seen_on_white(tmp_path):
    rgba = np.zeros((16, 16, 4), np.uint8)
    rgba[..., 0] = 255  # red everywhere, and ...
    rgba[..., 3] = np.array([0, 128, 255, 255])[np.arange(16) // 4]  # ... clear, half and solid from left to right
    Image.fromarray(rgba).save(tmp_path / "a.png")
    row = read_one(tmp_path / "a.png")[:, 8]
    assert row[:, 1].tolist() == [255, 255, 255]
    assert row[:, 14].tolist() == [255, 0, 0]
    assert row[1, 6] == pytest.approx(127, abs=9)  # bicubic does not blur at the same size


def test_sixteen_bits_keep_their_range(tmp_path):
    values = np.array([0, 257, 32768, 65535], np.uint16)[np.arange(16) // 4]
    gray = np.tile(values, (16, 1))
    Image.fromarray(gray).save(tmp_path / "a.png")
    Image.fromarray(gray).save(tmp_path / "a.tif")
    for name in ("a.png", "a.tif"):
        assert read_one(tmp_path / name)[:, 8, [0, 4, 8, 12]].tolist() == [[0, 1, 128, 255]] * 3


def test_floating_point_pixels_are_set_aside(tmp_path):
    Image.new("F", (16, 16), 0.5).save(tmp_path / "a.tif")
    assert "floating point pixels have no fixed white" in problem(tmp_path / "a.tif")


def corner(image):
    """The corner in which the green square sits."""
    half = image.shape[1] // 2
    green = image[1].float()
    means = {
        "top left": green[:half, :half],
        "top right": green[:half, half:],
        "bottom left": green[half:, :half],
        "bottom right": green[half:, half:],
    }
    return max(means, key=lambda name: means[name].mean())


# Where a picture whose stored top left is green has its green once the EXIF orientation is obeyed.
@pytest.mark.parametrize(
    ("orientation", "where"),
    [
        (1, "top left"),
        (2, "top right"),
        (3, "bottom right"),
        (4, "bottom left"),
        (5, "top left"),
        (6, "top right"),
        (7, "bottom right"),
        (8, "bottom left"),
    ],
)
@pytest.mark.parametrize("side", [16, 160])  # 160: decoded in draft mode
def test_exif_orientation(tmp_path, orientation, where, side):
    image = Image.new("RGB", (side, side), RED)
    image.paste(GREEN, (0, 0, side // 2, side // 2))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    assert corner(read_one(tmp_path / "a.jpg", 16)) == where


@pytest.mark.parametrize("size", [(40, 20), (20, 40)])
def test_short_side_is_scaled_and_the_center_kept(tmp_path, size):
    image = Image.new("RGB", size, RED)
    w, h = size
    image.paste(BLUE, ((w - 20) // 2, (h - 20) // 2, (w + 20) // 2, (h + 20) // 2))
    image.save(tmp_path / "a.png")
    got = read_one(tmp_path / "a.png", 10)
    assert got.shape == (3, 10, 10)
    assert bool((got[0] < 40).all())  # no more red than the filter takes from beyond the edge
    assert bool((got[2] > 215).all())


@pytest.mark.parametrize("size", [(90, 60), (60, 180), (10, 20), (33, 33)])  # the scaled sides are even
def test_scaling_the_square_is_scaling_everything_then_cropping(tmp_path, size):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    noise.save(tmp_path / "a.png")
    got = read_one(tmp_path / "a.png", 20).int()
    scale = 20 / min(size)
    scaled = noise.resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.BICUBIC)
    left, top = (scaled.width - 20) // 2, (scaled.height - 20) // 2
    want = torch.from_numpy(np.array(scaled.crop((left, top, left + 20, top + 20)))).permute(2, 0, 1).int()
    assert (got - want).abs().max() <= 1


def test_shrinking_averages(tmp_path):
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(tmp_path / "a.png")
    assert read_one(tmp_path / "a.png", 8).float().sub(127.5).abs().max() < 3  # without antialias: 0 and 255


@pytest.mark.parametrize(("cells", "side", "size"), [(5, 800, 32), (32, 256, 64)])
def test_draft_mode_shows_the_same_picture(tmp_path, cells, side, size):
    noise = np.random.default_rng(1).integers(0, 256, (cells, cells), dtype=np.uint8)
    picture = Image.fromarray(noise).convert("RGB").resize((side, side))
    picture.save(tmp_path / "a.jpg", quality=95)
    picture.save(tmp_path / "a.png")
    a, b = (read_one(tmp_path / name, size).float() for name in ("a.jpg", "a.png"))
    assert (a - b).abs().mean() < 3


def test_a_panorama_stays_small(tmp_path):
    assert_color(read_one(paint(tmp_path / "a.png", GREEN, size=(5000, 1)), 32), GREEN)


def test_unreadable_images_are_named_with_the_reason(tmp_path):
    whole = paint(tmp_path / "whole.jpg", size=(200, 200)).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "zero.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("not an image")
    os.symlink(tmp_path / "nowhere", tmp_path / "link.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    assert "cannot be decoded (OSError: image file is truncated" in problem(tmp_path / "cut.jpg")
    assert problem(tmp_path / "zero.jpg").endswith("zero.jpg is empty")
    assert "text.jpg is not an image" in problem(tmp_path / "text.jpg")
    assert "not a file" in problem(tmp_path / "link.jpg")
    assert "not a file" in problem(tmp_path / "pipe.jpg")


def test_too_many_pixels(tmp_path, monkeypatch):
    path = paint(tmp_path / "a.png", size=(20, 20))
    monkeypatch.setattr(sources, "MAX_PIXELS", 400)
    read_one(path)
    monkeypatch.setattr(sources, "MAX_PIXELS", 399)
    assert "has too many pixels to decode (the limit is 399). Shrink it." in problem(path)


def test_pillows_own_limit_reads_the_same(tmp_path, monkeypatch):
    path = paint(tmp_path / "a.png", size=(20, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow refuses at twice that
    assert "has too many pixels to decode" in problem(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)  # Pillow warns
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_one(path)
    assert caught == []


def test_a_hidden_bomb_is_not_decoded(tmp_path):
    """A tiny file that claims 65535 x 65535 pixels."""
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "JPEG")
    data = bytearray(buffer.getvalue())
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xff\xff\xff\xff"
    (tmp_path / "a.jpg").write_bytes(data)
    assert "has too many pixels" in problem(tmp_path / "a.jpg")


def test_order_is_kept_when_some_fail(tmp_path):
    paths = [paint(tmp_path / f"{i}.png", (i, i, i)) for i in range(40)]
    for i in (0, 7, 39):
        paths[i].write_bytes(b"")
    got, kept, problems = read_images(paths, 16)
    assert kept == [i for i in range(40) if i not in (0, 7, 39)]
    assert got[:, 0, 0, 0].tolist() == kept
    assert len(problems) == 3


# --- photos of phones -------------------------------------------------------------------------------------------------


def test_heic_is_read_upright(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    assert sources.can_read_heic()
    pixels = np.zeros((32, 48, 3), dtype=np.uint8)
    pixels[:, :24] = RED
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter: what was on the left is at the top
    heif.from_pillow(Image.fromarray(pixels)).save(tmp_path / "a.HEIC", exif=exif.tobytes(), quality=-1)
    image = read_one(tmp_path / "a.HEIC")
    assert_color(image[:, :6], RED, within=8)
    assert_color(image[:, 10:], (0, 0, 0), within=8)


def test_heic_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    sources.can_read_heic.cache_clear()
    try:
        assert problem(tmp_path / "a.heic").endswith(
            "is HEIC, which needs a package that is missing. Run: pip install 'opencon[heic]'"
        )
    finally:
        sources.can_read_heic.cache_clear()
