import os

import pytest
import torch
from PIL import Image

from opencon.data.list_files import list_from_file
from opencon.data.listings import find_images, list_folder
from opencon.data.sources import from_folder, from_list
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
