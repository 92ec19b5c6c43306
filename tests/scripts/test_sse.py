import json
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from scripts.sse import BadChunk, SSEReader, chunks_in

CHUNKS = [{"text": "é"}, {"text": "a: b\n\ndata: c"}]
STREAM = "".join(
    [
        ": a comment\n\n",
        *(f"data: {json.dumps(chunk)}\r\n\n" for chunk in CHUNKS),
        "data: [DONE]\n\n",
    ]
).encode()


@given(st.sets(st.integers(0, len(STREAM))))
def test_any_split_of_a_stream_gives_the_same_chunks(cuts: set[int]) -> None:
    reader = SSEReader()
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:stop] for start, stop in pairwise(edges)]
    assert [chunk for piece in pieces for chunk in reader.feed(piece)] == CHUNKS
    assert reader.is_done


def test_a_stream_that_is_cut_is_not_done() -> None:
    reader = SSEReader()
    assert list(reader.feed(STREAM[:-8])) == CHUNKS
    assert not reader.is_done
    with pytest.raises(AssertionError, match="does not end"):
        chunks_in(STREAM[:-8])


@pytest.mark.parametrize("data", ["{half", "[1]", ""])
def test_what_is_no_json_object_is_rejected(data: str) -> None:
    with pytest.raises(BadChunk, match="a chunk is no "):
        chunks_in(f"data: {data}\n\n".encode())
