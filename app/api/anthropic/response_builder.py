"""The responses of `/v1/messages`, streamed or not."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json
from sse_starlette import ServerSentEvent

from app.api.anthropic.conversation import THINKING, tool_use_id
from app.api.anthropic.response import (
    BetaMessage,
    BetaMessageUsage,
    ContentBlock,
    Message,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from app.api.call_inputs import call_inputs
from app.generation.choice import ChoiceFinishReason, Delta
from app.generation.generation import ChoiceResult, Generation, GenerationSummary
from app.http.errors.formats import anthropic_error
from app.http.errors.responses import stream_error_report
from app.http.streams.late_head import Opening
from app.observability.request_record import TokenUsage
from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    ToolCallArguments,
    ToolCallStart,
)
from app.storage.seal import Sealer
from batching import FinishReason

_REASONS: Final[dict[FinishReason, StopReason]] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


_NO_INPUT: Final = '"input":{}'

# The last delta has fewer fields than the message and its usage.
_OF_LAST_DELTA: Final = {"stop_reason", "stop_sequence", "stop_details", "container"}
_NOT_IN_LAST_USAGE: Final = {"cache_creation", "inference_geo", "service_tier", "speed"}


def new_ping() -> ServerSentEvent:
    """Return the event that keeps a silent stream alive."""
    return ServerSentEvent('{"type": "ping"}', event="ping", sep="\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBuilder:
    """Builds the response or its events.

    omits_thinking: the client gets its reasoning in the signature only.
    is_beta: it has the fields of Anthropic's beta types, too.
    """

    message_id: str
    model_id: str
    request_id: str
    sealer: Sealer
    omits_thinking: bool
    is_beta: bool = False

    def full_json(self, results: Sequence[ChoiceResult], summary: GenerationSummary) -> str:
        """Return the message; the arguments of calls stand in it as the model has written them."""
        (result,) = results
        message = self._message(
            summary.usage,
            self._blocks(result.events),
            _stop_reason(result.finish_reason, result.stop),
            result.stop,
        )
        # Nowhere else: inside strings, quotes are escaped.
        before, *others = message.model_dump_json().split(_NO_INPUT)
        inputs = call_inputs(result.events)
        rest = (f'"input":{text}{other}' for text, other in zip(inputs, others, strict=True))
        return before + "".join(rest)

    def first_message(self, usage: TokenUsage) -> Message:
        message = self._message(usage, [], None, None)
        # What of the prompt was cached is not known yet.
        message.usage.cache_creation = None
        return message

    def thinking_block(self, text: str) -> ThinkingBlock:
        signature = self.sealer.seal(THINKING, text)
        return ThinkingBlock(
            type="thinking", thinking="" if self.omits_thinking else text, signature=signature
        )

    def last_delta(self, reason: ChoiceFinishReason, stop: str | None, usage: TokenUsage) -> bytes:
        """Return the event with the reason, and with the numbers of the whole message."""
        message = self._message(usage, [], _stop_reason(reason, stop), stop)
        delta = message.model_dump(include=_OF_LAST_DELTA)
        totals = message.usage.model_dump(exclude=_NOT_IN_LAST_USAGE)
        beta: dict[str, Any] = {"context_management": None} if self.is_beta else {}
        return _event("message_delta", delta=delta, usage=totals, **beta)

    async def error_event(self, error: Exception) -> bytes:
        """Return the event of what ended a stream."""
        data = anthropic_error(stream_error_report(error), self.request_id)
        return f"event: error\ndata: {data}\n\n".encode()

    def _message(
        self,
        usage: TokenUsage,
        content: list[ContentBlock],
        reason: StopReason | None,
        stop: str | None,
    ) -> Message:
        kind = BetaMessage if self.is_beta else Message
        counts = BetaMessageUsage if self.is_beta else MessageUsage
        return kind(
            id=self.message_id,
            type="message",
            role="assistant",
            model=self.model_id,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=counts.of(usage),
        )

    def _blocks(self, events: Iterable[MessageEvent]) -> list[ContentBlock]:
        blocks: list[ContentBlock] = []
        for event in events:
            match event:
                case ContentPiece(text):
                    blocks.append(TextBlock(type="text", text=text))
                case ReasoningPiece(text):
                    blocks.append(self.thinking_block(text))
                case ToolCallStart():
                    blocks.append(_tool_use(event))
        return blocks


class BlockEvents:
    """The events of a message's content: one block is open at a time."""

    def __init__(self, builder: MessageBuilder) -> None:
        self._builder = builder
        self._index = -1
        self._open: type[MessageEvent] | None = None
        self._thinking: list[str] = []

    def add(self, event: MessageEvent) -> Iterator[bytes]:
        if isinstance(event, ToolCallStart):
            yield from self._begin(ToolCallArguments, _tool_use(event))
        elif isinstance(event, ToolCallArguments):
            yield self._delta("input_json_delta", partial_json=event.text)
        elif isinstance(event, ReasoningPiece):
            if self._open is not ReasoningPiece:
                yield from self._begin(
                    ReasoningPiece, ThinkingBlock(type="thinking", thinking="", signature="")
                )
            self._thinking.append(event.text)
            if not self._builder.omits_thinking:
                yield self._delta("thinking_delta", thinking=event.text)
        else:
            if self._open is not ContentPiece:
                yield from self._begin(ContentPiece, TextBlock(type="text", text=""))
            yield self._delta("text_delta", text=event.text)

    def end(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        if self._open is None:
            return
        if self._open is ReasoningPiece:
            block = self._builder.thinking_block("".join(self._thinking))
            self._thinking.clear()
            yield self._delta("signature_delta", signature=block.signature)
        self._open = None
        yield _event("content_block_stop", index=self._index)

    def _begin(self, kind: type[MessageEvent], block: ContentBlock) -> Iterator[bytes]:
        yield from self.end()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind} | fields)


async def message_events(generation: Generation, builder: MessageBuilder) -> AsyncIterator[bytes]:
    """Yield the events of a message."""
    # The number of cached tokens is known when the prompt is prefilled: the last event has it.
    yield Opening(_event("message_start", message=builder.first_message(generation.usage)))
    yield Opening(_event("ping"))
    blocks = BlockEvents(builder)
    async for item in generation:
        assert isinstance(item, Delta), "no progress is requested"
        for event in item.events:
            for written in blocks.add(event):
                yield written
        if item.finish_reason is not None:
            for written in blocks.end():
                yield written
            yield builder.last_delta(item.finish_reason, item.stop, generation.usage)
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind} | fields))


def _stop_reason(reason: ChoiceFinishReason, stop: str | None) -> StopReason:
    """Return Anthropic's reason; a stop sequence also ends calls, which are then not complete."""
    return _REASONS[reason] if stop is None else "stop_sequence"


def _tool_use(start: ToolCallStart) -> ToolUseBlock:
    return ToolUseBlock(type="tool_use", id=tool_use_id(start.call_id), name=start.name, input={})
