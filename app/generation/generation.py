"""The answers to one call, from the prompts' tokens to the events of each, and the usage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import anyio

from app.admission.controller import AdmissionTicket
from app.api.openai.schemas.usage import Timings, Totals, Usage
from app.api.schemas.fields import FinishReasonText
from app.generation.choice import Choice, Delta, TokenWithLogprob
from app.parsing.events import MessageEvent, join_pieces
from batching import DeadlineExceeded, TokenLogprobs, TokenOutput, TokenStream


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is read: tokens, of which `num_cached` were there already; seconds."""

    index: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_read_tokens: int
    elapsed: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer.

    mean_logprob: over all its tokens, the one that ended it included, if their odds were asked
        for; of answers that are compared, the best has the highest.
    """

    index: int
    events: Sequence[MessageEvent]
    tokens: Sequence[TokenWithLogprob]
    prompt_logprobs: Sequence[TokenLogprobs]
    finish_reason: FinishReasonText
    mean_logprob: float = 0.0


class Generation:
    """The events of all answers, as they come; an async iterator of Delta and Progress.

    There are as many answers to each prompt, and one prompt's have consecutive indices.  It
    ends after the last answer's delta that carries a finish reason.  `close()` never waits and
    may be called at any time, any number of times: unfinished answers are aborted.  Whoever
    has a generation closes it; that is also when it is logged.
    """

    def __init__(
        self,
        completion_id: str,
        tokens: TokenStream,
        choices: Sequence[Choice],
        prompt_lengths: Sequence[int],
        place: AdmissionTicket,
        *,
        is_blocking: bool = False,
        tells_timings: bool = False,
    ) -> None:
        """`is_blocking`: the choices take their time, so they do it in another thread.

        The place holds the prompts, and is left when the generation is closed.
        """
        self._completion_id = completion_id
        self._tokens = tokens
        self._choices = choices
        self._prompt_lengths = prompt_lengths
        self._place = place
        self._is_blocking = is_blocking
        self._tells_timings = tells_timings
        self._num_cached_tokens = [0] * len(prompt_lengths)
        self._prompt_logprobs: list[Sequence[TokenLogprobs]] = [()] * len(prompt_lengths)
        self._reasons: dict[int, FinishReasonText] = {}
        self._failure: str | None = None
        self._is_closed = False

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """The tokens so far; final once the last delta is out."""
        return Usage.of(
            num_prompt_tokens=sum(self._prompt_lengths),
            num_cached_tokens=sum(self._num_cached_tokens),
            num_output_tokens=sum(choice.num_tokens for choice in self._choices),
            num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    @property
    def totals(self) -> Totals:
        """What is told at the end."""
        usage = self.usage
        return Totals(
            usage, Timings.of(self._tokens.answers, usage) if self._tells_timings else None
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta | Progress:
        try:
            return await self._next()
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._failure = "timeout" if isinstance(error, DeadlineExceeded) else "failed"
            raise

    async def _next(self) -> Delta | Progress:
        index, output = await anext(self._tokens)
        prompt, place = divmod(index, self._num_answers)
        if place == 0:
            self._num_cached_tokens[prompt] = output.num_cached_tokens
        if not output.token_ids:
            return self._progress(index, output)
        delta = await self._take(index, output)
        if place == 0 and delta.is_first:
            self._place.read(self._prompt_lengths[prompt])
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        elif delta.is_first:
            # Those of one prompt come with its first answer, which is the first to come.
            delta = replace(delta, prompt_logprobs=self._prompt_logprobs[prompt])
        if delta.finish_reason is not None:
            self._reasons[index] = delta.finish_reason
            self._tokens.finish(index, delta.finish_reason)
        return delta

    async def collect(self) -> list[Answer]:
        """Wait for the end and return the whole answers."""
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        async for item in self:
            assert isinstance(item, Delta), "progress is told in streams only"
            deltas[item.index].append(item)
        return [self._answer(index, parts) for index, parts in enumerate(deltas)]

    def close(self) -> None:
        self._tokens.close()
        if self._is_closed:
            return
        self._is_closed = True
        self._place.end(self._completion_id, self._tokens.answers, self.usage, self._ending())

    @property
    def _num_answers(self) -> int:
        """How many there are to each prompt."""
        return len(self._choices) // len(self._prompt_lengths)

    async def _take(self, index: int, output: TokenOutput) -> Delta:
        take = self._choices[index].take
        return await anyio.to_thread.run_sync(take, output) if self._is_blocking else take(output)

    def _progress(self, index: int, output: TokenOutput) -> Progress:
        return Progress(
            index,
            self._prompt_lengths[index // self._num_answers],
            output.num_cached_tokens,
            output.num_read_tokens,
            self._place.elapsed(),
        )

    def _answer(self, index: int, deltas: Sequence[Delta]) -> Answer:
        return Answer(
            index,
            join_pieces([event for delta in deltas for event in delta.events]),
            [token for delta in deltas for token in delta.tokens],
            [logprobs for delta in deltas for logprobs in delta.prompt_logprobs],
            self._reasons[index],
            self._choices[index].mean_logprob,
        )

    def _ending(self) -> str:
        if self._failure is not None:
            return self._failure
        if len(self._reasons) < len(self._choices):
            return "aborted"
        return ",".join(sorted(set(self._reasons.values())))
