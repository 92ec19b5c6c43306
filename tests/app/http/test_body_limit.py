"""Bodies: too large, too slow, too many, and cut short."""

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http import body_limit
from app.http.body_limit import BodyLimit
from tests.app.server.test_http_protocol import (
    ENOUGH,
    LONG,
    SHORT,
    Connection,
    Site,
    later,
    running,
    split,
)

pytestmark = pytest.mark.anyio

MAX: Final = 100
HEAD: Final = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED: Final = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def sized(length: int, *fields: bytes) -> bytes:
    """Return a head that announces a body."""
    lines = [f"Content-Length: {length}".encode(), *fields]
    return HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class App:
    """Answers with what it received; then with what else it receives, if it should wait."""

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self.bodies: list[bytes] = []
        self.reached = threading.Event()
        self.told: list[str] = []
        self.done = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert not message.get("more_body", False)
        body = message.get("body", b"")
        self.bodies.append(body)
        self.reached.set()
        if self._waits:
            self.told.append((await receive())["type"])
            self.done.set()
        length = str(len(body)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def limited(app: App | None = None, *, timeout: float = LONG) -> Iterator[Site]:
    with running(BodyLimit(app or App(), MAX, timeout)) as site:
        yield site


def told(answer: bytes) -> tuple[int, str, dict[str, Any]]:
    """Return status, what becomes of the connection, and the error."""
    status, fields, body = split(answer)
    return status, fields.get("connection", ""), json.loads(body)["error"]


class TestWhatIsTaken:
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
    def test_a_body_of_the_largest_size_comes_in_one_piece(self, data: bytes) -> None:
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

    @pytest.mark.parametrize("length", [b"", b"Content-Length: 0\r\n"])
    @pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST"])
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

    def test_a_client_that_asks_whether_to_send_is_told_so(self) -> None:
        with limited() as site, site.connection() as connection:
            connection.send(sized(3, b"Expect: 100-continue"))
            assert connection.read(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
            connection.send(b"abc")
            assert split(connection.read(b"abc"))[0] == 200

    def test_the_app_hears_of_a_client_that_leaves(self) -> None:
        app = App(waits=True)
        with limited(app) as site:
            with site.connection() as connection:
                connection.send(sized(3) + b"abc")
                assert app.reached.wait(LONG)
            assert app.done.wait(LONG)
        assert app.told == ["http.disconnect"]


class TestTooLarge:
    def test_one_that_says_so_is_not_asked_for(self) -> None:
        app = App()
        with limited(app) as site, site.connection() as connection:
            connection.send(sized(MAX + 1, b"Expect: 100-continue"))
            status, after, error = told(connection.read(b"}}"))
        assert (status, after, error["code"]) == (413, "close", "request_too_large")
        assert app.bodies == []

    def test_one_that_does_not_say_so_is_stopped(self) -> None:
        app = App()
        with limited(app) as site, site.connection() as connection:
            connection.send(CHUNKED + chunk(b"a" * MAX))
            connection.send(chunk(b"a"))
            status, after, error = told(connection.read(b"}}"))
        assert (status, after, error["code"]) == (413, "close", "request_too_large")
        assert app.bodies == []

    def test_one_that_has_come_whole_costs_nothing_more_than_its_answer(self) -> None:
        with limited() as site, site.connection() as connection:
            connection.send(CHUNKED + chunk(b"a" * (MAX + 1)) + b"0\r\n\r\n")
            assert told(connection.read(b"}}"))[:2] == (413, "")
            connection.send(sized(3) + b"abc")
            assert split(connection.read(b"abc"))[0] == 200

    def test_a_client_that_sends_it_all_before_it_listens_gets_the_answer(self) -> None:
        size = 1 << 24
        with limited() as site, site.connection() as connection:
            connection.send(sized(size) + bytes(size))
            assert told(connection.read(b"}}"))[:2] == (413, "close")

    @pytest.mark.parametrize(("seconds", "num_bytes"), [(SHORT, 1 << 20), (2 * LONG, 1)])
    def test_a_client_that_never_ends_is_not_listened_to_for_ever(
        self, seconds: float, num_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(body_limit, "LINGER_SECONDS", seconds)
        monkeypatch.setattr(body_limit, "LINGER_BYTES", num_bytes)
        with limited() as site:
            assert told(site.ask(sized(1 << 20) + b"a"))[:2] == (413, "close")


class TestTooSlow:
    @pytest.mark.parametrize("data", [b"", b"ab"])
    def test_a_body_that_stays_out_is_not_waited_for(
        self, data: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(body_limit, "LINGER_SECONDS", SHORT)
        app = App()
        with limited(app, timeout=SHORT) as site:
            status, after, error = told(site.ask(sized(3) + data))
        assert (status, after, error["code"]) == (408, "close", "request_timeout")
        assert app.bodies == []

    def test_the_answer_may_take_longer_than_the_body(self) -> None:
        async def think(scope: Scope, receive: Receive, send: Send) -> None:
            await later(1.5 * ENOUGH)
            await App()(scope, receive, send)

        with running(BodyLimit(think, MAX, ENOUGH)) as site:
            assert split(site.ask(sized(3, b"Connection: close") + b"abc"))[2] == b"abc"


class Client:
    """Sends what it is told to, without a network."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": [*headers]}
        self.answer: list[Message] = []
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._pending = 0

    def send(self, data: bytes, *, more: bool = True) -> None:
        self._sent.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        self._sent.put_nowait({"type": "http.disconnect"})

    async def heard(self) -> None:
        """Wait until all that was sent has been received and looked at."""
        await self._sent.join()

    async def _receive(self) -> Message:
        # What was received before is looked at by the time somebody asks for more.
        if self._pending:
            self._pending = 0
            self._sent.task_done()
        message = await self._sent.get()
        self._pending = 1
        return message

    async def _tell(self, message: Message) -> None:
        self.answer.append(message)

    @property
    def status(self) -> int:
        return int(self.answer[0]["status"])

    async def call(self, limit: BodyLimit) -> None:
        await limit(self.scope, self._receive, self._tell)


CHUNKS: Final = (b"transfer-encoding", b"chunked")


class Waiting:
    """An app whose answers wait until they are let go."""

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


async def test_all_bodies_together_are_bounded_until_they_are_answered() -> None:
    app = Waiting()
    limit = BodyLimit(app, max_bytes=MAX, timeout=LONG)
    clients = [Client(CHUNKS) for _ in range(64)]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            client.send(b"a" * MAX, more=False)
            group.create_task(client.call(limit))
        await app.reached.wait()
        assert limit.num_held == 64 * MAX
        late = Client(CHUNKS)
        late.send(b"a", more=False)
        await late.call(limit)
        assert late.status == 503
        assert (b"retry-after", b"1") in late.answer[0]["headers"]
        assert b"too many request bodies are being read" in late.answer[1]["body"]
        assert limit.num_held == 64 * MAX
        app.may_end.set()
    assert limit.num_held == 0
    assert {client.status for client in clients} == {200}
    await late_again(limit)


async def late_again(limit: BodyLimit) -> None:
    client = Client(CHUNKS)
    client.send(b"a", more=False)
    await client.call(limit)
    assert client.status == 200


async def test_bytes_count_as_soon_as_they_come() -> None:
    limit = BodyLimit(Waiting(), max_bytes=MAX, timeout=LONG)
    client = Client(CHUNKS)
    client.send(b"a" * 30)
    client.send(b"a" * 30)
    call = asyncio.create_task(client.call(limit))
    await client.heard()
    assert limit.num_held == 60
    client.leave()
    await call
    assert limit.num_held == 0


async def test_a_client_that_leaves_before_the_end_leaves_nothing_behind() -> None:
    app = Waiting()
    limit = BodyLimit(app, max_bytes=MAX, timeout=LONG)
    client = Client((b"content-length", b"9"))
    client.send(b"a" * 8)
    client.leave()
    await client.call(limit)
    assert (limit.num_held, app.bodies, client.answer) == (0, [], [])


async def test_a_refused_body_is_given_back_before_its_client_is_waited_for() -> None:
    limit = BodyLimit(Waiting(), max_bytes=MAX, timeout=LONG)
    client = Client(CHUNKS)
    client.send(b"a" * (MAX + 1))
    call = asyncio.create_task(client.call(limit))
    await client.heard()
    assert (client.status, limit.num_held) == (413, 0)
    client.leave()
    await call


async def test_a_request_that_fails_or_is_cancelled_gives_its_bytes_back() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError

    limit = BodyLimit(fail, max_bytes=MAX, timeout=LONG)
    client = Client(CHUNKS)
    client.send(b"abc", more=False)
    with pytest.raises(KeyError):
        await client.call(limit)
    assert limit.num_held == 0

    app = Waiting()
    limit = BodyLimit(app, max_bytes=MAX, timeout=LONG)
    client.send(b"abc", more=False)
    call = asyncio.create_task(client.call(limit))
    await app.reached.wait()
    assert limit.num_held == 3
    call.cancel()
    await asyncio.wait([call])
    assert (call.cancelled(), limit.num_held) == (True, 0)


def lengths(*values: bytes) -> Iterable[tuple[bytes, bytes]]:
    return [(b"content-length", value) for value in values]


@pytest.mark.parametrize("headers", [lengths(b"x"), lengths(b"-5"), lengths(b"0" * 5000)])
async def test_a_length_that_is_none_is_counted(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """As behind a server that lets such heads pass."""
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


async def test_other_scopes_pass() -> None:
    called = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        called.append(scope["type"])

    client = Client()
    client.scope["type"] = "lifespan"
    await client.call(BodyLimit(app, MAX, LONG))
    assert called == ["lifespan"]


def test_a_client_that_resets_while_it_sends_is_nobodys_trouble() -> None:
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
