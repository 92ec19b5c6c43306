"""Rows whose logits the last bit may change a lot, because it may choose other experts."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from batching.backend.hooks.changes import Changes
from batching.engine.load_slices import ONE_SLICE, LoadSlices

# Noise on an embedding, as a share of its size: as much as rounding adds up to in many layers.
_NOISE: Final = 3e-5
_NUM_DRAWS: Final = 4

Row = tuple[int, int]  # A request, and the position of its token.


def has_experts(model: nn.Module) -> bool:
    return any(isinstance(module, SwitchGLU | SwitchMLP) for module in model.modules())


def plain_logits(model: nn.Module, pieces: Iterable[Sequence[int]]) -> mx.array:
    """Return the logits of a prompt in pieces, `[L, vocab_size]`, by mlx-lm's own code."""
    cache = make_prompt_cache(model)
    logits: list[mx.array] = [model(mx.array([list(p)]), cache=cache)[0] for p in pieces]
    return mx.concatenate(logits)


def flipping_rows(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[mx.array],
    tolerance: float,
    slices: LoadSlices = ONE_SLICE,
) -> set[Row]:
    """Return the rows that differ by more than `tolerance` if the embeddings are off by little."""
    flipping: set[Row] = set()
    for seed in range(_NUM_DRAWS):
        changes = Changes()
        _add_noise(model, changes, mx.random.key(seed))
        try:
            for request, prompt in enumerate(prompts):
                off = _distances(plain_logits(model, [prompt]), expected[request])
                # NaN counts, too.
                rows = np.flatnonzero(~(np.array(off.astype(mx.float32)) <= tolerance))
                flipping |= {(request, int(position)) for position in rows}
                slices.pause()
        finally:
            changes.undo()
    return flipping


def _distances(logits: mx.array, expected: mx.array) -> mx.array:
    """Return how far a logit of each row is off, as a share of the largest."""
    return mx.abs(logits - expected).max(axis=-1) / mx.abs(expected).max()


def _add_noise(model: nn.Module, changes: Changes, key: mx.array) -> None:
    for module in model.modules():
        # An embedding, of MLX or of a platform.
        if hasattr(module, "as_linear"):
            plain = type(module)

            def noisy(self: nn.Module, tokens: mx.array, plain: Any = plain) -> mx.array:
                embedded: mx.array = plain.__call__(self, tokens)
                noise = _NOISE * mx.random.normal(embedded.shape, key=key)
                return embedded * (1 + noise).astype(embedded.dtype)

            changes.override_call(module, noisy)
