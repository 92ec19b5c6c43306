"""Files of images, decoded in this process: each is right, or rejected with a reason."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from batching.media.decode_process import (
    ANSWER,
    MAX_SIDE,
    REQUEST,
    Outcome,
    Rejected,
    answer,
    decode,
    prepare,
)
from tests.support.images import chunk, encoded, png, webp_header
from tests.support.rows import rows

LIMIT: Final = 40_000_000
RED: Final = [255, 0, 0]
WHITE: Final = [255, 255, 255]
BLACK: Final = [0, 0, 0]


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    prepare(str(LIMIT))


def pixels(data: bytes, max_pixels: int = LIMIT) -> list[Any]:
    picture = decode(data, max_pixels)
    assert picture.mode == "RGB"
    values: list[Any] = np.asarray(picture).tolist()
    return values


def grey(*values: int) -> list[list[int]]:
    return [[value] * 3 for value in values]


def key(*values: int) -> bytes:
    """Return PNG's transparent value."""
    return chunk(b"tRNS", struct.pack(f">{len(values)}H", *values))


def two(mode: str, *colours: Any) -> Image.Image:
    """Return a picture of one row."""
    image = Image.new(mode, (len(colours), 1))
    image.putdata(colours)
    return image


def palette(*colours: int) -> Image.Image:
    image = two("P", *range(len(colours) // 3))
    image.putpalette(colours)
    return image


SIXTEEN: Final = struct.pack(">HH", 0x1234, 0xFFFF)


@rows(
    ("data", "row"),
    [
        (png((2, 1), 1, 0, [b"\x40"]), grey(0, 255)),
        (png((2, 1), 1, 0, [b"\x40"], key(0)), grey(255, 255)),
        (png((4, 1), 2, 0, [b"\x1b"]), grey(0, 85, 170, 255)),
        (png((4, 1), 2, 0, [b"\x1b"], key(1)), grey(0, 255, 170, 255)),
        (png((2, 1), 4, 0, [b"\x1e"], key(1)), grey(255, 238)),
        (png((2, 1), 8, 0, [b"\x01\x02"], key(1)), grey(255, 2)),
        (png((2, 1), 16, 0, [SIXTEEN]), grey(0x12, 0xFF)),
        (png((2, 1), 16, 0, [SIXTEEN], key(0x1234)), grey(0xFF, 0xFF)),
        (png((2, 1), 16, 0, [SIXTEEN], key(0x1235)), grey(0x12, 0xFF)),
        (png((1, 1), 16, 2, [struct.pack(">3H", 0x1234, 0x8000, 0xFFFF)]), [[0x12, 0x80, 0xFF]]),
        (png((2, 1), 16, 2, [SIXTEEN * 3], key(0x1234, 0xFFFF, 0x1234)), [WHITE, [255, 18, 255]]),
        (png((2, 1), 8, 2, [b"\1\2\3\4\5\6"], key(1, 2, 3)), [WHITE, [4, 5, 6]]),
        (png((1, 1), 16, 4, [struct.pack(">2H", 0, 0x8000)]), grey(127)),
        (encoded(two("LA", (0, 0), (9, 255)), "PNG"), grey(255, 9)),
        (encoded(two("RGBA", (255, 0, 0, 128), (1, 2, 3, 0)), "PNG"), [[255, 127, 127], WHITE]),
        (encoded(palette(*RED, 1, 2, 3), "PNG"), [RED, [1, 2, 3]]),
        (encoded(palette(*RED, 1, 2, 3), "PNG", transparency=1), [RED, WHITE]),
        (encoded(palette(*RED, 0, 0, 0), "PNG", transparency=b"\xff\x80"), [RED, [127] * 3]),
        (encoded(palette(*RED, 1, 2, 3), "GIF", transparency=0), [WHITE, [1, 2, 3]]),
        (encoded(palette(*RED, 1, 2, 3), "GIF"), [RED, [1, 2, 3]]),
        (encoded(two("RGB", (1, 2, 3), (4, 5, 6)), "WEBP", lossless=True), [[1, 2, 3], [4, 5, 6]]),
        (encoded(two("RGBA", (1, 2, 3, 0)), "WEBP", lossless=True), [WHITE]),
        (encoded(Image.new("1", (1, 1), 1), "PNG"), [WHITE]),
    ],
)
def test_every_mode_becomes_the_right_rgb(data: bytes, row: list[list[int]]) -> None:
    assert pixels(data) == [row]


@rows(
    ("image", "colour"),
    [
        (Image.new("L", (8, 8), 77), [77, 77, 77]),
        (Image.new("RGB", (8, 8), (200, 30, 90)), [200, 30, 90]),
        # As Adobe's programs write it: inverted.
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), RED),
        (Image.new("CMYK", (8, 8), (0, 0, 0, 255)), BLACK),
    ],
)
def test_a_jpeg_has_the_colours_that_it_was_made_of(image: Image.Image, colour: list[int]) -> None:
    [[first, *_], *_] = pixels(encoded(image, "JPEG", quality=95))
    assert np.abs(np.subtract(first, colour)).max() <= 3


