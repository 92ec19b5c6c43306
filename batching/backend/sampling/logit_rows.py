"""Which rows of a forward pass need logits, and what for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from batching.steps.step_plan import Slice


class Sample(NamedTuple):
    """One token to sample: for a sequence, at this position of its tokens.

    drafts: the draft tokens between the sequence's own tokens and this position.
    expects_token: the step in flight samples the token before it.
    """

    sequence_id: int
    position: int
    drafts: tuple[int, ...] = ()
    expects_token: bool = False


class PromptLogprobRow(NamedTuple):
    """The prompt token at `position` whose log probability comes from this one of the L rows."""

    sequence_id: int
    position: int
    row: int


@dataclass(frozen=True)
class LogitRows:
    """The rows that need logits, L of the T rows of a step.

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
            for position in s.scored_positions:
                scores.append(PromptLogprobRow(s.sequence_id, position, len(rows)))
                rows.append(first + position - 1 - s.start)
            for i in range(s.num_samples):
                drafts, position = s.drafts[:i], s.num_known + i
                samples.append(Sample(s.sequence_id, position, drafts, s.expects_token))
                sample_rows.append(len(rows))
                rows.append(first + len(s) - s.num_samples + i)
            samples += (Sample(fork, s.stop) for fork in s.forks)
            sample_rows += [len(rows) - 1] * len(s.forks)
        return cls(
            mx.array(rows, dtype=mx.int32), tuple(samples), tuple(sample_rows), tuple(scores)
        )

    def sampled(self, logits: mx.array) -> mx.array:
        """Return `[S, vocab_size]` of logits `[L, vocab_size]`."""
        if self.sample_rows == tuple(range(len(logits))):
            return logits
        return logits[mx.array(self.sample_rows)]
