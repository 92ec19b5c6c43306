"""What a GPU takes of the pool of MLX arrays: no copies, no casts, one index a step."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.paged.gathered_cache import GatheredLayerCache
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import (
    GatheredContext,
    RunContext,
    SlidingWindow,
    StepAttention,
)
from batching.backend.paged.mlx_pool import DeviceLayerCache, device_cache
from batching.block_manager import BlockTable
from batching.steps.step_plan import Slice
from tests.support.requests import make_request, slice_of

BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_HEADS = 2
DIM = 8
LAYER = LayerShape(NUM_HEADS, DIM, DIM, mx.float32)


def decode(request_id: int, num_tokens: int, blocks: list[int]) -> Slice:
    request = make_request(request_id, [0] * num_tokens, max_tokens=1)
    request.block_table = BlockTable(blocks)
    return slice_of(request, num_tokens - 1, num_tokens)


def rows(num_rows: int, num_heads: int = NUM_HEADS) -> mx.array:
    made = mx.random.normal((num_rows, num_heads, 1, DIM))
    mx.eval(made)
    return made


def filled(cache: PagedKVCache) -> DeviceLayerCache:
    """Write random keys and values into all slots of a cache's only layer."""
    blocks = BlockTable(range(NUM_BLOCKS)).value
    whole = Slice(9, 0, (0,) * (NUM_BLOCKS * BLOCK_SIZE), blocks)
    cache.begin([whole])
    layer = cache.layers[0]
    assert isinstance(layer, DeviceLayerCache)
    layer.update_and_fetch(rows(len(whole)), rows(len(whole)))
    mx.eval(cache.arrays)
    return layer


