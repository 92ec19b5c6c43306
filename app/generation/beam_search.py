"""Beam search: the likeliest answers, and not drawn ones.

Every step asks the engine for one token after each beam.  What the beams have in common is
shared as any prefix is, in whole blocks; only a beam's last, partial block is read anew.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from app.admission.controller import AdmissionTicket
from app.api.openai.schemas.usage import Totals, Usage
from app.generation.choice import Choice, TextOptions, TokenWithLogprob
from app.generation.generation import Answer
from app.parsing.events import join_pieces
from batching import (
    DeadlineExceeded,
    EngineError,
    EngineThread,
    FinishReason,
    Priority,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer, or its beginning; `logprob` is that of all its tokens together."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    logprob: float = 0.0
    is_finished: bool = False

    def score(self, length_penalty: float) -> float:
        """Return its log probability over a power of its length (Wu et al. 2016, simplified)."""
        return self.logprob / float(max(1, len(self.token_ids)) ** length_penalty)

    def followed_by(
        self, token_id: int, odds: TokenLogprobs, logprob: float, is_end: bool
    ) -> "Beam":
        told = TokenLogprobs(logprob, odds.top)
        return Beam(
            (*self.token_ids, token_id), (*self.logprobs, told), self.logprob + logprob, is_end
        )


@dataclass(kw_only=True)
class BeamSearch:
    """The best `num_answers` of `width` beams for each prompt."""

    engine: EngineThread
    prompts: Sequence[Sequence[int]]
    width: int
    num_answers: int
    max_tokens: int
    length_penalty: float
    end_token_ids: frozenset[int]
    options: TextOptions
    num_logprobs: int
    priority: Priority
    cache_salt: str | None
    completion_id: str
    place: AdmissionTicket

    def __post_init__(self) -> None:
        self.usage = self._usage(0, 0)
        self._ending = "aborted"

    @property
    def totals(self) -> Totals:
        return Totals(self.usage)

    async def collect(self) -> list[Answer]:
        """Search for the answers to all prompts at once."""
        searches = [asyncio.create_task(self._search(prompt)) for prompt in self.prompts]
        try:
            found = await asyncio.gather(*searches)
        except EngineError as error:
            self._ending = "timeout" if isinstance(error, DeadlineExceeded) else "failed"
            raise
        finally:
            for search in searches:
                search.cancel()
        beams = [beam for best, _ in found for beam in best]
        num_output_tokens = sum(len(beam.token_ids) for beam in beams)
        self.usage = self._usage(sum(cached for _, cached in found), num_output_tokens)
        self._ending = "beams"
        return [self._answer(index, beam) for index, beam in enumerate(beams)]

    def close(self) -> None:
        """Leave the place; a search that is cancelled closes the step that it is in."""
        self.place.end(self.completion_id, (), self.usage, self._ending)

    async def _search(self, prompt: Sequence[int]) -> tuple[list[Beam], int]:
        """Return the best beams, and how many tokens of the prompt were cached before."""
        beams, finished = [Beam()], list[Beam]()
        num_cached_tokens: int | None = None
        while beams and len(beams[0].token_ids) < self.max_tokens:
            outputs = await self._step([[*prompt, *beam.token_ids] for beam in beams])
            if num_cached_tokens is None:
                num_cached_tokens = outputs[0].num_cached_tokens
            candidates = self._successors(beams, [output.logprobs[0] for output in outputs])
            finished = self._best(
                [*finished, *(c for c in candidates if c.is_finished)], self.width
            )
            beams = [c for c in candidates if not c.is_finished][: self.width]
            if self._is_decided(beams, finished):
                break
        return self._best([*finished, *beams], self.num_answers), num_cached_tokens or 0

    def _successors(self, beams: Sequence[Beam], odds: Sequence[TokenLogprobs]) -> list[Beam]:
        """Return the likeliest, which are as long as each other.

        Twice the width, so that enough of them go on even if each beam could end here.
        """
        steps = (
            (beam.logprob + logprob, place, token_id, logprob)
            for place, beam in enumerate(beams)
            for token_id, logprob in odds[place].top
        )
        best = nlargest(2 * self.width, steps, key=lambda step: step[0])
        return [
            beams[place].followed_by(token_id, odds[place], logprob, token_id in self.end_token_ids)
            for _, place, token_id, logprob in best
        ]

    def _is_decided(self, beams: Sequence[Beam], finished: Sequence[Beam]) -> bool:
        """True if no beam that goes on can still become one of the answers.

        A beam's log probability only falls; the longest it can become divides it the most.
        """
        if len(finished) < self.width or not beams:
            return not beams
        length = self.max_tokens if self.length_penalty > 0 else 1
        most = max(beam.logprob for beam in beams) / float(length**self.length_penalty)
        return finished[-1].score(self.length_penalty) >= most

    async def _step(self, prompts: Sequence[Sequence[int]]) -> list[TokenOutput]:
        """Return for each prompt which tokens may come next."""
        sampling = SamplingParams(temperature=0.0, logprobs=2 * self.width)
        stream = await self.engine.submit(
            prompts,
            sampling=sampling,
            max_tokens=1,
            priority=self.priority,
            cache_salt=self.cache_salt,
            time_limit=self.place.time_left(),
        )
        try:
            outputs = {index: output async for index, output in stream}
        finally:
            stream.close()
        return [outputs[index] for index in range(len(prompts))]

    def _best(self, beams: Iterable[Beam], number: int) -> list[Beam]:
        return nlargest(number, beams, key=lambda beam: beam.score(self.length_penalty))

    def _answer(self, index: int, beam: Beam) -> Answer:
        """Return a beam as text; what follows a stop string is no part of it."""
        choice = Choice(index, self.engine.model.tokenizer, self.options)
        told = [
            TokenLogprobs(each.logprob, each.top[: self.num_logprobs]) for each in beam.logprobs
        ]
        reason = FinishReason.STOP if beam.is_finished else FinishReason.LENGTH
        delta = choice.take(TokenOutput(beam.token_ids, reason, 0, tuple(told)))
        tokens: Sequence[TokenWithLogprob] = delta.tokens
        assert delta.finish_reason is not None, "it was told how the beam ended"
        return Answer(index, join_pieces(delta.events), tokens, (), delta.finish_reason)

    def _usage(self, num_cached_tokens: int, num_output_tokens: int) -> Usage:
        return Usage.of(
            num_prompt_tokens=sum(map(len, self.prompts)),
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
            num_reasoning_tokens=0,
        )
