"""Pools the hidden states of a step's rows, for the requests that get a vector."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.backend.host_array import host_array
from batching.backend.pooling.head import Floats, PoolingHead
from batching.pooling import PoolingType, Vector
from batching.request import BatchRequest
from batching.steps.step_plan import Slice


@dataclass(frozen=True)
class PooledRows:
    """Of the T rows of a step, P are pooled.

    rows: int32 `[P]`; None is none of them.
    slices: those of pooled requests, in the order of their rows, and how many each of them has.
    """

    rows: mx.array | None
    slices: tuple[tuple[Slice, int], ...]

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> "PooledRows":
        """`slices` is the order of the T rows."""
        rows: list[int] = []
        pooled: list[tuple[Slice, int]] = []
        for first, s in zip(accumulate(map(len, slices), initial=0), slices, strict=False):
            if (pooling := s.request.pooling) is not None:
                positions = pooling.rows(s.start, s.stop, s.request.num_tokens)
                rows += (first + position - s.start for position in positions)
                pooled.append((s, len(positions)))
        return cls(mx.array(rows, dtype=mx.int32) if rows else None, tuple(pooled))

    def vectors(
        self, hidden: mx.array | None, head: PoolingHead
    ) -> Iterator[tuple[BatchRequest, Vector | None]]:
        """Yield for each pooled request what is pooled of it so far, or its vector.

        hidden: `[P, hidden_size]`, None if no rows are pooled.
        """
        none = np.empty((0, 0), np.float32)
        host: Floats = none if hidden is None else host_array(hidden.astype(mx.float32))
        first = 0
        for s, num_rows in self.slices:
            yield s.request, _pooled(s, host[first : first + num_rows], head)
            first += num_rows


def _pooled(s: Slice, rows: Floats, head: PoolingHead) -> Vector | None:
    params = s.request.pooling
    assert params is not None, "only the slices of pooled requests are here"
    pooled: npt.NDArray[np.float64] | None = None
    if s.request.pooled is not None:
        pooled = np.array(s.request.pooled, np.float64)
    for row in rows:
        # One after the other, so that no bit depends on where a chunk ends.
        pooled = row.astype(np.float64) if pooled is None else pooled + row
    if not s.embeds:
        return None if pooled is None else array("d", pooled.tobytes())
    assert pooled is not None, "the last slice has a row that is pooled, or one before had"
    if params.type is PoolingType.MEAN:
        pooled = pooled / s.stop
    return array("f", head.vector(pooled, params).tobytes())
