"""A stream has a status once something is generated; until then whatever ends it is an error as of any other request."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import anyio
import httpx
import pytest
from pydantic import ValidationError

from app.api import sse
from app.server_state import ServerState
from app.settings import Settings
from app.storage.responses.store import ResponseStore
from batching import EngineClosed, EngineError, EngineStalled, EngineStopped
from batching.steps.step_plan import SliceOutput, StepPlan
from scripts.server_process import wait_until
from tests.support.fill_in import QWEN, Marked
from tests.support.raw_http import LONG, SHORT, Connection, running, split
from tests.support.speaker import (
    MODEL_ID,
    Breaking,
    Gate,
    Served,
    Speaker,
    served,
    speaking_app,
    speaking_manager,
)

pytestmark = pytest.mark.anyio

CHATS: Final = "/v1/chat/completions"
TURNS: Final = [{"role": "user", "content": "Hi"}]
STREAMS: Final[dict[str, dict[str, Any]]] = {
    CHATS: {"messages": TURNS},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 100},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/chat": {"messages": TURNS},
    "/api/generate": {"prompt": "Hi"},
}
# What comes before the first token.
OPENINGS: Final = {
    CHATS: b'"role":"assistant"',
    "/v1/responses": b"response.in_progress",
    "/v1/messages": b"event: ping",
}


class Reading(Speaker):
    """Reads no prompt until the gate opens."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        self._gate.wait()
        return super().run(plan)


class BreakingReader(Breaking):
    def run(self, plan: StepPlan) -> list[SliceOutput]:
        self._gate.wait()
        return super().run(plan)


@asynccontextmanager
async def reading(runner: type[Speaker] = Reading, **settings: Any) -> AsyncIterator[Served]:
    async with served(
        b"", runner=runner, tokenizer=Marked(*QWEN), is_gated=True, **settings
    ) as server:
        yield server


async def ask(server: Served, path: str, **fields: Any) -> httpx.Response:
    return await server.post(path, {"model": MODEL_ID, "stream": True} | STREAMS[path] | fields)


def without_id(body: dict[str, Any]) -> dict[str, Any]:
    body.pop("request_id", None)
    return body


@pytest.mark.parametrize("path", STREAMS)
async def test_a_failure_before_the_first_token_is_that_of_a_whole_answer(path: str) -> None:
    async with served(b"", runner=Breaking, tokenizer=Marked(*QWEN)) as server:
        streamed = await ask(server, path)
        whole = await ask(server, path, stream=False)
        assert await server.num_unfinished() == 0
        assert server.service.admission.num_requests == 0
    assert streamed.status_code == whole.status_code == 500
    assert streamed.headers["content-type"] == whole.headers["content-type"]
    assert without_id(streamed.json()) == without_id(whole.json())


@pytest.mark.parametrize("path", STREAMS)
async def test_a_shutdown_before_the_first_token_is_a_503(path: str) -> None:
    response = await failed_while_reading(path, EngineClosed())
    assert response.status_code == 503
    assert response.headers["retry-after"] == "10"


@pytest.mark.parametrize("error", [EngineStopped(), EngineStalled()])
async def test_an_engine_that_dies_or_stalls_before_the_first_token_is_a_503(
    error: EngineError,
) -> None:
    response = await failed_while_reading(CHATS, error)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == str(error)


async def failed_while_reading(path: str, error: EngineError) -> httpx.Response:
    async with reading() as server:
        asked = asyncio.create_task(ask(server, path))
        await anyio.to_thread.run_sync(server.gate.reached.wait)
        server.engine.fail_streams(error)
        response = await asked
        assert server.service.admission.num_requests == 0
    return response


async def test_a_time_limit_that_passes_before_the_first_token_is_a_504() -> None:
    async with reading() as server:
        server.manager.get(MODEL_ID)  # it is loaded
        response = await ask(server, CHATS, timeout=0.01)
        assert await server.num_unfinished() == 0
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"


