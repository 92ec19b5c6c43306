"""The client against a server on a real socket."""

import threading

import pytest

from scripts.bench.load.client import ChatClient, RequestRecord
from tests.support.fake_server import (
    DONE,
    ROLE,
    Body,
    FakeServer,
    Reply,
    canned,
    data,
    fake_server,
    text_chunk,
    usage_chunk,
)

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "one two three"}]
ONE, TWO = text_chunk("one "), text_chunk("two", "stop")


async def ask(server: FakeServer, *, patience: float = 10) -> RequestRecord:
    async with ChatClient(server.url, "fake-model", patience) as client:
        return await client.ask(MESSAGES, 3)


async def completion_of(*lines: str, **how: int) -> RequestRecord:
    with fake_server(lambda body: Reply(lines, **how)) as server:
        return await ask(server)


async def test_a_completion_is_clocked_and_counted() -> None:
    with fake_server() as server:
        record = await ask(server)
    assert record.error is None
    assert record.text == "word0 word1 word2 "
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (3, 0)
    assert record.num_output_tokens == len(record.chunk_times) == 3
    times = (record.sent, *record.chunk_times, record.ended)
    assert list(times) == sorted(times)
    assert server.bodies == [
        {
            "model": "fake-model",
            "messages": MESSAGES,
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_usage_outranks_the_number_of_chunks() -> None:
    record = await completion_of(ONE, TWO, usage_chunk(9, 7), DONE)
    assert (record.num_output_tokens, record.num_prompt_tokens) == (7, 9)
    assert record.num_cached_tokens is None


async def test_without_usage_chunks_are_counted() -> None:
    record = await completion_of(ROLE, ONE, TWO, DONE)
    assert (record.num_output_tokens, record.num_prompt_tokens) == (2, None)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_thoughts_are_tokens_but_no_part_of_the_text(field: str) -> None:
    thought = data({"choices": [{"delta": {field: "hm"}}]})
    record = await completion_of(thought, ONE, DONE)
    assert (len(record.chunk_times), record.text) == (2, "one ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "no such model"}}', "HTTP 404: no such model"),
        ('{"error": "no such model"}', "HTTP 404: no such model"),
        ('{"detail": "no such model"}', "HTTP 404: no such model"),
        ("no such\n  model", "HTTP 404: no such model"),
        ("[1]", "HTTP 404: [1]"),
        ("", "HTTP 404: no message"),
    ],
)
async def test_an_error_body_is_the_error(body: str, message: str) -> None:
    record = await completion_of(body, status=404)
    assert record.error == message


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((ONE, TWO), "the stream ended without [DONE]"),
        ((ROLE, DONE), "the completion has no text"),
        ((ONE, data({"error": {"message": "out of memory"}}), DONE), "out of memory"),
        (("data: {half\n",), "a chunk is no JSON: {half"),
        (("data: [1]\n",), "a chunk is no object: [1]"),
        (('data: {"choices": [1]}\n',), 'not a chunk: {"choices": [1]}'),
    ],
)
async def test_a_broken_stream_is_an_error(lines: tuple[str, ...], message: str) -> None:
    record = await completion_of(*lines)
    assert record.error == message


async def test_a_connection_that_is_cut_is_an_error() -> None:
    record = await completion_of(ONE, num_missing=5)
    assert record.error is not None
    assert record.error.startswith("RemoteProtocolError: ")
    assert len(record.chunk_times) == 1


async def test_a_server_that_sends_nothing_times_out() -> None:
    gate = threading.Event()

    def wait(body: Body) -> Reply:
        gate.wait()
        return canned(body)

    with fake_server(wait) as server:
        record = await ask(server, patience=0.05)
        gate.set()
    assert record.error == "not complete within 0.05 s"
