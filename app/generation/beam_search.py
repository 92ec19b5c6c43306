"""Beam search: the most probable outputs instead of sampled ones.

Every step asks the engine for one token after each beam.  The common prefixes of beams share
blocks as any prefixes do; only a beam's last, partial block is prefilled again each step.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from app.admission.admitted_request import AdmittedRequest
from app.generation.choice import Choice
from app.generation.generation import ChoiceResult, GenerationSummary
from app.generation.job import GenerationJob
from app.observability.request_record import TokenUsage
from app.parsing.events import join_pieces
from batching import (
    AsyncEngine,
    DeadlineExceeded,
    EngineError,
    FinishReason,
    SamplingParams,
    SequenceSpec,
    TokenLogprobs,
    TokenOutput,
)


@dataclass(frozen=True, slots=True)
class Beam:
    """An output, or its beginning; `logprob` is that of all its tokens together."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    logprob: float = 0.0
    is_finished: bool = False

    def score(self, length_penalty: float) -> float:
        """Return its log probability over a power of its length (Wu et al. 2016, simplified)."""
        return self.logprob / float(max(1, len(self.token_ids)) ** length_penalty)

    def followed_by(self, token_id: int, logprobs: TokenLogprobs, is_end: bool) -> "Beam":
        return Beam(
            (*self.token_ids, token_id),
            (*self.logprobs, logprobs),
            self.logprob + logprobs.logprob,
            is_end,
        )


class BeamSearch:
    """The best `beams.num_returned` of `num_choices` beams for each prompt of a job."""

    def __init__(self, engine: AsyncEngine, job: GenerationJob, request: AdmittedRequest) -> None:
        """`request` holds the reserved tokens of the prompts, and finishes with `close`."""
        assert job.beams is not None and job.spec.max_tokens is not None
        self._engine = engine
        self._job = job
        self._request = request
        self._max_tokens = job.spec.max_tokens
        self._width = job.spec.num_choices
        self._num_returned = job.beams.num_returned
        self._length_penalty = job.beams.length_penalty
        self._usage = TokenUsage(num_prompt_tokens=job.num_prompt_tokens)
        self._outcome = "aborted"
        request.held.callback(self.close)

    @property
    def summary(self) -> GenerationSummary:
        return GenerationSummary(self._usage, ())

    async def collect(self) -> list[ChoiceResult]:
        """Search all prompts at once."""
        searches = [asyncio.create_task(self._search(prompt)) for prompt in self._job.prompts]
        try:
            found = await asyncio.gather(*searches)
        except EngineError as error:
            self._outcome = "timeout" if isinstance(error, DeadlineExceeded) else "failed"
            raise
        finally:
            for search in searches:
                search.cancel()
        beams = [beam for best, _ in found for beam in best]
        self._usage = replace(
            self._usage,
            num_cached_tokens=sum(num_cached for _, num_cached in found),
            written_tokens=self._job.written_tokens({i: num for i, (_, num) in enumerate(found)}),
            num_output_tokens=sum(len(beam.token_ids) for beam in beams),
        )
        self._outcome = "beams"
        return [self._result(index, beam) for index, beam in enumerate(beams)]

    def close(self) -> None:
        """Finish the request; a search that is cancelled closes the step that it is in."""
        self._request.finish(
            completion_id=self._job.completion_id,
            model_id=self._job.model_id,
            stats=(),
            usage=self._usage,
            outcome=self._outcome,
        )

    async def _search(self, prompt: Sequence[int]) -> tuple[list[Beam], int]:
        """Return the best beams, and how many tokens of the prompt were cached before."""
        beams, finished = [Beam()], list[Beam]()
        num_cached_tokens: int | None = None
        while beams and len(beams[0].token_ids) < self._max_tokens:
            outputs = await self._step([[*prompt, *beam.token_ids] for beam in beams])
            if num_cached_tokens is None:
                num_cached_tokens = outputs[0].num_cached_tokens
            candidates = self._successors(beams, [output.logprobs[0] for output in outputs])
            finished = self._best(
                [*finished, *(c for c in candidates if c.is_finished)], self._width
            )
            beams = [c for c in candidates if not c.is_finished][: self._width]
            if self._can_stop(beams, finished):
                break
        return self._best([*finished, *beams], self._num_returned), num_cached_tokens or 0

    def _successors(self, beams: Sequence[Beam], logprobs: Sequence[TokenLogprobs]) -> list[Beam]:
        """Return the most probable continuations by one token.

        Twice the width, so that enough of them go on even if each beam could end here.
        """
        steps = (
            (beam.logprob + logprob, index, token_id, logprob)
            for index, beam in enumerate(beams)
            for token_id, logprob in logprobs[index].top
        )
        ends = self._job.spec.stop_token_ids
        best = nlargest(2 * self._width, steps, key=lambda step: step[0])
        # A search looks at more alternatives than the request asks for; only those are kept.
        num_kept = self._job.spec.sampling.logprobs or 0
        kept = [each.top[:num_kept] for each in logprobs]
        return [
            beams[index].followed_by(
                token_id, TokenLogprobs(logprob, kept[index]), token_id in ends
            )
            for _, index, token_id, logprob in best
        ]

    def _can_stop(self, beams: Sequence[Beam], finished: Sequence[Beam]) -> bool:
        """True if no unfinished beam can still become one of the best.

        A beam's log probability only falls; the longest it can become divides it the most.
        """
        if len(finished) < self._width or not beams:
            return not beams
        length = self._max_tokens if self._length_penalty > 0 else 1
        most = max(beam.logprob for beam in beams) / float(length**self._length_penalty)
        return finished[-1].score(self._length_penalty) >= most

    async def _step(self, prompts: Sequence[Sequence[int]]) -> list[TokenOutput]:
        """Return for each prompt which tokens may come next."""
        sampling = SamplingParams(temperature=0.0, logprobs=2 * self._width)
        step = SequenceSpec(
            prompt=self._job.spec.prompt,
            sampling=sampling,
            max_tokens=1,
            cache_salt=self._job.spec.cache_salt,
            retention=self._job.spec.retention,
        )
        step = self._request.applied_to(step)
        stream = await self._engine.submit([step.with_prompt(prompt) for prompt in prompts])
        try:
            outputs = {index: output async for index, output in stream}
        finally:
            stream.close()
        return [outputs[index] for index in range(len(prompts))]

    def _best(self, beams: Iterable[Beam], number: int) -> list[Beam]:
        return nlargest(number, beams, key=lambda beam: beam.score(self._length_penalty))

    def _result(self, index: int, beam: Beam) -> ChoiceResult:
        """Return a beam as text; what follows a stop string is no part of it."""
        choice = Choice(index, self._engine.model.tokenizer, self._job.text)
        reason = FinishReason.STOP if beam.is_finished else FinishReason.LENGTH
        delta = choice.feed(TokenOutput(beam.token_ids, reason, 0, beam.logprobs))
        assert delta.finish_reason is not None
        events = join_pieces(delta.events)
        return ChoiceResult(index, events, delta.token_ids, delta.tokens, (), delta.finish_reason)
