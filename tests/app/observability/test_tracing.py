"""Spans, as a collector receives them."""

import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from app.observability.tracing import ENDPOINT, TracingUnavailable, make_tracer
from tests.support.speaker import MODEL_ID, served, served_endlessly

pytestmark = pytest.mark.anyio

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A collector that keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    started = Collector()
    monkeypatch.setenv(ENDPOINT, started.url)
    yield started
    started.close()


def attributes(span: Span) -> dict[str, object]:
    values = {a.key: a.value for a in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


async def test_a_request_is_a_span_in_the_callers_trace(collector: Collector) -> None:
    tracer = make_tracer({ENDPOINT: collector.url})
    assert tracer is not None
    async with served(b"Hello", tracer=tracer) as server:
        server.client.headers["traceparent"] = f"00-{TRACE_ID}-{PARENT_ID}-01"
        response = (await server.chat("secret")).json()
        await server.complete()
        body = {"model": MODEL_ID, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        await server.client.post("/v1/messages", json=body)
    tracer.close()
    span, other, message = collector.spans
    assert span.name == f"chat {MODEL_ID}"
    assert other.name == f"text_completion {MODEL_ID}"
    assert message.name == span.name
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    values = attributes(span)
    assert values["gen_ai.response.id"] == response["id"]
    assert values["gen_ai.usage.output_tokens"] == 6
    assert "secret" not in str(span)
    times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events)]
    assert [event.name for event in span.events] == ["time_in_queue", "time_to_first_token"]
    assert times == sorted(times)
    assert times[-1] <= span.end_time_unix_nano
    assert span.status.code == Status.STATUS_CODE_UNSET


async def test_a_request_that_failed_says_so(collector: Collector) -> None:
    tracer = make_tracer({ENDPOINT: collector.url})
    assert tracer is not None
    async with served_endlessly(tracer=tracer) as server:
        await server.chat(timeout=2)
    tracer.close()
    (span,) = collector.spans
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.parent_span_id == b""


def test_without_a_collector_nothing_is_traced() -> None:
    assert make_tracer({}) is None
    assert make_tracer({ENDPOINT: ""}) is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingUnavailable, match="pip install opentelemetry-sdk"):
        make_tracer({ENDPOINT: "http://127.0.0.1:1"})
