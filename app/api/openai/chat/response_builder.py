"""The responses of `/v1/chat/completions`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.openai.chat.call_writer import CallWriter
from app.api.openai.chat.response import (
    AnyCall,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ResponseMessage,
)
from app.api.openai.logprobs import TokenBytes, chat_logprobs, prompt_logprobs
from app.api.openai.response_builder import progress_field, summary_fields
from app.api.openai.schemas.logprobs import ChoiceLogprobs
from app.api.openai.schemas.response_options import ResponseOptions
from app.generation.choice import ChoiceFinishReason, Delta, TokenWithLogprob
from app.generation.generation import ChoiceResult, GenerationSummary, PromptProgress
from app.parsing.events import ContentPiece, MessageEvent, ReasoningPiece, ToolCallStart
from batching import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponseBuilder:
    """The chunks of a choice begin with the role and end with the finish reason, without text.

    names_tool: the request says which tool is called.
    """

    common_fields: dict[str, Any]
    options: ResponseOptions
    prompt: Sequence[int]
    include_reasoning: bool
    names_tool: bool = False
    include_logprobs: bool
    token_bytes: TokenBytes
    calls: CallWriter = field(default_factory=CallWriter)

    @property
    def num_echoed(self) -> int:
        return len(self.prompt) if self.options.return_token_ids else 0

    def first_chunks(self, num_choices: int) -> Iterator[ChatChunk]:
        delta = ChatDelta(role="assistant", content="", refusal=None)
        for index in range(num_choices):
            chunk = self._chunk(index, delta)
            if self.options.return_token_ids:
                chunk.prompt_token_ids = list(self.prompt)
            yield chunk

    def progress_chunk(self, progress: PromptProgress) -> ChatChunk:
        chunk = self._chunk(progress.index, ChatDelta())
        chunk.prompt_progress = progress_field(progress)
        return chunk

    def delta_chunks(self, delta: Delta) -> Iterator[ChatChunk]:
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        token_ids = list(delta.token_ids) if self.options.return_token_ids else []
        deltas = [
            piece
            for event in delta.events
            if self._is_visible(event)
            for piece in self._deltas(delta.index, event)
        ]
        if delta.finish_reason is not None:
            deltas += _call_deltas(self.calls.end(delta.index))
        if (logprobs is not None or token_ids) and not deltas:
            deltas = [ChatDelta(content="")]
        for piece in deltas:
            chunk = self._chunk(delta.index, piece, logprobs)
            if token_ids:
                chunk.choices[0].token_ids = token_ids
            yield chunk
            logprobs, token_ids = None, []
        if delta.finish_reason is not None:
            yield self._chunk(
                delta.index, ChatDelta(), finish_reason=self._reason(delta.finish_reason)
            )

    def final_chunks(self, summary: GenerationSummary) -> Iterator[ChatChunk]:
        fields = summary_fields(
            summary,
            with_usage=self.options.include_usage,
            with_timings=self.options.include_timings,
        )
        if fields:
            yield ChatChunk(
                object="chat.completion.chunk", choices=[], **fields, **self.common_fields
            )

    def full_response(
        self, results: Sequence[ChoiceResult], summary: GenerationSummary
    ) -> ChatCompletion:
        response = ChatCompletion(
            object="chat.completion",
            choices=[self._choice(result) for result in results],
            **summary_fields(summary, with_timings=self.options.include_timings),
            **self.common_fields,
        )
        if self.options.return_token_ids:
            response.prompt_token_ids = list(self.prompt)
        if (num_top := self.options.prompt_logprobs) is not None:
            response.prompt_logprobs = prompt_logprobs(
                self.token_bytes, self.prompt, results[0].prompt_logprobs, num_top
            )
        return response

    def _deltas(self, choice: int, event: MessageEvent) -> Sequence[ChatDelta]:
        if isinstance(event, ContentPiece):
            return [ChatDelta(content=event.text)]
        if isinstance(event, ReasoningPiece):
            return [ChatDelta(reasoning_content=event.text, reasoning=event.text)]
        return _call_deltas(self.calls.write(choice, event))

    def _choice(self, result: ChoiceResult) -> ChatChoice:
        choice = ChatChoice(
            index=result.index,
            message=self._message([event for event in result.events if self._is_visible(event)]),
            logprobs=self._logprobs(result.tokens),
            finish_reason=self._reason(result.finish_reason),
        )
        if self.options.return_token_ids:
            choice.token_ids = list(result.token_ids)
        return choice

    def _message(self, events: Sequence[MessageEvent]) -> ResponseMessage:
        content = _text(events, ContentPiece)
        reasoning = _text(events, ReasoningPiece)
        starts = [event for event in events if isinstance(event, ToolCallStart)]
        calls = [self.calls.whole(start, events) for start in starts]
        optional: dict[str, Any] = {}
        if reasoning:
            optional |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            optional["tool_calls"] = calls
        # Tool calls need no text beside them; OpenAI's API then has null.
        return ResponseMessage(
            role="assistant",
            content=content or (None if calls else ""),
            refusal=None,
            annotations=[],
            **optional,
        )

    def _reason(self, reason: ChoiceFinishReason) -> ChoiceFinishReason:
        """A tool that the request names is no decision of the model: OpenAI and vLLM say `stop`."""
        return (
            FinishReason.STOP if self.names_tool and reason is FinishReason.TOOL_CALLS else reason
        )

    def _is_visible(self, event: MessageEvent) -> bool:
        return self.include_reasoning or not isinstance(event, ReasoningPiece)

    def _logprobs(self, tokens: Iterable[TokenWithLogprob]) -> ChoiceLogprobs | None:
        if not self.include_logprobs:
            return None
        visible = [t for t in tokens if self.include_reasoning or not t.is_reasoning]
        as_ids = self.options.return_tokens_as_token_ids
        return chat_logprobs(self.token_bytes, visible, as_ids=as_ids)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChoiceLogprobs | None = None,
        finish_reason: ChoiceFinishReason | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason
        )
        no_usage: dict[str, Any] = {"usage": None} if self.options.include_usage else {}
        return ChatChunk(
            object="chat.completion.chunk", choices=[choice], **self.common_fields, **no_usage
        )


def _call_deltas(calls: Iterable[AnyCall]) -> list[ChatDelta]:
    return [ChatDelta(tool_calls=[call]) for call in calls]


def _text(events: Iterable[MessageEvent], kind: type[ContentPiece | ReasoningPiece]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))
