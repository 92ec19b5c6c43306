"""Content that is text, or parts of it."""

from collections.abc import Mapping
from typing import Any, Final

from app.api.schemas.fields import field_error

_SEPARATOR: Final = "\n"  # vLLM's and llama.cpp's too


def join_parts(content: Any, fields: Mapping[str, str]) -> Any:
    """Return the text of a list of parts, and anything else as it is.

    fields: the name of the text of a part, by its type.
    """
    if not isinstance(content, list):
        return content
    return _SEPARATOR.join(_text_of(part, fields) for part in content)


def _text_of(part: Any, fields: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise field_error("a part must be an object with a type")
    if kind not in fields:
        message = f"a part of type {kind[:40]!r} cannot be read: this model takes text only"
        raise field_error(message)
    if not isinstance(text := part.get(fields[kind]), str):
        raise field_error(f"a part of type {kind!r} must have a {fields[kind]}")
    return text
