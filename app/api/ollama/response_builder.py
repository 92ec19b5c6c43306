"""Writes the answers of `/api/chat` and `/api/generate`.

The arguments of calls stand in them as the model has written them, so an answer is put together from JSON texts.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import to_json

from app.admission.admitted_request import Deadline
from app.api.call_inputs import call_input
from app.api.ollama.response import DoneReason, now
from app.api.openai.logprobs import TokenBytes, chat_logprobs
from app.api.openai.schemas.logprobs import ChoiceLogprobs
from app.api.sse import LINES_TYPE
from app.generation.choice import ChoiceFinishReason, Delta, TokenWithLogprob
from app.generation.generation import ChoiceResult, Generation, GenerationSummary
from app.http.errors.formats import ollama_error
from app.http.errors.responses import stream_error_report
from app.http.streams.early_stream import StreamForm
from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    ToolCallArguments,
    ToolCallStart,
)
from batching import FinishReason

_SECOND: Final = 1_000_000_000


@dataclass(slots=True)
class OpenCall:
    """A call whose arguments are still written."""

    start: ToolCallStart
    arguments: list[str] = field(default_factory=list)

    def json(self) -> str:
        arguments = call_input("".join(self.arguments)) if self.arguments else "{}"
        function = _object(
            {
                "index": _text(self.start.index),
                "name": _text(self.start.name),
                "arguments": arguments,
            }
        )
        return _object({"id": _text(self.start.call_id), "function": function})


@dataclass(slots=True, kw_only=True)
class AnswerWriter:
    """Writes one answer, whole or line by line.

    is_chat: the text is in a `message`.
    deadline: tells how long the request has taken.
    load_time: seconds that it waited for the model.
    token_bytes: None leaves out log probabilities.
    """

    model: str
    is_chat: bool
    deadline: Deadline
    load_time: float = 0.0
    token_bytes: TokenBytes | None = None
    _open: OpenCall | None = None

    def line(self, delta: Delta) -> bytes | None:
        """Return the line of a delta; None if it adds nothing that is complete."""
        text, thinking, calls = self._read(delta.events, is_last=delta.finish_reason is not None)
        if not (text or thinking or calls or delta.tokens):
            return None
        return self._written(text, thinking, calls, delta.tokens, {"done": "false"})

    def last_line(self, reason: ChoiceFinishReason, summary: GenerationSummary) -> bytes:
        return self._written("", "", [], (), self._end(reason, summary))

    def empty_line(self) -> bytes:
        """Return a line that adds nothing, which keeps a connection alive."""
        return self._written("", "", [], (), {"done": "false"})

    def without_output(self, reason: DoneReason) -> bytes:
        """Return the answer to a request without a prompt."""
        return self._written("", "", [], (), {"done": "true", "done_reason": _text(reason)})

    def whole(self, results: Sequence[ChoiceResult], summary: GenerationSummary) -> str:
        (result,) = results
        text, thinking, calls = self._read(result.events, is_last=True)
        end = self._end(result.finish_reason, summary)
        return self._written(text, thinking, calls, result.tokens, end).decode()

    def _read(self, events: Iterable[MessageEvent], *, is_last: bool) -> tuple[str, str, list[str]]:
        """Return content, reasoning, and the calls that are complete."""
        text, thinking, calls = "", "", []
        for event in events:
            if isinstance(event, ToolCallArguments):
                assert self._open is not None, "a call begins with its name"
                self._open.arguments.append(event.text)
                continue
            calls += self._closed()
            match event:
                case ContentPiece(piece):
                    text += piece
                case ReasoningPiece(piece):
                    thinking += piece
                case _:
                    self._open = OpenCall(event)
        return text, thinking, calls + (self._closed() if is_last else [])

    def _closed(self) -> list[str]:
        call, self._open = self._open, None
        return [] if call is None else [call.json()]

    def _end(self, reason: ChoiceFinishReason, summary: GenerationSummary) -> dict[str, str]:
        (stats,) = summary.sequences
        started = stats.scheduled_time or stats.arrival_time
        first = stats.first_token_time or started
        last = stats.last_token_time or first
        return {
            "done": "true",
            "done_reason": _text("length" if reason is FinishReason.LENGTH else "stop"),
            "total_duration": _nanoseconds(self.deadline.elapsed()),
            "load_duration": _nanoseconds(self.load_time),
            "prompt_eval_count": str(summary.usage.num_prompt_tokens),
            "prompt_eval_duration": _nanoseconds(first - started),
            "eval_count": str(summary.usage.num_output_tokens),
            "eval_duration": _nanoseconds(last - first),
        }

    def _written(
        self,
        text: str,
        thinking: str,
        calls: Sequence[str],
        tokens: Sequence[TokenWithLogprob],
        end: Mapping[str, str],
    ) -> bytes:
        fields = {"model": _text(self.model), "created_at": _text(now())}
        said = {"content" if self.is_chat else "response": _text(text)}
        if thinking:
            said["thinking"] = _text(thinking)
        if calls:
            said["tool_calls"] = f"[{','.join(calls)}]"
        if self.is_chat:
            said = {"message": _object({"role": '"assistant"'} | said)}
        return _object(fields | said | dict(end) | self._logprobs(tokens)).encode() + b"\n"

    def _logprobs(self, tokens: Sequence[TokenWithLogprob]) -> dict[str, str]:
        if self.token_bytes is None or not tokens:
            return {}
        found: ChoiceLogprobs = chat_logprobs(self.token_bytes, tokens)
        return {"logprobs": to_json(found.model_dump()["content"]).decode()}


async def answer_lines(generation: Generation, writer: AnswerWriter) -> AsyncIterator[bytes]:
    """Yield the lines of an answer."""
    reason: ChoiceFinishReason = FinishReason.STOP
    async for item in generation:
        assert isinstance(item, Delta), "no progress is requested"
        if (line := writer.line(item)) is not None:
            yield line
        reason = item.finish_reason or reason
    yield writer.last_line(reason, generation.summary)


async def error_line(error: Exception) -> bytes:
    """Return the line of what ended an answer."""
    return ollama_error(stream_error_report(error)).encode() + b"\n"


def lines_form(writer: AnswerWriter) -> StreamForm:
    """Return how a stream begins before its model is loaded."""
    return StreamForm(LINES_TYPE, lambda _: writer.empty_line(), lambda body: body + b"\n")


def _object(fields: Mapping[str, str]) -> str:
    """Return an object of values that are JSON."""
    return f"{{{','.join(f'{_text(name)}:{value}' for name, value in fields.items())}}}"


def _text(value: Any) -> str:
    return to_json(value).decode()


def _nanoseconds(seconds: float) -> str:
    return str(max(0, round(seconds * _SECOND)))
