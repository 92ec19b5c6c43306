"""Content that is text, or parts of it."""

from collections.abc import Callable, Mapping
from typing import Any

from app.api.schemas.fields import field_error
from app.prompts.images.image_marks import MarkedText, Source, joined

# Reads a part that is no text.
ReadPart = Callable[[Mapping[str, Any]], str | Source]


def join_parts(
    content: Any, fields: Mapping[str, str], others: Mapping[str, ReadPart] | None = None
) -> Any:
    """Return the text of a list of parts, with marks for its images and files, and anything else as it is.

    fields: the name of the text of a part, by its type.
    others: what reads a part that is no text, by its type.
    """
    if not isinstance(content, list):
        return content
    return joined([_part(part, fields, others or {}) for part in content])


def keep_marks(content: Any, validate: Callable[[Any], str]) -> str:
    """Validate a text, and return it with the images and files that it has."""
    text = validate(content)
    return MarkedText.of(text, content.sources) if isinstance(content, MarkedText) else text


def _part(part: Any, fields: Mapping[str, str], others: Mapping[str, ReadPart]) -> str | Source:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise field_error("a part must be an object with a type")
    if kind in others:
        return others[kind](part)
    if kind not in fields:
        known = "only text, images and files" if others else "only text"
        raise field_error(f"a part of type {kind[:40]!r} cannot be read here: {known}")
    if not isinstance(text := part.get(fields[kind]), str):
        raise field_error(f"a part of type {kind!r} must have a {fields[kind]}")
    return text
