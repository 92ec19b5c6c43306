"""Bodies that are no JSON, that are no request, or that are made to be slow to read."""

from typing import Final

from tests.support.hostile.apis import (
    CHAT,
    COMPLETIONS,
    COUNT,
    MESSAGES,
    RESPONSES,
    Attack,
    Attacks,
    Body,
    chat,
    chat_with,
    filled,
    nested,
    to,
)

_JSON: Final[dict[str, Body]] = {
    "lists in lists": lambda: b"[" * 100_000,
    "lists in lists, as long as may be": lambda: filled("", "[", ""),
    "objects in objects": lambda: b'{"a":' * 100_000,
    "deep messages": lambda: b'{"messages":' + nested(900).encode() + b"}",
    "deep nothing": lambda: chat_with("x", nested(2000)),
    "many lists": lambda: filled('{"messages": [', "[],", "1]}"),
    "many lists in lists": lambda: filled('{"x": [', "[[[[1]]]],", "1]}"),
    "many deep lists": lambda: filled('{"x": [', nested(900) + ",", "1]}"),
    "many objects": lambda: filled('{"messages": [', "{},", "1]}"),
    "many keys": lambda: ("{" + ",".join(f'"{i}":1' for i in range(370_000)) + "}").encode(),
    "many numbers": lambda: filled('{"x": [', "1,", "1]}"),
    "many long numbers": lambda: filled('{"x": [', "9" * 4300 + ",", "1]}"),
    "many escapes": lambda: filled('{"x": "', "\\u0061", '"}'),
    "the same key again": lambda: b'{"messages": [], "max_tokens": 1, "messages": 1}',
    "empty": lambda: b"",
    "blanks": lambda: filled("", " ", ""),
    "null": lambda: b"null",
    "a number": lambda: b"1",
    "a list": lambda: b"[]",
    "a text": lambda: b'"a"',
    "NaN": lambda: b"NaN",
    "cut": lambda: chat()[:-1],
    "more behind it": lambda: chat() + b"x",
    "single quotes": lambda: b"{'messages': []}",
    "a comment": lambda: b"/* */ {}",
    "NULs": lambda: b"\0" * 1000,
    "no UTF-8": lambda: b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "overlong UTF-8": lambda: b'{"messages": [{"role": "user", "content": "\xc0\x80"}]}',
    "a surrogate in UTF-8": lambda: b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "a long key": lambda: b'{"' + b"k" * 1_000_000 + b'": 1}',
}

_CONTENT_TYPES: Final = [
    "",
    "text/plain",
    "text/html",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/octet-stream",
    "application",
    "json",
    "\xff\xfe",
    ";" * 1000,
]


def json_bodies() -> Attacks:
    return {
        name: attack
        for path in (CHAT, COMPLETIONS, MESSAGES, COUNT, RESPONSES)
        for name, attack in to(path, _JSON).items()
    }


def content_types() -> Attacks:
    """Return good requests that do not say that they are JSON."""
    return {
        f"{path}: {kind[:20]!r}": Attack(path, chat, kind)
        for path in (CHAT, MESSAGES)
        for kind in _CONTENT_TYPES
    }
