"""OpenTelemetry traces: one span per request, if the environment names a collector.

A span is created when its request has ended, from the recorded times, so that tracing costs nothing
before.  Attributes are those of the semantic conventions for generative AI and vLLM's
`gen_ai.latency.*`; like the log, they contain no text.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from app.observability.request_record import RequestRecord

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"

_SERVICE_NAME: Final = "mlx-batch-server"
_FAILURES: Final = ("failed", "timeout")
# By what ids begin with; those of chats differ from API to API.
_OPERATIONS: Final = {
    "cmpl": "text_completion",
    "embd": "embeddings",
    "rerank": "rerank",
    "score": "score",
}
_NANOSECONDS: Final = 1_000_000_000


class TracingUnavailable(Exception):
    """A collector is configured, but the packages for it are not installed."""


class Tracer:
    """Writes spans with OpenTelemetry's SDK."""

    def __init__(self, provider: Any) -> None:
        """`provider` is a TracerProvider of the SDK, which is an optional dependency."""
        self._provider = provider
        self._tracer = provider.get_tracer(_SERVICE_NAME)

    def record(self, record: RequestRecord) -> None:
        """Record the span of a request that has just ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = _OPERATIONS.get(record.completion_id.partition("-")[0], "chat")
        # The engine's clock is monotonic, not the time of day.
        began = time.time() - record.elapsed
        span = self._tracer.start_span(
            f"{operation} {record.model_id}",
            context=TraceContextTextMapPropagator().extract(record.trace_headers),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(began),
            attributes=self._attributes(operation, record),
        )
        for event, after in _latencies(record).items():
            span.add_event(event, timestamp=_nanoseconds(began + after))
        if record.outcome in _FAILURES:
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        span.end(end_time=_nanoseconds(began + record.elapsed))

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()

    def _attributes(self, operation: str, record: RequestRecord) -> Mapping[str, Any]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": record.model_id,
            "gen_ai.response.model": record.model_id,
            "gen_ai.response.id": record.completion_id,
            "gen_ai.response.finish_reasons": record.outcome.split(","),
            "gen_ai.usage.input_tokens": record.usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.usage.num_output_tokens,
            "gen_ai.latency.e2e": record.elapsed,
            "http.request.header.x-request-id": record.request_id,
            **{f"gen_ai.latency.{name}": after for name, after in _latencies(record).items()},
        }


def make_tracer(environ: Mapping[str, str]) -> Tracer | None:
    """Return a tracer for the collector that the environment names; None if it names none.

    Raises:
        TracingUnavailable: the packages are not installed.
    """
    if not environ.get(ENDPOINT):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise TracingUnavailable(
            f"{ENDPOINT} is set, but tracing is not installed: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    name = environ.get("OTEL_SERVICE_NAME", _SERVICE_NAME)
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider)


def _latencies(record: RequestRecord) -> dict[str, float]:
    """Return the latencies that are known, in seconds since the arrival."""
    times = {"time_in_queue": record.queue_time, "time_to_first_token": record.first_token_time}
    return {name: seconds for name, seconds in times.items() if seconds is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
