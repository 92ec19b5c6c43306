"""Content that is text, or parts of it."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

from app.api.schemas.fields import field_error
from app.prompts.image_marks import ImageSource, MarkedText

_SEPARATOR: Final = "\n"  # vLLM's and llama.cpp's too

# Reads a part that is an image.
ReadImage = Callable[[Mapping[str, Any]], ImageSource]


def join_parts(
    content: Any, fields: Mapping[str, str], images: Mapping[str, ReadImage] | None = None
) -> Any:
    """Return the text of a list of parts, with marks for its images, and anything else as it is.

    fields: the name of the text of a part, by its type.
    images: what reads an image, by the type of its part.
    """
    if not isinstance(content, list):
        return content
    parts = [_part(part, fields, images or {}) for part in content]
    text = ""
    for before, part in pairwise([None, *parts]):
        is_apart = isinstance(before, str) and isinstance(part, str)
        text += f"{_SEPARATOR if is_apart else ''}{_text(part)}"
    found = {part.mark: part for part in parts if isinstance(part, ImageSource)}
    return MarkedText.of(text, found) if found else text


def keep_marks(content: Any, validate: Callable[[Any], str]) -> str:
    """Validate a text, and return it with the images that it has."""
    text = validate(content)
    return MarkedText.of(text, content.images) if isinstance(content, MarkedText) else text


def _text(part: str | ImageSource | None) -> str:
    return part.mark if isinstance(part, ImageSource) else part or ""


def _part(
    part: Any, fields: Mapping[str, str], images: Mapping[str, ReadImage]
) -> str | ImageSource:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise field_error("a part must be an object with a type")
    if kind in images:
        return images[kind](part)
    if kind not in fields:
        known = "text and images" if images else "text"
        message = f"a part of type {kind[:40]!r} cannot be read: this model takes {known} only"
        raise field_error(message)
    if not isinstance(text := part.get(fields[kind]), str):
        raise field_error(f"a part of type {kind!r} must have a {fields[kind]}")
    return text
