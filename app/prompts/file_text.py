"""The text of a file in a prompt."""

from base64 import b64decode
from collections.abc import Sequence
from typing import Final

from app.prompts.images.image_marks import PdfPage, Source, joined

_DATA: Final = "data:"
_PDF: Final = b"%PDF-"
# Within so many bytes readers look for the beginning of a PDF.
_PDF_HEAD: Final = 1024
# The limit in characters of a name that a message repeats.
_MAX_NAME: Final = 100


class UnreadableFile(Exception):
    """A file whose text cannot be had here; the message says why."""


def decoded(data: str) -> bytes:
    """Return the file that a `data:` URL holds, or base64 alone.

    Raises:
        UnreadableFile: it is no base64.
    """
    if data[: len(_DATA)].lower() == _DATA:
        data = data.partition(",")[2]
    try:
        return b64decode("".join(data.split()), validate=True)
    except ValueError:
        raise UnreadableFile("the file is not valid base64") from None


def file_text(data: bytes, name: str | None) -> str:
    """Return what a prompt has of a file: its text, with its name.

    Raises:
        UnreadableFile: it is no text.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UnreadableFile(
            f"{shown_name(name)} is no PDF and no text in UTF-8, and others cannot be read here"
        )
    return joined(document([text], name))


def is_pdf(data: bytes) -> bool:
    return _PDF in data[:_PDF_HEAD]


def pdf_text(pages: Sequence[str | PdfPage], name: str | None) -> str:
    """Return what a prompt has of a PDF: the texts of its pages, or marks of them, with its name."""
    lines: list[str | Source] = []
    for number, page in enumerate(pages, 1):
        lines.append(f"<page {number}>")
        if page:
            lines.append(page if isinstance(page, str) else page.mark)
    return joined(document(lines, name))


def shown_name(name: str | None) -> str:
    """Return how messages name a file."""
    return "the file" if name is None else f"the file {name[:_MAX_NAME]!r}"


def document(parts: Sequence[str | Source], name: str | None) -> list[str | Source]:
    """Return the parts of a document between lines that tell where it is, and its name."""
    attribute = "" if name is None else f' name="{name.replace(chr(34), chr(39))}"'
    return [f"<document{attribute}>", *parts, "</document>"]
