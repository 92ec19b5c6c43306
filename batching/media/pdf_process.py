"""Reads PDFs, as a worker of `batching.sandbox`: it must not import anything of the project.

The files come from clients, and PDFium is C++: one that overflows, or draws for ever, ends this process only.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import StrEnum
from math import sqrt
from typing import Any, Final

import pypdfium2
from pypdfium2 import raw

# Pixels of a point, which is 1/72 inch: more of them show no more of a scan.
_MAX_SCALE: Final = 300 / 72
# Pixels, as of an image.
_MAX_SIDE: Final = 16_384
_WHITE: Final = (255, 255, 255, 255)
# A password is missing, or the encryption is none that PDFium knows.
_ENCRYPTED: Final = (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY)
# PDFium ends lines with CR LF, and has STX or a noncharacter where a word is broken; other controls are of no use.
_BROKEN: Final = "-\n"
_PLAIN: Final[dict[int, str | None]] = {
    **{i: None for i in (*range(32), 127) if chr(i) not in "\t\n"},
    2: _BROKEN,
    0xFFFE: _BROKEN,
}
# A page with a letter; PDFium finds the objects of a file without a table of them.
_SAMPLE: Final = b"""%PDF-1.7
1 0 obj << /Pages 2 0 R >> endobj
2 0 obj << /Kids [3 0 R] /Count 1 >> endobj
3 0 obj << /Type /Page /Parent 2 0 R /Contents 4 0 R
/Resources << /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >> endobj
4 0 obj << /Length 27 >> stream
BT /F 9 Tf 9 9 Td (a) Tj ET
endstream endobj
trailer << /Root 1 0 R >>
"""


class Outcome(StrEnum):
    """What became of a file."""

    READ = "read"
    ENCRYPTED = "encrypted"
    DAMAGED = "damaged"
    TOO_MANY_PAGES = "too many pages"
    TOO_MUCH_TEXT = "too much text"


class Rejected(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def prepare() -> None:
    """Read a page in both ways: later, no module can be imported."""
    texts(_SAMPLE, max_pages=1, max_characters=1)
    picture(_SAMPLE, page=1, max_pixels=1)


def answer(message: bytes) -> bytes:
    """Return what was read of a file: a line of JSON, and behind it the pixels of a page.

    message: a line of JSON with the arguments of `texts` or of `picture`, and behind it the file.
    """
    line, _, data = message.partition(b"\n")
    arguments: dict[str, int] = json.loads(line)
    found: dict[str, Any] = {"outcome": Outcome.READ}
    pixels = b""
    try:
        if "page" in arguments:
            found["height"], found["width"], pixels = picture(data, **arguments)
        else:
            found["texts"] = texts(data, **arguments)
    except Rejected as error:
        found["outcome"] = error.outcome
    return json.dumps(found).encode() + b"\n" + pixels


def texts(data: bytes, max_pages: int, max_characters: int) -> list[str | None]:
    """Return the text of each page, in order: None if there is something on it but no text.

    Raises:
        Rejected: it is no such file, or one that has more of them.
    """
    found: list[str | None] = []
    with _opened(data) as document:
        if len(document) > max_pages:
            raise Rejected(Outcome.TOO_MANY_PAGES)
        for index in range(len(document)):
            with closing(_loaded(document, index)) as page:
                text = _text(page, max_characters)
            max_characters -= len(text or "")
            found.append(text)
    return found


def picture(data: bytes, page: int, max_pixels: int) -> tuple[int, int, bytes]:
    """Return the height, the width and the RGB pixels of a page, of which the first is 1.

    Raises:
        Rejected: the page cannot be drawn.
    """
    with _opened(data) as document, closing(_loaded(document, page - 1)) as drawn:
        width, height = _fitting(drawn.get_size(), max_pixels)
        bitmap = pypdfium2.PdfBitmap.new_native(
            width, height, raw.FPDFBitmap_BGR, rev_byteorder=True
        )
        bitmap.fill_rect(_WHITE, 0, 0, width, height)
        flags = raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER
        raw.FPDF_RenderPageBitmap(bitmap, drawn, 0, 0, width, height, 0, flags)
        return height, width, bytes(bitmap.buffer)


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    try:
        with pypdfium2.PdfDocument(data) as document:
            document.init_forms()
            yield document
    except pypdfium2.PdfiumError as error:
        is_encrypted = error.err_code in _ENCRYPTED
        raise Rejected(Outcome.ENCRYPTED if is_encrypted else Outcome.DAMAGED) from None


def _loaded(document: Any, index: int) -> Any:
    """Return a page, of which what is filled into its form is a part."""
    page = document[index]
    if document.formenv:
        raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
        page.close()
        page = document[index]
    return page


def _text(page: Any, max_characters: int) -> str | None:
    with closing(page.get_textpage()) as found:
        if found.count_chars() > max_characters:
            raise Rejected(Outcome.TOO_MUCH_TEXT)
        text: str = found.get_text_bounded().translate(_PLAIN).strip()
    is_blank = not raw.FPDFPage_CountObjects(page) and not raw.FPDFPage_GetAnnotCount(page)
    return text if text or is_blank else None


def _fitting(size: tuple[float, float], max_pixels: int) -> tuple[int, int]:
    """Return the width and the height in pixels of a page of so many points."""
    width, height = size
    scale = min(_MAX_SCALE, _MAX_SIDE / max(width, height), sqrt(max_pixels / (width * height)))
    columns = max(1, int(width * scale))
    rows = max(1, min(int(height * scale), max_pixels // columns))
    # A side cannot be shorter than 1, so the other one is.
    return min(columns, max_pixels // rows), rows
