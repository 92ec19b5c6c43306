"""Runs the scheduler's plans on a model."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.model_hooks import RowSelection
from batching.backend.paged_cache import PagedKVCache, StepInputs
from batching.backend.sampler import Sampler
from batching.step_plan import StepPlan


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
        if not step.requests:
            mx.eval(self._cache.arrays)
            return []
        tokens = self._sampler.sample(logits, step.requests)
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)
        mx.eval(tokens, chosen, self._cache.arrays)
        if not mx.isfinite(chosen).all():
            # An overflow in half precision; the step fails, and the pool with it.
            raise FloatingPointError("the model's logits are not finite")
        token_of = dict(zip(step.requests, np.array(tokens).tolist(), strict=True))
        return [token_of[s.request] for s in plan.slices if s.samples]

    def logits(self, step: StepInputs) -> mx.array:
        """Return the logits of the sampled rows, `[S, vocab_size]`."""
        self._selection.rows = step.sample_rows
        try:
            logits: mx.array = self._model(step.tokens, cache=self._cache.layers)
        finally:
            self._selection.rows = None
        if len(logits) != len(step.requests):
            logits = logits[step.sample_rows]
        return logits.squeeze(1)

    def reset(self) -> None:
        self._cache.reset()
