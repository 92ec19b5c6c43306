"""Two models of one type in one thread: neither notices that the other is loaded, runs or is closed."""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import mlx.nn as nn
import pytest
from mlx_lm.models import base, gated_delta, llama, ssm

from batching.backend.builder.engine import build_engine
from batching.backend.platforms.cpu.native_loader import NoNative, load_native
from batching.config import EngineConfig, NativeMode
from batching.engine.async_engine import AsyncEngine
from batching.engine.mlx_thread import MLXThread
from batching.inputs.sequence_spec import SequenceSpec
from tests.support.model_files import write_model

PROMPTS: Final = [(1, 5, 9, 4, 6, 7, 8) * 3, (11, 12, 13)]
MAX_TOKENS: Final = 24
NAMES: Final = [
    (nn, "silu"),
    (nn, "gelu_approx"),
    (llama, "nn"),
    (llama, "mx"),
    (llama, "scaled_dot_product_attention"),
    (llama, "swiglu"),
    (base, "scaled_dot_product_attention"),
    (gated_delta, "gated_delta_ops"),
    (ssm, "ssm_attn"),
]

Tokens = list[list[int]]
_salts = count()


def engine(model: Path, native: NativeMode, thread: MLXThread | None = None) -> AsyncEngine:
    config = EngineConfig(
        model=str(model), model_id=model.name, max_blocks=16, native=native, device="cpu"
    )
    return AsyncEngine(partial(build_engine, config), thread)


async def tokens_of(thread: AsyncEngine, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> Tokens:
    """Return the output of each prompt; the next ones do not find the prefixes of these."""
    specs = [
        SequenceSpec(prompt=prompt, max_tokens=MAX_TOKENS, cache_salt=str(next(_salts)))
        for prompt in prompts
    ]
    stream = await thread.submit(specs)
    outputs: Tokens = [[] for _ in prompts]
    async for index, output in stream:
        outputs[index] += output.token_ids
    return outputs


async def alone(model: Path, native: NativeMode) -> Tokens:
    thread = engine(model, native)
    await asyncio.to_thread(thread.start)
    tokens = await tokens_of(thread)
    thread.stop()
    return tokens


async def compare(models: Sequence[Path], native: NativeMode, num_runs: int) -> None:
    served, loaded = models
    expected, expected_of_other = [await alone(model, native) for model in models]
    assert expected != expected_of_other
    shared = MLXThread()
    thread = engine(served, native, shared)
    await asyncio.to_thread(thread.start)
    for _ in range(num_runs):
        other = engine(loaded, native, shared)
        start = asyncio.create_task(asyncio.to_thread(other.start))
        while not start.done():
            assert await tokens_of(thread) == expected
        tokens, of_other = await asyncio.gather(tokens_of(thread), tokens_of(other))
        assert (tokens, of_other) == (expected, expected_of_other)
        await asyncio.to_thread(other.stop)
    assert await tokens_of(thread) == expected
    shared.stop()


def run(tmp_path: Path, native: NativeMode, num_runs: int) -> None:
    if native == "require" and isinstance(found := load_native("auto"), NoNative):
        pytest.skip(str(found))
    before = [vars(owner)[name] for owner, name in NAMES]
    models = [write_model(tmp_path / name, seed) for seed, name in enumerate("ab")]
    asyncio.run(compare(models, native, num_runs))
    assert [vars(owner)[name] for owner, name in NAMES] == before


@pytest.mark.parametrize("native", ["off", "require"])
def test_each_computes_as_if_it_were_alone(tmp_path: Path, native: NativeMode) -> None:
    run(tmp_path, native, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("native", ["off", "require"])
def test_each_computes_as_if_it_were_alone_a_hundred_times(
    tmp_path: Path, native: NativeMode
) -> None:
    run(tmp_path, native, 100)
