"""JSON in streamed text: followed to its end, and what models get wrong in it corrected."""

import json
from collections.abc import Sequence
from typing import Final

from app.parsing.tool_call_reader import BLANKS, CallText, NotCallSyntax, Steps, Write

_CLOSERS: Final = {"{": "}", "[": "]"}
# Characters that may stand before a value.
_BEFORE_VALUE: Final = ":,["


def escaped(text: str) -> str:
    """Return a text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def pass_json(text: CallText, write: Write, ends: Sequence[str] = ()) -> Steps[str]:
    """Pass one value on as it is written; return "", or the end marker that cuts it short.

    An end marker inside a string is part of the string.  Elsewhere it ends the value, and the
    brackets that are missing are added; so does an end marker after what is no JSON, which is
    passed on unchanged, because what has been passed on cannot be revoked.

    Raises:
        NotCallSyntax: it is no JSON, and there is no end marker.
    """
    closers: list[str] = []
    before = ":"
    while True:
        character = yield from text.peek()
        if not closers and _is_scalar(before) and not _is_scalar(character):
            return ""
        if not _may_follow(before, character, closers):
            return (yield from pass_rest(text, write, ends, closers))
        write((yield from text.take()))
        if character in BLANKS:
            continue
        before = character
        if character == '"':
            yield from _pass_string(text, write)
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
        elif character in "]}":
            closers.pop()
        if not closers and character in '"]}':
            return ""


def json_value(text: CallText) -> Steps[str]:
    """Return one value as it is written."""
    parts: list[str] = []
    yield from pass_json(text, parts.append)
    return "".join(parts).strip()


def _is_scalar(character: str) -> bool:
    """True for a character of a number, `true`, `false` or `null`."""
    return character.isalnum() or character in "+-."


def _may_follow(before: str, character: str, closers: Sequence[str]) -> bool:
    if character in BLANKS:
        return True
    if character == '"':
        return before in _BEFORE_VALUE or before == "{"
    if character in _CLOSERS:
        return before in _BEFORE_VALUE
    if character in "]}":
        return closers[-1:] == [character]
    if character == ":":
        return before == '"'
    if character == ",":
        return bool(closers) and before not in ":,{["
    return _is_scalar(character) and (before in _BEFORE_VALUE or _is_scalar(before))


def _pass_string(text: CallText, write: Write) -> Steps[None]:
    """Pass on a string after its first quote."""
    is_escaped = False
    while True:
        character = yield from text.take()
        # In JSON, control characters inside strings must be escaped.
        write(character if character >= " " else escaped(character))
        if character == '"' and not is_escaped:
            return
        is_escaped = character == "\\" and not is_escaped


def pass_rest(
    text: CallText, write: Write, ends: Sequence[str], closers: Sequence[str]
) -> Steps[str]:
    """Pass on what is left up to an end marker.

    Where that is nothing, the missing closers are added, or an empty object for no value at all.
    """
    if not ends:
        raise NotCallSyntax
    rest = 0

    def count(part: str) -> None:
        nonlocal rest
        rest += len(part)
        write(part)

    marker = yield from text.until(*ends, write=count)
    if rest == 0:
        write("".join(reversed(closers)) or "{}")
    return marker
