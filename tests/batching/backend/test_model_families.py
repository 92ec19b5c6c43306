"""Unmodified models of mlx-lm in one ragged batch, against their own single generation."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.mlx_runner import MLXRunner
from batching.backend.native.model import use_kernels
from batching.backend.native.modules import replace_modules
from batching.backend.native_loader import Native
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.self_check import Batchable, NotBatchable, check_model
from batching.backend.sequential_runner import SequentialRunner
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockTable
from batching.config import SchedulerConfig
from batching.constraints.protocol import AllowedTokens
from batching.request import BatchRequest, SamplingParams, TokenOutput
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.model_runner import ModelRunner
from batching.scheduling.outputs import RequestFailure
from batching.scheduling.step_plan import Slice
from tests.support.tiny_models import FAMILIES, UNBATCHABLE, VOCAB_SIZE, Check, tiny_model

NUM_TOKENS = 12
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, VOCAB_SIZE, size).tolist() for size in (1, 5, 19, 23, 9, 40)]
# Two that share a prefix of several blocks with another one.
PROMPTS += [[*PROMPTS[3][:17], 1, 2], PROMPTS[5][:30]]


def generate(model: nn.Module, prompt: list[int]) -> list[int]:
    """Decode greedily on mlx-lm's own cache, one request at a time."""
    cache, token_ids, output = make_prompt_cache(model), prompt, list[int]()
    for _ in range(NUM_TOKENS):
        logits = model(mx.array([token_ids]), cache=cache)[0, -1]
        token_ids = [int(mx.argmax(logits))]
        output += token_ids
    return output


