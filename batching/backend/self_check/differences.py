"""How far the logits of steps over the pool are off."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.layers import in_slices
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.sampling.logit_rows import LogitRows
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.self_check.expert_flips import Row
from batching.backend.self_check.steps import BLOCK_SIZE, DRAFTED, SHORT, Script
from batching.engine.load_slices import ONE_SLICE, LoadSlices


def row_differences(
    model: nn.Module,
    vocab_size: int,
    checked: CheckedModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[mx.array],
    script: Script = SHORT,
    slices: LoadSlices = ONE_SLICE,
) -> dict[Row, float]:
    """Return how far a logit of each row is off, as a share of the largest."""
    window = checked.layout.window
    num_window_blocks = 0 if window is None else script.num_window_blocks
    cache = checked.cache(script.num_blocks, BLOCK_SIZE, num_window_blocks=num_window_blocks)
    _fill_with_nan(cache, script)
    graphs = checked.graphs(cache, is_check=True)
    runner = MLXRunner(model, vocab_size, checked.selection, cache, graphs=graphs)
    differences: dict[Row, float] = {}
    for plan in script.plans(prompts, window):
        cache.copy_blocks(plan.copies)
        cache.copy_states(plan.state_copies)
        step = cache.begin(plan.slices)
        # A graph that is kept must be whole.
        with in_slices(model, slices if graphs is None else ONE_SLICE):
            logits = runner.logits(step)
        cache.flush()
        mx.eval(logits, cache.arrays)
        for row, (sequence_id, position) in enumerate(_positions(step.logit_rows)):
            if sequence_id != DRAFTED:
                reference = expected[sequence_id]
                scale = float(mx.abs(reference).max())
                off = float(mx.abs(logits[row] - reference[position]).max())
                differences[sequence_id, position] = off / scale
        slices.pause()
    return differences


def _fill_with_nan(cache: PagedKVCache, script: Script) -> None:
    """Fill a block of layers with windows and blocks of their own."""
    cache.begin([script.nan_slice()])
    for layer in cache.layers:
        if layer.is_windowed:
            shape = layer.shape
            size = (BLOCK_SIZE, shape.num_heads, 1)
            keys, values = (
                mx.full((*size, dim), mx.nan) for dim in (shape.key_dim, shape.value_dim)
            )
            layer.update_and_fetch(keys, values)
            layer.flush()
    mx.eval(cache.arrays)


def _positions(rows: LogitRows) -> list[tuple[int, int]]:
    """Return the sequence and the position of the token that each of the L rows is for."""
    positions = {score.row: (score.sequence_id, score.position - 1) for score in rows.scores}
    for sample, row in zip(rows.samples, rows.sample_rows, strict=True):
        positions[row] = (sample.sequence_id, sample.position - 1)
    return [positions[row] for row in range(len(rows.rows))]
