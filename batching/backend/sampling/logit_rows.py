"""Which rows of a forward pass need logits, and what for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from batching.backend.sampling.sampler import Sample
from batching.request import BatchRequest
from batching.steps.step_plan import Slice


class PromptLogprobRow(NamedTuple):
    """The prompt token at `position` whose log probability comes from this one of the L rows."""

    request: BatchRequest
    position: int
    row: int


@dataclass(frozen=True)
class LogitRows:
    """Of the T rows of a step, L need logits.

    rows: int32 `[L]`.
    samples: the tokens to sample, and `sample_rows` from which of the L rows.
    scores: the prompt tokens with log probabilities.
    """

    rows: mx.array
    samples: tuple[Sample, ...]
    sample_rows: tuple[int, ...]
    scores: tuple[PromptLogprobRow, ...]

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> "LogitRows":
        """`slices` is the order of the rows."""
        rows: list[int] = []
        samples: list[Sample] = []
        sample_rows: list[int] = []
        scores: list[PromptLogprobRow] = []
        for first, s in zip(accumulate(map(len, slices), initial=0), slices, strict=False):
            for position in s.prompt_logprob_positions:
                scores.append(PromptLogprobRow(s.request, position, len(rows)))
                rows.append(first + position - 1 - s.start)
            for i in range(s.num_samples):
                samples.append(Sample(s.request, s.num_known + i, s.drafts[:i]))
                sample_rows.append(len(rows))
                rows.append(first + len(s) - s.num_samples + i)
            samples += (Sample(fork, fork.num_tokens) for fork in s.forks)
            sample_rows += [len(rows) - 1] * len(s.forks)
        return cls(
            mx.array(rows, dtype=mx.int32), tuple(samples), tuple(sample_rows), tuple(scores)
        )

    @property
    def needs_logprobs(self) -> bool:
        """True if a request asks for log probabilities."""
        return bool(self.scores) or any(
            sample.request.sampling.logprobs is not None for sample in self.samples
        )

    def sampled(self, logits: mx.array) -> mx.array:
        """Return `[S, vocab_size]` of logits `[L, vocab_size]`."""
        if self.sample_rows == tuple(range(len(logits))):
            return logits
        return logits[mx.array(self.sample_rows)]
