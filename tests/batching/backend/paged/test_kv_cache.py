"""Paged attention against attention over each request's own contiguous keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import SlidingWindow, StepAttention
from batching.backend.paged.mlx_pool import DeviceLayerCache, device_cache
from batching.block_manager import BlockCopy, BlockTable
from batching.steps.step_plan import Slice
from tests.support.requests import make_request, slice_of

MakeCache = Callable[[list[LayerShape], int, int], PagedKVCache]

every_way = pytest.mark.parametrize(
    "make_cache",
    [device_cache, partial(device_cache, views_decodes=False)],
    ids=["with views", "gathered"],
)
BLOCK_SIZE = 4
NUM_BLOCKS = 64
DIM = 8


def first_visible(position: int, window: SlidingWindow | None) -> int:
    if window is None:
        return 0
    if window.is_chunked:
        return position - position % window.size
    return max(0, position - window.size + 1)


def reference(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    start: int,
    window: SlidingWindow | None,
    soft_cap: float,
    sinks: np.ndarray[Any, Any] | None,
) -> np.ndarray[Any, Any]:
    """Attention as its definition reads: q `[n, Hq, D]` at positions start.., k and v `[L, H, D]`."""
    n, num_queries, _ = q.shape
    group = num_queries // k.shape[1]
    out = np.zeros((n, num_queries, v.shape[-1]))
    for row in range(n):
        position = start + row
        low = first_visible(position, window)
        for head in range(num_queries):
            scores = k[low : position + 1, head // group] @ q[row, head] * DIM**-0.5
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            out[row, head] = weights / total @ v[low : position + 1, head // group]
    return out


def pool_keys(cache: PagedKVCache) -> np.ndarray[Any, Any]:
    layer = cache.layers[0]
    assert isinstance(layer, DeviceLayerCache)
    return np.array(layer.pool.keys)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """(start, stop, block ids) of requests whose blocks lie anywhere, or in one run.

    Some begin with the blocks of the one before, as after a hit in the prefix cache.
    """
    free = draw(st.permutations(range(NUM_BLOCKS)))
    made: list[tuple[int, int, list[int]]] = []
    for _ in range(draw(st.integers(1, 6))):
        stop = draw(st.integers(1, 37))
        start = stop - 1 if draw(st.booleans()) else draw(st.integers(0, stop - 1))
        count = -(-stop // BLOCK_SIZE)
        if draw(st.booleans()):
            free = sorted(free)
        blocks = list(made[-1][2][: draw(st.integers(0, count))]) if made else []
        taken, free = free[: count - len(blocks)], free[count - len(blocks) :]
        made.append((start, stop, [*blocks, *taken]))
    return made


def write(cache: PagedKVCache, parts: list[Slice], contents: Sequence[np.ndarray]) -> None:
    """Write keys and values of slices, `[2, stop, num_heads, DIM]` for each request, by one step."""
    inputs = cache.begin(parts)
    rows = [contents[s.sequence_id][:, s.start : s.stop] for s in inputs.attention.slices]
    keys, values = (as_rows([r[i] for r in rows]) for i in (0, 1))
    cache.layers[0].update_and_fetch(keys, values)
    cache.flush()


@every_way
@settings(deadline=None, max_examples=40)
@given(
    steps(),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.sampled_from([None, *(SlidingWindow(n, c) for n in (1, 3, 8, 100) for c in (False, True))]),
    st.sampled_from([(0.0, False), (0.0, True), (0.3, False)]),
    st.integers(0, 2**32 - 1),
)
def test_it_is_attention_whatever_the_rows_the_blocks_and_the_window(
    make_cache: MakeCache,
    step: list[tuple[int, int, list[int]]],
    heads: tuple[int, int],
    window: SlidingWindow | None,
    cap_and_sinks: tuple[float, bool],
    seed: int,
) -> None:
    num_queries, num_heads = heads
    soft_cap, has_sinks = cap_and_sinks
    rng = np.random.default_rng(seed)
    sinks = rng.normal(size=num_queries).astype(np.float32) if has_sinks else None
    size, is_chunked = window or (None, False)
    own_size = size if is_chunked else None
    shape = LayerShape(
        *(num_heads, DIM, DIM, mx.float32, own_size), soft_cap=soft_cap, is_chunked=is_chunked
    )
    cache = make_cache([shape], NUM_BLOCKS, BLOCK_SIZE)
    layer = cache.layers[0]
    slices, contents = [], []
    # Requests that share a block have the same tokens in it.
    pool = rng.normal(size=(2, NUM_BLOCKS, BLOCK_SIZE, num_heads, DIM)).astype(np.float32)
    for i, (start, stop, blocks) in enumerate(step):
        request = make_request(i, [0] * stop, max_tokens=1)
        request.block_table = BlockTable(blocks)
        slices.append(slice_of(request, start, stop))
        contents.append(pool[:, blocks].reshape(2, -1, num_heads, DIM)[:, :stop])
    before = [replace(s, start=0, token_ids=(0,) * s.start) for s in slices if s.start]
    if before:
        write(cache, before, contents)
    write(cache, slices, contents)
    order = layer.step.attention.slices
    queries = [rng.normal(size=(len(s), num_queries, DIM)).astype(np.float32) for s in order]
    out = layer.attend(
        as_rows(queries),
        scale=DIM**-0.5,
        # A model makes one of its own for chunks.
        mask=mx.zeros(1) if is_chunked else layer.make_mask(1, window_size=size),
        sinks=None if sinks is None else mx.array(sinks),
    )
    got = np.array(out.squeeze(2))
    expected = []
    for q, s in zip(queries, order, strict=True):
        k, v = contents[s.sequence_id]
        expected.append(reference(q, k, v, s.start, window, soft_cap, sinks))
    assert np.allclose(got, np.concatenate(expected), atol=2e-5)


def as_rows(parts: list[np.ndarray[Any, Any]]) -> mx.array:
    """`[L, H, D]` each as `[T, H, 1, D]`."""
    return mx.array(np.concatenate(parts))[:, :, None]


@pytest.mark.parametrize("num_tokens", [100, 600])
def test_long_rows_are_read_as_views_and_short_ones_together(num_tokens: int) -> None:
    requests = []
    for i in range(3):
        request = make_request(i, [0] * num_tokens, max_tokens=1)
        request.block_table = BlockTable(range(i * 20, i * 20 + 19))
        requests.append(request)
    attention = StepAttention([slice_of(r, num_tokens - 1, num_tokens) for r in requests], 32)
    assert [g.num_rows for g in attention.groups(None)] == ([3] if num_tokens == 100 else [1] * 3)


def test_a_write_changes_its_slots_and_nothing_else() -> None:
    cache = device_cache([LayerShape(1, DIM, DIM, mx.float32)], NUM_BLOCKS, BLOCK_SIZE)
    request = make_request(0, [0] * 6, max_tokens=1)
    request.block_table = BlockTable([9, 3])
    cache.begin([slice_of(request, 0, 6)])
    ones = mx.ones((6, 1, 1, DIM))
    cache.layers[0].update_and_fetch(ones, ones)
    cache.flush()
    written = np.flatnonzero(pool_keys(cache)[0, :, 0])
    assert written.tolist() == [12, 13, 36, 37, 38, 39]


def test_a_copied_block_has_its_sources_contents() -> None:
    cache = device_cache([LayerShape(2, DIM, DIM, mx.float32)], 4, BLOCK_SIZE)
    request = make_request(0, [0] * 4 * BLOCK_SIZE, max_tokens=1)
    request.block_table = BlockTable(range(4))
    cache.begin([slice_of(request, 0, 4 * BLOCK_SIZE)])
    rows = mx.random.normal((4 * BLOCK_SIZE, 2, 1, DIM))
    cache.layers[0].update_and_fetch(rows, rows)
    cache.flush()
    before = pool_keys(cache).reshape(2, 4, BLOCK_SIZE, DIM)
    cache.copy_blocks([])
    cache.copy_blocks([BlockCopy(1, 3), BlockCopy(0, 2)])
    after = pool_keys(cache).reshape(2, 4, BLOCK_SIZE, DIM)
    assert (after == before[:, [0, 1, 0, 1]]).all()


def test_a_write_that_was_never_read_is_dropped() -> None:
    cache = device_cache([LayerShape(1, DIM, DIM, mx.float32)], 4, BLOCK_SIZE)
    request = make_request(0, [0] * 3, max_tokens=1)
    request.block_table = BlockTable([1])
    cache.begin([slice_of(request, 0, 3)])
    cache.layers[0].update_and_fetch(mx.ones((3, 1, 1, DIM)), mx.ones((3, 1, 1, DIM)))
    cache.reset()
    cache.flush()
    assert not pool_keys(cache).any()


def test_a_mask_that_is_not_ours_is_rejected() -> None:
    cache = device_cache([LayerShape(1, DIM, DIM, mx.float32, 16)], 4, BLOCK_SIZE)
    assert cache.layers[0].make_mask(1) == SlidingWindow(16)
    with pytest.raises(TypeError, match="takes no mask of"):
        cache.layers[0].attend(mx.zeros((1, 1, 1, DIM)), scale=1.0, mask=mx.zeros(1), sinks=None)
