"""The responses of `/v1/completions`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.openai.completions.response import Completion, CompletionChoice
from app.api.openai.logprobs import CompletionLogprobsWriter, TokenBytes, joined, prompt_logprobs
from app.api.openai.response_builder import progress_field, summary_fields
from app.api.openai.schemas.logprobs import CompletionLogprobs
from app.api.openai.schemas.response_options import ResponseOptions
from app.generation.choice import ChoiceFinishReason, Delta, TokenWithLogprob
from app.generation.generation import ChoiceResult, GenerationSummary, PromptProgress
from app.parsing.events import ContentPiece, MessageEvent
from batching import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt to be echoed; `offsets` is where its tokens begin, in characters."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResponseBuilder:
    """Chunks of text; the last one of a choice has the finish reason and no text.

    num_returned, num_candidates: choices of each prompt, of which the best are returned.
    echoed: the prompts, if they are echoed.
    num_logprobs: None leaves out log probabilities.
    """

    common_fields: dict[str, Any]
    options: ResponseOptions
    prompts: Sequence[Sequence[int]]
    num_returned: int
    num_candidates: int
    echoed: Sequence[PromptText] = ()
    token_bytes: TokenBytes
    num_logprobs: int | None = None

    @property
    def num_echoed(self) -> int:
        num_characters = sum(len(each.text) for each in self.echoed)
        num_tokens = sum(map(len, self.prompts)) if self.options.return_token_ids else 0
        return self.num_returned * (num_characters + num_tokens)

    def first_chunks(self, num_choices: int) -> Iterator[Completion]:
        return iter(())

    def progress_chunk(self, progress: PromptProgress) -> Completion:
        chunk = self._chunk(_choice(progress.index, ""))
        chunk.prompt_progress = progress_field(progress)
        return chunk

    def delta_chunks(self, delta: Delta) -> Iterator[Completion]:
        choices = list(self._delta_choices(delta))
        if delta.is_first and self.options.return_token_ids:
            choices[0].prompt_token_ids = self._prompt(delta.index)
        yield from map(self._chunk, choices)

    def _delta_choices(self, delta: Delta) -> Iterator[CompletionChoice]:
        echo = self._echo(delta.index)
        if delta.is_first and echo is not None:
            logprobs = self._echoed_logprobs(echo, delta.prompt_logprobs)
            yield _choice(delta.index, echo.text, logprobs)
        text = _text(delta.events)
        token_ids = list(delta.token_ids) if self.options.return_token_ids else []
        if text or token_ids or (delta.tokens and self.num_logprobs is not None):
            offset = 0 if echo is None else len(echo.text)
            choice = _choice(delta.index, text, self._logprobs(delta.tokens, offset))
            if token_ids:
                choice.token_ids = token_ids
            yield choice
        if delta.finish_reason is not None:
            yield _choice(delta.index, "", finish_reason=delta.finish_reason)

    def final_chunks(self, summary: GenerationSummary) -> Iterator[Completion]:
        fields = summary_fields(
            summary,
            with_usage=self.options.include_usage,
            with_timings=self.options.include_timings,
        )
        if fields:
            yield Completion(object="text_completion", choices=[], **fields, **self.common_fields)

    def full_response(
        self, results: Sequence[ChoiceResult], summary: GenerationSummary
    ) -> Completion:
        best = [result for group in self._by_prompt(results) for result in self._best(group)]
        return Completion(
            object="text_completion",
            choices=[self._full_choice(index, result) for index, result in enumerate(best)],
            **summary_fields(summary, with_timings=self.options.include_timings),
            **self.common_fields,
        )

    def _by_prompt(self, results: Sequence[ChoiceResult]) -> Iterator[Sequence[ChoiceResult]]:
        for start in range(0, len(results), self.num_candidates):
            yield results[start : start + self.num_candidates]

    def _best(self, results: Sequence[ChoiceResult]) -> Sequence[ChoiceResult]:
        """Return those with the highest mean log probability, if there are more than requested."""
        if len(results) == self.num_returned:
            return results
        return sorted(results, key=lambda a: a.mean_logprob, reverse=True)[: self.num_returned]

    def _full_choice(self, index: int, result: ChoiceResult) -> CompletionChoice:
        text, echo = _text(result.events), self._echo(result.index)
        logprobs = self._logprobs(result.tokens, 0 if echo is None else len(echo.text))
        if echo is not None:
            prompt = self._echoed_logprobs(echo, result.prompt_logprobs)
            text = echo.text + text
            logprobs = prompt and logprobs and joined(prompt, logprobs)
        choice = _choice(index, text, logprobs, result.finish_reason)
        prompt_token_ids = self._prompt(result.index)
        if self.options.return_token_ids:
            choice.token_ids = list(result.token_ids)
            choice.prompt_token_ids = prompt_token_ids
        if (num_top := self.options.prompt_logprobs) is not None:
            choice.prompt_logprobs = prompt_logprobs(
                self.token_bytes, prompt_token_ids, result.prompt_logprobs, num_top
            )
        return choice

    def _prompt(self, index: int) -> list[int]:
        return list(self.prompts[index // self.num_candidates])

    def _echo(self, index: int) -> PromptText | None:
        return self.echoed[index // self.num_candidates] if self.echoed else None

    def _echoed_logprobs(
        self, echo: PromptText, logprobs: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if self.num_logprobs is None:
            return None
        return self._writer.of_prompt(echo.token_ids, echo.offsets, logprobs, self.num_logprobs)

    def _logprobs(
        self, tokens: Sequence[TokenWithLogprob], offset: int
    ) -> CompletionLogprobs | None:
        return None if self.num_logprobs is None else self._writer.of_output(tokens, offset)

    @property
    def _writer(self) -> CompletionLogprobsWriter:
        as_ids = self.options.return_tokens_as_token_ids
        return CompletionLogprobsWriter(self.token_bytes, as_ids)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        no_usage: dict[str, Any] = {"usage": None} if self.options.include_usage else {}
        return Completion(
            object="text_completion", choices=[choice], **self.common_fields, **no_usage
        )


def _choice(
    index: int,
    text: str,
    logprobs: CompletionLogprobs | None = None,
    finish_reason: ChoiceFinishReason | None = None,
) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)


def _text(events: Iterable[MessageEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentPiece))
