"""Checks at load how a model can be served from the paged pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.choose_pool import is_on_host, kv_cache
from batching.backend.cpu.modules import replace_modules
from batching.backend.hooks.attention import hook_attention
from batching.backend.hooks.observe import Observation, observe, own_layout
from batching.backend.hooks.regroup import regroup
from batching.backend.hooks.rows import RowSelection, select_rows
from batching.backend.hooks.undo import Changes
from batching.backend.mlx_runner import MLXRunner
from batching.backend.native.modules import min_input_bits
from batching.backend.native_loader import Native
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import CacheLayout
from batching.backend.sampling.logit_rows import LogitRows
from batching.backend.sampling.sampler import ArgMax
from batching.backend.self_check_steps import (
    BLOCK_SIZE,
    DRAFTED,
    NUM_BLOCKS,
    probe_prompts,
    probe_steps,
)

# Of the largest logit: rounding differs with the shape of a product, outputs do not.
_TOLERANCE: Final[dict[mx.Dtype, float]] = {mx.float32: 1e-3}
_COARSE_TOLERANCE: Final = 6e-2
# A value midway between two steps of 8 bits rounds either way, and that grows in later layers.
_TOLERANCE_OF_8_BITS: Final = 0.3
# A token of a damaged model may have no finite logits; the others are served.
_MAX_TRIES: Final = 8


class Way(StrEnum):
    """How much of a model runs for all rows of a step at once, from most to least.

    RAGGED: all of it.  PIECES: but for modules with a state or with attention of their own, which
    get chunks one by one and decodes together.  ONE_BY_ONE: these get a request at a time.
    WHOLE: the model runs for a request at a time, on the pool.  OWN: likewise, on its own caches.
    """

    RAGGED = "ragged"
    PIECES = "pieces"
    ONE_BY_ONE = "one by one"
    WHOLE = "whole model"
    OWN = "own caches"


@dataclass(frozen=True)
class CheckedModel:
    """What the runner needs to know; `selection` is hooked into the model already.

    native: the kernels that the model's modules and its pool use.
    reason: why faster ways are wrong, for the operator to read; empty if there is none.
    """

    layout: CacheLayout
    selection: RowSelection
    way: Way
    native: Native | None = None
    reason: str = ""

    def cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Return an empty pool."""
        one_by_one = self.way not in (Way.RAGGED, Way.PIECES)
        return kv_cache(self.layout, num_blocks, block_size, self.native, one_by_one=one_by_one)

    @property
    def arg_max(self) -> ArgMax | None:
        """What finds the highest logits, if not MLX."""
        return self.native.module.arg_max if self.native else None


def check_model(
    model: nn.Module,
    vocab_size: int,
    native: Native | None = None,
    kv_dtype: mx.Dtype | None = None,
) -> CheckedModel:
    """Return the fastest way in which a model gives the right logits.

    Ragged steps over the pool are compared with mlx-lm's own single requests: unlike prompts are
    prefilled in chunks, mixed with decodes, over scattered blocks, with a prefix that is found and drafts
    that are wrong; the logits of every token must be those of a plain forward pass.  Keys and values are
    kept in `kv_dtype`; None is the type in which the model makes them.
    """
    prompts, expected = _plain_logits(model, vocab_size)
    reason = "" if expected else "its logits are not finite"
    tokens = prompts[0]
    hook_attention(model)
    observed = observe(model, tokens)
    if native is None and is_on_host(observed.layout):
        replace_modules(model)
    for way, layout, modules in _ways(model, tokens, observed) if expected else ():
        if kv_dtype is not None:
            layout = layout.with_dtype(kv_dtype)
        checked = CheckedModel(layout, RowSelection(), way, native, reason)
        changes = _change(model, checked, modules)
        try:
            difference = _largest_difference(model, vocab_size, checked, prompts, expected)
        except Exception as error:
            # A model's code can do anything with a cache, so it can raise anything.
            reason = reason or f"its code does not run over a paged cache ({error})"
        else:
            if difference <= _tolerance(model, layout):
                return checked
            reason = reason or f"a batch changes its logits by {difference:.2g} of the largest one"
        changes.undo()
    layout = own_layout(model, tokens)
    checked = CheckedModel(layout, RowSelection(), Way.OWN, native, reason)
    _change(model, checked, (model,))
    return checked


def _plain_logits(model: nn.Module, vocab_size: int) -> tuple[list[list[int]], list[mx.array]]:
    """Return prompts, and the logits `[L, vocab_size]` of each; none if no prompts give finite ones."""
    for salt in range(_MAX_TRIES):
        prompts = probe_prompts(vocab_size, salt)
        caches = (make_prompt_cache(model) for _ in prompts)
        logits = [
            model(mx.array([p]), cache=cache)[0] for p, cache in zip(prompts, caches, strict=True)
        ]
        if all(bool(mx.isfinite(rows).all()) for rows in logits):
            return prompts, logits
    return prompts, []


def _ways(
    model: nn.Module, tokens: Sequence[int], observed: Observation
) -> Iterator[tuple[Way, CacheLayout, tuple[nn.Module, ...]]]:
    """Yield ways to serve a model, and the modules that get pieces of a step."""
    way = Way.PIECES if observed.to_regroup else Way.RAGGED
    yield way, observed.layout, observed.to_regroup
    gathered = observe(model, tokens, gathers_all=True)
    if gathered.layout != observed.layout:
        yield Way.PIECES, gathered.layout, gathered.to_regroup
    yield Way.ONE_BY_ONE, gathered.layout, gathered.to_regroup
    if not gathered.layout.has_own:
        yield Way.WHOLE, gathered.layout, (model,)


def _change(model: nn.Module, checked: CheckedModel, modules: Sequence[nn.Module]) -> Changes:
    changes = Changes()
    for module in modules:
        regroup(module, changes)
    if not any(module is model for module in modules):
        select_rows(model, checked.selection, changes)
    return changes


def _tolerance(model: nn.Module, layout: CacheLayout) -> float:
    if min_input_bits(model) == 8:
        return _TOLERANCE_OF_8_BITS
    dtypes = {shape.dtype for shape in layout.shapes} or {mx.float32}
    return max(_TOLERANCE.get(dtype, _COARSE_TOLERANCE) for dtype in dtypes)


def _largest_difference(
    model: nn.Module,
    vocab_size: int,
    checked: CheckedModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[mx.array],
) -> float:
    """Return how far a logit is off, as a share of the largest; NaN if one is not a number."""
    cache = checked.cache(NUM_BLOCKS, BLOCK_SIZE)
    runner = MLXRunner(model, vocab_size, checked.selection, cache)
    worst = 0.0
    for plan in probe_steps(prompts):
        cache.copy_states(plan.state_copies)
        step = cache.begin(plan.slices)
        logits = runner.logits(step)
        cache.flush()
        mx.eval(logits, cache.arrays)
        for row, (request_id, position) in enumerate(_positions(step.logit_rows)):
            if request_id != DRAFTED:
                reference = expected[request_id]
                scale = float(mx.abs(reference).max())
                off = float(mx.abs(logits[row] - reference[position]).max()) / scale
                # `max` would hide NaN.
                worst = max(worst, off)
    return worst


def _positions(rows: LogitRows) -> list[tuple[int, int]]:
    """Return the request and the position of the token that each of the L rows is for."""
    positions = {score.row: (score.request.request_id, score.position - 1) for score in rows.scores}
    for sample, row in zip(rows.samples, rows.sample_rows, strict=True):
        positions[row] = (sample.request.request_id, sample.position - 1)
    return [positions[row] for row in range(len(rows.rows))]
