"""Runs the scheduler's plans on a model."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.model_hooks import RowSelection
from batching.backend.paged_cache import PagedKVCache, StepInputs
from batching.backend.sampler import Sampler
from batching.request import BatchRequest
from batching.step_plan import Slice, StepPlan


class MLXRunner:
    """One ragged forward pass a step: T tokens of any requests as T rows of length 1."""

    def __init__(self, model: nn.Module, selection: RowSelection, cache: PagedKVCache) -> None:
        self._model = model
        self._selection = selection
        self._cache = cache
        self._sampler = Sampler()

    def run(self, plan: StepPlan) -> list[int]:
        self._cache.copy_blocks(plan.copies)
        step = self._cache.begin(plan.slices)
        logits = self.logits(step)
        self._cache.flush()
        # The pool is evaluated too: unread writes would pile up from step to step.
        if not step.samples:
            mx.eval(self._cache.arrays)
            return []
        tokens = self._sampler.sample(logits, step.samples)
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)
        mx.eval(tokens, chosen, self._cache.arrays)
        if not mx.isfinite(chosen).all():
            # An overflow in half precision; the step fails, and the pool with it.
            raise FloatingPointError("the model's logits are not finite")
        return _in_order(plan.slices, step, np.array(tokens).tolist())

    def logits(self, step: StepInputs) -> mx.array:
        """Return the logits of the sampled rows, `[S, vocab_size]`."""
        self._selection.rows = step.sample_rows
        try:
            logits: mx.array = self._model(step.tokens, cache=self._cache.layers)
        finally:
            self._selection.rows = None
        if len(logits) != len(step.samples):
            logits = logits[step.sample_rows]
        return logits.squeeze(1)

    def reset(self) -> None:
        self._cache.reset()


def _in_order(slices: Sequence[Slice], step: StepInputs, token_ids: list[int]) -> list[int]:
    """Put the sampled tokens into the order of the slices; the rows may have had another."""
    sampled: dict[BatchRequest, list[int]] = {}
    for sample, token_id in zip(step.samples, token_ids, strict=True):
        sampled.setdefault(sample.request, []).append(token_id)
    return [token_id for s in slices if s.samples for token_id in sampled[s.request]]
