import io
import os
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from opencon.data import sources
from opencon.data.listings import find_images, list_folder, list_from_file
from opencon.data.sources import ImageSet, from_arrays, from_folder, from_list, read_images
from opencon.errors import DataError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def paint(path, color=RED, size=(16, 16), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).convert(mode).save(path, **options)
    return path


def two_classes(root):
    for i in range(2):
        paint(root / "cat" / f"{i}.png", RED)
        paint(root / "dog" / f"{i}.png", BLUE)
    return root


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
    assert_color(read_one(paint(tmp_path / "a.png", (10, 200, 30), mode="P")), (10, 200, 30), within=30)


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
    assert got[:, 0, 0].tolist() == got[:, 9, 9].tolist() == list(BLUE)


@pytest.mark.parametrize("size", [(90, 60), (61, 200), (33, 33)])
def test_crop_then_scale_is_scale_then_crop(tmp_path, size):
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.png")
    got = read_one(tmp_path / "a.png", 20).float()
    scale = 20 / min(size)
    scaled = smooth.resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.BICUBIC)
    left, top = (scaled.width - 20) // 2, (scaled.height - 20) // 2
    want = torch.from_numpy(np.array(scaled.crop((left, top, left + 20, top + 20)))).permute(2, 0, 1).float()
    assert (got - want)[:, 2:-2, 2:-2].abs().mean() < 4  # up to half a pixel of shift


def test_shrinking_averages(tmp_path):
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(tmp_path / "a.png")
    assert read_one(tmp_path / "a.png", 8).float().sub(127.5).abs().max() < 3  # without antialias: 0 and 255


def test_draft_mode_shows_the_same_picture(tmp_path):
    rng = np.random.default_rng(1)
    smooth = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize(
        (800, 800), Image.Resampling.BICUBIC
    )
    smooth.save(tmp_path / "a.jpg", quality=95)
    smooth.save(tmp_path / "a.png")
    a, b = (read_one(tmp_path / name, 32).float() for name in ("a.jpg", "a.png"))
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


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folder(tmp_path):
    two_classes(tmp_path)
    paint(tmp_path / "dog" / "deep" / "er" / "z.JPG", BLUE)
    got = from_folder(tmp_path, 8)
    assert got.class_names == ("cat", "dog")
    assert got.classes.tolist() == [0, 0, 1, 1, 1]
    assert got.images.shape == (5, 3, 8, 8)
    assert got.images.dtype == torch.uint8
    assert [os.path.relpath(f, tmp_path) for f in got.files] == [
        "cat/0.png",
        "cat/1.png",
        "dog/0.png",
        "dog/1.png",
        "dog/deep/er/z.JPG",
    ]
    assert got.problems == ()
    for image, c in zip(got.images, got.classes, strict=True):
        assert_color(image, (RED, BLUE)[int(c)])


def test_odd_file_names(tmp_path):
    names = ["with space.png", "quo\"te's.png", "größe-日本.png", "percent%20#.png", "comma,.png", "new\nline.png"]
    for name in names:
        paint(tmp_path / "ça va" / name)
        paint(tmp_path / 'b "q"' / name)
    got = from_folder(str(tmp_path), 8)
    assert got.class_names == ('b "q"', "ça va")
    assert sorted(os.path.basename(f) for f in got.files[:6]) == sorted(names)


def test_a_name_that_is_no_text_can_still_be_printed(tmp_path):
    two_classes(tmp_path)
    with open(os.fsencode(tmp_path) + b"/cat/\xff.png", "wb"):
        pass
    (line,) = from_folder(tmp_path, 8).problems
    assert line.encode("utf-8").decode("utf-8").endswith("\N{REPLACEMENT CHARACTER}.png is empty")


def test_one_bad_image_is_set_aside(tmp_path):
    two_classes(tmp_path)
    (tmp_path / "cat" / "0.png").write_bytes(b"")
    paint(tmp_path / "stray.png")
    got = from_folder(tmp_path, 8)
    assert got.classes.tolist() == [0, 1, 1]
    assert got.problems == (
        f"{tmp_path}/stray.png lies outside the class folders",
        f"{tmp_path}/cat/0.png is empty",
    )


def test_hidden_files_and_folders_are_left_alone(tmp_path):
    two_classes(tmp_path)
    paint(tmp_path / ".cache" / "a.png")
    paint(tmp_path / "cat" / ".thumbnails" / "a.png")
    (tmp_path / "cat" / "._0.png").write_bytes(b"resource fork")
    (tmp_path / "cat" / "notes.txt").write_text("hello")
    got = from_folder(tmp_path, 8)
    assert len(got) == 4
    assert got.problems == ()


