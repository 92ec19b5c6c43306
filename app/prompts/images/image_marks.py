"""Images and files in the text of a conversation: a mark stands for each until the prompt is tokenized.

A text with marks can be joined, wrapped and rendered like any other, and the places of what they stand for stay.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Final, Literal, NamedTuple

# Noncharacters of Unicode, which are for such uses, around the SHA-256 of what a client has sent.
_BEGIN: Final = "\ufdd0"
_END: Final = "\ufdd1"
MARK: Final = re.compile(f"{_BEGIN}[0-9a-f]{{64}}{_END}")

_SEPARATOR: Final = "\n"  # vLLM's and llama.cpp's too


@dataclass(frozen=True)
class ImageSource:
    """An image as a client names it.

    value: a URL, base64, or the id of a file that the client has uploaded.
    detail: OpenAI's; how much of the image the model is to see.
    """

    value: str
    form: Literal["url", "base64", "file"] = "url"
    detail: str = "auto"

    @cached_property
    def mark(self) -> str:
        return _mark(f"{self.form} {self.detail} {self.value}")


@dataclass(frozen=True)
class FileSource:
    """A file whose text is to be in the prompt.

    value: the id of a file that the client has uploaded, or base64, also in a `data:` URL.
    name: None is the one that it was uploaded with.
    """

    value: str
    form: Literal["file", "base64"] = "file"
    name: str | None = None

    @cached_property
    def mark(self) -> str:
        return _mark(f"text {self.form} {self.name} {self.value}")


Source = ImageSource | FileSource


@dataclass(frozen=True)
class PdfFile:
    """A PDF that a request has.

    shown: how messages name it.
    """

    data: bytes
    shown: str

    @cached_property
    def digest(self) -> str:
        return sha256(self.data).hexdigest()


@dataclass(frozen=True)
class PdfPage:
    """A page of a PDF that is to be in the prompt as an image; the first has the number 1."""

    file: PdfFile
    number: int

    @cached_property
    def mark(self) -> str:
        return _mark(f"page {self.number} {self.file.digest}")

    @property
    def shown(self) -> str:
        return f"page {self.number} of {self.file.shown}"


class Attachment(NamedTuple):
    """An image or a file of a request, and the field that has it, for errors."""

    source: Source
    param: str


class MarkedText(str):
    """A text with marks, and what they stand for."""

    __slots__ = ("sources",)

    sources: Mapping[str, Source]

    @classmethod
    def of(cls, text: str, sources: Mapping[str, Source]) -> "MarkedText":
        made = cls(text)
        made.sources = sources
        return made


def joined(parts: Sequence[str | Source]) -> str:
    """Return the parts as one text with marks; adjacent texts are lines of their own."""
    text = ""
    sources: dict[str, Source] = {}
    is_after_text = False
    for part in parts:
        if isinstance(part, str):
            text += f"{_SEPARATOR if is_after_text else ''}{part}"
        else:
            sources[part.mark] = part
            text += part.mark
        is_after_text = isinstance(part, str)
    return MarkedText.of(text, sources) if sources else text


def split(text: str) -> list[str | Source]:
    """Return the parts of a text, none of them empty; `joined` makes the text of them again."""
    sources = text.sources if isinstance(text, MarkedText) else {}
    parts: list[str | Source] = []
    done = 0
    for match in MARK.finditer(text):
        if (source := sources.get(match[0])) is not None:
            parts += [str(text[done : match.start()]), source]
            done = match.end()
    return [part for part in (*parts, str(text[done:])) if part]


def attachments_in(text: str, param: str) -> dict[str, Attachment]:
    """Return what the marks of a text stand for that a field has."""
    sources = text.sources if isinstance(text, MarkedText) else {}
    return {mark: Attachment(source, param) for mark, source in sources.items()}


def filled(text: str, texts: Mapping[str, str]) -> str:
    """Return a text with texts in the places of their marks, in lines of their own; other marks stay."""

    def line(match: re.Match[str]) -> str:
        mark = match[0]
        return f"{_SEPARATOR}{texts[mark]}{_SEPARATOR}" if mark in texts else mark

    return MARK.sub(line, text)


def moved_first(content: str) -> str:
    """Return a text with its marks before all else."""
    marks = [match[0] for match in MARK.finditer(content)]
    return "".join(marks) + MARK.sub("", content)


def _mark(identity: str) -> str:
    return f"{_BEGIN}{sha256(identity.encode()).hexdigest()}{_END}"
