"""Models with windows over blocks that are given up, against their own single generation.

What a request gives up, and no other can find, is overwritten with NaN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batching.backend.builder.engine import build_engine
from batching.backend.memory.pool_size import BlockBytes, least_window_blocks
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.paged.mlx_pool import DeviceLayerCache
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockCopy, BlockTable, PagedBlockManager
from batching.config import EngineConfig, SchedulerConfig, blocks_held
from batching.kv_cache.window_blocks import WindowBlocks
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestOutput
from batching.steps.step_plan import SliceOutput, StepPlan
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.greedy import most_probable
from tests.support.model_files import edit_config
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request, slice_of
from tests.support.tiny_models import DEVICE_KINDS, VOCAB_SIZE as TINY_VOCAB_SIZE, Check, tiny_model
from tests.support.weekly import weekly, weekly_pairs

# More than two windows of 12 tokens.
NUM_TOKENS: Final = 26
RNG = np.random.default_rng(3)
PROMPTS: Final = [RNG.integers(1, VOCAB_SIZE, size).tolist() for size in (1, 5, 33, 70)]
# One that begins as another one does, and one that repeats itself, so that it has drafts.
PROMPTS.extend([[*PROMPTS[3][:50], 1, 2], PROMPTS[1] * 6])
# So few blocks that requests are preempted, and chunks that cut every prompt.
LIMITS: Final = SchedulerConfig(
    num_blocks=60,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    prefill_chunk=7,
    max_draft_tokens=3,
)


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """Let MLX not compile for each number of rows that a step has."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def windowed(checked: CheckedModel, num_extra: int = 2) -> SchedulerConfig:
    """Return limits under which windows run out, too: there are blocks for three of four requests."""
    window = checked.layout.window
    assert window is not None
    num_blocks = 3 * blocks_held(window, LIMITS.block_size) + num_extra
    return replace(LIMITS, window=window, num_window_blocks=num_blocks)


class Poisoner:
    """A runner that overwrites blocks of windowed layers which no request has or can find."""

    def __init__(self, model: nn.Module, checked: CheckedModel, config: SchedulerConfig) -> None:
        # Two blocks more than are given out: of NaN, and of zeros.
        self._nan, self._zeros = config.num_window_blocks, config.num_window_blocks + 1
        self.cache: PagedKVCache = checked.cache(
            config.num_blocks, config.block_size, num_window_blocks=config.num_window_blocks + 2
        )
        self._runner = MLXRunner(
            model, VOCAB_SIZE, checked.selection, self.cache, checked.platform.sampler()
        )
        self._poisoned: set[int] = set()
        self.blocks: PagedBlockManager | None = None
        self.reset()

    def reset(self) -> None:
        self._runner.reset()
        self._poisoned.clear()
        for block_id, value in ((self._nan, mx.nan), (self._zeros, 0.0)):
            self._fill(block_id, value)

    def _fill(self, block_id: int, value: float) -> None:
        request = make_request(0, [0] * LIMITS.block_size, max_tokens=1)
        request.block_table, request.window_table = BlockTable([0]), BlockTable([block_id])
        self.cache.begin([slice_of(request, 0, LIMITS.block_size)])
        for layer in self.cache.layers:
            if layer.is_windowed:
                shape, count = layer.shape, LIMITS.block_size
                keys, values = (
                    mx.full((count, shape.num_heads, 1, dim), value)
                    for dim in (shape.key_dim, shape.value_dim)
                )
                layer.update_and_fetch(keys, values)
        self.cache.flush()
        mx.eval(self.cache.arrays)

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        assert self.blocks is not None
        gone = {b.block_id for b in self.blocks.blocks if not b.ref_count and not b.block_hash}
        copies = [BlockCopy(self._nan, block_id, True) for block_id in gone - self._poisoned]
        copies += [BlockCopy(self._zeros, block_id, True) for block_id in self._poisoned - gone]
        self.cache.copy_blocks(copies)
        self._poisoned = gone
        return self._runner.run(plan)


def serve(runner: Poisoner, config: SchedulerConfig) -> list[list[int]] | None:
    """Return the completions of the prompts, and of a fork of the last; None if a step failed."""
    scheduler = ContinuousBatchingScheduler(config)
    engine = BatchInferenceEngine(scheduler, runner, max_stall=1e9)
    windows = scheduler._kv.windows
    assert windows is not None
    runner.blocks = windows.block_manager
    requests = [make_request(i, p, max_tokens=NUM_TOKENS) for i, p in enumerate(PROMPTS)]
    requests.append(requests[-1].fork(len(requests)))
    for r in requests[:-2]:
        engine.add(r)
    engine.add(*requests[-2:])
    while engine.has_work:
        if not all(isinstance(item, RequestOutput) for item in engine.step()):
            return None
    stats = scheduler.stats()
    assert stats.num_free_blocks == config.num_blocks
    assert stats.num_free_window_blocks == config.num_window_blocks
    return [r.output_token_ids for r in requests]


plain_model = cache(make_tiny)