def test_linked_folders_are_followed_but_not_in_circles(tmp_path):
    two_classes(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    for name in ("cat", "dog"):
        os.symlink(tmp_path / "real" / name, tmp_path / "linked" / name)
    os.symlink(tmp_path / "real" / "cat", tmp_path / "real" / "cat" / "again")
    assert len(list_folder(tmp_path / "linked").paths) == 4
    assert len(find_images(tmp_path / "real" / "cat")) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: None, "there is no folder .*photos. Give the folder that holds one sub-folder per class"),
        (lambda r: r.write_text(""), "photos is not a folder"),
        (lambda r: r.mkdir(), r"holds no class folder \(it is empty\)"),
        (lambda r: (r.mkdir(), (r / "a.txt").touch(), (r / "b").touch()), r"\(found only 1 x .txt, 1 x no suffix\)"),
        (lambda r: paint(r / "a.jpg"), "1 images lie directly in .*photos, but there is no class folder"),
        (lambda r: (two_classes(r), (r / "emu").mkdir()), r"class folder .*emu holds no image \(it is empty\)"),
        (
            lambda r: (two_classes(r), (r / "emu").mkdir(), (r / "emu" / "a.heic").touch()),
            r"emu holds no image \(found only 1 x .heic\).*\.jpg",
        ),
        (lambda r: (two_classes(r / "train"), two_classes(r / "val")), r"holds parts of a data set \(train, val\)"),
    ],
)
def test_folder_refuses(tmp_path, make, message):
    make(tmp_path / "photos")
    with pytest.raises(DataError, match=message):
        from_folder(tmp_path / "photos", 8)


