"""Serves the models that a paged pool cannot: one request at a time, on mlx-lm's own cache."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.logit_rows import LogitRows
from batching.backend.sampler import Sampler
from batching.backend.slice_outputs import slice_outputs
from batching.backend.token_masks import MaskFiller
from batching.request import BatchRequest
from batching.step_plan import Slice, SliceOutput, StepPlan


class SequentialRunner:
    """Recurrent layers and unusual attention keep their state in a cache of the model's own.

    It holds one request's state, so the scheduler must plan one request at a time and share
    no prefixes.  A slice that begins at 0 begins a request.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        self._model = model
        self._sampler = Sampler()
        self._mask_filler = MaskFiller(vocab_size)
        self._owner: BatchRequest | None = None
        self._cache: list[Any] = []

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        outputs = [self._output(s) for s in plan.slices]
        mx.eval([layer.state for layer in self._cache])
        return outputs

    def reset(self) -> None:
        self._owner, self._cache = None, []

    def _output(self, s: Slice) -> SliceOutput:
        wanted = LogitRows.of([s])
        masks = self._mask_filler.start(wanted.samples)
        logits = self._read(s)[wanted.rows]
        token_ids: list[int] = []
        if wanted.samples:
            tokens = self._sampler.sample(wanted.sampled(logits), wanted.samples, masks)
            token_ids = np.array(tokens).tolist()
        (output,) = slice_outputs([s], wanted, logits, token_ids)
        return output

    def _read(self, s: Slice) -> mx.array:
        """Read a slice; return its logits, `[len(s), vocab_size]`."""
        if s.start == 0:
            self._owner, self._cache = s.request, make_prompt_cache(self._model)
        assert s.request is self._owner, "one request at a time"
        tokens = mx.array([s.request.token_ids[s.start : s.stop]])
        logits: mx.array = self._model(tokens, cache=self._cache)
        return logits[0]
