"""Turns the deltas of a generation into the output items of a response and their events."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from app.api.openai.logprobs import TokenBytes
from app.api.openai.responses.items.open_items import (
    Event,
    OpenCompaction,
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
)
from app.api.openai.responses.items.output_items import ItemStatus, OutputItem
from app.api.openai.responses.items.tools import CallableTool
from app.generation.choice import Delta, TokenWithLogprob
from app.parsing.events import ContentPiece, MessageEvent, ReasoningPiece, ToolCallStart
from batching import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How the output is written.

    tools: the tools that may be called, by the name that the model knows.
    is_summarized: the reasoning is written as a summary instead of content.
    seal: seals reasoning; None leaves out the sealed value.
    token_bytes: returns the bytes of a token; None leaves out log probabilities.
    generates: whether there is output at all; without it nothing is cut.
    seal_summary: seals the text, which is the summary of the conversation; None if it is an answer.
    """

    tools: Mapping[str, CallableTool] = field(default_factory=dict)
    is_summarized: bool = False
    seal: Callable[[str], str] | None = None
    token_bytes: TokenBytes | None = None
    generates: bool = True
    seal_summary: Callable[[str], str] | None = None


class OutputWriter:
    """Turns generated text into items, of which at most the last one is open.

    num_logprobs: how many log probabilities there are so far, those of alternatives included.
    """

    def __init__(self, options: OutputOptions) -> None:
        self._options = options
        self._open: OpenItem | None = None
        self._kind: object = None
        self._tokens: list[TokenWithLogprob] = []
        self.items: list[OutputItem] = []
        self.num_logprobs = 0

    def feed(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of what is new; the one with a finish reason ends the last item."""
        self._tokens += [token for token in delta.tokens if not token.is_reasoning]
        self.num_logprobs += sum(1 + len(token.logprobs.top) for token in delta.tokens)
        for event in delta.events:
            yield from self._write(event)
        if delta.finish_reason is not None:
            yield from self._end("incomplete" if self._is_cut(delta) else "completed")

    def _is_cut(self, delta: Delta) -> bool:
        """True if the last item is not whole; a stop string may be in the arguments of a call."""
        if delta.finish_reason is FinishReason.STOP:
            return self._kind is ToolCallStart
        return delta.finish_reason is FinishReason.LENGTH

    def _write(self, event: MessageEvent) -> Iterator[Event]:
        kind = type(event)
        if self._options.seal_summary is not None:
            yield from self._summarize(event, self._options.seal_summary)
            return
        if isinstance(event, ToolCallStart):
            yield from self._begin(self._new_call(event), kind)
            return
        if isinstance(event, ContentPiece) and self._kind is not kind:
            yield from self._begin(OpenMessage(self._options.token_bytes), kind)
        elif isinstance(event, ReasoningPiece) and self._kind is not kind:
            options = self._options
            reasoning = OpenReasoning(options.seal, is_summary=options.is_summarized)
            yield from self._begin(reasoning, kind)
        assert self._open is not None, "arguments follow the start of their call"
        yield from self._number(self._open.add(event.text, self._take_tokens()))

    def _summarize(self, event: MessageEvent, seal: Callable[[str], str]) -> Iterator[Event]:
        """Add to the summary; the reasoning before it is no part of it."""
        if not isinstance(event, ContentPiece) or not (self._open or event.text.strip()):
            return
        if self._open is None:
            yield from self._begin(OpenCompaction(seal), type(event))
        assert self._open is not None, "it was begun"
        yield from self._open.add(event.text, ())

    def _begin(self, item: OpenItem, kind: object) -> Iterator[Event]:
        yield from self._end("completed")
        if kind is not ContentPiece:
            # The tokens that are left are those of markers.
            self._tokens.clear()
        self._open, self._kind = item, kind
        added = item.item("in_progress")
        yield "output_item.added", {"output_index": len(self.items), "item": added}
        yield from self._number(item.begin())

    def _end(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._number(self._open.end(status))
        item = self._open.item(status)
        yield "output_item.done", {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._open = self._kind = None

    def _number(self, events: Iterator[Event]) -> Iterator[Event]:
        for kind, fields in events:
            yield kind, {"output_index": len(self.items)} | fields

    def _take_tokens(self) -> Sequence[TokenWithLogprob]:
        tokens, self._tokens = self._tokens, []
        return tokens

    def _new_call(self, start: ToolCallStart) -> OpenItem:
        tool = self._options.tools.get(start.name)
        fields = {"call_id": start.call_id, "name": start.name}
        if tool is not None:
            fields["name"] = tool.name
            if tool.namespace is not None:
                fields["namespace"] = tool.namespace
            if tool.is_custom:
                return OpenCustomCall(fields)
        return OpenFunctionCall(fields)
