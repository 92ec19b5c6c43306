"""Serves the models that a paged pool cannot: one request at a time, on mlx-lm's own cache."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.exceptions import forget_locals
from batching.backend.sampling.logit_rows import LogitRows
from batching.backend.sampling.slice_sampler import SliceSampler
from batching.request import BatchRequest
from batching.scheduling.step_plan import Slice, SliceOutput, StepPlan


class SequentialRunner:
    """Recurrent layers and unusual attention keep their state in a cache of the model's own.

    It keeps one request's state, so the scheduler must plan one request at a time and share
    no prefixes.  A slice that begins at 0 begins a request.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        self._model = model
        self._sampler = SliceSampler(vocab_size)
        self._owner: BatchRequest | None = None
        self._cache: list[Any] = []

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        try:
            return [self._output(s) for s in plan.slices]
        except Exception as error:
            forget_locals(error)
            raise

    def reset(self) -> None:
        self._owner, self._cache = None, []
        mx.clear_cache()

    def _output(self, s: Slice) -> SliceOutput:
        logit_rows = LogitRows.of([s])
        with self._sampler.masks(logit_rows) as masks:
            logits = self._forward(s)[logit_rows.rows]
            states = [layer.state for layer in self._cache]
            with self._sampler.isolate_failures([s], logits, states):
                (output,) = self._sampler.outputs([s], logit_rows, logits, masks, states)
        return output

    def _forward(self, s: Slice) -> mx.array:
        """Process a slice; return its logits, `[len(s), vocab_size]`."""
        if s.start == 0:
            self._owner, self._cache = s.request, make_prompt_cache(self._model)
        assert s.request is self._owner, "one request at a time"
        tokens = mx.array([s.request.token_ids[s.start : s.stop]])
        logits: mx.array = self._model(tokens, cache=self._cache)
        return logits[0]