def test_all_images_unreadable(tmp_path):
    for name in ("cat/a.jpg", "dog/b.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"none of the 2 images can be read. The first: .*a.jpg is not an image"):
        from_folder(tmp_path, 8)


def test_a_class_without_a_readable_image(tmp_path):
    two_classes(tmp_path)
    (tmp_path / "cat" / "0.png").write_bytes(b"")
    paint(tmp_path / "dog" / "0.png").write_text("x")
    (tmp_path / "dog" / "1.png").write_text("x")
    with pytest.raises(DataError, match=r"class 'dog' has no readable image. One of its files: .*dog/0.png is not an"):
        from_folder(tmp_path, 8)


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    two_classes(tmp_path)
    scandir = os.scandir

    def locked(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(DataError, match=r"cannot look into .*dog \(Permission denied\)"):
        list_folder(tmp_path)


# --- list files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    for i, name in enumerate(["a.png", "b.png", "with space.png", "sub/größe 'x', \"y\".png"]):
        paint(tmp_path / name, (i * 50, 0, 0))
    return tmp_path


def write(folder, text, name="list.txt"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_plain_list(photos):
    text = "b.png dog\n\na.png   cat\r\nwith space.png\tdog\nsub/größe 'x', \"y\".png cat"
    got = from_list(write(photos, text), 8)
    assert got.class_names == ("cat", "dog")
    assert got.classes.tolist() == [1, 0, 1, 0]
    assert got.images[:, 0, 0, 0].tolist() == [50, 0, 100, 150]
    assert got.files[2] == str(photos / "with space.png")


@pytest.mark.parametrize(
    "text",
    [
        'path,label\na.png,big cat\nwith space.png,dog\n"sub/größe \'x\', ""y"".png",dog\n',
        '\ufeffClass , extra, Filename\nbig cat,1,a.png\ndog,2,with space.png\ndog,3,"sub/größe \'x\', ""y"".png"\n',
        'file\tclass\na.png\tbig cat\n\nwith space.png\tdog\n"sub/größe \'x\', ""y"".png"\tdog',
        '# made by hand\npath,label\r\na.png,big cat\r\nwith space.png,dog\r\n"sub/größe \'x\', ""y"".png",dog\r\n',
    ],
)
def test_table(photos, text):
    got = list_from_file(write(photos, text, "list.csv"))
    assert got.class_names == ("big cat", "dog")
    assert got.classes == (0, 1, 1)
    assert [p.name for p in got.paths] == ["a.png", "with space.png", "größe 'x', \"y\".png"]


def test_paths_start_at_the_list_or_at_root(photos, tmp_path_factory):
    other = tmp_path_factory.mktemp("lists")
    text = f"a.png x\n{photos / 'b.png'} y\n"
    with pytest.raises(DataError, match=r"line 1: there is no file .*a.png\. Correct .* paths start at .*lists"):
        list_from_file(write(other, text))
    assert list_from_file(write(other, text), root=photos).paths == (photos / "a.png", photos / "b.png")
    assert list_from_file(write(photos, text)).paths == (photos / "a.png", photos / "b.png")


def test_numbers_keep_their_order(tmp_path):
    names = [paint(tmp_path / f"{i}.png").name for i in range(12)]
    text = "".join(f"{name} {11 - i:02d}\n" for i, name in enumerate(names))
    got = list_from_file(write(tmp_path, text))
    assert got.classes == tuple(range(11, -1, -1))
    assert got.class_names == tuple(str(c) for c in range(12))  # "10" after "9", not after "1"


def test_declared_classes_fix_the_order(photos):
    rows = "a.png cat\nb.png dog\n"
    assert list_from_file(write(photos, "# classes: dog cat\n" + rows)).classes == (1, 0)
    assert list_from_file(write(photos, "# note\n# Classes: dog\n# classes: cat\n" + rows)).class_names == (
        "dog",
        "cat",
    )
    table = "# classes: small dog, big cat\npath,label\na.png,big cat\nb.png,small dog\n"
    assert list_from_file(write(photos, table)).class_names == ("small dog", "big cat")


def test_a_repeated_line_counts_once(photos):
    got = from_list(write(photos, "a.png x\nb.png y\n./a.png x\n"), 8)
    assert got.classes.tolist() == [0, 1]
    assert got.problems == (f"{photos}/list.txt, line 3 repeats line 1",)


def test_unreadable_image_in_a_list(photos):
    (photos / "zero.png").touch()
    got = from_list(write(photos, "zero.png x\na.png x\nb.png y\n"), 8)
    assert got.classes.tolist() == [0, 1]
    assert got.problems == (f"{photos}/zero.png is empty",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no image"),
        ("# only a comment\n", "names no image"),
        ("path,label\n", "names no image"),
        ("a.png x\nb.png\n", r"line 2 cannot be understood: 'b.png'. Expected 'path class', or a first line 'path,lab"),
        ("a.png,x\n", r"line 1 cannot be understood: 'a.png,x'"),
        (
            "path,label\na.png,x\n\nb.png\n",
            r"line 4 cannot be understood: 'b.png'. Expected 2 filled columns \(path, la",
        ),
        ("path,label\nb,c.png,x\n", r"line 2 .*quote what holds a separator"),
        ("path,label\na.png,\n", r"line 2 cannot be understood"),
        ('path,label\na.png,x\n"b.png,y\n', r"line 3 cannot be understood: .*not valid CSV: unexpected end of data"),
        ("a.png x\nno.png x\nb.png y\nnope.png y\n", r"line 2: there is no file .*/no.png \(and 1 more are missing\)"),
        ("a.png x\nno.png x\n", r"line 2: there is no file .*/no.png\. Correct"),
        ("a.png x\nsub y\n", r"line 2: there is no file .*/sub"),
        ("a.png x\nb.png y\nsub/../a.png y\n", r"a.png is 'x' in line 1 and 'y' in line 3. Keep one"),
        ("a.png 0\nb.png 3\n", r"class in the list without images: 1 and 1 more .* without a gap"),
        ("a.png 1\n", r"class in the list without images: 0 \("),
        ("a.png 0\nb.png 20260101\n", r"without images: 1 and 20260099 more"),
        ("a.png 0\nb.png -1\n", r"line 2: a class number must not be negative"),
        ("# classes: x y z\na.png x\nb.png y\n", r"class in the list without images: z \("),
        ("# classes: xylophone y\na.png y\nb.png xylofone\n", r"line 3: class 'xylofone' is not .* mean 'xylophone'\?"),
        (b"caf\xe9.png x\n", "cannot be read as UTF-8 text"),
    ],
)
def test_list_refuses(photos, text, message):
    with pytest.raises(DataError, match=message):
        list_from_file(write(photos, text))


def test_no_list_file(tmp_path):
    with pytest.raises(DataError, match=r"there is no list file .*/none.txt"):
        from_list(tmp_path / "none.txt", 8)
    with pytest.raises(DataError, match="cannot be read as UTF-8 text"):
        from_list(tmp_path, 8)
