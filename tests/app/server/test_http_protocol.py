"""The HTTP protocol: a client that stalls, floods or sends garbage loses its connection, no more."""

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

from app.http.streams.unsent_bytes import UnsentBytes
from app.server.connection_limit import ConnectionLimit
from app.server.http_protocol import MAX_HEAD_BYTES, Protocol, protocol_class
from tests.support.raw_http import GET, LAST_GET, LONG, SHORT, running, split, timers_have_fired

# A read timeout within which a first request surely arrives.
ENOUGH: Final = 0.4

POST: Final = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
CHUNKED: Final = POST + b"Transfer-Encoding: chunked\r\n\r\n"


async def respond(send: Send, body: bytes = b"", *, is_last: bool = True) -> None:
    length = str(len(body)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def echo_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond without reading the body."""
    await respond(send, scope["path"].encode())


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which faults of a client were logged above info."""
    with caplog.at_level(logging.INFO):
        yield
    logged = [
        (r.name, r.getMessage()) for r in caplog.get_records("call") if r.levelno > logging.INFO
    ]
    assert logged == []


class TestHeads:
    """A connection without a complete head ends after the read timeout."""

    def test_an_idle_connection_is_closed(self) -> None:
        with running(echo_path, read_timeout=SHORT) as site:
            assert site.ask(b"") == b""

    def test_half_a_head_is_a_408(self) -> None:
        with running(echo_path, read_timeout=SHORT) as site:
            status, fields, body = split(site.ask(GET[:-2]))
        assert (status, fields["connection"]) == (408, "close")
        assert fields["content-type"] == "application/json"
        assert json.loads(body)["error"] == {
            "message": "the head of the request was not received in time",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_timeout",
        }

    def test_half_of_a_later_head_is_a_408(self) -> None:
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(GET)
            connection.read(b"/a")
            connection.send(b"GET")
            assert split(connection.read_all())[0] == 408

    def test_half_of_a_pipelined_head_is_a_408(self) -> None:
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(GET + b"GET")
            assert connection.read(b"/a").startswith(b"HTTP/1.1 200")
            assert split(connection.read_all())[0] == 408

    def test_after_keep_alive_the_connection_is_closed_without_a_response(self) -> None:
        with running(echo_path, keep_alive=0) as site:
            assert site.ask(GET).endswith(b"/a")

    def test_pipelined_requests_are_answered_in_order(self) -> None:
        with running(echo_path) as site:
            responses = site.ask(GET + GET.replace(b"/a", b"/b") + LAST_GET).split(b"HTTP/1.1 ")
        assert [response[-2:] for response in responses] == [b"", b"/a", b"/b", b"/z"]

    def test_the_response_to_head_has_no_body(self) -> None:
        with running(echo_path) as site:
            status, fields, body = split(site.ask(LAST_GET.replace(b"GET", b"HEAD")))
        assert (status, fields["content-length"], body) == (200, "2", b"")


class TestUnreadBodies:
    @pytest.mark.parametrize("rest", [b"", b"abc"])
    def test_one_that_does_not_end_closes_the_connection(self, rest: bytes) -> None:
        head = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(head)
            assert connection.read(b"/a").startswith(b"HTTP/1.1 200")
            connection.send(rest)
            assert connection.read_all() == b""

    def test_one_that_ends_late_closes_the_connection(self) -> None:
        head = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
        with running(echo_path, read_timeout=ENOUGH) as site, site.connection() as connection:
            connection.send(head)
            connection.read(b"/a")
            connection.send(b"abc")
            assert connection.read_all() == b""


class TestInvalidHTTP:
    """Invalid HTTP gets an error in OpenAI's format, and is not logged."""

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
            # What a proxy that goes by the length would pass on as a part of the body.
            (
                POST.replace(b"close", b"keep-alive")
                + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
                + LAST_GET,
                400,
                "the request is not valid HTTP",
            ),
            (
                POST + b"Transfer-Encoding: gzip\r\n\r\n",
                501,
                "the server does not support this Transfer-Encoding",
            ),
            (
                LAST_GET[:-2] + b"a: b\r\n" * (2 * MAX_HEAD_BYTES // 6) + b"\r\n",
                431,
                "the head of the request is larger than the limit",
            ),
        ],
    )
    def test_it_gets_an_error(self, data: bytes, status: int, message: str) -> None:
        with running(echo_path) as site:
            responded, fields, body = split(site.ask(data))
        assert responded == status
        assert (fields["connection"], fields["content-type"]) == ("close", "application/json")
        assert json.loads(body)["error"]["message"] == message

    def test_a_head_of_the_largest_size_is_accepted(self) -> None:
        head = LAST_GET[:-2] + b"a: " + b"b" * (MAX_HEAD_BYTES - len(LAST_GET) - 10) + b"\r\n\r\n"
        with running(echo_path) as site:
            assert site.ask(head).endswith(b"/z")


