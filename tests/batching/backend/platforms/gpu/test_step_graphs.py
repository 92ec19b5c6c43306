"""Decode steps whose graphs are kept: the model's code runs once for steps of the same shapes.

That they give the same tokens is what the tests of the pool show, whose runners keep all graphs.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.paged.kv_cache import PagedKVCache, StepInputs
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu import step_graphs
from batching.backend.platforms.gpu.step_graphs import COMPILE_AT, StepGraphs
from batching.backend.platforms.gpu.step_rows import KernelAttention
from batching.backend.runner.mlx_runner import MLXRunner
from batching.block_manager import BlockTable
from batching.steps.step_plan import Slice
from tests.support.kernel_models import BLOCK_SIZE, FAMILIES, NUM_BLOCKS, Served, served
from tests.support.requests import make_request, slice_of
from tests.support.tiny_models import VOCAB_SIZE


@dataclass
class Steps:
    """Steps of a model, and how often its code ran for them."""

    model: Served
    graphs: StepGraphs
    cache: PagedKVCache
    runner: MLXRunner
    num_built: int = 0
    before: Callable[[StepInputs], object] = field(default=lambda _: None)

    @classmethod
    def of(cls, family: str, native: Native, **options: Any) -> "Steps":
        model = served(family, native)
        cache = model.checked.cache(NUM_BLOCKS, BLOCK_SIZE, num_window_blocks=NUM_BLOCKS)
        cache.reset()
        selection = model.checked.selection
        runner = MLXRunner(model.model, VOCAB_SIZE, selection, cache)
        return cls(model, StepGraphs(cache, selection, **options), cache, runner)

    def logits(self, slices: Sequence[Slice]) -> mx.array:
        logits = self.graphs.logits(self.cache.begin(slices), self._build)
        self.cache.flush()
        mx.eval(logits, self.cache.arrays)
        return logits

    def expected(self, slices: Sequence[Slice]) -> mx.array:
        logits = self.runner.logits(self.cache.begin(slices))
        self.cache.flush()
        mx.eval(logits, self.cache.arrays)
        return logits

    def _build(self, step: StepInputs) -> mx.array:
        self.num_built += 1
        self.before(step)
        return self.runner.logits(step)


def decodes(num_rows: int, at: int = 9) -> list[Slice]:
    """Return slices of a token each, of requests with blocks of their own."""
    slices: list[Slice] = []
    for row in range(num_rows):
        request = make_request(row, [(7 * row + i) % VOCAB_SIZE for i in range(at)], max_tokens=9)
        blocks = range(8 * row, 8 * row + 8)
        request.block_table, request.window_table = BlockTable(blocks), BlockTable(blocks)
        slices.append(slice_of(request, at - 1, at))
    return slices


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_code_runs_once_for_steps_of_the_same_shapes(
    native: Native, family: str
) -> None:
    steps = Steps.of(family, native, is_check=True)
    for at in range(5, 21):
        logits = steps.logits(decodes(3, at))
        # It writes what is there already.
        np.testing.assert_allclose(logits, steps.expected(decodes(3, at)), rtol=1e-4, atol=1e-5)
    # Once more to learn what layers see.
    assert steps.num_built == 2
    steps.logits(decodes(4))
    assert steps.num_built == 3


def test_a_graph_is_kept_of_shapes_that_come_again_and_again(native: Native) -> None:
    steps = Steps.of("qwen3", native)
    for _ in range(9):
        steps.logits(decodes(2))
    assert steps.num_built == 1 + COMPILE_AT


def test_the_shapes_that_were_not_seen_for_the_longest_time_are_forgotten(native: Native) -> None:
    steps = Steps.of("qwen3", native, is_check=True, most=2)
    for num_rows in (1, 1, 2, 1, 3, 1):
        steps.logits(decodes(num_rows))
    assert steps.num_built == 4
    steps.logits(decodes(2))
    assert steps.num_built == 5


def test_steps_with_chunks_are_built_each_time(native: Native) -> None:
    steps = Steps.of("qwen3", native, is_check=True)
    chunk = make_request(0, [1] * 12, max_tokens=1)
    chunk.block_table = BlockTable(range(40, 44))
    for _ in range(3):
        steps.logits([*decodes(2), slice_of(chunk, 0, 12)])
    assert steps.num_built == 3


def test_another_pool_is_read_after_a_reset(native: Native) -> None:
    steps = Steps.of("qwen3", native, is_check=True)
    for at in (5, 6, 7):
        steps.logits(decodes(2, at))
    steps.cache.reset()
    logits = steps.logits(decodes(2, 8))
    steps.cache.reset()
    np.testing.assert_allclose(logits, steps.expected(decodes(2, 8)), rtol=1e-4, atol=1e-5)
    assert steps.num_built == 2


def test_a_graph_keeps_no_step(native: Native) -> None:
    steps = Steps.of("mistral", native, is_check=True)
    built: list[weakref.ref[StepInputs]] = []
    steps.before = lambda step: built.append(weakref.ref(step))
    for _ in range(3):
        steps.logits(decodes(2))
    assert len(built) == 2
    steps.cache.begin(decodes(1))
    assert [step() for step in built] == [None, None]


def reads_numbers(step: StepInputs) -> None:
    step.positions.tolist()


def sees_through_another_window(step: StepInputs) -> None:
    assert isinstance(step.attention, KernelAttention)
    step.attention.decodes(SlidingWindow(3))


@pytest.mark.parametrize("fault", [reads_numbers, sees_through_another_window])
def test_what_cannot_be_traced_is_built_each_time(
    native: Native,
    fault: Callable[[StepInputs], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(step_graphs, "COMPILE_AT", 1)
    steps = Steps.of("qwen3", native)
    steps.logits(decodes(2))
    steps.before = fault
    with caplog.at_level(logging.WARNING):
        logits = [steps.logits(decodes(2)) for _ in range(3)]
    np.testing.assert_allclose(logits[0], steps.expected(decodes(2)), rtol=1e-4, atol=1e-5)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "decode steps are built one by one"
    ]
    # One of them in vain.
    assert steps.num_built == 1 + 4
    strict = Steps.of("qwen3", native, is_check=True)
    strict.logits(decodes(2))
    strict.before = fault
    with pytest.raises((ValueError, RuntimeError)):
        strict.logits(decodes(2))
