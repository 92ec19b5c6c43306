"""One response from its beginning to its end: the response object, and the events of a stream."""

from collections.abc import Mapping, Sequence
from time import time
from typing import Any, Final, NamedTuple

from pydantic import BaseModel
from pydantic_core import to_json
from sse_starlette import ServerSentEvent

from app.api.openai.responses.event_writer import OutputOptions, OutputWriter
from app.api.openai.responses.items.open_items import Event
from app.api.openai.responses.items.output_items import (
    UNFINISHED,
    IncompleteDetails,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from app.api.serving import LOGPROB_BYTES
from app.generation.choice import Delta
from app.generation.generation import GenerationSummary
from batching import FinishReason

_NO_SUMMARY: Final = "the model wrote no summary"
# Longer events are written by another thread.
_LONG_BYTES: Final = 64 << 10


class EncodedEvent(NamedTuple):
    """An event without its number; `members` are those of its JSON object, with a comma between them."""

    kind: str
    members: bytes


class ResponseWriter:
    """Makes the events of a response; they are numbered when they are sent in a stream."""

    def __init__(self, response: ResponseObject, options: OutputOptions) -> None:
        self.response = response
        # A ping may come while the end is being stored.
        self._in_progress = response.model_copy(update={"status": "in_progress"})
        self._output = OutputWriter(options)
        echoed = to_json([response.tools, response.text, response.metadata])
        self._num_echoed = len(response.instructions or "") + len(echoed)
        self._num_events = 0
        self._generates = options.generates
        self._is_summary = options.seal_summary is not None
        self._is_cut = False

    def begin(self) -> Sequence[Event]:
        if self.response.status == "queued":
            queued = {"response": self.response.model_copy()}
            begun: list[Event] = [("created", queued), ("queued", queued)]
        else:
            begun = [self._lifecycle("created")]
        self.response.status = "in_progress"
        return [*begun, self._lifecycle("in_progress")]

    def feed(self, delta: Delta) -> Sequence[Event]:
        self._is_cut |= self._generates and delta.finish_reason is FinishReason.LENGTH
        return list(self._output.feed(delta))

    def end(self, summary: GenerationSummary) -> Sequence[Event]:
        """Complete the response, or end it as incomplete if its last item was cut."""
        self.response.usage = ResponseUsage.of(summary.usage)
        if self._is_summary and not self._output.items:
            return self.fail(ResponseError(code="server_error", message=_NO_SUMMARY))
        self._finish("incomplete" if self._is_cut else "completed")
        if self._is_cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            self.response.completed_at = int(time())
        return [self._lifecycle(self.response.status)]

    def fail(self, error: ResponseError) -> Sequence[Event]:
        self._finish("failed")
        self.response.error = error
        # It may have been complete, but for being stored.
        self.response.completed_at = self.response.incomplete_details = None
        return [self._lifecycle("failed")]

    @property
    def num_bytes(self) -> int:
        """About how long the response is so far, without its text."""
        return self._num_echoed + LOGPROB_BYTES * self._output.num_logprobs

    def is_long(self, events: Sequence[Event]) -> bool:
        """Return whether writing events takes long: they repeat all of a long response."""
        repeats = any(kind != "output_text.delta" for kind, _ in events)
        return repeats and self.num_bytes > _LONG_BYTES

    def encode(self, events: Sequence[Event]) -> list[EncodedEvent]:
        """Write events as JSON, also in another thread."""
        return [EncodedEvent(kind, _members(fields)) for kind, fields in events]

    @property
    def is_finished(self) -> bool:
        return self.response.status not in UNFINISHED

    def frames(self, events: Sequence[EncodedEvent]) -> list[bytes]:
        """Return the frames of a stream, numbered as what is sent next."""
        numbered = enumerate(events, self._num_events)
        return [
            b"event: %b\ndata: %b\n\n" % (_name(event), _data(event, number))
            for number, event in numbered
        ]

    def sent(self, events: Sequence[EncodedEvent]) -> list[bytes]:
        """Return what `frames` does, of events that are sent now."""
        frames = self.frames(events)
        self._num_events += len(frames)
        return frames

    def ping(self) -> ServerSentEvent:
        """Return an event that says only that the response is still in progress."""
        (event,) = self.encode([("in_progress", {"response": self._in_progress})])
        data = _data(event, self._num_events)
        self._num_events += 1
        return ServerSentEvent(data.decode(), event=_name(event).decode(), sep="\n")

    def _finish(self, status: ResponseStatus) -> None:
        self.response.status = status
        self.response.output = self._output.items

    def _lifecycle(self, kind: str) -> Event:
        return kind, {"response": self.response}


def _name(event: EncodedEvent) -> bytes:
    return f"response.{event.kind}".encode()


def _data(event: EncodedEvent, number: int) -> bytes:
    return b'{"type":"%b","sequence_number":%d,%b}' % (_name(event), number, event.members)


def _members(fields: Mapping[str, Any]) -> bytes:
    return b",".join(to_json(name) + b":" + _json(value) for name, value in fields.items())


def _json(value: Any) -> bytes:
    if isinstance(value, BaseModel):
        return value.model_dump_json(exclude_unset=True).encode()
    return to_json(value)
