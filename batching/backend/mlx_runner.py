"""Runs the scheduler's plans on a model."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.model_hooks import RowSelection
from batching.backend.paged_cache import PagedKVCache, StepInputs
from batching.backend.sampler import Sampler
from batching.backend.slice_outputs import slice_outputs
from batching.backend.token_masks import MaskFiller, TokenMasks
from batching.step_plan import SliceOutput, StepPlan


class MLXRunner:
    """One ragged forward pass a step: T tokens of any requests as T rows of length 1."""

    def __init__(
        self, model: nn.Module, vocab_size: int, selection: RowSelection, cache: PagedKVCache
    ) -> None:
        self._model = model
        self._selection = selection
        self._cache = cache
        self._sampler = Sampler()
        self._mask_filler = MaskFiller(vocab_size)

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        self._cache.copy_blocks(plan.copies)
        step = self._cache.begin(plan.slices)
        masks = self._mask_filler.start(step.wanted.samples)
        logits = self.logits(step)
        self._cache.flush()
        token_ids = self._sample(step, logits, masks)
        # The pool is evaluated in any case: unread writes would pile up from step to step.
        mx.eval(self._cache.arrays)
        return slice_outputs(plan.slices, step.wanted, logits, token_ids)

    def logits(self, step: StepInputs) -> mx.array:
        """Return the logits of the rows that are wanted, `[L, vocab_size]`."""
        self._selection.rows = step.wanted.rows
        try:
            logits: mx.array = self._model(step.tokens, cache=self._cache.layers)
        finally:
            self._selection.rows = None
        if len(logits) != len(step.wanted.rows):
            logits = logits[step.wanted.rows]
        return logits.squeeze(1)

    def reset(self) -> None:
        self._cache.reset()

    def _sample(self, step: StepInputs, logits: mx.array, masks: TokenMasks | None) -> list[int]:
        if not step.wanted.samples:
            return []
        logits = step.wanted.sampled(logits)
        tokens = self._sampler.sample(logits, step.wanted.samples, masks)
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)
        mx.eval(tokens, chosen, self._cache.arrays)
        if not mx.isfinite(chosen).all():
            # An overflow in half precision; the step fails, and the pool with it.
            raise FloatingPointError("the model's logits are not finite")
        token_ids: list[int] = np.array(tokens).tolist()
        return token_ids
