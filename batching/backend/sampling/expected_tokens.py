"""The tokens that a step in flight samples, for use by the step after it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import mlx.core as mx

from batching.steps.step_plan import Slice


class SampledTokens(NamedTuple):
    """The tokens that a step samples, as arrays that may not be evaluated yet.

    tokens: uint32 `[S]`.
    logits: float32 `[S]`, of these tokens.
    indices: the index in `tokens` for each sequence that samples one token, by its id.
    """

    tokens: mx.array
    logits: mx.array
    indices: Mapping[int, int]

    def fill(self, tokens: mx.array, slices: Iterable[Slice]) -> None:
        """Put those that slices expect into int32 `[P, 1]`, in the order of the slices."""
        rows: list[int] = []
        taken: list[int] = []
        row = 0
        for s in slices:
            if s.expects_token:
                # It is pending alone.
                rows.append(row)
                taken.append(self.indices[s.sequence_id])
            row += len(s)
        if not rows:
            return
        expected = self.tokens
        if taken != list(range(len(expected))):
            expected = expected[mx.array(taken)]
        expected = expected.astype(mx.int32)[:, None]
        if len(rows) == len(tokens):
            tokens[:] = expected
        else:
            tokens[mx.array(rows)] = expected
