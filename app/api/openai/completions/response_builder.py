"""The words of `/v1/completions`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.openai.completions.request import Completion, CompletionChoice
from app.api.openai.logprobs import TokenBytes, completion_logprobs, joined, prompt_logprobs
from app.api.openai.schemas.logprobs import CompletionLogprobs
from app.api.openai.schemas.usage import Totals
from app.api.response_builder import prompt_progress
from app.api.schemas.fields import FinishReasonText
from app.generation.choice import Delta, TokenWithLogprob
from app.generation.generation import Answer, Progress
from app.parsing.events import ContentPiece, MessageEvent
from batching import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as it is said again before its answers; `offsets` is where its tokens begin."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResponseBuilder:
    """Chunks of text; each answer's last one has none, but the finish reason.

    num_answers, num_compared: to each prompt, those that are told and those that there are.
    echoed: the prompts, if they are to be said again.
    token_bytes: None tells nobody the odds of tokens.
    """

    head: dict[str, Any]
    include_usage: bool
    num_answers: int
    num_compared: int
    echoed: Sequence[PromptText] = ()
    token_bytes: TokenBytes | None = None

    def opening(self, num_choices: int) -> Iterator[Completion]:
        return iter(())

    def progress(self, progress: Progress) -> Completion:
        chunk = self._chunk(_choice(progress.index, ""))
        chunk.prompt_progress = prompt_progress(progress)
        return chunk

    def pieces(self, delta: Delta) -> Iterator[Completion]:
        echo = self._echo(delta.index)
        if delta.is_first and echo is not None:
            told = self._echoed_logprobs(echo, delta.prompt_logprobs)
            yield self._chunk(_choice(delta.index, echo.text, told))
        text = _text(delta.events)
        if text or (delta.tokens and self.token_bytes is not None):
            offset = 0 if echo is None else len(echo.text)
            yield self._chunk(_choice(delta.index, text, self._logprobs(delta.tokens, offset)))
        if delta.finish_reason is not None:
            yield self._chunk(_choice(delta.index, "", finish_reason=delta.finish_reason))

    def closing(self, totals: Totals) -> Iterator[Completion]:
        told = totals.told(with_usage=self.include_usage)
        if told:
            yield Completion(object="text_completion", choices=[], **told, **self.head)

    def whole(self, answers: Sequence[Answer], totals: Totals) -> Completion:
        chosen = [answer for answers in self._by_prompt(answers) for answer in self._best(answers)]
        return Completion(
            object="text_completion",
            choices=[self._whole_choice(index, answer) for index, answer in enumerate(chosen)],
            **totals.told(),
            **self.head,
        )

    def _by_prompt(self, answers: Sequence[Answer]) -> Iterator[Sequence[Answer]]:
        for start in range(0, len(answers), self.num_compared):
            yield answers[start : start + self.num_compared]

    def _best(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return those whose tokens are the likeliest on average, if there are more than asked."""
        if len(answers) == self.num_answers:
            return answers
        return sorted(answers, key=lambda a: a.mean_logprob, reverse=True)[: self.num_answers]

    def _whole_choice(self, index: int, answer: Answer) -> CompletionChoice:
        text, echo = _text(answer.events), self._echo(answer.index)
        logprobs = self._logprobs(answer.tokens, 0 if echo is None else len(echo.text))
        if echo is not None:
            told = self._echoed_logprobs(echo, answer.prompt_logprobs)
            text = echo.text + text
            logprobs = told and logprobs and joined(told, logprobs)
        return _choice(index, text, logprobs, answer.finish_reason)

    def _echo(self, index: int) -> PromptText | None:
        return self.echoed[index // self.num_compared] if self.echoed else None

    def _echoed_logprobs(
        self, echo: PromptText, logprobs: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if self.token_bytes is None:
            return None
        return prompt_logprobs(self.token_bytes, echo.token_ids, echo.offsets, logprobs)

    def _logprobs(
        self, tokens: Sequence[TokenWithLogprob], offset: int
    ) -> CompletionLogprobs | None:
        if self.token_bytes is None:
            return None
        return completion_logprobs(self.token_bytes, tokens, offset)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        no_usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        return Completion(object="text_completion", choices=[choice], **self.head, **no_usage)


def _choice(
    index: int,
    text: str,
    logprobs: CompletionLogprobs | None = None,
    finish_reason: FinishReasonText | None = None,
) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)


def _text(events: Iterable[MessageEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentPiece))
