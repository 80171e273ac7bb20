"""Text, data and pictures in a form that is safe in a page, whatever they hold."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import unicodedata
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps

from opencon.data.pixel_budget import BUDGET

PICTURE_SIDE, PICTURE_QUALITY = 128, 70  # pixels of the longer side, JPEG: 3 kB for a photo (ours)
# These reorder or hide the text around them, so that one file name could pass for another.
BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def readable(text: object) -> str:
    """Text that any page can hold: bytes that were no UTF-8, control and direction characters appear as escapes."""

    def shown(letter: str) -> str:
        code = ord(letter)
        if 0xDC80 <= code <= 0xDCFF:
            return f"\\x{code - 0xDC00:02x}"  # os.fsdecode marks a byte that is no text this way
        is_odd = unicodedata.category(letter) in ("Cc", "Cs") or letter in BIDI_CONTROLS
        return f"\\u{code:04x}" if is_odd else letter

    whole = str(text)
    return whole if whole.isprintable() else "".join(map(shown, whole))  # printable text has none of these


def as_html(text: object) -> str:
    """Readable text for the content of an element or a quoted attribute."""
    return html.escape(readable(text), quote=True)


def as_json(data: object) -> str:
    """JSON for the content of a script element; nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def as_jpeg(load: Callable[[], Image.Image | None]) -> str:
    """A small JPEG in base64; empty where there is no picture, or none that can be decoded."""
    return base64.b64encode(jpeg(load, PICTURE_SIDE, PICTURE_QUALITY)).decode("ascii")


def jpeg(load: Callable[[], Image.Image | None], side: int, quality: int) -> bytes:
    """A JPEG whose longer side has at most these pixels; empty where there is no picture, or none that can be decoded."""
    try:
        image = load()
        if image is None:
            return b""
        image.draft("RGB", (2 * side, 2 * side))  # decodes a JPEG at a smaller size
        with BUDGET.take(image.width * image.height):
            image = _small(image, side)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality, optimize=True)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return b""  # the file could be read before, so it has changed since; the page says "no picture"
    return buffer.getvalue()


def _small(image: Image.Image, side: int) -> Image.Image:
    """Upright, RGB on white, and no longer side than this."""
    ImageOps.exif_transpose(image, in_place=True)  # no second copy: a picture may have 180 million pixels
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image if image.mode == "RGB" else image.convert("RGB")
    image.thumbnail((side, side))
    return image


def policy_hash(code: str) -> str:
    """The hash by which a content security policy allows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode("ascii")