async def test_a_response_that_fails_before_the_first_token_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[object] = []
    monkeypatch.setattr(ResponseStore, "put", lambda *arguments: stored.append(arguments))
    async with served(b"", runner=Breaking, tokenizer=Marked(*QWEN)) as server:
        await ask(server, "/v1/responses", store=True)
    assert stored == []


# On a real socket


class Reader:
    """The app on a real socket, with a model that has read no prompt yet."""

    def __init__(self, connection: Connection, gate: Gate, service: ServerState) -> None:
        self.connection = connection
        self.gate = gate
        self.service = service

    def ask(self, path: str, **fields: Any) -> None:
        body = json.dumps({"model": MODEL_ID, "stream": True} | STREAMS[path] | fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.connection.send(f"{head}{kind}".encode() + body)
        assert self.gate.reached.wait(LONG)


@contextmanager
def reader(runner: type[Speaker] = Reading, **settings: Any) -> Iterator[Reader]:
    gate = Gate(is_open=False)
    manager = speaking_manager(
        b"ok", runner=runner, tokenizer=Marked(*QWEN), gate=gate, num_blocks=1024
    )
    with speaking_app(manager, **settings) as app, running(app) as site:
        manager.get(MODEL_ID)
        with site.connection() as connection:
            yield Reader(connection, gate, app.state.service)
        gate.open()


@pytest.mark.parametrize("path", STREAMS)
def test_nothing_is_sent_before_the_first_token(path: str) -> None:
    with reader() as server:
        server.ask(path)
        assert server.connection.read_within(SHORT) == b""
        server.gate.open()
        status, fields, body = split(server.connection.read_all())
    assert status == 200
    assert fields["content-type"].startswith(("text/event-stream", "application/x-ndjson"))
    assert OPENINGS.get(path, b"") in body


@pytest.mark.parametrize("path", OPENINGS)
@pytest.mark.parametrize("late_head_ms", [0, 1])
def test_a_head_that_is_due_comes_with_what_there_is(path: str, late_head_ms: int) -> None:
    with reader(runner=BreakingReader, late_head_ms=late_head_ms) as server:
        server.ask(path)
        begun = server.connection.read_until(OPENINGS[path])
        server.gate.open()
        status, _, body = split(begun + server.connection.read_all())
    assert status == 200
    assert b"server_error" in body or b"api_error" in body


def test_a_head_is_due_before_a_stream_begins_for_another_reason() -> None:
    """So that a client never waits longer for it, and comments on the load of a model have no late head behind them."""
    longest = 1000 * sse.PING_INTERVAL
    assert Settings().late_head_ms <= longest
    with pytest.raises(ValidationError):
        Settings(late_head_ms=longest + 1)


def test_a_keep_alive_begins_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_INTERVAL", 0.01)
    with reader() as server:
        server.ask(CHATS)
        begun = server.connection.read_until(b": ping")
        server.gate.open()
        assert split(begun + server.connection.read_all())[0] == 200


class ReadingOn(Speaker):
    """Reads the first part of a long prompt, and no further until the gate opens."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        if any(s.start for s in plan.slices):
            self._gate.wait()
        return super().run(plan)


def test_a_report_of_progress_begins_a_stream() -> None:
    turns = [{"role": "user", "content": "long " * 1000}]
    with reader(runner=ReadingOn) as server:
        server.ask(CHATS, messages=turns, return_progress=True)
        begun = server.connection.read_until(b'"prompt_progress"')
        server.gate.open()
        assert split(begun + server.connection.read_all())[0] == 200


def test_a_client_that_leaves_before_the_head_ends_its_request() -> None:
    with reader() as server:
        server.ask(CHATS, max_tokens=200)
        server.connection.reset()
        admission = server.service.admission
        wait_until(lambda: not admission.num_requests, "the request goes on", timeout=LONG)
        assert not server.service.in_flight.num_open
