"""PDFs, read in this process: texts in order, pictures of pages, and reasons."""

import json
import struct
from typing import Any, Final

import numpy as np
import pytest

from batching.media.pdf_process import Outcome, Rejected, answer, picture, prepare, texts
from tests.support.pdfs import (
    ENCRYPTED,
    HELLO,
    SCAN,
    compressed,
    drawn,
    form,
    of_objects,
    of_tree,
    pdf,
    stream,
)
from tests.support.rows import rows

RED: Final = [255, 0, 0]
BLUE: Final = [0, 0, 255]
WHITE: Final = [255, 255, 255]


def read(data: bytes, max_pages: int = 9, max_characters: int = 999) -> list[str | None]:
    return texts(data, max_pages, max_characters)


def shown(data: bytes, max_pixels: int = 5000, page: int = 1) -> Any:
    height, width, pixels = picture(data, page, max_pixels)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


ANNOTATED: Final = "/Annots [<< /Type /Annot /Subtype /Square /Rect [9 9 20 20] >>]"
# Letters A and B that are an emoji, and one without a meaning.
MAPPED: Final = stream(
    b"1 beginbfchar <41> <D83DDE00> endbfchar 1 beginbfchar <42> <0001> endbfchar"
)
EMOJI: Final = of_objects(
    b"<< /Type /Catalog /Pages 2 0 R >>",
    b"<< /Type /Pages /Kids [3 0 R] /Count 1 /MediaBox [0 0 200 100] >>",
    b"<< /Type /Page /Parent 2 0 R /Contents 5 0 R /Resources << /Font << /F 4 0 R >> >> >>",
    b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 6 0 R >>",
    stream(b"BT /F 12 Tf 10 10 Td (ABA) Tj ET"),
    MAPPED,
)


@rows(
    ("data", "found"),
    [
        (form("/AP << /N 7 0 R >>"), ["Name:\nHello"]),
        (form(), ["Name:\nFilled"]),
        (pdf("One", "Two", "Three"), ["One", "Two", "Three"]),
        (pdf("a\nb  c"), ["a\nb c"]),
        (pdf("an exam-\nple"), ["an exam-\nple"]),
        (pdf("caf\xe9"), ["caf\xe9"]),
        (pdf("", None, "c", " "), ["", None, "c", None]),
        (drawn(stream(b"")), [""]),
        (drawn(stream(b""), page=ANNOTATED), [None]),
        (drawn(stream(b"0 0 m 9 9 l S")), [None]),
        (drawn(stream(SCAN + b" " + HELLO)), ["Hello"]),
        # What is not on the page is not read.
        (drawn(stream(b"BT /F 9 Tf 10 10 Td (in) Tj 0 300 Td (out) Tj ET")), ["in"]),
        (drawn(compressed(HELLO)), ["Hello"]),
        (EMOJI, ["\U0001f600\U0001f600"]),
        (b"\n" * 99 + pdf("a"), ["a"]),
        # The length of the stream is a lie.
        (pdf("a").replace(b"/Length 34", b"/Length 99999999"), ["a"]),
    ],
)
def test_each_page_has_its_text_in_order(data: bytes, found: list[str | None]) -> None:
    assert read(data) == found


def test_a_page_that_has_no_text_is_drawn() -> None:
    pixels = shown(pdf("a", None), page=2)
    assert pixels.shape == (50, 100, 3)
    assert pixels[0, 0].tolist() == RED
    assert pixels[0, -1].tolist() == BLUE
    assert pixels[-1, 0].tolist() == WHITE
    assert shown(drawn(stream(b""))).min() == 255


def test_a_page_is_upright() -> None:
    pixels = shown(drawn(stream(SCAN), page="/Rotate 90"))
    assert pixels.shape == (100, 50, 3)
    assert pixels[0, -1].tolist() == RED
    assert pixels[-1, -1].tolist() == BLUE


@rows(
    ("box", "max_pixels", "shape"),
    [
        # 300 dots an inch.
        ("0 0 72 144", 2_000_000, (600, 300)),
        ("0 0 7200 14400", 20_000, (200, 100)),
        ("0 0 14400 1", 2_000_000, (1, 16_384)),
        ("0 0 14400 1", 100, (1, 100)),
        ("0 0 1 14400", 100, (100, 1)),
        ("0 0 0.001 0.001", 100, (1, 1)),
        # None that is a page: it is US Letter then.
        ("0 0 0 0", 10_000, (113, 87)),
        ("0 0 1e38 1e38", 10_000, (113, 87)),
        ("5 5 1 1", 10_000, (16, 16)),
    ],
)
def test_a_picture_has_bounded_pixels(box: str, max_pixels: int, shape: tuple[int, int]) -> None:
    assert shown(pdf(None, box=box), max_pixels).shape == (*shape, 3)


HUGE: Final = stream(
    b"", "/Type /XObject /Subtype /Image /Width 60000 /Height 60000 /BitsPerComponent 8"
)


def test_a_picture_that_is_none_is_not_on_the_page() -> None:
    data = drawn(stream(SCAN), image=HUGE)
    assert read(data) == [None]
    assert shown(data).min() == 255


@rows(
    ("data", "outcome"),
    [
        (b"", Outcome.DAMAGED),
        (b"%PDF-1.7\n", Outcome.DAMAGED),
        (b"%PDF-1.7\n" + bytes(range(256)) * 99, Outcome.DAMAGED),
        (pdf("a")[:300], Outcome.DAMAGED),
        (pdf(), Outcome.DAMAGED),
        (of_tree("/Kids [2 0 R 2 0 R] /Count 2"), Outcome.DAMAGED),
        (of_tree("/Kids [3 0 R] /Count 9"), Outcome.DAMAGED),
        (of_objects(b"<< /Pages 2 0 R >>", b"[" * 9999 + b"]" * 9999), Outcome.DAMAGED),
        (ENCRYPTED, Outcome.ENCRYPTED),
        (of_tree("/Kids [3 0 R] /Count 1", "/Encrypt << /Filter /Other >>"), Outcome.ENCRYPTED),
        (pdf(*"abcdefghij"), Outcome.TOO_MANY_PAGES),
        (of_tree(f"/Kids [{'3 0 R ' * 9999}] /Count 9999"), Outcome.TOO_MANY_PAGES),
        (drawn(compressed(HELLO, times=200)), Outcome.TOO_MUCH_TEXT),
        (pdf(*["\n".join(["i" * 60] * 5)] * 4), Outcome.TOO_MUCH_TEXT),
    ],
)
def test_what_is_hostile_or_no_pdf_is_rejected(data: bytes, outcome: Outcome) -> None:
    with pytest.raises(Rejected) as caught:
        read(data)
    assert caught.value.outcome == outcome


def test_an_answer_says_what_became_of_the_file() -> None:
    prepare()

    def asked(data: bytes, **arguments: int) -> tuple[Any, bytes]:
        line, _, pixels = answer(json.dumps(arguments).encode() + b"\n" + data).partition(b"\n")
        return json.loads(line), pixels

    data = pdf("one\ntwo", None)
    found, _ = asked(data, max_pages=2, max_characters=9)
    assert found == {"outcome": "read", "texts": ["one\ntwo", None]}
    found, pixels = asked(data, page=2, max_pixels=2)
    assert found == {"outcome": "read", "height": 1, "width": 2}
    assert struct.unpack("6B", pixels)[0] > 0
    assert asked(data, max_pages=1, max_characters=9) == ({"outcome": "too many pages"}, b"")
    assert asked(b"", page=1, max_pixels=9) == ({"outcome": "damaged"}, b"")
