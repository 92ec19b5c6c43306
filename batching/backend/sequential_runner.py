"""Serves the models that a paged pool cannot: one request at a time, on mlx-lm's own cache."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.sampler import Sample, Sampler
from batching.request import BatchRequest
from batching.step_plan import Slice, StepPlan


class SequentialRunner:
    """Recurrent layers and unusual attention keep their state in a cache of the model's own.

    It holds one request's state, so the scheduler must plan one request at a time and share
    no prefixes.  A slice that begins at 0 begins a request.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sampler = Sampler()
        self._owner: BatchRequest | None = None
        self._cache: list[Any] = []

    def run(self, plan: StepPlan) -> list[int]:
        sampled: list[int] = []
        for s in plan.slices:
            tokens = self._sampler.sample(self._read(s), [Sample(s.request, s.stop)])
            mx.eval(tokens, [layer.state for layer in self._cache])
            if s.samples:
                sampled.append(int(tokens[0]))
        return sampled

    def reset(self) -> None:
        self._owner, self._cache = None, []

    def _read(self, s: Slice) -> mx.array:
        """Read a slice; return its last row of logits, `[1, vocab_size]`."""
        if s.start == 0:
            self._owner, self._cache = s.request, make_prompt_cache(self._model)
        assert s.request is self._owner, "one request at a time"
        tokens = mx.array([s.request.token_ids[s.start : s.stop]])
        logits: mx.array = self._model(tokens, cache=self._cache)
        return logits[:, -1]
