"""Every request has an id, is counted, and ends with a response."""

import asyncio
import logging
from collections.abc import Callable

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http.errors.rejections import ShuttingDown
from app.http.request_context import InFlightRequests, RequestContextMiddleware
from app.observability.logs import summarize_exception
from app.storage.disk.database import StorageError
from batching import InvalidRequest
from tests.support.raw_http import LAST_GET, running, split
from tests.support.rows import rows

pytestmark = pytest.mark.anyio

SECRET = "my diary"


class App:
    """Responds, and calls a function before or during the response."""

    def __init__(
        self, before: Callable[[Scope], None] | None = None, *, is_late: bool = False
    ) -> None:
        self._do = before or (lambda scope: None)
        self._is_late = is_late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_late:
            self._do(scope)
        headers = [(b"x-mine", b"yes")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        if self._is_late:
            self._do(scope)
        await send({"type": "http.response.body"})


def fail(scope: Scope) -> None:
    raise KeyError(SECRET)


async def ask(
    app: App,
    path: str = "/",
    request_id: bytes | None = None,
    count: InFlightRequests | None = None,
) -> httpx.Response:
    transport = httpx.ASGITransport(RequestContextMiddleware(app, count or InFlightRequests()))
    headers = [] if request_id is None else [(b"X-Request-Id", request_id)]
    async with httpx.AsyncClient(transport=transport) as client:
        return await client.get(f"http://test{path}", headers=headers)


class TestIds:
    @rows("client_id", [b"a", b"trace-7/{b}%s", b"~" * 128])
    async def test_the_id_of_the_client_is_kept(self, client_id: bytes) -> None:
        seen = []
        app = App(lambda scope: seen.append(scope["state"]["request_id"]))
        response = await ask(app, request_id=client_id)
        assert response.headers["x-request-id"].encode() == client_id
        assert seen == [client_id.decode()]
        assert response.headers["x-mine"] == "yes"

    @rows(
        "client_id", [None, b"", b"a b", b"a\tb", b"\xc3\xa9", b"a\nx-y: z", b"a\r\n", b"~" * 129]
    )
    async def test_other_requests_get_a_new_one(self, client_id: bytes | None) -> None:
        responses = [await ask(App(), request_id=client_id) for _ in range(2)]
        one, two = [response.headers["x-request-id"] for response in responses]
        assert one.startswith("req-")
        assert len(one) == 36
        assert one != two

    @rows(
        ("path", "is_anthropic"),
        [
            ("/v1/messages", True),
            ("/v1/messages/count_tokens", True),
            ("/v1/messages-of-others", False),
            ("/v1/chat/completions", False),
        ],
    )
    async def test_anthropics_clients_get_it_by_their_name(
        self, path: str, is_anthropic: bool
    ) -> None:
        headers = (await ask(App(), path, b"a")).headers
        assert headers["x-request-id"] == "a"
        assert headers.get("request-id") == ("a" if is_anthropic else None)

    async def test_the_state_of_the_server_is_kept(self) -> None:
        scope: Scope = {"type": "http", "path": "/", "headers": [], "state": {"ours": 1}}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            pass

        await RequestContextMiddleware(app, InFlightRequests())(
            scope, nothing_is_received, nothing_is_sent
        )
        assert scope["state"].keys() == {"ours", "request_id"}


async def nothing_is_received() -> Message:
    raise AssertionError("nothing is read")


async def nothing_is_sent(message: Message) -> None:
    raise AssertionError("nothing is sent")


class TestCount:
    @rows(
        ("path", "num_open"),
        [("/v1/models", 1), ("/healthy", 1), ("/health", 0), ("/ready", 0), ("/metrics", 0)],
    )
    async def test_a_request_counts_while_it_is_in_flight(self, path: str, num_open: int) -> None:
        count = InFlightRequests()
        seen = []
        await ask(App(lambda scope: seen.append(count.num_open), is_late=True), path, count=count)
        assert seen == [num_open]
        assert count.num_open == 0

    @pytest.mark.parametrize("is_late", [False, True])
    async def test_a_failed_request_no_longer_counts(self, is_late: bool) -> None:
        count = InFlightRequests()
        sent: list[Message] = []

        async def record(message: Message) -> None:
            sent.append(message)

        scope: Scope = {"type": "http", "path": "/", "headers": []}
        await RequestContextMiddleware(App(fail, is_late=is_late), count)(
            scope, nothing_is_received, record
        )
        assert sent[0]["status"] == (200 if is_late else 500)
        assert count.num_open == 0

    async def test_a_cancelled_request_is_cancelled_and_no_longer_counts(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        count = InFlightRequests()
        reached = asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            reached.set()
            await asyncio.Event().wait()

        scope: Scope = {"type": "http", "path": "/", "headers": []}
        call = asyncio.create_task(
            RequestContextMiddleware(wait, count)(scope, nothing_is_received, nothing_is_sent)
        )
        await reached.wait()
        assert count.num_open == 1
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert count.num_open == 0
        assert caplog.text == ""


class TestFailures:
    async def test_an_unexpected_exception_is_a_500_without_its_message(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        response = await ask(App(fail), request_id=b"trace-7")
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "trace-7"
        assert response.json()["error"]["type"] == "server_error"
        assert SECRET not in response.text
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        line = record.getMessage()
        assert line.startswith("request trace-7 failed: KeyError at http/test_request_context.py:")
        assert " fail < http/test_request_context.py:" in line
        assert SECRET not in caplog.text

    async def test_a_rejection_gets_its_response_and_is_counted(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def reject(scope: Scope) -> None:
            raise ShuttingDown(retry_after=7)

        counted: list[str] = []
        app = RequestContextMiddleware(App(reject), InFlightRequests(), counted.append)
        caplog.set_level(logging.INFO)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            response = await client.request("G" * 32_000, "http://test/")
        # A log does not grow with what a client without a key sends.
        lines = [r.getMessage() for r in caplog.records if r.name.startswith("app.")]
        assert any("method=GGG" in line for line in lines)
        assert all(len(line) < 300 for line in lines)
        assert counted == ["shutting_down"]
        assert response.status_code == 503
        assert response.headers["retry-after"] == "7"

    @pytest.mark.parametrize("body", [b"", b"Not found", b"[]", b'{"error": 1}'])
    async def test_the_line_of_a_rejection_needs_no_known_body(
        self, body: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body"})

        caplog.set_level(logging.INFO, logger="app")
        transport = httpx.ASGITransport(RequestContextMiddleware(app, InFlightRequests()))
        async with httpx.AsyncClient(transport=transport) as client:
            await client.get("http://test/", headers={"X-Request-Id": "mine"})
        assert [record.getMessage() for record in caplog.records] == [
            "request_id=mine method=GET route=- status=404 code=- param=-"
        ]

    async def test_a_rejection_that_no_client_reads_has_its_line(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def nothing_can_be_sent(message: Message) -> None:
            raise OSError("the client has gone")

        def reject(scope: Scope) -> None:
            raise InvalidRequest("input", SECRET)

        caplog.set_level(logging.INFO, logger="app.http.request_context")
        scope = {"type": "http", "path": "/", "method": "GET", "headers": []}
        with pytest.raises(OSError, match="the client has gone"):
            await RequestContextMiddleware(App(reject), InFlightRequests())(
                scope, nothing_is_received, nothing_can_be_sent
            )
        *_, last = [record.getMessage() for record in caplog.records]
        assert last.endswith("method=GET route=- status=400 code=- param=-")

    @pytest.mark.parametrize(
        ("param", "shown"),
        [
            ("input.0.id", "input"),
            ("expires_after[seconds]", "expires_after"),
            ("X-Request-Timeout", "X-Request-Timeout"),
            ("my diary", "-"),
            ("a" * 33, "-"),
        ],
    )
    async def test_the_line_of_a_rejection_has_the_first_name_of_the_field(
        self, param: str, shown: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def reject(scope: Scope) -> None:
            raise InvalidRequest(param, SECRET)

        caplog.set_level(logging.INFO, logger="app.http.request_context")
        await ask(App(reject))
        *_, last = [record.getMessage() for record in caplog.records]
        assert last.endswith(f"status=400 code=invalid_request_error param={shown}")

    def test_the_response_on_the_wire_is_complete(self, caplog: pytest.LogCaptureFixture) -> None:
        with running(RequestContextMiddleware(App(fail), InFlightRequests())) as site:
            status, fields, body = split(site.ask(LAST_GET))
        assert status == 500
        assert fields["x-request-id"].startswith("req-")
        assert body.endswith(b"}}")
        assert [r.name for r in caplog.records if r.levelno >= logging.ERROR] == [
            "app.http.request_context"
        ]

    def test_a_response_that_has_started_is_cut(self, caplog: pytest.LogCaptureFixture) -> None:
        with running(RequestContextMiddleware(App(fail, is_late=True), InFlightRequests())) as site:
            status, _, body = split(site.ask(LAST_GET.replace(b"Connection: close\r\n", b"")))
        assert status == 200
        # A chunk, and not the one that ends the body.
        assert body == b"4\r\npart\r\n"
        assert SECRET not in caplog.text


class TestSummaries:
    """An exception in one line: types and frames, and no message."""

    def caught(self, function: Callable[[], None]) -> BaseException:
        with pytest.raises(BaseException) as info:  # noqa: PT011
            function()
        return info.value

    def test_the_cause_is_included(self) -> None:
        def fail() -> None:
            try:
                raise KeyError(SECRET)
            except KeyError as error:
                raise ValueError(SECRET) from error

        line = summarize_exception(self.caught(fail))
        assert line.startswith("ValueError at ")
        assert "; from KeyError at " in line
        assert SECRET not in line

    def test_the_context_is_included_unless_it_is_suppressed(self) -> None:
        def upon() -> None:
            try:
                raise KeyError(SECRET)
            except KeyError:
                raise ValueError(SECRET)  # noqa: B904

        def instead() -> None:
            try:
                raise KeyError(SECRET)
            except KeyError:
                raise ValueError(SECRET) from None

        assert "; from KeyError at " in summarize_exception(self.caught(upon))
        assert "KeyError" not in summarize_exception(self.caught(instead))

    def test_the_members_of_a_group_are_included_up_to_a_limit(self) -> None:
        group = ExceptionGroup(
            SECRET, [KeyError(SECRET), OSError(SECRET), ValueError(), EOFError()]
        )
        line = summarize_exception(group)
        assert [text.split(" at ")[0] for text in line.split("; from ")] == [
            "ExceptionGroup",
            "KeyError",
            "OSError",
            "ValueError",
        ]

    @rows(
        ("error", "name"),
        [
            (StorageError("disk is full"), "StorageError (disk is full)"),
            (OSError(28, SECRET, SECRET), "OSError (No space left on device)"),
            (OSError(SECRET), "OSError"),
            (KeyError(SECRET), "KeyError"),
        ],
    )
    def test_what_the_system_says_of_a_disk_is_included(self, error: Exception, name: str) -> None:
        assert summarize_exception(error).partition(" at ")[0] == name
        assert f"; from {name} at " in summarize_exception(ExceptionGroup(SECRET, [error]))

    def test_it_is_short_however_deep_the_failure(self) -> None:
        def sink() -> None:
            sink()

        def chain() -> None:
            error: Exception = KeyError()
            for _ in range(100):
                error, cause = ValueError(), error
                error.__cause__ = cause
            raise error

        assert len(summarize_exception(self.caught(sink))) < 1000
        assert summarize_exception(self.caught(chain)).count("ValueError") == 3
