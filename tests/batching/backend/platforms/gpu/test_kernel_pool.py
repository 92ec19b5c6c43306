"""A model on the pool of kernels gives the tokens that it gives on the portable pool."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from batching.backend.paged.kv_cache import StepInputs
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.paged.mlx_pool import device_cache
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.kernel_pool import KernelLayerCache, kernel_cache
from batching.backend.platforms.gpu.step_rows import KernelAttention
from batching.backend.runner import mlx_runner
from batching.backend.runner.mlx_runner import EncodingStep, MLXStep
from batching.block_manager import BlockCopy, BlockTable
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.steps.step_plan import Slice, StepPlan
from tests.support.host_kernels import HostKernels
from tests.support.kernel_models import BLOCK_SIZE, FAMILIES, NUM_BLOCKS, served
from tests.support.requests import make_request, slice_of
from tests.support.serving import limits, make_runner, serve
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.weekly import weekly


def random_requests(seed: int) -> list[BatchRequest]:
    """Prompts of any lengths, some with a prefix of another, greedy, sampled and penalized, with choices."""
    rng = random.Random(seed)
    requests: list[BatchRequest] = []
    for _ in range(rng.randrange(1, 7)):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 45))]
        if requests and rng.random() < 0.3:
            prompt = [*rng.choice(requests).token_ids[:24], *prompt[:9]]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.9)),
            seed=rng.randrange(99),
            presence_penalty=rng.choice((0.0, 0.0, 1.0)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        )
        made = make_request(
            len(requests), prompt, max_tokens=rng.randrange(1, 14), sampling=sampling
        )
        requests += [made, *(made.fork(len(requests) + 1 + i) for i in range(rng.randrange(3)))]
    return requests


@pytest.mark.parametrize("family", weekly(FAMILIES, 2))
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_tokens_are_those_of_the_portable_pool(native: Native, family: str, seed: int) -> None:
    """Forks, shared prefixes, preemption by a small pool, chunks beside decodes, and queued steps or not."""
    model = served(family, native)
    expected = model.tokens(lambda: random_requests(seed), on_kernels=False, queued=False)
    for queued in (False, True):
        found = model.tokens(lambda: random_requests(seed), on_kernels=True, queued=queued)
        assert found == expected


def many_requests() -> list[BatchRequest]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, size).tolist() for size in (1, 19, 23, 9, 40, 33)]
    return [make_request(i, prompt, max_tokens=24) for i, prompt in enumerate(prompts)]


def test_steps_computed_in_any_order_change_no_token(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU may, which knows nothing but what waits for what: the step that is queued last comes first."""
    model = served("gpt_oss", native)
    expected = model.tokens(many_requests, on_kernels=False, queued=False)
    queued: list[Any] = []

    def compute(*arrays: Any) -> None:
        while queued:
            mx.eval(queued.pop())
        mx.eval(*arrays)

    late = SimpleNamespace(
        **vars(mx) | {"async_eval": lambda *a: queued.append(a), "eval": compute}
    )
    monkeypatch.setattr(mlx_runner, "mx", late)
    assert model.tokens(many_requests, on_kernels=True, queued=True) == expected


@pytest.mark.parametrize("penalty", [-9.0, 9.0])
def test_steps_of_requests_with_penalties_are_queued(
    native: Native, monkeypatch: pytest.MonkeyPatch, penalty: float
) -> None:
    """What was said last is said again, or never again."""
    sampling = SamplingParams(
        temperature=0.0, presence_penalty=penalty, repetition_penalty=1.1, logit_bias=((3, 1.0),)
    )

    def requests() -> list[BatchRequest]:
        return [
            make_request(i, prompt, max_tokens=24, sampling=sampling)
            for i, prompt in enumerate([[1, 2, 3], [4] * 9])
        ]

    model = served("qwen3", native)
    expected = model.tokens(requests, on_kernels=True, queued=False)
    runner, made = make_runner(model.model, VOCAB_SIZE, model.checked), requests()
    submit, num_following = runner.submit, 0

    def watched(plan: StepPlan, after: MLXStep | None = None) -> MLXStep | EncodingStep:
        nonlocal num_following
        num_following += after is not None
        return submit(plan, after)

    monkeypatch.setattr(runner, "submit", watched)
    serve(runner, replace(limits(model.checked), max_draft_tokens=0), made)
    assert num_following > 20
    assert [request.output_token_ids for request in made] == expected


