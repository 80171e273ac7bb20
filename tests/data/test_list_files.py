"""List files: one image and its class a line."""

import pytest
from PIL import Image

from opencon.data.list_files import list_from_file
from opencon.data.sources import load_listing
from opencon.errors import DataError


def paint(path, color=(255, 0, 0)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), color).save(path)
    return path


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
    got = load_listing(list_from_file(write(photos, text)), 8)
    assert got.class_names == ("cat", "dog")
    assert got.classes.tolist() == [1, 0, 1, 0]
    assert got.images[:, 0, 0, 0].tolist() == [50, 0, 100, 150]
    assert got.files[2] == str(photos / "with space.png")


@pytest.mark.parametrize(
    "text",
    [
        'path,label\na.png,big cat\nwith space.png,dog\n"sub/größe \'x\', ""y"".png",dog\n',
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
    got = load_listing(list_from_file(write(photos, "a.png x\nb.png y\n./a.png x\n")), 8)
    assert got.classes.tolist() == [0, 1]
    assert got.problems == (f"{photos}/list.txt, line 3 repeats line 1",)


def test_unreadable_image_in_a_list(photos):
    (photos / "zero.png").touch()
    got = load_listing(list_from_file(write(photos, "zero.png x\na.png x\nb.png y\n")), 8)
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
        ("path,label\na.png,x\n\n,y\n", r"line 4 cannot be understood: ',y'. Expected a path"),
        ("path,label\nb,c.png,x\n", r"line 2 .*quote what holds a separator"),
        ('{"path": "a.png"}\n{"label": "x"}\n', r"line 2 cannot be understood: .* Expected a path"),
        ("path,label,truth\na.png,,x\na.png,,y\n", r"a.png is 'x' in line 2 and 'y' in line 3. Keep one"),
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
        load_listing(list_from_file(tmp_path / "none.txt"), 8)
    with pytest.raises(DataError, match="cannot be read as UTF-8 text"):
        load_listing(list_from_file(tmp_path), 8)
