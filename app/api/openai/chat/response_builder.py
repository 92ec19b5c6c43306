"""The words of `/v1/chat/completions`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.openai.chat.response import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FunctionCall,
    ResponseMessage,
    ResponseToolCall,
)
from app.api.openai.logprobs import TokenBytes, chat_logprobs
from app.api.openai.schemas.logprobs import ChoiceLogprobs
from app.api.openai.schemas.usage import Totals
from app.api.response_builder import prompt_progress
from app.api.schemas.fields import FinishReasonText
from app.generation.choice import Delta, TokenWithLogprob
from app.generation.generation import Answer, Progress
from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponseBuilder:
    """Each answer's chunks begin with the role and end with the finish reason, without text.

    token_bytes: None tells nobody the odds of tokens.
    """

    head: dict[str, Any]
    include_usage: bool
    include_reasoning: bool
    token_bytes: TokenBytes | None

    def opening(self, num_choices: int) -> Iterator[ChatChunk]:
        delta = ChatDelta(role="assistant", content="")
        return (self._chunk(index, delta) for index in range(num_choices))

    def progress(self, progress: Progress) -> ChatChunk:
        chunk = self._chunk(progress.index, ChatDelta())
        chunk.prompt_progress = prompt_progress(progress)
        return chunk

    def pieces(self, delta: Delta) -> Iterator[ChatChunk]:
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        deltas = [_delta(event) for event in delta.events if self._is_told(event)]
        if logprobs is not None and not deltas:
            deltas = [ChatDelta(content="")]
        for piece in deltas:
            yield self._chunk(delta.index, piece, logprobs)
            logprobs = None
        if delta.finish_reason is not None:
            yield self._chunk(delta.index, ChatDelta(), finish_reason=delta.finish_reason)

    def closing(self, totals: Totals) -> Iterator[ChatChunk]:
        told = totals.told(with_usage=self.include_usage)
        if told:
            yield ChatChunk(object="chat.completion.chunk", choices=[], **told, **self.head)

    def whole(self, answers: Sequence[Answer], totals: Totals) -> ChatCompletion:
        return ChatCompletion(
            object="chat.completion",
            choices=[self._choice(answer) for answer in answers],
            **totals.told(),
            **self.head,
        )

    def _choice(self, answer: Answer) -> ChatChoice:
        return ChatChoice(
            index=answer.index,
            message=_message([event for event in answer.events if self._is_told(event)]),
            logprobs=self._logprobs(answer.tokens),
            finish_reason=answer.finish_reason,
        )

    def _is_told(self, event: MessageEvent) -> bool:
        return self.include_reasoning or not isinstance(event, ReasoningPiece)

    def _logprobs(self, tokens: Iterable[TokenWithLogprob]) -> ChoiceLogprobs | None:
        if self.token_bytes is None:
            return None
        told = (t for t in tokens if self.include_reasoning or not t.is_reasoning)
        return chat_logprobs(self.token_bytes, told)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChoiceLogprobs | None = None,
        finish_reason: FinishReasonText | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason
        )
        no_usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self.head, **no_usage)


def _delta(event: MessageEvent) -> ChatDelta:
    if isinstance(event, ContentPiece):
        return ChatDelta(content=event.text)
    if isinstance(event, ReasoningPiece):
        return ChatDelta(reasoning_content=event.text, reasoning=event.text)
    if isinstance(event, ToolCallStart):
        function = FunctionCall(name=event.name, arguments="")
        call = ResponseToolCall(
            index=event.index, id=event.call_id, type="function", function=function
        )
    else:
        call = ResponseToolCall(index=event.index, function=FunctionCall(arguments=event.text))
    return ChatDelta(tool_calls=[call])


def _message(events: Sequence[MessageEvent]) -> ResponseMessage:
    content = _text(events, ContentPiece)
    reasoning = _text(events, ReasoningPiece)
    calls = [_call(event, events) for event in events if isinstance(event, ToolCallStart)]
    optional: dict[str, Any] = {}
    if reasoning:
        optional |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        optional["tool_calls"] = calls
    # Beside calls there need not be any text, and null is how OpenAI says so.
    return ResponseMessage(
        role="assistant", content=content or (None if calls else ""), refusal=None, **optional
    )


def _text(events: Iterable[MessageEvent], kind: type[ContentPiece | ReasoningPiece]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _call(start: ToolCallStart, events: Iterable[MessageEvent]) -> ResponseToolCall:
    pieces = (
        event.text
        for event in events
        if isinstance(event, ToolCallArguments) and event.index == start.index
    )
    function = FunctionCall(name=start.name, arguments="".join(pieces))
    return ResponseToolCall(id=start.call_id, type="function", function=function)
