"""Limits of bodies: too large, too slow, too many at once, and incomplete."""

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http import body_limit
from app.http.authentication import Authentication, client_for_key
from app.http.body_limit import MAX_STREAMED, BodyLimit
from app.http.client import ANONYMOUS, Client as ApiClient
from tests.support.raw_http import (
    LONG,
    SHORT,
    Connection,
    Site,
    running,
    split,
    timers_have_fired,
)
from tests.support.rows import rows
from tests.support.speaker import served

pytestmark = pytest.mark.anyio

MAX: Final = 100
HEAD: Final = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED: Final = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def sized(length: int, *fields: bytes) -> bytes:
    """Return a head that declares a body."""
    lines = [f"Content-Length: {length}".encode(), *fields]
    return HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class App:
    """Responds with the body; if it waits, after the next message."""

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self.bodies: list[bytes] = []
        self.reached = threading.Event()
        self.received: list[str] = []
        self.done = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert not message.get("more_body", False)
        body = message.get("body", b"")
        self.bodies.append(body)
        self.reached.set()
        if self._waits:
            self.received.append((await receive())["type"])
            self.done.set()
        length = str(len(body)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def limited(app: App | None = None, *, timeout: float = LONG) -> Iterator[Site]:
    with running(identified(BodyLimit(app or App(), MAX, timeout))) as site:
        yield site


def identified(limit: BodyLimit) -> ASGIApp:
    """Return the app by which each request has a client, as on a server without keys."""
    return Authentication(limit, (), share_prefix_cache=False)


def rejected(response: bytes) -> tuple[int, str, dict[str, Any]]:
    """Return the status, the Connection header, and the error."""
    status, fields, body = split(response)
    return status, fields.get("connection", ""), json.loads(body)["error"]


class TestAccepted:
    @pytest.mark.parametrize(
        "data",
        [
            sized(MAX, b"Connection: close") + b"a" * MAX,
            HEAD
            + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunk(b"a" * 60)
            + chunk(b"a" * 40)
            + b"0\r\n\r\n",
        ],
    )
    def test_a_body_of_the_largest_size_is_one_message(self, data: bytes) -> None:
        app = App()
        with limited(app) as site:
            assert split(site.ask(data))[2] == b"a" * MAX
        assert app.bodies == [b"a" * MAX]

    def test_one_in_single_bytes_as_well(self) -> None:
        app = App()
        with limited(app) as site, site.connection() as connection:
            for byte in sized(3) + b"abc":
                connection.send(bytes([byte]))
            connection.read(b"abc")
        assert app.bodies == [b"abc"]

    @rows("length", [b"", b"Content-Length: 0\r\n"])
    @rows("method", [b"GET", b"HEAD", b"POST"])
    def test_a_request_without_one_is_passed_on(self, method: bytes, length: bytes) -> None:
        app = App()
        head = HEAD.replace(b"POST", method) + length + b"Connection: close\r\n\r\n"
        with limited(app) as site:
            assert split(site.ask(head))[0] == 200
        assert app.bodies == [b""]

    def test_requests_in_one_piece_get_their_own_bodies(self) -> None:
        app = App()
        with limited(app) as site:
            last = sized(1, b"Connection: close")
            site.ask(sized(2) + b"ab" + CHUNKED + chunk(b"cde") + b"0\r\n\r\n" + last + b"f")
        assert app.bodies == [b"ab", b"cde", b"f"]

    def test_a_client_that_expects_100_continue_gets_it(self) -> None:
        with limited() as site, site.connection() as connection:
            connection.send(sized(3, b"Expect: 100-continue"))
            assert connection.read(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
            connection.send(b"abc")
            assert split(connection.read(b"abc"))[0] == 200

    def test_the_app_gets_the_disconnect(self) -> None:
        app = App(waits=True)
        with limited(app) as site:
            with site.connection() as connection:
                connection.send(sized(3) + b"abc")
                assert app.reached.wait(LONG)
            assert app.done.wait(LONG)
        assert app.received == ["http.disconnect"]


class TestTooLarge:
    def test_one_that_declares_it_is_not_read(self) -> None:
        app = App()
        with limited(app) as site, site.connection() as connection:
            connection.send(sized(MAX + 1, b"Expect: 100-continue"))
            status, after, error = rejected(connection.read(b"}}"))
        assert (status, after, error["code"]) == (413, "close", "request_too_large")
        assert app.bodies == []

    def test_one_that_does_not_declare_it_is_stopped(self) -> None:
        app = App()
        with limited(app) as site, site.connection() as connection:
            connection.send(CHUNKED + chunk(b"a" * MAX))
            connection.send(chunk(b"a"))
            status, after, error = rejected(connection.read(b"}}"))
        assert (status, after, error["code"]) == (413, "close", "request_too_large")
        assert app.bodies == []

    def test_after_a_complete_one_the_connection_stays_open(self) -> None:
        with limited() as site, site.connection() as connection:
            connection.send(CHUNKED + chunk(b"a" * (MAX + 1)) + b"0\r\n\r\n")
            assert rejected(connection.read(b"}}"))[:2] == (413, "")
            connection.send(sized(3) + b"abc")
            assert split(connection.read(b"abc"))[0] == 200

    def test_a_client_that_sends_all_before_it_reads_gets_the_response(self) -> None:
        size = 1 << 24
        with limited() as site, site.connection() as connection:
            connection.send(sized(size) + bytes(size))
            assert rejected(connection.read(b"}}"))[:2] == (413, "close")

    @pytest.mark.parametrize(("seconds", "num_bytes"), [(SHORT, 1 << 20), (2 * LONG, 1)])
    def test_the_rest_of_a_rejected_body_is_read_within_limits(
        self, seconds: float, num_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(body_limit, "LINGER_SECONDS", seconds)
        monkeypatch.setattr(body_limit, "LINGER_BYTES", num_bytes)
        with limited() as site:
            assert rejected(site.ask(sized(1 << 20) + b"a"))[:2] == (413, "close")


class TestTooSlow:
    @pytest.mark.parametrize("data", [b"", b"ab"])
    def test_a_body_that_does_not_arrive_is_a_408(
        self, data: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(body_limit, "LINGER_SECONDS", SHORT)
        app = App()
        with limited(app, timeout=SHORT) as site:
            status, after, error = rejected(site.ask(sized(3) + data))
        assert (status, after, error["code"]) == (408, "close", "request_timeout")
        assert app.bodies == []


class Client:
    """Sends messages without a network."""

    def __init__(self, *headers: tuple[bytes, bytes], client: ApiClient = ANONYMOUS) -> None:
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [*headers],
            "state": {"client": client},
        }
        self.messages: list[Message] = []
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._pending = 0

    def send(self, data: bytes, *, more: bool = True) -> None:
        self._sent.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        self._sent.put_nowait({"type": "http.disconnect"})

    async def heard(self) -> None:
        """Wait until all messages have been received and processed."""
        await self._sent.join()

    async def _receive(self) -> Message:
        # The previous message has been processed when the next one is awaited.
        if self._pending:
            self._pending = 0
            self._sent.task_done()
        message = await self._sent.get()
        self._pending = 1
        return message

    async def _record(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    async def call(self, app: ASGIApp) -> None:
        await app(self.scope, self._receive, self._record)


CHUNKS: Final = (b"transfer-encoding", b"chunked")


class Waiting:
    """An app that responds once it may."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.reached = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])
        self.reached.set()
        await self.may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})


async def test_all_bodies_in_flight_are_bounded_together() -> None:
    app = Waiting()
    limit = BodyLimit(app, max_bytes=MAX, timeout=LONG)
    clients = [Client(CHUNKS) for _ in range(16)]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            client.send(b"a" * MAX, more=False)
            group.create_task(client.call(limit))
        await app.reached.wait()
        assert limit.budget.num_bytes == 16 * MAX
        late = Client(CHUNKS)
        late.send(b"a", more=False)
        await late.call(limit)
        assert late.status == 503
        assert (b"retry-after", b"1") in late.messages[0]["headers"]
        assert b"too many request bodies are being read" in late.messages[1]["body"]
        assert limit.budget.num_bytes == 16 * MAX
        app.may_end.set()
    assert limit.budget.num_bytes == 0
    assert {client.status for client in clients} == {200}
    again = Client(CHUNKS)
    again.send(b"a", more=False)
    await again.call(limit)
    assert again.status == 200


async def test_rejections_for_the_bodies_of_others_are_counted() -> None:
    async with served(max_body_bytes=1) as server, asyncio.TaskGroup() as group:
        clients = [Client(CHUNKS) for _ in range(17)]
        for client in clients[:16]:
            client.send(b"a")
            group.create_task(client.call(server.app))
            await client.heard()
        clients[16].send(b"a", more=False)
        await clients[16].call(server.app)
        assert clients[16].status == 503
        page = (await server.client.get("/metrics")).text
        assert (
            'admission_rejections_total{model_name="fake/speaker",reason="queue_full"} 1.0' in page
        )
        for client in clients[:16]:
            client.leave()


async def test_a_body_that_comes_at_the_least_rate_may_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_limit, "LEAST_RATE", 1 / LONG)
    client = Client(CHUNKS)
    client.send(b"a")
    call = asyncio.create_task(client.call(BodyLimit(App(), MAX, timeout=0)))
    await client.heard()
    assert not (await asyncio.wait([call], timeout=SHORT))[0]
    client.send(b"b", more=False)
    await call
    assert client.messages[1]["body"] == b"ab"


async def test_each_client_has_a_share_of_the_bytes() -> None:
    one, two = (client_for_key(key, share_prefix_cache=False) for key in ("one", "two"))
    limit = BodyLimit(Waiting(), max_bytes=MAX, timeout=LONG, num_clients=2)
    async with asyncio.TaskGroup() as group:
        clients = [Client(CHUNKS, client=one) for _ in range(12)]
        clients += [Client(CHUNKS, client=two) for _ in range(4)]
        for client in clients:
            client.send(b"a" * MAX)
            group.create_task(client.call(limit))
            await client.heard()
        assert limit.budget.num_bytes == 16 * MAX
        for owner in (one, two):
            late = Client(CHUNKS, client=owner)
            late.send(b"a", more=False)
            await late.call(limit)
            assert late.status == 503
        for client in clients:
            client.leave()
    assert limit.budget.num_bytes == 0


async def test_the_response_may_take_longer_than_the_body() -> None:
    async def think(scope: Scope, receive: Receive, send: Send) -> None:
        await timers_have_fired()
        await App()(scope, receive, send)

    client = Client(CHUNKS)
    client.send(b"abc", more=False)
    await client.call(BodyLimit(think, MAX, timeout=0))
    assert client.messages[1]["body"] == b"abc"


async def test_bytes_count_as_soon_as_they_are_received() -> None:
    limit = BodyLimit(Waiting(), max_bytes=MAX, timeout=LONG)
    client = Client(CHUNKS)
    client.send(b"a" * 30)
    client.send(b"a" * 30)
    call = asyncio.create_task(client.call(limit))
    await client.heard()
    assert limit.budget.num_bytes == 60
    client.leave()
    await call
    assert limit.budget.num_bytes == 0


async def test_a_client_that_disconnects_early_leaves_nothing_behind() -> None:
    app = Waiting()
    limit = BodyLimit(app, max_bytes=MAX, timeout=LONG)
    client = Client((b"content-length", b"9"))
    client.send(b"a" * 8)
    client.leave()
    await client.call(limit)
    assert (limit.budget.num_bytes, app.bodies, client.messages) == (0, [], [])


async def test_a_rejected_body_is_released_before_the_rest_is_read() -> None:
    limit = BodyLimit(Waiting(), max_bytes=MAX, timeout=LONG)
    client = Client(CHUNKS)
    client.send(b"a" * (MAX + 1))
    call = asyncio.create_task(client.call(limit))
    await client.heard()
    assert (client.status, limit.budget.num_bytes) == (413, 0)
    client.leave()
    await call


async def test_a_request_that_fails_or_is_cancelled_releases_its_bytes() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError

    limit = BodyLimit(fail, max_bytes=MAX, timeout=LONG)
    client = Client(CHUNKS)
    client.send(b"abc", more=False)
    with pytest.raises(KeyError):
        await client.call(limit)
    assert limit.budget.num_bytes == 0

    app = Waiting()
    limit = BodyLimit(app, max_bytes=MAX, timeout=LONG)
    client.send(b"abc", more=False)
    call = asyncio.create_task(client.call(limit))
    await app.reached.wait()
    assert limit.budget.num_bytes == 3
    call.cancel()
    await asyncio.wait([call])
    assert (call.cancelled(), limit.budget.num_bytes) == (True, 0)


async def test_one_that_is_cancelled_when_a_chunk_arrives_releases_what_it_held() -> None:
    limit = BodyLimit(Waiting(), max_bytes=MAX, timeout=LONG)
    client = Client(CHUNKS)
    client.send(b"abc")
    call = asyncio.create_task(client.call(limit))
    await client.heard()
    client.send(b"d")
    call.cancel()
    await asyncio.wait([call])
    assert (call.cancelled(), limit.budget.num_bytes) == (True, 0)


def lengths(*values: bytes) -> Iterable[tuple[bytes, bytes]]:
    return [(b"content-length", value) for value in values]


@rows("headers", [lengths(b"x"), lengths(b"-5"), lengths(b"0" * 5000)])
async def test_a_body_with_an_invalid_length_is_counted(
    headers: Iterable[tuple[bytes, bytes]],
) -> None:
    """Another server might pass such heads on."""
    client = Client(*headers)
    client.send(b"a" * MAX)
    client.send(b"a", more=False)
    await client.call(BodyLimit(App(), MAX, LONG))
    assert client.status == 413


async def test_the_largest_of_several_lengths_counts() -> None:
    client = Client(*lengths(b"5", b"101"))
    client.leave()
    await client.call(BodyLimit(App(), MAX, LONG))
    assert client.status == 413


def test_a_reset_connection_does_not_harm_others() -> None:
    app = App()

    def cut(connection: Connection, data: bytes) -> None:
        connection.send(data)
        connection.reset()

    with limited(app) as site:
        for data in (sized(9), sized(9) + b"abc", CHUNKED + chunk(b"abc")):
            with site.connection() as connection:
                cut(connection, data)
        assert split(site.ask(sized(3, b"Connection: close") + b"abc"))[2] == b"abc"
    assert app.bodies == [b"abc"]


class StreamingApp:
    """Responds in two parts before it has read the body, which it gets as it comes."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads
        self.chunks: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while self._reads:
            message = await receive()
            self.chunks.append(message["body"])
            if not message["more_body"]:
                break
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        await send({"type": "http.response.body", "body": b"k"})


class TestStreamed:
    """Bodies of any size, on paths that have limits of their own."""

    def ask(self, app: StreamingApp, data: bytes) -> bytes:
        limit = BodyLimit(app, MAX, LONG, streamed=("/",))
        with running(identified(limit)) as site:
            return site.ask(data)

    def test_a_body_comes_in_pieces(self) -> None:
        app = StreamingApp(reads=True)
        size = 10 * (1 << 16)
        response = self.ask(app, sized(size, b"Connection: close") + b"a" * size)
        assert split(response)[2] == b"ok"
        assert sum(map(len, app.chunks)) == size
        assert len(app.chunks) > 1

    async def test_a_client_may_send_a_few_at_a_time(self) -> None:
        one, two = (client_for_key(key, share_prefix_cache=False) for key in ("one", "two"))
        app = Waiting()
        limit = BodyLimit(app, MAX, LONG, streamed=("/",), num_clients=2)

        async def status_of(owner: ApiClient) -> int:
            client = Client(CHUNKS, client=owner)
            client.send(b"a", more=False)
            await client.call(limit)
            return client.status

        async with asyncio.TaskGroup() as group:
            served = [group.create_task(status_of(one)) for _ in range(MAX_STREAMED)]
            await app.reached.wait()
            assert await status_of(one) == 429
            app.may_end.set()
            assert await status_of(two) == 200
        assert {task.result() for task in served} == {200}
        assert await status_of(one) == 200

    async def test_what_follows_the_end_of_a_body_may_come_late(self) -> None:
        received: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            received.extend([await receive(), await receive()])

        client = Client(CHUNKS)
        client.send(b"a", more=False)
        call = asyncio.create_task(client.call(BodyLimit(app, MAX, timeout=0, streamed=("/",))))
        await client.heard()
        assert not (await asyncio.wait([call], timeout=SHORT))[0]
        client.leave()
        await call
        assert [message["type"] for message in received] == ["http.request", "http.disconnect"]

    def test_a_response_before_the_end_of_the_body_arrives(self) -> None:
        """The rest is read and dropped: a reset would take the response from the client."""
        size = 10 * (1 << 16)
        status, fields, body = split(self.ask(StreamingApp(reads=False), sized(size) + b"a" * size))
        assert (status, fields["connection"], body) == (200, "close", b"ok")
