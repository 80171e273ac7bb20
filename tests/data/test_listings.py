import os

import pytest
import torch
from PIL import Image

from opencon.data.listings import find_images, list_folder
from opencon.data.sources import load_listing
from opencon.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def paint(path, color=RED, size=(16, 16), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).convert(mode).save(path, **options)
    return path


def two_classes(root):
    for i in range(2):
        paint(root / "cat" / f"{i}.png", RED)
        paint(root / "dog" / f"{i}.png", BLUE)
    return root


def assert_color(image, color, within=3):
    middle = image[:, image.shape[1] // 2, image.shape[2] // 2].tolist()
    assert all(abs(a - b) <= within for a, b in zip(middle, color, strict=True)), middle


def test_folder(tmp_path):
    two_classes(tmp_path)
    paint(tmp_path / "dog" / "deep" / "er" / "z.JPG", BLUE)
    got = load_listing(list_folder(tmp_path), 8)
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
    got = load_listing(list_folder(str(tmp_path)), 8)
    assert got.class_names == ('b "q"', "ça va")
    assert sorted(os.path.basename(f) for f in got.files[:6]) == sorted(names)


def test_a_name_that_is_no_text_can_still_be_printed(tmp_path):
    two_classes(tmp_path)
    with open(os.fsencode(tmp_path) + b"/cat/\xff.png", "wb"):
        pass
    (line,) = load_listing(list_folder(tmp_path), 8).problems
    assert line.encode("utf-8").decode("utf-8").endswith("\N{REPLACEMENT CHARACTER}.png is empty")


def test_one_bad_image_is_set_aside(tmp_path):
    two_classes(tmp_path)
    (tmp_path / "cat" / "0.png").write_bytes(b"")
    paint(tmp_path / "stray.png")
    got = load_listing(list_folder(tmp_path), 8)
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
    got = load_listing(list_folder(tmp_path), 8)
    assert len(got) == 4
    assert got.problems == ()


def test_linked_folders_are_followed_but_not_in_circles(tmp_path):
    two_classes(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    for name in ("cat", "dog"):
        os.symlink(tmp_path / "real" / name, tmp_path / "linked" / name)
    os.symlink(tmp_path / "real" / "cat", tmp_path / "real" / "cat" / "again")
    paint(tmp_path / "elsewhere" / "z.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "real" / "dog" / "more")
    assert len(list_folder(tmp_path / "linked").paths) == 5
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
            lambda r: (two_classes(r), (r / "emu").mkdir(), (r / "emu" / "a.dng").touch()),
            r"emu holds no image \(found only 1 x .dng\).*\.jpg",
        ),
        (lambda r: (two_classes(r / "train"), two_classes(r / "val")), r"holds parts of a data set \(train, val\)"),
    ],
)
def test_folder_refuses(tmp_path, make, message):
    make(tmp_path / "photos")
    with pytest.raises(DataError, match=message):
        load_listing(list_folder(tmp_path / "photos"), 8)


def test_all_images_unreadable(tmp_path):
    for name in ("cat/a.jpg", "dog/b.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"none of the 2 images can be read. The first: .*a.jpg is not an image"):
        load_listing(list_folder(tmp_path), 8)


def test_a_class_without_a_readable_image(tmp_path):
    two_classes(tmp_path)
    (tmp_path / "cat" / "0.png").write_bytes(b"")
    paint(tmp_path / "dog" / "0.png").write_text("x")
    (tmp_path / "dog" / "1.png").write_text("x")
    with pytest.raises(DataError, match=r"class 'dog' has no readable image. One of its files: .*dog/0.png is not an"):
        load_listing(list_folder(tmp_path), 8)


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
