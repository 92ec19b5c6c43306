"""Open connections are bounded: an idle one makes room, and without one a new connection gets a 503."""

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, NoReturn

import pytest
from starlette.types import Receive, Scope, Send

from app.server.connection_limit import (
    ConnectionLimit,
    fitting_backlog,
    fitting_connections,
    fitting_lingering,
    max_files,
)
from tests.support.raw_http import GET, LAST_GET, Connection, Site, running, split
from tests.support.rows import rows

MOST: Final = 3


async def echo_path(scope: Scope, receive: Receive, send: Send) -> None:
    body = scope["path"].encode()
    length = str(len(body)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": body})


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Counted(ConnectionLimit):
    """A limit, and what it counts."""

    def __init__(
        self, most: int = MOST, clock: Clock | None = None, *, max_lingering: int = MOST
    ) -> None:
        self.rejections: list[str] = []
        clock = clock or Clock()
        super().__init__(most, self.rejections.append, clock, max_lingering=max_lingering)


@contextmanager
def connections(site: Site, number: int) -> Iterator[list[Connection]]:
    """Open connections, each of which is known to be served: half of a head has been sent."""
    with ExitStack() as stack:
        made = [stack.enter_context(site.connection()) for _ in range(number)]
        for connection in made:
            connection.send(GET[:-2])
        yield made


def send_for_ever(connection: Connection) -> NoReturn:
    while True:
        connection.send(b"a")


def test_one_more_than_the_most_gets_a_503_until_one_ends() -> None:
    limit = Counted()
    with running(echo_path, limit=limit) as site, connections(site, MOST) as open_ones:
        status, fields, body = split(site.ask(LAST_GET))
        assert status == 503
        assert (fields["connection"], fields["retry-after"]) == ("close", "1")
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("server_error", "too_many_connections")
        assert limit.rejections == ["too_many_connections"]
        # Those that were open before go on, and the end of one lets a new one in.
        open_ones[0].send(b"Connection: close\r\n\r\n")
        assert open_ones[0].read_all().endswith(b"/a")
        assert site.ask(LAST_GET).endswith(b"/z")
        open_ones[1].send(b"\r\n")
        assert open_ones[1].read(b"/a").startswith(b"HTTP/1.1 200")


def test_the_one_that_is_idle_for_longest_makes_room() -> None:
    with running(echo_path, limit=Counted()) as site, ExitStack() as stack:
        open_ones = [stack.enter_context(site.connection()) for _ in range(MOST)]
        for connection in open_ones:
            connection.send(GET)
            connection.read(b"/a")
        # The first one is used again, so the second is the oldest.
        open_ones[0].send(GET)
        open_ones[0].read(b"/a")
        assert site.ask(LAST_GET).endswith(b"/z")
        assert open_ones[1].read_all() == b""
        for connection in (open_ones[0], open_ones[2]):
            connection.send(GET)
            assert connection.read(b"/a").startswith(b"HTTP/1.1 200")


def test_one_that_has_begun_a_head_is_not_idle() -> None:
    with running(echo_path, limit=Counted(1)) as site, site.connection() as connection:
        connection.send(GET + GET[:-2])
        connection.read(b"/a")
        assert split(site.ask(LAST_GET))[0] == 503
        connection.send(b"\r\n")
        assert connection.read(b"/a").startswith(b"HTTP/1.1 200")


def test_a_refused_client_may_send_a_request_that_is_not_read() -> None:
    """The response arrives whole, though nothing of the request is taken."""
    body = b"a" * (1 << 20)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with running(echo_path, limit=Counted()) as site, connections(site, MOST):
        status, _, answer = split(site.ask(head + body))
    assert status == 503
    assert answer.endswith(b"}")


def test_a_refused_client_that_does_not_leave_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.server.http_protocol._LINGER", 0.01)
    limit = Counted()
    with running(echo_path, limit=limit) as site, connections(site, MOST):
        with site.connection() as refused:
            assert split(refused.read(b"}}"))[0] == 503
            # It is closed for sending only, until the time is over.
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                send_for_ever(refused)


def test_few_refused_clients_are_waited_for() -> None:
    with running(echo_path, limit=Counted(max_lingering=1)) as site, connections(site, MOST):
        with site.connection() as first, site.connection() as second:
            assert split(first.read(b"}}"))[0] == 503
            assert split(second.read_all())[0] == 503


def test_the_log_has_a_line_at_times(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limit = Counted(0, clock)

    class Never:
        def shutdown(self) -> None:
            raise AssertionError("it is not served")

    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert not limit.admit(Never())
        clock.now += 11
        assert not limit.admit(Never())
    assert [record.getMessage() for record in caplog.records] == [
        "connections refused: 1, since 0 are open (MLX_SERVER_MAX_CONNECTIONS)",
        "connections refused: 5, since 0 are open (MLX_SERVER_MAX_CONNECTIONS)",
    ]
    assert len(limit.rejections) == 6


@rows(
    ("wanted", "num_files", "expected"),
    [(1024, 65_536, 1024), (1024, 1024, 256), (1024, 1, 1), (1, 1024, 1)],
)
def test_connections_fit_the_open_files(wanted: int, num_files: int, expected: int) -> None:
    assert fitting_connections(wanted, num_files) == expected
    # Each with a file that it uploads or downloads.
    taken = 2 * expected + fitting_lingering(num_files) + fitting_backlog(num_files)
    assert taken <= max(num_files, 3)


@rows(("num_files", "expected"), [(65_536, 64), (512, 64), (128, 16), (1, 0)])
def test_refused_clients_fit_the_open_files(num_files: int, expected: int) -> None:
    assert fitting_lingering(num_files) == expected


@pytest.mark.parametrize(("limit", "expected"), [(256, 256), (resource.RLIM_INFINITY, 1 << 21)])
def test_the_limit_of_open_files_may_be_none(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert max_files() == expected
