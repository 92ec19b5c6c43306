"""Server-sent events as the page reads them."""

import json
from base64 import b64encode
from typing import Final

from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.page import Page
from tests.fuzz.target import Target, pieces_of

_WORDS: Final = (
    *(b"data: ", b"data:", b"\n\n", b"\n", b"\r\n", b": ping\n\n", b"event: a\n", b"[DONE]"),
    *('{"a": "é😀"}'.encode(), b"\xff", b"\xe2\x82", b"\xef\xbb\xbf", b"\0", b"\\u2028"),
)
_PAGE: Final = Page(cpu_seconds=1.0)


def run(data: bytes) -> None:
    """How the bytes are split decides nothing; and what the server writes is what is read."""
    assert _read([data]) == _read(pieces_of(data)), data
    payload = json.dumps(data.decode(errors="replace"), ensure_ascii=False)
    assert _read(pieces_of(f"data: {payload}\n\n".encode())) == [payload], payload


def _read(pieces: list[bytes]) -> list[str]:
    events: list[str] = _PAGE.ask("events", [b64encode(piece).decode() for piece in pieces])
    return events


TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS))