@rows("form", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_several_frames_it_is_the_first(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    assert getattr(Image.open(BytesIO(data)), "n_frames", 1) == 3
    assert np.abs(np.subtract(pixels(data), RED)).max() <= 3


UPRIGHT: Final = np.arange(18, dtype=np.uint8).reshape(2, 3, 3) * 10
# By Exif's orientation: how the upright picture is stored.
STORED: Final[dict[int, Callable[[Any], Any]]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
    9: lambda a: a,
}


@rows("form", ["PNG", "WEBP"])
def test_it_is_turned_as_exif_says(form: str) -> None:
    for orientation, stored in STORED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        image = Image.fromarray(np.ascontiguousarray(stored(UPRIGHT)))
        data = encoded(image, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
        assert pixels(data) == UPRIGHT.tolist(), orientation


def test_exif_that_cannot_be_read_turns_nothing() -> None:
    head = b"MM\0*\0\0\0\x08"
    text = b"\0\1\x01\x12\0\2\0\0\0\3up\0\0" + bytes(4)
    for exif in (head + b"\xff\xff", head + text, b"", b"?"):
        data = png((1, 1), 8, 0, [b"\7"], chunk(b"eXIf", exif))
        assert pixels(data) == [grey(7)]


def rejected(data: bytes) -> Outcome:
    with pytest.raises(Rejected) as caught:
        decode(data, LIMIT)
    return caught.value.outcome


PLAIN: Final = Image.effect_noise((64, 64), 90).convert("RGB")
BOMB: Final = zlib.compress(bytes(100 << 20), 9)
GIF_HEADER: Final = b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0)


@rows(
    ("data", "outcome"),
    [
        (b"", Outcome.OTHER_FORMAT),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Outcome.OTHER_FORMAT),
        (b"%PDF-1.7\n" + encoded(PLAIN, "PNG"), Outcome.OTHER_FORMAT),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", Outcome.OTHER_FORMAT),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", Outcome.OTHER_FORMAT),
        *((encoded(PLAIN, form), Outcome.OTHER_FORMAT) for form in ("TIFF", "BMP", "ICO", "PPM")),
        (encoded(PLAIN, "AVIF"), Outcome.OTHER_FORMAT),
        (encoded(PLAIN, "JPEG2000"), Outcome.OTHER_FORMAT),
        *((encoded(PLAIN, form)[:-1500], Outcome.DAMAGED) for form in ("JPEG", "PNG", "GIF")),
        (encoded(PLAIN, "WEBP", lossless=True)[:-1500], Outcome.DAMAGED),
        (encoded(PLAIN, "PNG")[:30], Outcome.OTHER_FORMAT),
        (png((0, 5), 8, 0), Outcome.OTHER_FORMAT),
        (png((100_000, 100_000), 8, 2), Outcome.TOO_MANY_PIXELS),
        (webp_header(1 << 15, 1 << 15), Outcome.TOO_MANY_PIXELS),
        (GIF_HEADER + b"," + bytes(9) + b"\2\0;", Outcome.TOO_MANY_PIXELS),
        (png((LIMIT // 8000, 8001), 8, 0), Outcome.TOO_MANY_PIXELS),
        (png((30_000, 1), 8, 0, [bytes(30_000)]), Outcome.SIDE_TOO_LONG),
        (png((1, MAX_SIDE + 1), 8, 0), Outcome.SIDE_TOO_LONG),
        (png((1, 1), 8, 0, [b"\0"], chunk(b"zTXt", b"a\0\0" + BOMB)), Outcome.DAMAGED),
        (png((1, 1), 8, 0, [b"\0"], chunk(b"iCCP", b"a\0\0" + BOMB)), Outcome.DAMAGED),
        (png((1, 1), 8, 0, [b"\0"], chunk(b"iTXt", b"a\0\1\0\0\0" + BOMB)), Outcome.DAMAGED),
        # Pixels that the rows do not hold.
        (png((6000, 6000), 8, 2, [b"\0"]), Outcome.DAMAGED),
    ],
)
def test_what_is_hostile_or_no_picture_is_rejected(data: bytes, outcome: Outcome) -> None:
    assert rejected(data) == outcome


@rows(
    "data",
    [
        png((1, 1), 8, 2, [b"\xff\0\0"]) + b"PK\x03\x04<script>alert(1)</script>",
        encoded(palette(*RED), "GIF") + b"%PDF-1.7",
        png((1, 1), 8, 2, [b"\xff\0\0"], chunk(b"tEXt", b"a\0<svg onload='alert(1)'/>")),
        # More rows than the header says, as a bomb.
        png((1, 1), 8, 2, [b"\xff\0\0", bytes(10 << 20)]),
    ],
)
def test_what_is_a_picture_and_something_else_is_the_picture(data: bytes) -> None:
    assert pixels(data) == [[RED]]


@rows(
    ("size", "max_pixels", "expected"),
    [
        ((64, 48), 64 * 48, (64, 48)),
        ((64, 48), 16 * 12, (16, 12)),
        ((48, 64), 16 * 12, (12, 16)),
        ((64, 64), 1, (1, 1)),
        ((MAX_SIDE, 1), 100, (100, 1)),
        ((1, MAX_SIDE), 100, (1, 100)),
        ((1000, 10), 999, (316, 3)),
    ],
)
def test_a_picture_with_more_pixels_is_scaled_down(
    size: tuple[int, int], max_pixels: int, expected: tuple[int, int]
) -> None:
    for mode, form in (("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG")):
        data = encoded(Image.new(mode, size), form)
        assert decode(data, max_pixels).size == expected


def test_transparent_pixels_do_not_colour_their_neighbours_when_it_is_scaled() -> None:
    image = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 32, 64))
    values = np.asarray(decode(encoded(image, "PNG"), 16 * 16)).astype(int)
    # White or blue, or between the two, and so never with more red than green.
    assert np.abs(values[..., 0] - values[..., 1]).max() <= 1


def test_an_answer_says_what_became_of_the_file() -> None:
    data = encoded(Image.new("RGB", (2, 1), "red"), "PNG")
    answered = answer(REQUEST.pack(LIMIT) + data)
    assert ANSWER.unpack_from(answered) == (Outcome.DECODED, 1, 2)
    assert answered[ANSWER.size :] == bytes(RED) * 2
    assert answer(REQUEST.pack(LIMIT) + data[:9]) == ANSWER.pack(Outcome.OTHER_FORMAT, 0, 0)
