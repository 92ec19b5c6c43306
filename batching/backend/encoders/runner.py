"""Runs the steps of an encoder: whole texts, each of which gets a vector or a score."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.backend.encoders.encoder import Encoder
from batching.backend.encoders.ragged import Texts
from batching.backend.exceptions import forget_locals
from batching.backend.host_array import host_array
from batching.backend.pooling.head import NO_HEAD, PoolingHead
from batching.backend.sampling.slice_sampler import not_finite
from batching.pooling import PoolingParams, PoolingType, Vector
from batching.steps.sequences import Sequences, SequenceState
from batching.steps.step_plan import Slice, SliceOutput, StepPlan


class EncoderRunner:
    """A `ModelRunner` without a pool: each slice is a whole text, since its tokens see each other."""

    def __init__(self, encoder: Encoder, head: PoolingHead = NO_HEAD) -> None:
        self._encoder, self._head = encoder, head
        self._sequences = Sequences()

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        sequences = self._sequences.begin(plan)
        if not plan.slices:
            return []
        try:
            vectors = dict(self._vectors(plan.slices, sequences))
        except Exception as error:
            forget_locals(error)
            raise
        if failed := [id_ for id_, vector in vectors.items() if not np.isfinite(vector).all()]:
            raise not_finite(failed)
        return [SliceOutput(vector=vectors[s.sequence_id]) for s in plan.slices]

    def reset(self) -> None:
        self._sequences.forget()

    def _vectors(
        self, slices: Sequence[Slice], sequences: Mapping[int, SequenceState]
    ) -> Iterator[tuple[int, Vector]]:
        """Yield the vector of each slice, or its score; texts of equal lengths are computed together."""
        ordered = sorted(slices, key=len)
        pooling = [_pooling(s, sequences) for s in ordered]
        texts = Texts.of([s.token_ids for s in ordered], [each.second for each in pooling])
        computed = host_array(self._encoder(texts).astype(mx.float32))
        if self._encoder.classifier is not None:
            scores = self._encoder.activation(computed.astype(np.float64))
            for s, score in zip(ordered, scores, strict=True):
                yield s.sequence_id, array("f", score)
            return
        for s, params, first in zip(ordered, pooling, texts.firsts, strict=True):
            vector = self._head.vector(_pooled(computed[first : first + len(s)], params), params)
            yield s.sequence_id, array("f", vector.tobytes())


def _pooling(s: Slice, sequences: Mapping[int, SequenceState]) -> PoolingParams:
    pooling = sequences[s.sequence_id].spec.pooling
    assert pooling is not None and s.embeds, "an encoder gets whole texts, for vectors and scores"
    return pooling


def _pooled(rows: npt.NDArray[Any], params: PoolingParams) -> npt.NDArray[Any]:
    pooled: npt.NDArray[Any] = rows[0 if params.type is PoolingType.CLS else -1]
    if params.type is PoolingType.MEAN:
        pooled = rows.mean(axis=0, dtype=np.float64)
    return pooled
