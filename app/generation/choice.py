"""One choice of a completion: turns its tokens into text and the events of its message."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.generation.detokenizer import Detokenizer
from app.generation.stop_strings import StopStrings
from app.parsing.events import MessageEvent, ReasoningPiece, join_pieces
from app.parsing.output_format import Parser, PlainText
from batching import FinishReason, Tokenizer, TokenLogprobs, TokenOutput

# A choice that is not complete has none.
ChoiceFinishReason = Literal[FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS]


class TokenWithLogprob(NamedTuple):
    """A token of the output; `offset` is where its text begins, in characters."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text.

    hidden_token_ids: tokens that are not part of the text, such as those that end the output.
    stops: stop strings.
    include_stop: whether the stop string is part of the text.
    min_tokens: stop strings apply only after this many tokens.
    is_empty: the output has no tokens (`max_tokens` is 0).
    has_hidden_logprobs: tokens without text have log probabilities, too.
    has_cut_logprobs: so have those whose text a stop string cuts off.
    """

    hidden_token_ids: frozenset[int] = frozenset()
    stops: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    is_empty: bool = False
    has_hidden_logprobs: bool = False
    has_cut_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of one choice that an output of the engine adds; the last one has the finish reason.

    events: pieces of content, reasoning and tool calls.
    token_ids: the new tokens, those that end the output included.
    tokens: the tokens with log probabilities, if those are requested.
    prompt_logprobs: log probabilities of the prompt's tokens, if requested; in the first Delta only.
    stop: the stop string that ended the choice.
    """

    index: int
    is_first: bool = False
    events: Sequence[MessageEvent] = ()
    token_ids: Sequence[int] = ()
    tokens: Sequence[TokenWithLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: ChoiceFinishReason | None = None
    stop: str | None = None


@dataclass
class Choice:
    """Turns the token outputs of one sequence into deltas of its message."""

    index: int
    tokenizer: Tokenizer
    options: TextOptions
    parser: Parser = field(default_factory=PlainText)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(
            self.tokenizer, skip_special_tokens=self.options.skip_special_tokens
        )
        self._stop_strings = StopStrings(self.options.stops, include_stop=self.options.include_stop)
        self._num_chars = 0
        self._num_emitted_chars = 0
        self._sum_logprobs = 0.0
        self._pending_logprobs: list[TokenWithLogprob] = []
        self._is_reasoning = False

    @property
    def mean_logprob(self) -> float:
        return self._sum_logprobs / max(1, self.num_tokens)

    @property
    def looks_at_each_token(self) -> bool:
        """True if the text of a token may end the choice, or say what the token counts as."""
        return self.options.is_empty or bool(self.options.stops) or not self.parser.is_plain

    def feed(self, output: TokenOutput) -> Delta:
        """Take the next tokens; return what they add."""
        if self.options.is_empty:
            return Delta(
                self.index,
                is_first=True,
                prompt_logprobs=output.prompt_logprobs,
                finish_reason=FinishReason.LENGTH,
            )
        num_tokens_before = self.num_tokens
        at_once = not (self.looks_at_each_token or output.logprobs)
        events = self._read_all(output.token_ids) if at_once else self._read_each(output)
        reason = self._finish_reason(output)
        if reason is not None:
            events += self._last_events()
            # Text that has waited for the rest of a character may end in a stop string.
            reason = FinishReason.STOP if self._stop_strings.is_matched else reason
        return Delta(
            self.index,
            num_tokens_before == 0,
            join_pieces(events),
            output.token_ids[: self.num_tokens - num_tokens_before],
            self._take_ready_logprobs(is_last=reason is not None),
            output.prompt_logprobs,
            self._end(reason) if reason else None,
            self._stop_strings.matched,
        )

    def _read_all(self, token_ids: Sequence[int]) -> list[MessageEvent]:
        self.num_tokens += len(token_ids)
        visible = [i for i in token_ids if i not in self.options.hidden_token_ids]
        text = self._filter_stop_strings(self._detokenizer.add_all(visible))
        return [*self.parser.add(text)]

    def _read_each(self, output: TokenOutput) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for i, token_id in enumerate(output.token_ids):
            offset = self._num_chars
            events += self._events(token_id)
            if output.logprobs:
                self._record_logprob(token_id, offset, output.logprobs[i])
            if self._has_ended:
                break
        return events

    def _events(self, token_id: int) -> Iterator[MessageEvent]:
        self.num_tokens += 1
        if token_id not in self.options.hidden_token_ids:
            for event in self.parser.add(
                self._filter_stop_strings(self._detokenizer.add(token_id))
            ):
                self._is_reasoning = isinstance(event, ReasoningPiece)
                yield event
        self.num_reasoning_tokens += self._is_reasoning

    def _record_logprob(self, token_id: int, offset: int, logprobs: TokenLogprobs) -> None:
        self._sum_logprobs += logprobs.logprob
        if self.options.has_hidden_logprobs or token_id not in self.options.hidden_token_ids:
            self._pending_logprobs.append(
                TokenWithLogprob(token_id, offset, logprobs, self._is_reasoning)
            )

    def _take_ready_logprobs(self, *, is_last: bool) -> Sequence[TokenWithLogprob]:
        """Return the tokens whose text has come, and in the end those that have none."""
        if is_last and (self.options.has_cut_logprobs or not self._stop_strings.is_matched):
            ready, self._pending_logprobs = self._pending_logprobs, []
            return ready
        ready = [
            token for token in self._pending_logprobs if token.offset < self._num_emitted_chars
        ]
        del self._pending_logprobs[: len(ready)]
        return ready

    def _filter_stop_strings(self, text: str) -> str:
        """Return the text that no stop string can cut off any more."""
        self._num_chars += len(text)
        if self.num_tokens > self.options.min_tokens:
            text = self._stop_strings.add(text)
        self._num_emitted_chars += len(text)
        return text

    def _last_events(self) -> Iterator[MessageEvent]:
        rest = self._filter_stop_strings(self._detokenizer.flush()) + self._stop_strings.flush()
        yield from self.parser.add(rest)
        yield from self.parser.flush()

    def _finish_reason(self, output: TokenOutput) -> FinishReason | None:
        return FinishReason.STOP if self._has_ended else output.finish_reason

    @property
    def _has_ended(self) -> bool:
        return self._stop_strings.is_matched or self.parser.is_finished

    def _end(self, reason: FinishReason) -> ChoiceFinishReason:
        if reason is FinishReason.LENGTH:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self.parser.has_calls else FinishReason.STOP
