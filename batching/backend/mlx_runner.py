"""Runs the scheduler's plans on a model."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.exceptions import forget_locals
from batching.backend.hooks.rows import RowSelection
from batching.backend.paged.kv_cache import PagedKVCache, StepInputs
from batching.backend.pooling.head import NO_HEAD, PoolingHead
from batching.backend.pooling.pooler import PooledRows
from batching.backend.sampling.sampler import Sampler
from batching.backend.sampling.slice_sampler import SliceSampler, not_finite, request_ids
from batching.scheduling.step_plan import SliceOutput, StepPlan


class MLXRunner:
    """One ragged forward pass a step: T tokens of any requests as T rows of length 1."""

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int,
        selection: RowSelection,
        cache: PagedKVCache,
        sampler: Sampler | None = None,
        head: PoolingHead = NO_HEAD,
    ) -> None:
        self._model = model
        self._selection = selection
        self._cache = cache
        self._sampler = SliceSampler(vocab_size, sampler)
        self._head = head

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        try:
            return self._run(plan)
        except Exception as error:
            forget_locals(error)
            raise

    def logits(self, step: StepInputs) -> mx.array:
        """Return the logits of the selected rows, `[L, vocab_size]`."""
        self._selection.rows = step.logit_rows.rows
        try:
            logits: mx.array = self._model(step.tokens, cache=self._cache.caches)
        finally:
            self._selection.rows = None
        if len(logits) != len(step.logit_rows.rows):
            logits = logits[step.logit_rows.rows]
        return logits.squeeze(1)

    def reset(self) -> None:
        self._selection.are_finite = self._selection.hidden = None
        self._cache.reset()

    def _run(self, plan: StepPlan) -> list[SliceOutput]:
        self._cache.copy_blocks(plan.copies)
        self._cache.copy_states(plan.state_copies)
        step = self._cache.begin(plan.slices)
        pooled = PooledRows.of(step.attention.slices)
        with self._sampler.masks(step.logit_rows) as masks:
            logits, hidden = self._logits_and_hidden(step, pooled)
            self._cache.flush()
            # The pool is evaluated in any case: lazy writes would pile up from step to step.
            written = self._cache.arrays
            if self._selection.are_finite is not None:
                written.append(self._selection.are_finite)
            if hidden is not None:
                written.append(hidden)
            with self._sampler.isolate_failures(step.attention.slices, logits, written):
                outputs = self._sampler.outputs(
                    plan.slices, step.logit_rows, logits, masks, written
                )
        self._check_rows(step)
        if pooled.slices:
            vectors = dict(pooled.vectors(hidden, self._head))
            pairs = zip(plan.slices, outputs, strict=True)
            return [output._replace(pooled=vectors.get(s.request)) for s, output in pairs]
        return outputs

    def _logits_and_hidden(
        self, step: StepInputs, pooled: PooledRows
    ) -> tuple[mx.array, mx.array | None]:
        """Return the logits of the selected rows, and the hidden states of those that are pooled."""
        self._selection.pooled_rows = pooled.rows
        try:
            logits = self.logits(step)
        finally:
            self._selection.pooled_rows = None
        hidden, self._selection.hidden = self._selection.hidden, None
        return logits, hidden

    def _check_rows(self, step: StepInputs) -> None:
        """Raise SlicesFailed for requests with rows that are not finite, sampled or not.

        Such keys and values must not stay: an attention weight of 0 does not hide them from
        the request that gets the block next.
        """
        if self._selection.are_finite is None:
            return
        are_finite, self._selection.are_finite = np.array(self._selection.are_finite), None
        if are_finite.all():
            return
        slices = step.attention.slices
        ends = np.cumsum([len(s) for s in slices])
        parts = zip(slices, np.split(are_finite, ends), strict=False)
        if failing := [s for s, part in parts if not part.all()]:
            raise not_finite(request_ids(failing))
