"""Work that reads prompts and writes no text: a vector, or one step's log probabilities, for each."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from app.admission.admitted_request import AdmittedRequest
from app.observability.request_record import TokenUsage
from batching import (
    AsyncEngine,
    DeadlineExceeded,
    EngineError,
    FinishReason,
    SequenceSpec,
    SequenceStats,
    TokenOutput,
)

# While the prompts of one group are read, those of the other wait in the engine already.
_NUM_GROUPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """specs: one for each prompt; each asks for a vector or for one token.

    group_size: how many prompts are handed to the engine at a time.
    prefix: tokens that all prompts begin with; the specs have what follows them.  The first prompt computes them, and
        the prefix cache has them for the others.
    """

    completion_id: str
    model_id: str
    specs: Sequence[SequenceSpec]
    group_size: int
    prefix: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts, of which those of the prefix count once."""
        return len(self.prefix) + sum(len(spec.prompt) for spec in self.specs)

    def spec(self, index: int) -> SequenceSpec:
        """Return the spec of a whole prompt."""
        spec = self.specs[index]
        return spec.with_prompt(self.prefix + spec.prompt) if self.prefix else spec


class PromptTask:
    """The outputs of a job's prompts, one for each.

    Only a few groups of prompts are in the engine at a time: a request of thousands does not keep later
    ones waiting until all of its own are read.  `close()` never waits and may be called at any time.
    """

    def __init__(self, engine: AsyncEngine, job: PromptJob, request: AdmittedRequest) -> None:
        """`request` has reserved the tokens of all prompts."""
        self._engine, self._job, self._request = engine, job, request
        self._outputs: dict[int, TokenOutput] = {}
        self._sequences: list[SequenceStats] = []
        self._outcome = "aborted"
        request.held.callback(self.close)

    @property
    def usage(self) -> TokenUsage:
        """The tokens of all prompts; those that were cached are final once all outputs are there."""
        return TokenUsage(
            num_prompt_tokens=self._job.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens(),
            num_output_tokens=sum(len(o.token_ids) for o in self._outputs.values()),
        )

    def _num_cached_tokens(self) -> int:
        """Return how many tokens were cached before the request: behind a prefix, what the first prompt found."""
        counted = [0] if self._job.prefix else range(len(self._job.specs))
        return sum(self._outputs[i].num_cached_tokens for i in counted if i in self._outputs)

    async def collect(self) -> list[TokenOutput]:
        """Wait for all outputs."""
        groups = self._groups()
        workers = [asyncio.create_task(self._work(groups)) for _ in range(_NUM_GROUPS)]
        try:
            await asyncio.gather(*workers)
        except EngineError as error:
            self._outcome = "timeout" if isinstance(error, DeadlineExceeded) else "failed"
            raise
        finally:
            for worker in workers:
                worker.cancel()
        self._outcome = str(FinishReason.STOP)
        return [self._outputs[index] for index in range(len(self._job.specs))]

    def close(self) -> None:
        """Finish the request; a group that is cancelled closes its own stream."""
        self._request.finish(
            completion_id=self._job.completion_id,
            model_id=self._job.model_id,
            stats=self._sequences,
            usage=self.usage,
            outcome=self._outcome,
        )

    def _groups(self) -> Iterator[range]:
        num_prompts, size = len(self._job.specs), self._job.group_size
        for first in range(0, num_prompts, size):
            yield range(first, min(first + size, num_prompts))

    async def _work(self, groups: Iterator[range]) -> None:
        """Serve groups until none is left; others take from them, too."""
        for group in groups:
            await self._serve(group)

    async def _serve(self, group: range) -> None:
        job = self._job
        stream = await self._engine.submit(
            [self._request.applied_to(job.spec(index)) for index in group]
        )
        self._sequences += stream.sequences
        try:
            async for index, output in stream:
                if not self._outputs:
                    self._request.ticket.release_tokens(len(job.prefix))
                self._outputs[group[index]] = output
                self._request.ticket.release_tokens(len(job.specs[group[index]].prompt))
        finally:
            stream.close()
