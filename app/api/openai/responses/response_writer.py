"""One response from its beginning to its end: the response object, and the events of a stream."""

from collections.abc import Sequence
from time import time
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from sse_starlette import ServerSentEvent

from app.api.openai.responses.event_writer import OutputOptions, OutputWriter
from app.api.openai.responses.open_items import Event
from app.api.openai.responses.output_items import (
    IncompleteDetails,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from app.generation.choice import Delta
from app.generation.generation import GenerationSummary
from batching import FinishReason


class ResponseWriter:
    """Makes the events of a response; they are numbered when they are encoded for a stream."""

    def __init__(self, response: ResponseObject, options: OutputOptions) -> None:
        self.response = response
        # A ping may come while the end is being stored.
        self._in_progress = response.model_copy(update={"status": "in_progress"})
        self._output = OutputWriter(options)
        self._num_events = 0
        self._is_cut = False

    def begin(self) -> Sequence[Event]:
        self.response.status = "in_progress"
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def feed(self, delta: Delta) -> Sequence[Event]:
        self._is_cut |= delta.finish_reason is FinishReason.LENGTH
        return list(self._output.feed(delta))

    def end(self, summary: GenerationSummary) -> Sequence[Event]:
        """Complete the response, or end it as incomplete if its last item was cut."""
        self._finish("incomplete" if self._is_cut else "completed")
        self.response.usage = ResponseUsage.of(summary.usage)
        if self._is_cut:
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            self.response.completed_at = int(time())
        return [self._lifecycle(self.response.status)]

    def fail(self, error: ResponseError) -> Sequence[Event]:
        self._finish("failed")
        self.response.error = error
        return [self._lifecycle("failed")]

    def encode(self, events: Sequence[Event]) -> bytes:
        """Return the frames of a stream."""
        frames = (self._numbered(event) for event in events)
        return b"".join(b"event: %b\ndata: %b\n\n" % (n.encode(), data) for n, data in frames)

    def ping(self) -> ServerSentEvent:
        """Return an event that says only that the response is still in progress."""
        name, data = self._numbered(("in_progress", {"response": self._in_progress}))
        return ServerSentEvent(data.decode(), event=name, sep="\n")

    def _finish(self, status: ResponseStatus) -> None:
        self.response.status = status
        self.response.output = self._output.items

    def _lifecycle(self, kind: str) -> Event:
        return kind, {"response": self.response}

    def _numbered(self, event: Event) -> tuple[str, bytes]:
        kind, fields = event
        name = f"response.{kind}"
        data = {"type": name, "sequence_number": self._num_events}
        self._num_events += 1
        return name, to_json(data | {key: _plain(value) for key, value in fields.items()})


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
