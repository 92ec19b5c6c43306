"""Reads a stream of server-sent events as the OpenAI API sends it: JSON chunks, then `[DONE]`."""

import json
from collections.abc import Iterator
from typing import Any, Final

# A chunk's fields are of many types.
Chunk = dict[str, Any]

_MAX_SHOWN: Final = 300


class BadChunk(Exception):
    """An event's data is no JSON object."""


class SSEReader:
    """Finds the chunks in a stream, whatever pieces it arrives in.

    Every event has one `data` line; comments and other fields are skipped.
    """

    def __init__(self) -> None:
        self._incomplete_line = b""
        self.is_done = False

    def feed(self, piece: bytes) -> Iterator[Chunk]:
        """Yield the chunks whose lines the piece completes.

        Raises:
            BadChunk: what came is no JSON object.
        """
        *lines, self._incomplete_line = (self._incomplete_line + piece).split(b"\n")
        for line in lines:
            field, _, value = line.partition(b":")
            if field != b"data":
                continue
            if value.strip() == b"[DONE]":
                self.is_done = True
            else:
                yield _chunk_in(value)


def chunks_in(stream: bytes) -> list[Chunk]:
    """Return the chunks of a complete stream; one without `[DONE]` is a failed assertion."""
    reader = SSEReader()
    chunks = list(reader.feed(stream))
    assert reader.is_done, f"the stream does not end with [DONE]: {stream[-_MAX_SHOWN:]!r}"
    return chunks


def _chunk_in(value: bytes) -> Chunk:
    text = value.decode(errors="replace").strip()[:_MAX_SHOWN]
    try:
        chunk = json.loads(value)
    except ValueError:
        raise BadChunk(f"a chunk is no JSON: {text}") from None
    if not isinstance(chunk, dict):
        raise BadChunk(f"a chunk is no object: {text}")
    return chunk
