"""A prompt of 32k tokens over the kernels."""

import os
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request

_NUM_TOKENS: Final = 32768
_NUM_NEW: Final = 8
_BLOCK_SIZE: Final = 32
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
# Less than the scores of one chunk, were they all kept: 512 x 32768 floats for each head.
_MAX_GROWTH: Final = 48 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kv_dtype", [mx.bfloat16, mx.int8])
def test_a_long_prompt_in_any_chunks_in_flat_memory(native: Native, kv_dtype: mx.Dtype) -> None:
    input_bits = max(16, native.min_input_bits)
    model = use_kernels(make_tiny("llama", bits=4), native, input_bits=input_bits)
    vocab_size = model.args.vocab_size
    checked = check_model(model, vocab_size, native, kv_dtype)
    prompt = np.random.default_rng(2).integers(0, vocab_size, _NUM_TOKENS).tolist()

    def run(chunk: int, num_times: int) -> list[list[int]]:
        config = SchedulerConfig(
            num_blocks=_NUM_TOKENS // _BLOCK_SIZE + 8,
            block_size=_BLOCK_SIZE,
            max_model_len=_NUM_TOKENS + _NUM_NEW,
            prefill_chunk=chunk,
            max_num_batched_tokens=chunk,
        )
        cache = checked.cache(config.num_blocks, config.block_size)
        runner = MLXRunner(model, vocab_size, checked.selection, cache, checked.platform.sampler())
        engine = BatchInferenceEngine(ContinuousBatchingScheduler(config), runner, max_stall=1e9)
        sizes: list[int] = []
        outputs: list[list[int]] = []
        for i in range(num_times):
            request = make_request(i, prompt, max_tokens=_NUM_NEW)
            engine.add(request)
            while engine.has_work:
                list(engine.step())
                sizes.append(_resident())
            outputs.append(request.output_token_ids)
        assert max(sizes) - sizes[4] < _MAX_GROWTH
        return outputs

    once, on_cached_prefix = run(512, 2)
    assert len(once) == _NUM_NEW
    assert on_cached_prefix == once
    assert run(2048, 1) == [once]
