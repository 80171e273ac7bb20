import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from opencon.report.embed import as_html, as_jpeg, as_json, readable
from tests.report.pages import HOSTILE

# --- pictures ---------------------------------------------------------------------------------------------------------


def decoded(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def center(image):
    return image.getpixel((image.width // 2, image.height // 2))


def test_pictures_are_small_jpegs_that_keep_their_shape():
    image = decoded(as_jpeg(lambda: Image.new("RGB", (1000, 500), (200, 30, 30))))
    assert (image.format, image.size) == ("JPEG", (128, 64))
    np.testing.assert_allclose(center(image), (200, 30, 30), atol=4)


@pytest.mark.parametrize(
    ("image", "want"),
    [
        (Image.new("RGBA", (50, 50), (0, 0, 0, 0)), 255),  # transparent: on white
        (Image.fromarray(np.full((50, 50), 32896, np.uint16)), 128),
        (Image.fromarray(np.full((50, 50), 32896, np.int32)), 128),
        (Image.new("L", (50, 50), 77), 77),
        (Image.new("CMYK", (50, 50), (0, 0, 0, 255)), 0),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_pictures_of_any_mode(image, want):
    np.testing.assert_allclose(center(decoded(as_jpeg(lambda: image))), want, atol=4)


def test_a_phone_photo_is_upright():
    image = Image.new("RGB", (80, 40))
    image.getexif()[0x0112] = 6  # turned by a quarter
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=image.getexif())
    assert decoded(as_jpeg(lambda: Image.open(buffer))).size == (40, 80)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_survives_as_text(name):
    assert not set(as_html(name)) & set("<>\"'")
    assert not set(as_json([name])) & set("<>&")
    assert json.loads(as_json([readable(name)])) == [readable(name)]
    readable(name).encode()  # no lone surrogates


def test_readable_shows_what_cannot_be_printed():
    assert readable("a\udcffb") == "a\\xffb"
    assert readable("a\ud800b") == "a\\ud800b"
    assert readable("a\nb\x00") == "a\\u000ab\\u0000"
    assert readable("invoice\u202egpj.exe") == "invoice\\u202egpj.exe"
    assert readable("日本語 🦊 👨\u200d👩") == "日本語 🦊 👨\u200d👩"