class DisconnectListener:
    """An app that reads until the client disconnects, and then responds."""

    def __init__(self, *, responds_first: bool = False) -> None:
        self._responds_first = responds_first
        self.has_heard = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._responds_first:
            await respond(send, b"early", is_last=False)
        while (await receive())["type"] != "http.disconnect":
            pass
        # As the framework does, as if the client were connected.
        await respond(send, b"late")
        self.has_heard.set()


class TestBytesBeyondARequest:
    """What comes before the response is read: else the end of the connection would not be."""

    @pytest.mark.parametrize("more", [b"", b"\r\n", b"x", GET, GET + GET + b"G"])
    @pytest.mark.parametrize("field", [b"", b"Connection: upgrade\r\nUpgrade: foo\r\n"])
    def test_one_that_sends_more_and_leaves_is_noticed(self, more: bytes, field: bytes) -> None:
        app = DisconnectListener(responds_first=True)
        with running(app) as site:
            with site.connection() as connection:
                connection.send(GET[:-2] + field + b"\r\n")
                connection.read(b"early")
                connection.send(more)
            assert app.has_heard.wait(LONG)

    def test_one_that_sends_too_much_more_is_rejected(self) -> None:
        app = DisconnectListener()
        with running(app) as site:
            status, fields, body = split(site.ask(GET + b"x" * (2 * MAX_HEAD_BYTES)))
            assert app.has_heard.wait(LONG)
        assert (status, fields["connection"]) == (413, "close")
        assert f"more than {MAX_HEAD_BYTES} bytes" in json.loads(body)["error"]["message"]


class TestInvalidBodies:
    def test_the_client_gets_an_error_and_the_app_a_disconnect(self) -> None:
        app = DisconnectListener()
        with running(app) as site:
            status, _, body = split(site.ask(CHUNKED + b"x\r\n"))
            assert app.has_heard.wait(LONG)
        assert status == 400
        assert json.loads(body)["error"]["message"] == "the request is not valid HTTP"

    def test_a_response_that_has_started_is_cut(self) -> None:
        app = DisconnectListener(responds_first=True)
        with running(app) as site, site.connection() as connection:
            connection.send(CHUNKED)
            connection.read(b"early")
            connection.send(b"x\r\n")
            assert connection.read_all() == b""
            assert app.has_heard.wait(LONG)

    def test_the_error_for_head_has_no_body(self) -> None:
        app = DisconnectListener()
        with running(app) as site:
            status, _, body = split(site.ask(CHUNKED.replace(b"POST", b"HEAD") + b"x\r\n"))
        assert (status, body) == (400, b"")


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_a_request_to_upgrade_is_served_without_it(protocol: bytes) -> None:
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
    """A client that reads nothing is aborted; a slow one is waited for."""

    def test_one_that_reads_nothing_is_aborted_and_the_app_notified(self) -> None:
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

    def test_one_that_reads_nothing_does_not_delay_the_shutdown(self) -> None:
        responded = threading.Event()

        async def respond_at_length(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, b"a" * (1 << 24))
            responded.set()

        with running(respond_at_length, write_timeout=SHORT) as site:
            with site.connection(receive_buffer=4096) as connection:
                connection.send(LAST_GET)
                assert responded.wait(LONG)
                site.stop()

    def test_one_that_reads_all_gets_all(self) -> None:
        async def respond_at_length(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, os.urandom(1 << 20))

        with running(respond_at_length) as site, site.connection(receive_buffer=4096) as connection:
            connection.send(LAST_GET)
            assert len(split(connection.read_all())[2]) == 1 << 20


class FakeTransport(asyncio.Transport):
    """Reports the given buffer sizes one after the other; signals when it is closed."""

    def __init__(self, sock: socket.socket, sizes: list[int]) -> None:
        super().__init__({"socket": sock})
        self.sizes = sizes
        self.is_closed = asyncio.Event()
        self.high: int | None = None
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def is_closing(self) -> bool:
        return self.is_closed.is_set()

    def abort(self) -> None:
        self.is_closed.set()

    def close(self) -> None:
        self.is_closed.set()