def attend(cache: PagedKVCache, slices: list[Slice], queries: mx.array) -> np.ndarray[Any, Any]:
    cache.begin(slices)
    return np.array(cache.layers[0].attend(queries, scale=1.0, mask=None, sinks=None))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_what_is_gathered_needs_no_second_copy_for_metals_attention(num_rows: int) -> None:
    """Rows and heads are one evenly spaced dimension, and the numbers of a key lie side by side."""
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS)[: num_rows * 5].reshape(num_rows, 5)
    pool = mx.random.normal((NUM_HEADS, NUM_BLOCKS * BLOCK_SIZE, DIM))
    context = GatheredContext(blocks, BLOCK_SIZE, num_tokens=18).read(pool)
    mx.eval(context)
    assert context.shape == (num_rows, NUM_HEADS, 18, DIM)
    row, head, _, number = np.asarray(context).strides
    assert row == head * NUM_HEADS
    assert number == context.itemsize
    slots = (blocks[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(num_rows, -1)[:, :18]
    assert np.array_equal(np.array(context), np.array(pool)[:, slots].swapaxes(0, 1))


@pytest.mark.parametrize("window", [None, SlidingWindow(3)])
@pytest.mark.parametrize("num_tokens", [9, 600])
def test_no_decode_attends_to_a_view_where_views_are_read_wrong(
    num_tokens: int, window: SlidingWindow | None
) -> None:
    """A decode by itself, some side by side, and those of layers with blocks of their own."""
    first, second = (decode(i, num_tokens, [*range(i * 150, i * 150 + 150)]) for i in (0, 1))
    first, second = (replace(s, window_blocks=s.blocks) for s in (first, second))
    for slices in ([first], [first, second]):
        for of_layer in (lambda a: a, StepAttention.windowed):
            attention = of_layer(StepAttention(slices, BLOCK_SIZE, views_decodes=False))
            groups = attention.groups(window)
            assert [type(group.context) for group in groups] == [GatheredContext]
            viewed = of_layer(StepAttention(slices, BLOCK_SIZE)).groups(window)
            assert any(isinstance(group.context, RunContext) for group in viewed) == (
                len(slices) == 1 or num_tokens == 600
            )


def test_a_chunk_is_a_view_anyway() -> None:
    chunk = Slice(0, 2, (0,) * 7, BlockTable([3, 4, 5]).value)
    [group] = StepAttention([chunk], BLOCK_SIZE, views_decodes=False).groups(None)
    assert isinstance(group.context, RunContext)


def test_gathered_decodes_have_the_values_of_views() -> None:
    mx.random.seed(3)
    viewing, gathering = (
        device_cache([LAYER], 64, 4),
        device_cache([LAYER], 64, 4, views_decodes=False),
    )
    for cache in (viewing, gathering):
        mx.random.seed(4)
        filled(cache)
    queries = rows(1)
    lone = [decode(0, 22, [*range(7, 13)])]
    assert np.allclose(attend(viewing, lone, queries), attend(gathering, lone, queries), atol=1e-6)
    # As if the pool began with the run.
    from_0 = attend(viewing, [decode(0, 22, [*range(6)])], queries)
    assert not np.allclose(from_0, attend(gathering, lone, queries), atol=1e-3)


def primitives(directory: Path, arrays: list[mx.array]) -> tuple[Counter[str], int]:
    """Return how many primitives of each kind a graph has, and how many arrays it begins with."""
    path = directory / "graph.dot"
    mx.export_to_dot(str(path), *arrays)
    text = path.read_text()
    kinds = Counter(re.findall(r'label ?="(\w+)", shape=rectangle', text))
    return kinds, len(re.findall("rank=source", text))


@pytest.mark.parametrize("num_layers", [1, 4])
def test_a_step_has_one_array_of_slots_for_all_layers_and_casts_none(
    num_layers: int, tmp_path: Path
) -> None:
    cache = device_cache([LAYER] * num_layers, NUM_BLOCKS, BLOCK_SIZE)
    mx.eval(cache.arrays)
    cache.begin([decode(i, 6, [2 * i, 2 * i + 9]) for i in range(3)])
    keys, values = rows(3), rows(3)
    for layer in cache.layers:
        layer.update_and_fetch(keys, values)
    kinds, num_sources = primitives(tmp_path, cache.arrays)
    pools, of_the_step = 2 * num_layers, len(("keys", "values", "slots"))
    assert num_sources == pools + of_the_step
    # A write is one kernel: the rest changes shapes.
    assert kinds == {"Scatter": pools, "Reshape": kinds["Reshape"]}


def test_layers_whose_own_code_reads_share_the_slots_too(tmp_path: Path) -> None:
    shape = LAYER._replace(is_gathered=True)
    cache = device_cache([shape] * 3, NUM_BLOCKS, BLOCK_SIZE)
    step = cache.begin([decode(0, 6, [5, 9])])
    [piece] = step.pieces
    for layer in cache.layers:
        assert isinstance(layer, GatheredLayerCache)
        layer.piece(piece).update_and_fetch(rows(1), rows(1))
    cache.flush()
    mx.eval(cache.arrays)
    cache.begin([decode(0, 7, [5, 9])])
    _, num_sources = primitives(tmp_path, [pool for layer in cache.layers for pool in layer.state])
    pools = pending = 6
    assert num_sources == pools + pending + 1
    assert step.slot_rows(1, NUM_BLOCKS * BLOCK_SIZE).dtype == mx.uint32


def test_a_write_copies_no_pool() -> None:
    shape = LayerShape(8, 64, 64, mx.float32)
    cache = device_cache([shape] * 2, 256, 32)
    mx.eval(cache.arrays)
    pool_bytes = cache.arrays[0].nbytes
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for num_tokens in (5, 6, 7):
        cache.begin([decode(0, num_tokens, [200])])
        for layer in cache.layers:
            new = mx.random.normal((1, 8, 1, 64))
            layer.update_and_fetch(new, new)
            mx.eval(layer.attend(new, scale=1.0, mask=None, sinks=None))
        mx.eval(cache.arrays)
    assert mx.get_peak_memory() - before < pool_bytes / 4


def test_keys_and_values_have_dims_and_types_of_their_own() -> None:
    cache = device_cache([LayerShape(2, 8, 4, mx.bfloat16)], 8, BLOCK_SIZE)
    cache.begin([decode(0, 6, [3, 1])])
    layer = cache.layers[0]
    assert isinstance(layer, DeviceLayerCache)
    keys, values = mx.arange(16.0).reshape(1, 2, 1, 8), mx.arange(8.0).reshape(1, 2, 1, 4)
    layer.update_and_fetch(keys, values)
    pool = layer.pool
    assert (pool.keys.shape, pool.keys.dtype) == ((2, 32, 8), mx.bfloat16)
    assert (pool.values.shape, pool.values.dtype) == ((2, 32, 4), mx.bfloat16)
    slot = 1 * BLOCK_SIZE + 1
    assert mx.array_equal(pool.keys[:, slot], keys[0, :, 0])
    assert mx.array_equal(pool.values[:, slot], values[0, :, 0])
    assert pool.keys.sum().item() == keys.sum().item()
