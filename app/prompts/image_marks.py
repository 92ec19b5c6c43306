"""Images in the text of a conversation: a mark stands for each until the prompt is tokenized.

A text with marks can be joined, wrapped and rendered like any other, and the places of the images stay.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple

# Noncharacters of Unicode, which are for such uses, around the SHA-256 of what a client has sent.
_BEGIN: Final = "\ufdd0"
_END: Final = "\ufdd1"
MARK: Final = re.compile(f"{_BEGIN}[0-9a-f]{{64}}{_END}")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a client names it.

    value: a URL, or base64 if `is_base64`.
    detail: OpenAI's; how much of the image the model is to see.
    """

    value: str
    is_base64: bool = False
    detail: str = "auto"

    @property
    def mark(self) -> str:
        digest = sha256(f"{self.is_base64} {self.detail} {self.value}".encode()).hexdigest()
        return f"{_BEGIN}{digest}{_END}"


class RequestedImage(NamedTuple):
    """An image of a request, and the field that has it, for errors."""

    source: ImageSource
    param: str


class MarkedText(str):
    """A text with marks, and the images that they stand for."""

    __slots__ = ("images",)

    images: Mapping[str, ImageSource]

    @classmethod
    def of(cls, text: str, images: Mapping[str, ImageSource]) -> "MarkedText":
        made = cls(text)
        made.images = images
        return made


def images_in(text: str, param: str) -> dict[str, RequestedImage]:
    """Return the images of a text that a field has, by their marks."""
    images = text.images if isinstance(text, MarkedText) else {}
    return {mark: RequestedImage(source, param) for mark, source in images.items()}


def moved_first(content: str) -> str:
    """Return a text with its marks before all else."""
    marks = [match[0] for match in MARK.finditer(content)]
    return "".join(marks) + MARK.sub("", content)
