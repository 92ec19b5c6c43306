"""The arguments of calls as objects, for APIs that have them so."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from pydantic_core import from_json, to_json

from app.parsing.events import MessageEvent, ToolCallArguments, ToolCallStart
from app.parsing.json_text import refuse_constant

# Whole pairs and escaped backslashes come first, and stay.
_HALVES: Final = re.compile(
    r"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


def call_inputs(events: Iterable[MessageEvent]) -> list[str]:
    """Return the arguments of each call, which may have none, as the JSON of an object."""
    inputs: list[str] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            inputs.append("{}")
        elif isinstance(event, ToolCallArguments):
            inputs[-1] = call_input(event.text)
    return inputs


def call_input(text: str) -> str:
    """Return arguments as they are if they are an object, as a stream has them.

    Those of a call that was cut off are read as Anthropic's SDKs read a stream.  What is no object is returned in
    one, as Anthropic's documents advise clients to send it.
    """
    readable = _without_halves(text)
    if _is_object(readable):
        return readable
    with suppress(ValueError):
        value = from_json(readable, allow_inf_nan=False, allow_partial=True)
        if isinstance(value, dict):
            return to_json(value, inf_nan_mode="null").decode()
    return json.dumps({"INVALID_JSON": text})


def _is_object(text: str) -> bool:
    """Return whether a text is the JSON of an object, with numbers of any size."""
    try:
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _without_halves(text: str) -> str:
    """Replace escapes of half a surrogate pair, which JSON allows and no text can have."""
    return _HALVES.sub(lambda found: found[1] or r"\ufffd", text)
