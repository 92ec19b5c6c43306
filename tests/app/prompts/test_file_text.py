"""The text of files in prompts."""

from base64 import b64encode

import pytest

from app.prompts.file_text import UnreadableFile, decoded, file_text, is_pdf, pdf_text
from app.prompts.images.image_marks import PdfFile, PdfPage
from tests.support.rows import rows


@rows(
    ("data", "name", "text"),
    [
        (b"a", "a.py", '<document name="a.py">\na\n</document>'),
        ("\ufeffé".encode(), None, "<document>\né\n</document>"),
        (b"a", '"', '<document name="\'">\na\n</document>'),
    ],
)
def test_a_text_has_its_name(data: bytes, name: str | None, text: str) -> None:
    assert file_text(data, name) == text


@rows(
    ("data", "reason"),
    [
        (b"\xff", "the file 'a' is no PDF and no text in UTF-8"),
        (b"a\0b", "the file 'a' is no PDF and no text in UTF-8"),
    ],
)
def test_what_is_no_text_is_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableFile, match=reason):
        file_text(data, "a")


def test_a_pdf_is_known_by_its_head() -> None:
    assert is_pdf(b"\n" * 1019 + b"%PDF-1.4")
    assert not is_pdf(b"\n" * 1020 + b"%PDF-1.4")


def test_a_pdf_has_its_pages_in_order() -> None:
    scan = PdfPage(PdfFile(b"", "the file"), 3)
    text = pdf_text(["a\nb", "", scan, "c"], "d.pdf")
    pages = f"<page 1>\na\nb\n<page 2>\n<page 3>\n{scan.mark}\n<page 4>\nc"
    assert text == f'<document name="d.pdf">\n{pages}\n</document>'


def test_base64_may_be_in_a_url() -> None:
    data = b64encode(b"abc").decode()
    for text in (data, f"data:text/plain;base64,{data}", f"DATA:,{data[:2]}\n{data[2:]}"):
        assert decoded(text) == b"abc"
    with pytest.raises(UnreadableFile, match="not valid base64"):
        decoded("data:text/plain;base64,?")
