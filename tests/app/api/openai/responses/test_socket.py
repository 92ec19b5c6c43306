"""`/v1/responses` over a WebSocket: a conversation on one connection."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGTERM
from typing import Any, Final

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import SecretStr
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from app.api.openai.responses.socket import ResponseMessages, SocketConversation
from app.main import create_app
from app.server.uvicorn_server import Server
from app.server_state import ServerState
from app.settings import Settings
from tests.support.raw_http import started
from tests.support.responses import PATH
from tests.support.sdk_types import check_shape
from tests.support.speaker import MODEL_ID, Breaking, Gate, Speaker, speaking_manager

LONG: Final = 20.0


class Site:
    def __init__(
        self, url: str, service: ServerState, gate: Gate, ask: Callable[[bytes], bytes]
    ) -> None:
        self.url = url
        self.ask = ask
        self.service = service
        self.gate = gate

    def open(self, **headers: str) -> ClientConnection:
        return connect(self.url, additional_headers=headers, open_timeout=LONG)


@contextmanager
def serving(
    answer: bytes | None = b"Hello!",
    *,
    is_gated: bool = False,
    runner: type[Speaker] = Speaker,
    **settings: Any,
) -> Iterator[Site]:
    gate = Gate(is_open=not is_gated)
    manager = speaking_manager(answer, gate=gate, runner=runner)
    app = create_app(manager, Settings.model_construct(**settings))
    service: ServerState = app.state.service
    try:
        with started(server := Server(app, service)) as site:
            host, port = site.address
            try:
                yield Site(f"ws://{host}:{port}{PATH}", service, gate, site.ask)
            finally:
                gate.open()
                server.handle_exit(SIGTERM, None)
    finally:
        manager.close(LONG)


def create(socket: ClientConnection, input_: Any = "Hi", **fields: Any) -> None:
    event = {"type": "response.create", "model": MODEL_ID, "input": input_} | fields
    socket.send(json.dumps(event))


def events(socket: ClientConnection) -> list[dict[str, Any]]:
    """Return the events up to the last one of a response, or an error."""
    received: list[dict[str, Any]] = []
    ends = ("error", "response.completed", "response.incomplete", "response.failed")
    while not received or received[-1]["type"] not in ends:
        received.append(json.loads(socket.recv(timeout=LONG)))
    return received


def response(socket: ClientConnection, input_: Any = "Hi", **fields: Any) -> dict[str, Any]:
    create(socket, input_, **fields)
    last = events(socket)[-1]
    assert last["type"] == "response.completed", last
    answer: dict[str, Any] = last["response"]
    return answer


def error(socket: ClientConnection) -> tuple[int, str | None, str | None]:
    (event,) = events(socket)
    return event["status"], event["error"]["param"], event["error"]["code"]


def test_the_events_are_those_of_a_stream() -> None:
    with serving() as site, site.open() as socket:
        create(socket)
        received = events(socket)
    for number, event in enumerate(received):
        assert event["sequence_number"] == number
        check_shape(event, ResponseStreamEvent)
    text = "".join(e["delta"] for e in received if e["type"] == "response.output_text.delta")
    assert text == "Hello!"


@pytest.mark.parametrize("store", [True, False])
def test_it_goes_on_from_the_latest_response(store: bool) -> None:
    with serving() as site, site.open() as socket:
        first = response(socket, "One", store=store)
        second = response(socket, "Two", store=store, previous_response_id=first["id"])
        third = response(socket, "Three", store=store, previous_response_id=second["id"])
        alone = response(socket, "Three", store=False)
    assert second["previous_response_id"] == first["id"]
    sizes = [each["usage"]["input_tokens"] for each in (alone, first, second, third)]
    assert sizes[1] < sizes[2] < sizes[3] > sizes[0]


def test_what_is_not_stored_is_of_its_connection_and_the_latest_one_only() -> None:
    with serving() as site, site.open() as socket, site.open() as other:
        first = response(socket, store=False)
        create(other, previous_response_id=first["id"])
        assert error(other) == (400, "previous_response_id", "previous_response_not_found")
        second = response(socket, store=False)
        create(socket, previous_response_id=first["id"])
        assert error(socket) == (400, "previous_response_id", "previous_response_not_found")
        # A request that fails forgets what it could have gone on from.
        create(socket, previous_response_id=second["id"])
        assert error(socket)[0] == 400
        assert site.service.storage.responses.get("", second["id"]) is None


@pytest.mark.parametrize("store", [True, False])
def test_it_goes_on_from_a_conversation_and_adds_to_it(store: bool) -> None:
    with serving() as site, site.open() as socket:
        conversations = site.service.storage.responses.conversations
        conversations.create("", "conv_1", "{}", {})
        first = response(socket, "One", store=store, conversation="conv_1")
        second = response(socket, "Two", store=store, conversation={"id": "conv_1"})
        turn = conversations.turns.take("", "conv_1")
        create(socket, conversation="conv_1")
        assert error(socket) == (400, "conversation", "conversation_locked")
        turn.close()
        create(socket, conversation="conv_2")
        assert error(socket) == (404, "conversation", "not_found")
        items = [json.loads(item) for _, item in conversations.backwards("", "conv_1")]
    assert second["conversation"] == {"id": "conv_1"}
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    texts = [item["content"][0]["text"] for item in items]
    assert texts == ["Hello!", "Two", "Hello!", "One"]


def test_a_request_that_generates_nothing_warms_the_cache() -> None:
    with serving() as site, site.open() as socket:
        warm = response(socket, "a" * 200, generate=False, store=False)
        after = response(socket, "b", previous_response_id=warm["id"], store=False)
    assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
    assert after["usage"]["input_tokens_details"]["cached_tokens"] > 100
    assert after["output"][0]["content"][0]["text"] == "Hello!"


def test_requests_are_served_in_their_order() -> None:
    with serving() as site, site.open() as socket:
        for name in ("a", "b", "c"):
            create(socket, metadata={"name": name})
        names = [events(socket)[-1]["response"]["metadata"]["name"] for _ in range(3)]
    assert names == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None),
        ("[]", None),
        ('{"type": "response.steer"}', "type"),
        ('{"input": "Hi"}', "type"),
        ('{"type": "response.create", "input": "Hi", "background": true}', "background"),
        ('{"type": "response.create", "input": "Hi", "stream_id": "a"}', "stream_id"),
        ('{"type": "response.create", "input": "Hi", "top_p": 7}', "top_p"),
        ('{"type": "response.create", "input": "\\ud800"}', "input.0.content"),
        ('{"type": "response.create", "input": 1' + "0" * 5000 + "}", None),
        ("[" * 100_000, None),
        ("[" * 300_000, None),
        (b"\xff\xfe", None),
    ],
)
def test_a_bad_message_is_an_error_and_no_end(message: str | bytes, param: str | None) -> None:
    with serving() as site, site.open() as socket:
        socket.send(message)
        assert error(socket)[:2] == (400, param)
        socket.send('{"type": "response.processed", "response_id": "resp_1"}')
        assert response(socket)["status"] == "completed"


def test_too_many_and_too_large_requests_are_refused() -> None:
    with serving(None, is_gated=True, max_body_bytes=4096) as site, site.open() as socket:
        for _ in range(30):
            create(socket, "a" * 200)
        refused = json.loads(socket.recv(timeout=LONG))
        while refused["type"] != "error":
            refused = json.loads(socket.recv(timeout=LONG))
        assert refused["status"] == 429
        socket.send("a" * 5000)
        with pytest.raises(ConnectionClosed) as closed:
            deque(iter(socket.recv, None), 0)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_the_request_ends_with_its_connection() -> None:
    with serving(None, is_gated=True) as site:
        with site.open() as socket:
            create(socket)
            assert site.gate.reached.wait(LONG)
            assert site.service.in_flight.num_open == 1
        site.gate.open()
        while site.service.in_flight.num_open or site.service.admission.num_requests:
            pass


def test_a_failure_of_the_engine_is_an_event() -> None:
    with serving(b"ok", runner=Breaking) as site, site.open() as socket:
        create(socket)
        assert events(socket)[-1]["type"] == "response.failed"


def test_it_needs_a_key_and_a_known_origin() -> None:
    with serving(api_keys=SecretStr("sk-one")) as site:
        with pytest.raises(InvalidStatus) as refused:
            site.open()
        with site.open(Authorization="Bearer sk-one") as socket:
            assert response(socket)["status"] == "completed"
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"
    with serving() as site, pytest.raises(InvalidStatus) as foreign:
        site.open(Origin="https://evil.example")
    assert foreign.value.response.status_code == 403


def test_a_connection_counts_as_one() -> None:
    with serving(max_connections=1) as site:
        with site.open() as socket:
            assert response(socket)["status"] == "completed"
            assert site.ask(b"").startswith(b"HTTP/1.1 503 ")
        assert b" 405 " in site.ask(
            b"GET /v1/responses HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n\r\n"
        )


@pytest.mark.anyio
async def test_an_error_may_come_in_pieces() -> None:
    failed: list[tuple[int, bytes]] = []

    class Conversation(SocketConversation):
        def __init__(self) -> None: ...

        async def fail(self, status: int, body: bytes) -> None:
            failed.append((status, body))

    messages = ResponseMessages(Conversation())
    headers = [(b"content-type", b"application/json")]
    await messages.send({"type": "http.response.start", "status": 503, "headers": headers})
    await messages.send({"type": "http.response.body", "body": b"{", "more_body": True})
    await messages.send({"type": "http.response.body", "body": b"}"})
    assert failed == [(503, b"{}")]
