"""Reads JSON of foreign files, in which readers could see different things."""

import json
from typing import Any


def read_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: says what it is instead, in words that follow the name of what is read.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except _TwiceError as error:
        raise ValueError(f"has the key {error.args[0]!r:.100} twice") from None
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


class _TwiceError(Exception):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _TwiceError(key)
        values[key] = value
    return values
