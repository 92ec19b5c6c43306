"""Pools the hidden states of a step's rows, for the requests that get a vector."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from batching.backend.host_array import host_array
from batching.backend.pooling.head import Floats, PoolingHead
from batching.pooling import PoolingType, Vector
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import Slice


@dataclass(frozen=True)
class PooledRows:
    """The rows that are pooled, P of the T rows of a step.

    rows: int32 `[P]`; None is none of them.
    slices: those of sequences with pooling, in the order of their rows, and how many each of them has.
    """

    rows: mx.array | None
    slices: tuple[tuple[Slice, SequenceState, int], ...]

    @classmethod
    def of(cls, slices: Sequence[Slice], sequences: Mapping[int, SequenceState]) -> "PooledRows":
        """`slices` is the order of the T rows."""
        rows: list[int] = []
        pooled: list[tuple[Slice, SequenceState, int]] = []
        for first, s in zip(accumulate(map(len, slices), initial=0), slices, strict=False):
            sequence = sequences[s.sequence_id]
            if (pooling := sequence.spec.pooling) is not None:
                positions = pooling.rows(s.start, s.stop, sequence.num_prompt_tokens)
                rows += (first + position - s.start for position in positions)
                pooled.append((s, sequence, len(positions)))
        return cls(mx.array(rows, dtype=mx.int32) if rows else None, tuple(pooled))

    def vectors(self, hidden: mx.array | None, head: PoolingHead) -> Iterator[tuple[int, Vector]]:
        """Pool the rows; yield the id and the vector of each sequence that is complete.

        hidden: `[P, hidden_size]`, None if no rows are pooled.
        """
        none = np.empty((0, 0), np.float32)
        host: Floats = none if hidden is None else host_array(hidden.astype(mx.float32))
        first = 0
        for s, sequence, num_rows in self.slices:
            _add(sequence, host[first : first + num_rows])
            if s.embeds:
                yield s.sequence_id, _vector(sequence, head)
            first += num_rows


def _add(sequence: SequenceState, rows: Floats) -> None:
    for row in rows:
        # One after the other, so that no bit depends on where a chunk ends.
        added = row.astype(np.float64)
        sequence.pooled = added if sequence.pooled is None else sequence.pooled + added


def _vector(sequence: SequenceState, head: PoolingHead) -> Vector:
    params, pooled = sequence.spec.pooling, sequence.pooled
    assert params is not None, "only sequences with pooling are here"
    assert pooled is not None, "the last slice has a row that is pooled, or one before had"
    if params.type is PoolingType.MEAN:
        pooled = pooled / sequence.num_prompt_tokens
    return array("f", head.vector(pooled, params).tobytes())