def serve(
    runner: ModelRunner, config: SchedulerConfig, prompts: list[list[int]] = PROMPTS
) -> list[list[int]]:
    scheduler = ContinuousBatchingScheduler(config)
    engine = BatchInferenceEngine(scheduler, runner)
    requests = [BatchRequest(i, p, max_tokens=NUM_TOKENS) for i, p in enumerate(prompts)]
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
    assert scheduler.stats().num_free_blocks == config.num_blocks
    return [r.output_token_ids for r in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_gives_the_tokens_of_the_model_alone(
    device_kind: Check, family: str
) -> None:
    model = tiny_model(family)
    expected = [generate(model, p) for p in PROMPTS]
    assert len({tuple(e) for e in expected}) > 4, "the model must tell its prompts apart"
    check = device_kind(model, VOCAB_SIZE)
    assert isinstance(check, Batchable)
    # A pool so small that requests are preempted, and chunks that cut every prompt.
    config = SchedulerConfig(
        num_blocks=30, block_size=4, max_num_seqs=5, max_batched_tokens=16, prefill_chunk=7
    )
    cache = check.cache(config.num_blocks, config.block_size)
    runner = MLXRunner(model, VOCAB_SIZE, check.selection, cache, check.arg_max)
    assert serve(runner, config) == expected
    # The hooks leave the model usable as it was.
    assert generate(model, PROMPTS[2]) == expected[2]


def pool_bytes(cache: PagedKVCache) -> int:
    """Return what the keys and values of all layers really take."""
    pools: list[Any] = [cast(Any, layer).pool for layer in cache.layers]
    regions = [size for pool in pools if hasattr(pool, "regions") for _, size in pool.regions]
    return sum(regions) or sum(array.nbytes for pool in pools for array in pool)


def test_keys_and_values_of_16_bits_take_half_the_room_and_requests_do_not_mix(
    device_kind: Check,
) -> None:
    plain = device_kind(tiny_model("llama"), VOCAB_SIZE)
    model = tiny_model("llama")
    check = device_kind(model, VOCAB_SIZE, kv_dtype=mx.bfloat16)
    assert isinstance(plain, Batchable)
    assert isinstance(check, Batchable)
    assert [2 * s.bytes_per_token for s in check.shapes] == [
        s.bytes_per_token for s in plain.shapes
    ]
    assert 2 * pool_bytes(check.cache(30, 4)) == pool_bytes(plain.cache(30, 4))
    config = SchedulerConfig(
        num_blocks=30, block_size=4, max_num_seqs=5, max_batched_tokens=16, prefill_chunk=7
    )

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        cache = check.cache(config.num_blocks, config.block_size)
        runner = MLXRunner(model, VOCAB_SIZE, check.selection, cache, check.arg_max)
        return serve(runner, config, prompts)

    assert answers(PROMPTS) == [answers([prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_block_in_one_kernel_is_its_modules_bit_for_bit(native: Native, family: str) -> None:
    logits: list[mx.array] = []
    for is_fused in (False, True):
        model = tiny_model(family)
        model = use_kernels(model, native) if is_fused else replace_modules(model, native)
        assert all("fused" in vars(layer) for layer in model.layers) == is_fused
        check = check_model(model, VOCAB_SIZE, native)
        assert isinstance(check, Batchable)
        cache = check.cache(16, 4)
        runner = MLXRunner(model, VOCAB_SIZE, check.selection, cache)
        requests = [BatchRequest(i, PROMPTS[i], max_tokens=1) for i in (2, 3)]
        for request, first in zip(requests, (0, 8), strict=True):
            request.block_table = BlockTable(list(range(first, first + 8)))
        step = cache.begin([Slice(r, 0, r.num_tokens) for r in requests])
        logits.append(runner.logits(step))
    assert mx.array_equal(logits[0], logits[1])


@pytest.mark.parametrize("family", UNBATCHABLE)
def test_what_cannot_be_batched_is_found_out_and_served_alone(family: str) -> None:
    model = tiny_model(family)
    expected = [generate(model, p) for p in PROMPTS]
    check = check_model(model, VOCAB_SIZE)
    assert isinstance(check, NotBatchable), "the paged pool would have given wrong answers"
    config = SchedulerConfig(
        num_blocks=30, block_size=4, max_num_seqs=1, prefill_chunk=7, enable_prefix_cache=False
    )
    assert serve(SequentialRunner(model, VOCAB_SIZE), config) == expected


def test_a_model_served_alone_has_choices_logprobs_and_constraints_too() -> None:
    model = tiny_model(next(iter(UNBATCHABLE)))
    config = SchedulerConfig(
        num_blocks=30, block_size=4, max_num_seqs=1, prefill_chunk=7, enable_prefix_cache=False
    )
    scheduler = ContinuousBatchingScheduler(config)
    engine = BatchInferenceEngine(scheduler, SequentialRunner(model, VOCAB_SIZE))
    sampling = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0)
    made = BatchRequest(0, PROMPTS[2], max_tokens=NUM_TOKENS, sampling=sampling)
    fork = made.fork(1)
    constrained = BatchRequest(2, PROMPTS[2], max_tokens=4, constraint=AllowedTokens({5}))
    engine.add(made, fork)
    engine.add(constrained)
    outputs = {0: list[TokenOutput](), 1: list[TokenOutput](), 2: list[TokenOutput]()}
    while engine.has_work:
        for request_id, output in engine.step():
            assert isinstance(output, TokenOutput)
            outputs[request_id].append(output)
    assert made.output_token_ids == fork.output_token_ids == generate(model, PROMPTS[2])
    assert constrained.output_token_ids == [5] * 4
    for request_id in (0, 1):
        returned = [each for output in outputs[request_id] for each in output.logprobs]
        assert [each.top[0] for each in returned] == list(
            zip(made.output_token_ids, [each.logprob for each in returned], strict=True)
        )
    expected = np.array(model(mx.array([PROMPTS[2]]))[0].astype(mx.float32), np.float64)
    expected -= np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    of_prompt = [expected[i, token] for i, token in enumerate(PROMPTS[2][1:])]
    returned = list(outputs[0][0].prompt_logprobs)
    assert [each.logprob for each in returned] == pytest.approx(of_prompt, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_runs_on_the_selected_rows_only(device_kind: Check, family: str) -> None:
    model = tiny_model(family)
    tokens = mx.array([[1], [2], [3]])
    expected = model(tokens)
    check = device_kind(model, VOCAB_SIZE)
    assert isinstance(check, Batchable)
    check.selection.rows = mx.array([2, 0])
    assert mx.allclose(model(tokens), expected[mx.array([2, 0])], atol=1e-5)


def test_logits_that_are_no_numbers_fail_the_step_and_leave_nothing_behind() -> None:
    model = tiny_model("llama")
    check = check_model(model, VOCAB_SIZE)
    assert isinstance(check, Batchable)
    config = SchedulerConfig(num_blocks=30, block_size=4)
    cache = check.cache(config.num_blocks, config.block_size)
    engine = BatchInferenceEngine(
        ContinuousBatchingScheduler(config), MLXRunner(model, VOCAB_SIZE, check.selection, cache)
    )
    norm = model.model.norm.weight
    model.model.norm.weight = norm * mx.nan
    engine.add(BatchRequest(0, PROMPTS[2], max_tokens=2))
    assert [type(item) for item in engine.step()] == [RequestFailure]
    model.model.norm.weight = norm
    healthy = BatchRequest(1, PROMPTS[2], max_tokens=NUM_TOKENS)
    engine.add(healthy)
    while engine.has_work:
        engine.step()
    assert healthy.output_token_ids == generate(model, PROMPTS[2])


@pytest.mark.parametrize("input_bits", [None, 32, 16, 8])
def test_a_model_whose_batch_differs_is_not_trusted(
    request: pytest.FixtureRequest, input_bits: int | None
) -> None:
    """A planted fault: positions are those of another row."""
    model = tiny_model("llama")
    native: Native | None = None
    if input_bits is not None:
        native = request.getfixturevalue("native")
        assert native is not None
        if input_bits < 32 and not native.supports_int_inputs:
            pytest.skip("this processor has no fast mode")
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            class_predicate=lambda _, m: (
                hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
            ),
        )
        model = replace_modules(model, native, input_bits=input_bits)
        assert isinstance(check_model(model, VOCAB_SIZE, native), Batchable)
    layer_type = type(model.layers[0].self_attn.rope)

    class Shifted(layer_type):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
            shift = offset[::-1] if isinstance(offset, mx.array) else offset
            rotated: mx.array = super().__call__(x, offset=shift)
            return rotated

    for layer in model.layers:
        layer.self_attn.rope.__class__ = Shifted
    check = check_model(model, VOCAB_SIZE, native)
    assert isinstance(check, NotBatchable)
    assert "a batch changes its logits" in check.reason
