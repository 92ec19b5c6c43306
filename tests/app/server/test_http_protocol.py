"""HTTP on real sockets: a client that stalls, floods or babbles costs its connection, no more."""

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from app.server.http_protocol import MAX_HEAD_BYTES, Protocol, protocol_class
from app.server.uvicorn_server import bind

# Nobody waits that long: a test that needs it has failed.
LONG: Final = 20.0
# What passes although nobody is in a hurry, and what passes although others must be in time.
SHORT: Final = 0.05
ENOUGH: Final = 0.4

GET: Final = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET: Final = b"GET /z HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST: Final = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
CHUNKED: Final = POST + b"Transfer-Encoding: chunked\r\n\r\n"


async def respond(send: Send, body: bytes = b"", *, is_last: bool = True) -> None:
    length = str(len(body)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def echo_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without looking at the body."""
    await respond(send, scope["path"].encode())


async def later(seconds: float) -> None:
    """Wait for as long as a timer of the loop takes, which is at least as long as another's."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, passed.set)
    await passed.wait()


class Connection:
    """The client's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def read(self, end: bytes) -> bytes:
        """Read until something has come."""
        data = b""
        while not data.endswith(end):
            piece = self._sock.recv(1 << 16)
            assert piece, data
            data += piece
        return data

    def read_all(self) -> bytes:
        """Read until the server closes, or resets what it had not read."""
        data = b""
        try:
            while piece := self._sock.recv(1 << 16):
                data += piece
        except ConnectionResetError:
            pass
        return data

    def reset(self) -> None:
        """Leave without a goodbye."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._sock.close()


class Site:
    """A server that runs in another thread."""

    def __init__(self, server: uvicorn.Server, sock: socket.socket) -> None:
        self.server = server
        self._address = sock.getsockname()
        self._thread = threading.Thread(target=server.run, args=([sock],))
        self._thread.start()

    def stop(self) -> None:
        """Stop in good order, and wait until that is done."""
        self.server.should_exit = True
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "something keeps the server from stopping"

    @contextmanager
    def connection(self, receive_buffer: int | None = None) -> Iterator[Connection]:
        with socket.socket() as sock:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(LONG)
            sock.connect(self._address)
            yield Connection(sock)

    def ask(self, data: bytes) -> bytes:
        """Send, and return all that comes until the server closes."""
        with self.connection() as connection:
            connection.send(data)
            return connection.read_all()


@contextmanager
def running(
    app: ASGIApp,
    *,
    read_timeout: float = LONG,
    write_timeout: float = LONG,
    keep_alive: int = int(LONG),
) -> Iterator[Site]:
    """Serve in another thread, on real sockets."""
    config = uvicorn.Config(
        app,
        http=protocol_class(read_timeout=read_timeout, write_timeout=write_timeout),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=keep_alive,
        log_config=None,
        access_log=False,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        site = Site(server, sock)
        try:
            yield site
        finally:
            site.stop()


def split(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, header fields and body of one response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), fields, body


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which a client's doing was logged above debug."""
    with caplog.at_level(logging.INFO):
        yield
    told = [
        (r.name, r.getMessage()) for r in caplog.get_records("call") if r.levelno > logging.INFO
    ]
    assert told == []


class TestHeads:
    """A connection is for requests that come."""

    def test_one_that_says_nothing_is_closed(self) -> None:
        with running(echo_path, read_timeout=SHORT) as site:
            assert site.ask(b"") == b""

    def test_half_a_head_is_answered(self) -> None:
        with running(echo_path, read_timeout=SHORT) as site:
            status, fields, body = split(site.ask(GET[:-2]))
        assert (status, fields["connection"]) == (408, "close")
        assert fields["content-type"] == "application/json"
        assert json.loads(body)["error"] == {
            "message": "the head of the request has not come in time",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_timeout",
        }

    def test_half_of_a_later_head_is_answered(self) -> None:
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(GET)
            connection.read(b"/a")
            connection.send(b"GET")
            assert split(connection.read_all())[0] == 408

    def test_half_of_a_head_that_came_with_the_one_before_is_answered(self) -> None:
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(GET + b"GET")
            assert connection.read(b"/a").startswith(b"HTTP/1.1 200")
            assert split(connection.read_all())[0] == 408

    def test_between_requests_a_client_may_rest_as_long_as_keep_alive_allows(self) -> None:
        rested = threading.Event()

        async def rest(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, scope["path"].encode())
            if scope["path"] == "/a":
                asyncio.get_running_loop().call_later(1.5 * ENOUGH, rested.set)

        with running(rest, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(GET)
            connection.read(b"/a")
            assert rested.wait(LONG)
            connection.send(LAST_GET)
            assert connection.read_all().endswith(b"/z")

    def test_a_rest_that_is_too_long_ends_in_silence(self) -> None:
        with running(echo_path, keep_alive=0) as site:
            assert site.ask(GET).endswith(b"/a")

    def test_an_answer_may_take_longer_than_the_head(self) -> None:
        async def think(scope: Scope, receive: Receive, send: Send) -> None:
            await later(1.5 * ENOUGH)
            await respond(send, b"42")

        with running(think, read_timeout=ENOUGH) as site:
            assert site.ask(LAST_GET).endswith(b"42")

    def test_the_time_for_a_body_is_not_the_protocols_to_measure(self) -> None:
        async def read_late(scope: Scope, receive: Receive, send: Send) -> None:
            await later(1.5 * ENOUGH)
            await respond(send, (await receive())["body"])

        head = POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        with running(read_late, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(head)
            assert connection.read(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
            connection.send(b"abc")
            assert connection.read_all().endswith(b"abc")

    def test_requests_in_one_piece_are_answered_in_order(self) -> None:
        with running(echo_path) as site:
            answers = site.ask(GET + GET.replace(b"/a", b"/b") + LAST_GET).split(b"HTTP/1.1 ")
        assert [answer[-2:] for answer in answers] == [b"", b"/a", b"/b", b"/z"]

    def test_a_head_answer_has_no_body(self) -> None:
        with running(echo_path) as site:
            status, fields, body = split(site.ask(LAST_GET.replace(b"GET", b"HEAD")))
        assert (status, fields["content-length"], body) == (200, "2", b"")


class TestBodiesThatNobodyReads:
    @pytest.mark.parametrize("rest", [b"", b"abc"])
    def test_one_that_does_not_end_costs_the_connection(self, rest: bytes) -> None:
        head = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(head)
            assert connection.read(b"/a").startswith(b"HTTP/1.1 200")
            connection.send(rest)
            assert connection.read_all() == b""

    def test_the_connection_does_not_stay_for_ever_after_one_that_ends_late(self) -> None:
        head = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(head)
            connection.read(b"/a")
            connection.send(b"abc")
            assert connection.read_all() == b""


class TestNoHTTP:
    """What is no HTTP is answered in the envelope, and not worth a line in the log."""

    @pytest.mark.parametrize(
        ("data", "status", "message"),
        [
            (b"\x16\x03\x01\x02\x00", 400, "the request is not valid HTTP"),
            (b"hello?\r\n\r\n", 400, "the request is not valid HTTP"),
            (b"GET / HTTP/1.1\r\n\r\n", 400, "the request is not valid HTTP"),
            (POST + b"Content-Length: -1\r\n\r\n", 400, "the request is not valid HTTP"),
            (
                POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
                400,
                "the request is not valid HTTP",
            ),
            (
                POST + b"Transfer-Encoding: gzip\r\n\r\n",
                501,
                "the server does not know this Transfer-Encoding",
            ),
            (
                LAST_GET[:-2] + b"a: b\r\n" * (2 * MAX_HEAD_BYTES // 6) + b"\r\n",
                431,
                "the head of the request is larger than what the server takes",
            ),
        ],
    )
    def test_it_is_told_so(self, data: bytes, status: int, message: str) -> None:
        with running(echo_path) as site:
            answered, fields, body = split(site.ask(data))
        assert answered == status
        assert (fields["connection"], fields["content-type"]) == ("close", "application/json")
        assert json.loads(body)["error"]["message"] == message

    def test_a_head_of_the_largest_size_is_taken(self) -> None:
        head = LAST_GET[:-2] + b"a: " + b"b" * (MAX_HEAD_BYTES - len(LAST_GET) - 10) + b"\r\n\r\n"
        with running(echo_path) as site:
            assert site.ask(head).endswith(b"/z")

    def test_a_head_in_single_bytes_is_taken(self) -> None:
        with running(echo_path) as site, site.connection() as connection:
            for byte in LAST_GET:
                connection.send(bytes([byte]))
            assert connection.read_all().endswith(b"/z")

    def test_a_client_that_resets_its_connection_leaves_the_server_well(self) -> None:
        with running(echo_path) as site:
            for _ in range(3):
                with site.connection() as connection:
                    connection.send(GET[:9])
                    connection.reset()
            assert site.ask(LAST_GET).endswith(b"/z")


class Told:
    """An app that reads on until it is told that the client has gone, which it then answers."""

    def __init__(self, *, answers_first: bool = False) -> None:
        self._answers_first = answers_first
        self.is_told = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._answers_first:
            await respond(send, b"early", is_last=False)
        while (await receive())["type"] != "http.disconnect":
            pass
        # As if to a client that is there: what the framework does.
        await respond(send, b"late")
        self.is_told.set()


class TestBodiesThatAreNoHTTP:
    def test_the_client_is_answered_and_the_app_told(self) -> None:
        app = Told()
        with running(app) as site:
            status, _, body = split(site.ask(CHUNKED + b"x\r\n"))
            assert app.is_told.wait(LONG)
        assert status == 400
        assert json.loads(body)["error"]["message"] == "the request is not valid HTTP"

    def test_an_answer_that_has_begun_is_cut(self) -> None:
        app = Told(answers_first=True)
        with running(app) as site, site.connection() as connection:
            connection.send(CHUNKED)
            connection.read(b"early")
            connection.send(b"x\r\n")
            assert connection.read_all() == b""
            assert app.is_told.wait(LONG)

    def test_the_answer_to_head_has_no_body(self) -> None:
        app = Told()
        with running(app) as site:
            status, _, body = split(site.ask(CHUNKED.replace(b"POST", b"HEAD") + b"x\r\n"))
        assert (status, body) == (400, b"")


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_an_upgrade_is_not_taken_and_not_made_a_fuss_of(protocol: bytes) -> None:
    """As a Java client asks for it with each request."""
    fields = (
        b"Upgrade: " + protocol + b"\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAA"
    )
    with running(echo_path) as site, site.connection() as connection:
        connection.send(
            GET[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\n" + fields + b"\r\n\r\n"
        )
        assert connection.read(b"/a").startswith(b"HTTP/1.1 200")
        connection.send(LAST_GET)
        assert connection.read_all().endswith(b"/z")


class TestReaders:
    """Who takes nothing is cut off; who takes a little is waited for."""

    def test_one_that_takes_nothing_is_cut_off_and_the_app_told(self) -> None:
        gone = threading.Event()

        async def flood(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            listener = asyncio.create_task(listen(receive))
            while not listener.done():
                await send({"type": "http.response.body", "body": b"a" * 4096, "more_body": True})
            gone.set()

        async def listen(receive: Receive) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        with running(flood, write_timeout=SHORT) as site:
            with site.connection(receive_buffer=4096) as connection:
                connection.send(GET)
                assert gone.wait(LONG)

    def test_one_that_takes_nothing_does_not_hold_up_the_end(self) -> None:
        answered = threading.Event()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, b"a" * (1 << 24))
            answered.set()

        with running(answer, write_timeout=SHORT) as site:
            with site.connection(receive_buffer=4096) as connection:
                connection.send(LAST_GET)
                assert answered.wait(LONG)
                site.stop()

    def test_one_that_takes_it_all_gets_it_all(self) -> None:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, os.urandom(1 << 20))

        with running(answer) as site, site.connection(receive_buffer=4096) as connection:
            connection.send(LAST_GET)
            assert len(split(connection.read_all())[2]) == 1 << 20


class PacedTransport(asyncio.Transport):
    """Says for each look at it how many bytes it still holds; tells when it is cut."""

    def __init__(self, sock: socket.socket, sizes: list[int]) -> None:
        super().__init__({"socket": sock})
        self.sizes = sizes
        self.is_cut = asyncio.Event()
        self.high: int | None = None
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def is_closing(self) -> bool:
        return self.is_cut.is_set()

    def abort(self) -> None:
        self.is_cut.set()

    def close(self) -> None:
        self.is_cut.set()


@contextmanager
def paced(*sizes: int, app: ASGIApp = echo_path) -> Iterator[tuple[PacedTransport, Protocol]]:
    """Yield both ends of a connection whose time for taking something passes at once.

    The socket is none of TCP's and refuses its options, as those of some systems do.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = PacedTransport(ours, list(sizes))
        config = uvicorn.Config(app, log_config=None)
        made = protocol_class(read_timeout=LONG, write_timeout=0)
        protocol = made(config, ServerState(), {})
        protocol.connection_made(transport)
        yield transport, protocol
        protocol.connection_lost(None)


@pytest.mark.anyio
async def test_a_slow_reader_has_as_long_again_for_each_piece_it_takes() -> None:
    with paced(100, 99, 99, 50, 50, 1, 1, 1) as (transport, protocol):
        protocol.pause_writing()
        await transport.is_cut.wait()
        # The first, two looks for each of three pieces, and the one that sees none.
        assert transport.sizes == []


@pytest.mark.anyio
async def test_a_reader_that_took_everything_is_not_looked_at() -> None:
    with paced(100) as (transport, protocol):
        protocol.pause_writing()
        protocol.resume_writing()
        await later(0)
        assert not transport.is_cut.is_set()


@pytest.mark.anyio
async def test_a_reader_that_left_is_not_looked_at() -> None:
    with paced(100) as (_, protocol):
        protocol.pause_writing()
        protocol.connection_lost(None)
        await later(0)


@pytest.mark.anyio
async def test_whatever_waits_to_be_taken_is_looked_at() -> None:
    with paced() as (transport, _):
        assert transport.high == 0


@pytest.mark.anyio
async def test_the_app_is_told_of_a_fault_before_the_client_takes_its_answer() -> None:
    app = Told()
    with paced(app=app) as (transport, protocol):
        protocol.data_received(CHUNKED)
        await later(0)
        protocol.data_received(b"x\r\n")
        await asyncio.wait(protocol.tasks, timeout=LONG)
        assert app.is_told.is_set()
        # And nothing of the app's answer after that of the protocol.
        assert transport.written.count(b"HTTP/1.1 ") == 1
        assert transport.written.startswith(b"HTTP/1.1 400 ")


@pytest.mark.anyio
async def test_the_server_closes_what_is_idle() -> None:
    with paced() as (transport, protocol):
        protocol.shutdown()
        assert transport.is_cut.is_set()


@pytest.mark.anyio
async def test_a_connection_that_broke_does_not_break_the_shutdown() -> None:
    with paced() as (transport, protocol):
        protocol.conn.send_failed()
        transport.abort()
        protocol.shutdown()


class TestDeadPeers:
    """The kernel looks for peers that are gone without a word."""

    def test_it_is_asked_to(self) -> None:
        options: dict[str, int] = {}

        async def look(scope: Scope, receive: Receive, send: Send) -> None:
            # The task is the connection's own, and the protocol is whose response this is.
            (connection,) = site.server.server_state.connections
            sock = cast(Protocol, connection).transport.get_extra_info("socket")
            options["alive"] = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT"):
                if hasattr(socket, name):
                    options[name] = sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            await respond(send)

        with running(look, write_timeout=60) as site:
            site.ask(LAST_GET)
        assert options.pop("alive") == 1
        idle = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10}
        assert options == {
            name: value
            for name, value in {**idle, "TCP_USER_TIMEOUT": 60_000}.items()
            if hasattr(socket, name)
        }

    def test_a_system_that_has_not_all_of_them_serves_as_well(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(socket, "TCP_KEEPINTVL", raising=False)
        with running(echo_path) as site:
            assert site.ask(LAST_GET).endswith(b"/z")