@contextmanager
def connected(
    *sizes: int, app: ASGIApp = echo_path, read_timeout: float = LONG
) -> Iterator[tuple[FakeTransport, Protocol]]:
    """Yield both ends of a connection whose write timeout passes at once.

    The socket is not a TCP socket and rejects its options, as those of some systems do.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = FakeTransport(ours, list(sizes))
        config = uvicorn.Config(app, log_config=None)
        made = protocol_class(
            read_timeout=read_timeout,
            write_timeout=0,
            limit=ConnectionLimit(1),
            unsent=UnsentBytes(),
        )
        protocol = made(config, ServerState(), {})
        protocol.connection_made(transport)
        yield transport, protocol
        protocol.connection_lost(None)


class Waiting:
    """An app that responds with its path and the body, once it may."""

    def __init__(self) -> None:
        self.may_respond = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.may_respond.wait()
        await respond(send, scope["path"].encode() + (await receive())["body"])


class TestReadTimeout:
    """It limits the time for a head; here it passes at once when the client owes one."""

    @pytest.mark.anyio
    async def test_the_response_may_take_longer(self) -> None:
        app = Waiting()
        with connected(app=app, read_timeout=0) as (transport, protocol):
            protocol.data_received(GET)
            await timers_have_fired()
            assert not transport.is_closed.is_set()
            app.may_respond.set()
            await asyncio.wait(protocol.tasks)
            assert transport.written.endswith(b"/a")

    @pytest.mark.anyio
    async def test_the_body_may_take_longer(self) -> None:
        """`app/http/body_limit.py` limits its time."""
        app = Waiting()
        with connected(app=app, read_timeout=0) as (transport, protocol):
            protocol.data_received(POST + b"Content-Length: 3\r\n\r\n")
            await timers_have_fired()
            assert not transport.is_closed.is_set()
            protocol.data_received(b"abc")
            app.may_respond.set()
            await asyncio.wait(protocol.tasks)
            assert transport.written.endswith(b"/abc")

    @pytest.mark.anyio
    async def test_between_requests_the_client_may_pause_as_long_as_keep_alive_allows(self) -> None:
        with connected(read_timeout=0) as (transport, protocol):
            for request, end in ((GET, b"/a"), (LAST_GET, b"/z")):
                protocol.data_received(request)
                await asyncio.wait(protocol.tasks)
                assert transport.written.endswith(end)
                await timers_have_fired()
                assert transport.is_closed.is_set() == (request is LAST_GET)


@pytest.mark.anyio
async def test_a_slow_reader_has_as_long_again_for_each_piece_it_reads() -> None:
    with connected(100, 99, 99, 50, 50, 1, 1, 1) as (transport, protocol):
        protocol.pause_writing()
        await transport.is_closed.wait()
        # The first, two checks for each of three pieces, and the one that finds no progress.
        assert transport.sizes == []


@pytest.mark.anyio
async def test_a_reader_that_has_read_all_is_not_checked() -> None:
    with connected(100) as (transport, protocol):
        protocol.pause_writing()
        protocol.resume_writing()
        await timers_have_fired()
        assert not transport.is_closed.is_set()


@pytest.mark.anyio
async def test_a_reader_that_disconnected_is_not_checked() -> None:
    with connected(100) as (_, protocol):
        protocol.pause_writing()
        protocol.connection_lost(None)
        await timers_have_fired()


@pytest.mark.anyio
async def test_all_buffered_data_is_checked() -> None:
    with connected() as (transport, _):
        assert transport.high == 0


@pytest.mark.anyio
async def test_the_app_gets_the_disconnect_before_the_client_reads_the_error() -> None:
    app = DisconnectListener()
    with connected(app=app) as (transport, protocol):
        protocol.data_received(CHUNKED)
        await timers_have_fired()
        protocol.data_received(b"x\r\n")
        await asyncio.wait(protocol.tasks, timeout=LONG)
        assert app.has_heard.is_set()
        # And no response of the app after that of the protocol.
        assert transport.written.count(b"HTTP/1.1 ") == 1
        assert transport.written.startswith(b"HTTP/1.1 400 ")


@pytest.mark.anyio
async def test_the_server_closes_what_is_idle() -> None:
    with connected() as (transport, protocol):
        protocol.shutdown()
        assert transport.is_closed.is_set()


@pytest.mark.anyio
async def test_a_broken_connection_does_not_break_the_shutdown() -> None:
    with connected() as (transport, protocol):
        protocol.conn.send_failed()
        transport.abort()
        protocol.shutdown()


class TestDeadPeers:
    """The kernel detects peers that have vanished."""

    def test_the_options_are_set(self) -> None:
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

    def test_a_system_without_some_of_the_options_serves_as_well(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(socket, "TCP_KEEPINTVL", raising=False)
        with running(echo_path) as site:
            assert site.ask(LAST_GET).endswith(b"/z")
