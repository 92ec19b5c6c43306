"""The text of a file in a prompt."""

from base64 import b64decode
from collections.abc import Sequence
from typing import Final

from app.prompts.image_marks import Source, joined

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
    shown = "the file" if name is None else f"the file {name[:_MAX_NAME]!r}"
    if _PDF in data[:_PDF_HEAD]:
        raise UnreadableFile(f"{shown} is a PDF, and a PDF cannot be read here: send its text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UnreadableFile(f"{shown} is no text in UTF-8, and others cannot be read here")
    return joined(document([text], name))


def document(parts: Sequence[str | Source], name: str | None) -> list[str | Source]:
    """Return the parts of a document between lines that tell where it is, and its name."""
    attribute = "" if name is None else f' name="{name.replace(chr(34), chr(39))}"'
    return [f"<document{attribute}>", *parts, "</document>"]
