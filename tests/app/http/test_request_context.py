"""Every request has an id, is counted, and ends with an answer."""

import asyncio
import logging
from collections.abc import Callable

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http.rejections import ShuttingDown
from app.http.request_context import InFlightRequests, RequestContextMiddleware
from app.observability.logs import summarize_exception
from tests.app.server.test_http_protocol import LAST_GET, running, split

pytestmark = pytest.mark.anyio

SECRET = "my diary"


class App:
    """Answers, and then or before does what a test wants."""

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
    @pytest.mark.parametrize("wanted", [b"a", b"trace-7/{b}%s", b"~" * 128])
    async def test_the_clients_own_is_kept(self, wanted: bytes) -> None:
        seen = []
        app = App(lambda scope: seen.append(scope["state"]["request_id"]))
        response = await ask(app, request_id=wanted)
        assert response.headers["x-request-id"].encode() == wanted
        assert seen == [wanted.decode()]
        assert response.headers["x-mine"] == "yes"

    @pytest.mark.parametrize(
        "wanted", [None, b"", b"a b", b"a\tb", b"\xc3\xa9", b"a\nx-y: z", b"a\r\n", b"~" * 129]
    )
    async def test_anything_else_gets_a_new_one(self, wanted: bytes | None) -> None:
        responses = [await ask(App(), request_id=wanted) for _ in range(2)]
        one, two = [response.headers["x-request-id"] for response in responses]
        assert one.startswith("req-")
        assert len(one) == 36
        assert one != two

    async def test_what_the_server_put_into_the_state_stays(self) -> None:
        scope: Scope = {"type": "http", "path": "/", "headers": [], "state": {"ours": 1}}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            pass

        await RequestContextMiddleware(app, InFlightRequests())(scope, nothing_comes, nobody_hears)
        assert scope["state"].keys() == {"ours", "request_id"}


async def nothing_comes() -> Message:
    raise AssertionError("nothing is read")


async def nobody_hears(message: Message) -> None:
    raise AssertionError("nothing is said")


class TestCount:
    @pytest.mark.parametrize(
        ("path", "num_open"),
        [("/v1/models", 1), ("/healthy", 1), ("/health", 0), ("/ready", 0), ("/metrics", 0)],
    )
    async def test_a_request_counts_while_it_is_answered(self, path: str, num_open: int) -> None:
        count = InFlightRequests()
        seen = []
        await ask(App(lambda scope: seen.append(count.num_open), is_late=True), path, count=count)
        assert seen == [num_open]
        assert count.num_open == 0

    @pytest.mark.parametrize("is_late", [False, True])
    async def test_one_that_fails_does_not_count_for_ever(self, is_late: bool) -> None:
        count = InFlightRequests()
        told: list[Message] = []

        async def hear(message: Message) -> None:
            told.append(message)

        scope: Scope = {"type": "http", "path": "/", "headers": []}
        await RequestContextMiddleware(App(fail, is_late=is_late), count)(
            scope, nothing_comes, hear
        )
        assert told[0]["status"] == (200 if is_late else 500)
        assert count.num_open == 0

    async def test_one_that_is_cancelled_passes_it_on_and_does_not_count_for_ever(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        count = InFlightRequests()
        reached = asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            reached.set()
            await asyncio.Event().wait()

        scope: Scope = {"type": "http", "path": "/", "headers": []}
        call = asyncio.create_task(
            RequestContextMiddleware(wait, count)(scope, nothing_comes, nobody_hears)
        )
        await reached.wait()
        assert count.num_open == 1
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert count.num_open == 0
        assert caplog.text == ""

    async def test_other_scopes_pass_uncounted(self) -> None:
        count = InFlightRequests()
        seen = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append((scope["type"], count.num_open))

        await RequestContextMiddleware(app, count)(
            {"type": "lifespan"}, nothing_comes, nobody_hears
        )
        assert seen == [("lifespan", 0)]


class TestFailures:
    async def test_one_that_nobody_expected_is_a_500_without_its_words(
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

    async def test_one_that_has_an_answer_of_its_own_gets_it(self) -> None:
        def refuse(scope: Scope) -> None:
            raise ShuttingDown(retry_after=7)

        response = await ask(App(refuse))
        assert response.status_code == 503
        assert response.headers["retry-after"] == "7"

    def test_on_the_wire_it_is_a_whole_answer(self, caplog: pytest.LogCaptureFixture) -> None:
        with running(RequestContextMiddleware(App(fail), InFlightRequests())) as site:
            status, fields, body = split(site.ask(LAST_GET))
        assert status == 500
        assert fields["x-request-id"].startswith("req-")
        assert body.endswith(b"}}")
        assert [r.name for r in caplog.records if r.levelno >= logging.ERROR] == [
            "app.http.request_context"
        ]

    def test_a_response_that_has_begun_is_cut_and_not_ended(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with running(RequestContextMiddleware(App(fail, is_late=True), InFlightRequests())) as site:
            status, _, body = split(site.ask(LAST_GET.replace(b"Connection: close\r\n", b"")))
        assert status == 200
        # A chunk, and not the one that ends the body.
        assert body == b"4\r\npart\r\n"
        assert SECRET not in caplog.text


class TestOutline:
    """An exception in one line: types and places, and no words of it."""

    def caught(self, function: Callable[[], None]) -> BaseException:
        with pytest.raises(BaseException) as info:  # noqa: PT011
            function()
        return info.value

    def test_what_led_to_it_is_told(self) -> None:
        def fail() -> None:
            try:
                raise KeyError(SECRET)
            except KeyError as error:
                raise ValueError(SECRET) from error

        line = summarize_exception(self.caught(fail))
        assert line.startswith("ValueError at ")
        assert "; from KeyError at " in line
        assert SECRET not in line

    def test_what_it_came_upon_is_told_unless_it_is_of_no_account(self) -> None:
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

    def test_all_of_a_group_are_told_as_far_as_they_fit(self) -> None:
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