def assert_as_alone(model_type: str, outputs: Sequence[list[int]] | None) -> None:
    """Check completions of the prompts, and of a fork of the last one, by a model that no server has hooked."""
    assert outputs is not None
    for prompt, output in zip([*PROMPTS, PROMPTS[-1]], outputs, strict=True):
        assert output == most_probable(plain_model(model_type), prompt, output, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("device_kind", "model_type", "enable_prefix_cache"),
    weekly_pairs(
        DEVICE_KINDS, ["gemma3_text", "gpt_oss", "llama4", "mistral"], [True, False], size=3
    ),
    indirect=["device_kind"],
)
def test_what_has_left_the_window_is_not_needed(
    device_kind: Check, model_type: str, enable_prefix_cache: bool
) -> None:
    model = make_tiny(model_type)
    checked = device_kind(model, VOCAB_SIZE)
    config = replace(windowed(checked), enable_prefix_cache=enable_prefix_cache)
    runner = Poisoner(model, checked, config)
    assert {layer.is_windowed for layer in runner.cache.layers} == {True, False}
    # The second time on cached prefixes, if there are any.
    for _ in range(1 + enable_prefix_cache):
        assert_as_alone(model_type, serve(runner, config))


@pytest.mark.parametrize("model_type", weekly(["gemma3_text", "gpt_oss", "mistral"], 1))
def test_windows_of_8_bits_give_what_a_request_alone_gives(native: Native, model_type: str) -> None:
    model = use_kernels(make_tiny(model_type), native)
    checked = check_model(model, VOCAB_SIZE, native, mx.int8)
    config = windowed(checked)
    alone = replace(config, num_blocks=200, max_num_seqs=1, prefill_chunk=16, max_draft_tokens=0)
    alone = replace(alone, enable_prefix_cache=False)
    expected = serve(Poisoner(model, checked, alone), alone)
    assert expected is not None
    assert serve(Poisoner(model, checked, config), config) == expected


def test_a_block_that_is_given_up_too_early_is_noticed(
    device_kind: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault."""
    model = make_tiny("gemma3_text")
    checked = device_kind(model, VOCAB_SIZE)
    config = replace(windowed(checked), enable_prefix_cache=False)
    plain = WindowBlocks._first_visible
    monkeypatch.setattr(WindowBlocks, "_first_visible", lambda self, index: plain(self, index + 1))
    with pytest.raises(AssertionError):
        assert_as_alone("gemma3_text", serve(Poisoner(model, checked, config), config))


def num_bytes(cache: PagedKVCache, *, is_windowed: bool) -> int:
    """Return the bytes of the arrays of some layers."""
    total = 0
    for layer in cache.layers:
        assert isinstance(layer, DeviceLayerCache)
        if layer.is_windowed == is_windowed:
            total += sum(array.nbytes for array in layer.pool)
    return total


def test_long_requests_keep_a_fifth_of_the_bytes() -> None:
    """Counted in the pool's arrays, of a model in which one of six layers sees all tokens."""
    model = tiny_model("gemma3_text", num_hidden_layers=6, sliding_window_pattern=6)
    checked = check_model(model, TINY_VOCAB_SIZE)
    limits = replace(LIMITS, num_blocks=512, max_num_batched_tokens=64, prefill_chunk=32)
    least = least_window_blocks(limits, 6)
    num_window_blocks = BlockBytes(6, 5, least).num_window_blocks(limits.num_blocks)
    cache = checked.cache(limits.num_blocks, limits.block_size, num_window_blocks=num_window_blocks)
    general, windowed = (num_bytes(cache, is_windowed=each) for each in (False, True))
    shared = checked.cache(limits.num_blocks, limits.block_size)
    all_bytes = num_bytes(shared, is_windowed=False)
    assert (general + windowed) / all_bytes < 0.23

    scheduler = ContinuousBatchingScheduler(
        replace(limits, window=6, num_window_blocks=num_window_blocks)
    )
    runner = MLXRunner(model, TINY_VOCAB_SIZE, checked.selection, cache, checked.platform.sampler())
    for i in range(4):
        prompt = RNG.integers(0, TINY_VOCAB_SIZE, 400).tolist()
        scheduler.add(make_request(i, prompt, max_tokens=20))
    most = 0.0
    while scheduler.has_work:
        plan = scheduler.schedule()
        stats = scheduler.stats()
        in_use = 1 - stats.num_free_blocks / stats.num_blocks
        in_windows = 1 - stats.num_free_window_blocks / num_window_blocks
        kept = in_use * general + in_windows * windowed
        most = max(most, kept / (in_use * all_bytes))
        scheduler.update(plan, runner.run(plan))
    assert scheduler.stats().num_preemptions == 0
    assert most < 0.23


def test_a_model_with_a_window_is_served_on_a_smaller_pool(directory: Path) -> None:
    """The layers of this one differ in their window only."""
    config = EngineConfig(
        model=str(directory),
        model_id="tiny",
        num_blocks=1024,
        block_size=4,
        max_num_seqs=2,
        cpu_precision="exact",
    )
    edit_config(directory, layer_types=["full_attention"] * 2, sliding_window=16)
    assert "1024 blocks of 4 tokens (2 MiB" in "".join(build_engine(config).startup_lines)
    edit_config(directory, layer_types=["sliding_attention", "full_attention"])
    loaded = build_engine(config)
    assert "1024 blocks of 4 tokens, 320 in windows of 16 (1 MiB" in "".join(loaded.startup_lines)
    stats = loaded.engine.stats()
    assert (stats.num_blocks, stats.num_window_blocks) == (1024, 320)
