"""Decodes images, as a worker of `batching.sandbox`: it must not import anything of the project.

The files come from clients, and decoders are C: one that overflows, or decodes for ever, ends this process only.
"""

import struct
import warnings
from collections.abc import Callable
from enum import IntEnum
from io import BytesIO
from typing import Final

from PIL import (
    Image,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

# What is imported is what Pillow needs not look for: a JPEG of several pictures is one for `MpoImagePlugin`.
_USED: Final = (JpegImagePlugin, MpoImagePlugin, WebPImagePlugin)
# By content.  Pillow reads many more, with as many decoders to attack.
_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
# Pixels: more than any camera has, and few enough for all that computes with them.
MAX_SIDE: Final = 16_384

# The most pixels of the result, then the file.
REQUEST: Final = struct.Struct(">Q")
# An outcome, the height and the width, then the pixels.
ANSWER: Final = struct.Struct(">BII")

_ORIENTATION: Final = 0x0112
# By Exif's orientation: what makes the picture upright.
_TRANSPOSITIONS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# A value of 16 bits as one of 8, as Pillow does with colours.
_HIGH_BYTE: Final = [value >> 8 for value in range(1 << 16)]
# Of PNG's raw modes: a transparent value in the units that pixels have here.  Pillow leaves it in those of the file.
_KEY_SCALES: Final[dict[str, Callable[[int], int]]] = {
    "L;2": lambda value: value * 85,
    "L;4": lambda value: value * 17,
    "RGB;16B": lambda value: value >> 8,
}


class Outcome(IntEnum):
    """What became of a file."""

    DECODED = 0
    OTHER_FORMAT = 1
    DAMAGED = 2
    TOO_MANY_PIXELS = 3
    SIDE_TOO_LONG = 4


class Rejected(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.name)
        self.outcome = outcome


def prepare(max_pixels: str) -> None:
    """Set the most pixels that a file may have, and read one of each format: later, no module can be imported."""
    # Pillow checks it as well: for WebP before it has memory for them.
    Image.MAX_IMAGE_PIXELS = int(max_pixels)
    # They are of what is about to be rejected, or of no concern.
    warnings.simplefilter("ignore")
    exif = Image.Exif()
    exif[_ORIENTATION] = 1
    for form in _FORMATS:
        file = BytesIO()
        Image.new("RGB", (2, 2)).save(file, form, exif=exif)
        decode(file.getvalue(), max_pixels=1)


def answer(message: bytes) -> bytes:
    """Return the pixels of a file, or why there are none."""
    (most,) = REQUEST.unpack_from(message)
    try:
        image = decode(message[REQUEST.size :], most)
    except Rejected as error:
        return ANSWER.pack(error.outcome, 0, 0)
    return ANSWER.pack(Outcome.DECODED, image.height, image.width) + image.tobytes()


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return the upright picture of a file in RGB, on white where it is transparent.

    It is that of the first frame, and is scaled down to `max_pixels` if it has more.

    Raises:
        Rejected: it is no such file, or one that is too large or damaged.
        MemoryError: it takes more memory than this process may have.
    """
    try:
        return _decoded(data, max_pixels)
    except (Rejected, MemoryError):
        raise
    except UnidentifiedImageError:
        raise Rejected(Outcome.OTHER_FORMAT) from None
    except Image.DecompressionBombError:
        raise Rejected(Outcome.TOO_MANY_PIXELS) from None
    except Exception:
        # Whatever decoders raise: of damaged files, and of text that grows without end.
        raise Rejected(Outcome.DAMAGED) from None


def _decoded(data: bytes, max_pixels: int) -> Image.Image:
    with Image.open(BytesIO(data), formats=_FORMATS) as image:
        _check(image.size)
        size = _fitting(image.size, max_pixels)
        _scale_key(image)
        if size != image.size:
            # A JPEG is decoded at the smallest of its scales that is not below this size.
            image.draft(None, size)
        image.load()
        picture = _scaled(_plain(image), size)
        orientation = _orientation(image)
    if picture.mode == "RGBA":
        white = Image.new("RGB", picture.size, "white")
        white.paste(picture, mask=picture)
        picture = white
    picture = picture.convert("RGB")
    if orientation in _TRANSPOSITIONS:
        picture = picture.transpose(_TRANSPOSITIONS[orientation])
    return picture


def _check(size: tuple[int, int]) -> None:
    width, height = size
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise Rejected(Outcome.TOO_MANY_PIXELS)
    if max(size) > MAX_SIDE:
        raise Rejected(Outcome.SIDE_TOO_LONG)


def _fitting(size: tuple[int, int], max_pixels: int) -> tuple[int, int]:
    """Return the size, or the largest of about its ratio that has at most so many pixels."""
    width, height = size
    if width * height <= max_pixels:
        return size
    ratio = (max_pixels / (width * height)) ** 0.5
    width, height = max(1, int(width * ratio)), max(1, int(height * ratio))
    # A side cannot be shorter than 1, so the other one is.
    width = max(1, min(width, max_pixels // height))
    return width, min(height, max_pixels // width)


def _scale_key(image: Image.Image) -> None:
    """Write the transparent value of a PNG in the units of its pixels."""
    key = image.info.get("transparency")
    if key is None or not isinstance(image, PngImagePlugin.PngImageFile):
        return
    scale = _KEY_SCALES.get(str(image.tile[0].args))
    if scale is not None:
        scaled = tuple(map(scale, key)) if isinstance(key, tuple) else scale(key)
        image.info["transparency"] = scaled


def _plain(image: Image.Image) -> Image.Image:
    """Return the picture in RGB or RGBA, or in another mode that has the same values when it is scaled."""
    key = image.info.get("transparency")
    if image.mode == "I;16":
        values = image.convert("I")
        grey = values.point(_HIGH_BYTE, "L").convert("RGB")
        if key is not None:
            grey.putalpha(values.point([255 * (v != key) for v in range(1 << 16)], "L"))
        return grey
    if key is not None or image.mode in ("LA", "PA"):
        return image.convert("RGBA")
    return image if image.mode in ("L", "RGB", "RGBA", "CMYK") else image.convert("RGB")


def _scaled(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    if picture.size == size:
        return picture
    return picture.resize(size, Image.Resampling.LANCZOS)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        # It is no part of the picture.
        return 1