def test_a_small_pool_preempts_on_kernels_too(native: Native) -> None:
    model = served("qwen3", native)
    runner = make_runner(model.model, VOCAB_SIZE, model.checked)
    stats = serve(runner, limits(model.checked), many_requests()).stats
    assert stats.num_preemptions > 0


def test_drafts_are_decoded_row_by_row(native: Native) -> None:
    model = served("qwen3", native)
    config = replace(limits(model.checked), max_draft_tokens=7, num_blocks=64)
    repeating = [[1, 2, 3, 4] * 6, [7, 8] * 9, [5] * 20]
    outputs: list[list[list[int]]] = []
    for checked in (model.portable, model.checked):
        requests = [make_request(i, p, max_tokens=80) for i, p in enumerate(repeating)]
        stats = serve(make_runner(model.model, VOCAB_SIZE, checked, config), config, requests).stats
        assert stats.num_draft_tokens > 0
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]


def decode(num_tokens: int, blocks: list[int], num_rows: int = 1) -> Slice:
    request = make_request(0, [0] * num_tokens, max_tokens=1)
    request.block_table = BlockTable(blocks)
    return slice_of(request, num_tokens - num_rows, num_tokens)


def test_rows_come_before_chunks_and_see_what_they_may() -> None:
    lone, drafted, chunk = decode(6, [5, 9]), decode(11, [1, 2, 3], 3), decode(20, [*range(5)], 20)
    attention = KernelAttention([chunk, drafted, lone], BLOCK_SIZE)
    assert attention.slices == [drafted, lone, chunk]
    assert attention.windowed().slices == attention.slices
    assert attention.num_decoded == 4
    rows = attention.decodes(None)
    assert np.array(rows.ranges).tolist() == [[0, 9], [0, 10], [0, 11], [0, 6]]
    assert np.array(rows.tables)[:, :3].tolist() == [[1, 2, 3]] * 3 + [[5, 9, 0]]
    assert [group.num_rows for group in attention.chunks(None)] == [20]
    positions = StepInputs.of(attention, BLOCK_SIZE).positions
    assert attention.positions(positions) is positions
    assert np.array(positions).tolist() == [8, 9, 10, 5, *range(20)]


def test_a_window_has_a_table_of_its_own_that_begins_with_it() -> None:
    """So that its width does not grow with the context."""
    attention = KernelAttention([decode(400, [*range(100)])], BLOCK_SIZE)
    rows = attention.decodes(SlidingWindow(6))
    assert np.array(rows.ranges).tolist()[0] == [394 % BLOCK_SIZE, 6]
    assert np.array(rows.tables).tolist() == [[98, 99, 0, 0, 0, 0, 0, 0]]
    assert attention.decodes(None).tables.shape == (1, 128)
    assert attention.decodes(SlidingWindow(6)) is rows


def test_no_input_is_so_small_that_metal_has_another_kernel_for_it() -> None:
    attention = KernelAttention([decode(1, [3])], BLOCK_SIZE)
    rows = attention.decodes(None)
    slots = attention.slots(np.array([12]))
    assert (rows.tables.shape, rows.ranges.shape) == ((1, 8), (4, 2))
    positions = attention.positions(mx.array([0]))
    assert (slots.shape, positions.shape) == ((8,), (8,))
    assert (slots.dtype, rows.tables.dtype, rows.ranges.dtype) == (mx.uint32, mx.uint32, mx.int32)
    # What is behind the slots of the step is none.
    assert np.array(slots).tolist() == [12, *[2**32 - 1] * 7]


def test_all_layers_of_a_step_take_the_same_arrays(native: Native) -> None:
    """They are made once: each is an upload."""
    given: list[tuple[int, ...]] = []

    class Watched(HostKernels):
        def decode(self, *args: Any, **options: Any) -> Any:
            given.append(tuple(map(id, args[1])))
            return super().decode(*args, **options)

        def write(self, *args: Any) -> Any:
            given.append((id(args[1]),))
            return super().write(*args)

    cache = kernel_cache(Watched(native), [LayerShape(2, 8, 8, mx.float32)] * 3, 16, BLOCK_SIZE)
    cache.begin([decode(6, [5, 9])])
    for layer in cache.layers:
        layer.update_and_fetch(mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 8)))
        layer.attend(mx.ones((1, 4, 1, 8)), scale=1.0, mask=None, sinks=None)
    assert len(given) == 6
    assert len(set(given)) == 2


