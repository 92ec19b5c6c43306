"""Unmodified models of mlx-lm in one ragged batch, against their own single generation."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batching.backend.execution_mode import ExecutionMode
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.batch_inference import BatchInferenceEngine
from batching.constraints.protocol import AllowedTokens
from batching.inputs.sampling_params import SamplingParams
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestFailure
from tests.support.greedy import most_probable
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request
from tests.support.serving import TIGHT, limits, make_runner, serve
from tests.support.tiny_models import DEVICE_KINDS, FAMILIES, VOCAB_SIZE, Check, tiny_model
from tests.support.weekly import weekly_pairs

NUM_TOKENS = 12
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, VOCAB_SIZE, size).tolist() for size in (1, 5, 19, 23, 9, 40)]
# Two that share a prefix of several blocks with another one.
PROMPTS += [[*PROMPTS[3][:17], 1, 2], PROMPTS[5][:30]]


def alone(model: nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """Return what the model would say instead of an output by itself."""
    return most_probable(model, prompt, output, VOCAB_SIZE)


def greedy(runner: MLXRunner, check: CheckedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Return the completions of a batch."""
    requests = [make_request(i, p, max_tokens=NUM_TOKENS) for i, p in enumerate(prompts)]
    serve(runner, limits(check), requests)
    return [r.output_token_ids for r in requests]


@pytest.mark.parametrize(
    ("device_kind", "family"),
    weekly_pairs(DEVICE_KINDS, FAMILIES, size=7),
    indirect=["device_kind"],
)
def test_a_ragged_batch_gives_the_tokens_of_the_model_alone(
    device_kind: Check, family: str
) -> None:
    model, plain = tiny_model(family), tiny_model(family)
    check = device_kind(model, VOCAB_SIZE)
    assert check.mode not in (ExecutionMode.WHOLE, ExecutionMode.OWN)
    outputs = greedy(make_runner(model, VOCAB_SIZE, check), check, PROMPTS)
    assert [alone(plain, *each) for each in zip(PROMPTS, outputs, strict=True)] == outputs
    assert len({*map(tuple, outputs)}) > 4, "the model must tell its prompts apart"
    # The hooks leave the model usable as it was.
    assert alone(model, PROMPTS[2], outputs[2]) == outputs[2]


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
    assert 2 * check.layout.bytes_per_token == plain.layout.bytes_per_token
    assert 2 * pool_bytes(check.cache(30, 4)) == pool_bytes(plain.cache(30, 4))

    def completions(prompts: list[list[int]]) -> list[list[int]]:
        return greedy(make_runner(model, VOCAB_SIZE, check), check, prompts)

    assert completions(PROMPTS) == [completions([prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_keys_and_values_of_8_bits_take_what_is_counted_and_requests_do_not_mix(
    native: Native, family: str
) -> None:
    """Windows, soft caps and sinks."""
    model = use_kernels(tiny_model(family, head_dim=32), native)
    check = check_model(model, VOCAB_SIZE, native, mx.int8)
    assert check.mode is ExecutionMode.RAGGED
    # Of two layers and two heads: 32 bytes and a scale of a key, and as many of a value.
    assert check.layout.bytes_per_token == 2 * 2 * 2 * (32 + 4)
    assert pool_bytes(check.cache(3, 32)) == 3 * 32 * check.layout.bytes_per_token

    def completions(prompts: list[list[int]]) -> list[list[int]]:
        return greedy(make_runner(model, VOCAB_SIZE, check), check, prompts)

    assert completions(PROMPTS) == [completions([prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["mamba", "stablelm"])
def test_pieces_have_choices_logprobs_and_constraints_too(family: str) -> None:
    model = tiny_model(family)
    check = check_model(model, VOCAB_SIZE)
    assert check.mode is ExecutionMode.PIECES
    sampling = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0)
    made = make_request(0, PROMPTS[2], max_tokens=NUM_TOKENS, sampling=sampling)
    fork = made.fork(1)
    constrained = make_request(2, PROMPTS[2], max_tokens=4, constraint=AllowedTokens({5}))
    runner = make_runner(model, VOCAB_SIZE, check)
    outputs = serve(runner, limits(check), [made, fork, constrained]).outputs
    output = made.output_token_ids
    assert fork.output_token_ids == output == alone(model, PROMPTS[2], output)
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


@pytest.mark.parametrize(
    ("device_kind", "family"),
    weekly_pairs(DEVICE_KINDS, FAMILIES, size=4),
    indirect=["device_kind"],
)
def test_the_head_runs_on_the_selected_rows_only(device_kind: Check, family: str) -> None:
    model = tiny_model(family)
    tokens = mx.array([[1], [2], [3]])
    expected = model(tokens)
    check = device_kind(model, VOCAB_SIZE)
    check.selection.rows = mx.array([2, 0])
    assert mx.allclose(model(tokens), expected[mx.array([2, 0])], atol=1e-5)


def test_logits_that_are_no_numbers_fail_the_step_and_leave_nothing_behind() -> None:
    model = tiny_model("llama")
    check = check_model(model, VOCAB_SIZE)
    runner = make_runner(model, VOCAB_SIZE, check)
    engine = BatchInferenceEngine(ContinuousBatchingScheduler(TIGHT), runner)
    norm = model.model.norm.weight
    model.model.norm.weight = norm * mx.nan
    engine.add(make_request(0, PROMPTS[2], max_tokens=2))
    assert [type(item) for item in engine.step()] == [RequestFailure]
    model.model.norm.weight = norm
    healthy = make_request(1, PROMPTS[2], max_tokens=NUM_TOKENS)
    engine.add(healthy)
    while engine.has_work:
        engine.step()
    output = healthy.output_token_ids
    assert output == alone(model, PROMPTS[2], output)