@pytest.mark.parametrize("num_rows", [1, 20])
def test_attention_is_that_of_the_portable_pool(native: Native, num_rows: int) -> None:
    """With soft caps and windows, over scattered blocks, of decodes and of chunks."""
    shape = LayerShape(2, 8, 16, mx.float32, soft_cap=3.0)
    outputs: list[mx.array] = []
    for pool in (
        device_cache([shape], NUM_BLOCKS, BLOCK_SIZE),
        kernel_cache(HostKernels(native), [shape], NUM_BLOCKS, BLOCK_SIZE),
    ):
        mx.random.seed(5)
        whole = decode(60, [*range(40, 10, -2)], 60)
        for s in (whole, replace(whole, start=60 - num_rows, token_ids=(0,) * num_rows)):
            pool.begin([s])
            [layer] = pool.layers
            layer.update_and_fetch(
                mx.random.normal((len(s), 2, 1, 8)), mx.random.normal((len(s), 2, 1, 16))
            )
            queries = mx.random.normal((len(s), 6, 1, 8))
            outputs.append(layer.attend(queries, scale=0.3, mask=SlidingWindow(9), sinks=None))
        mx.eval(pool.arrays)
    portable, kernels = outputs[:2], outputs[2:]
    for a, b in zip(portable, kernels, strict=True):
        assert a.shape == b.shape
        assert np.allclose(np.array(a), np.array(b), atol=1e-5)


def test_keys_that_nothing_attends_to_are_written_at_the_end_of_the_step(native: Native) -> None:
    cache = kernel_cache(HostKernels(native), [LayerShape(2, 8, 8, mx.float32)], 16, BLOCK_SIZE)
    cache.begin([decode(6, [5, 9])])
    [layer] = cache.layers
    assert isinstance(layer, KernelLayerCache)
    keys = mx.random.normal((1, 2, 1, 8))
    layer.update_and_fetch(keys, keys)
    cache.flush()
    mx.eval(cache.arrays)
    by_head = np.array(layer.state[0]).reshape(2, -1, 8)
    assert np.array_equal(by_head[:, 9 * BLOCK_SIZE + 1], np.array(keys)[0, :, 0])
    assert np.count_nonzero(by_head.any(axis=2)) == 2


def test_neither_queued_steps_nor_copies_copy_the_pool(native: Native) -> None:
    """MLX copies what it writes to while a step in flight has it, too."""
    shape = LayerShape(8, 64, 64, mx.float32)
    cache = kernel_cache(HostKernels(native), [shape] * 2, 256, 32)
    mx.eval(cache.arrays)
    pool_bytes = cache.arrays[0].nbytes
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    kept: list[mx.array] = []
    for num_tokens in (20, 33, 34, 35):
        cache.copy_blocks([BlockCopy(200, 100)])
        cache.begin([decode(num_tokens, [200, 7], 20 if num_tokens == 20 else 1)])
        for layer in cache.layers:
            new = mx.random.normal((len(layer.step.slots), 8, 1, 64))
            layer.update_and_fetch(new, new)
            kept.append(layer.attend(new, scale=1.0, mask=None, sinks=None))
        mx.async_eval(cache.arrays)
    mx.eval(kept)
    assert mx.get_peak_memory() - before < pool_bytes / 4


def test_after_a_reset_steps_in_flight_write_to_no_pool_that_is_used(native: Native) -> None:
    cache = kernel_cache(HostKernels(native), [LayerShape(2, 8, 8, mx.float32)], 16, BLOCK_SIZE)
    [layer] = cache.layers
    cache.begin([decode(1, [5])])
    layer.update_and_fetch(mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 8)))
    output = layer.attend(mx.ones((1, 2, 1, 8)), scale=1.0, mask=None, sinks=None)
    cache.reset()
    assert np.array(output).tolist() == np.ones((1, 2, 1, 8)).tolist()
    assert not any(np.array(array).any() for array in cache.arrays)
