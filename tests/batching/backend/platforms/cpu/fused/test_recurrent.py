"""Recurrent mixers as one operation: mlx-lm's outputs, and bits that depend on no other request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.execution_mode import ExecutionMode
from batching.backend.platforms.cpu.fused import mixers, recurrent
from batching.backend.platforms.cpu.fused.halves import AttentionHalf
from batching.backend.platforms.cpu.fused.mixers import Mixer
from batching.backend.platforms.cpu.fused.recurrent import RecurrentHalf
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.states import NativeStates, StateCells
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_manager import BlockTable
from batching.steps.step_plan import StateCopy
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request, slice_of
from tests.support.weekly import weekly, weekly_pairs

DELTA_NETS: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
SHORT_CONVOLUTIONS: Final = ("lfm2", "lfm2_moe")
MAMBAS: Final = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h")
MIXERS: Final = (*DELTA_NETS, *SHORT_CONVOLUTIONS, *MAMBAS)
# One of each.
KINDS: Final = ("qwen3_5", "lfm2", "nemotron_h")
BLOCK_SIZE: Final = 4
BLOCKS_EACH: Final = 8
# Of the largest logit.
TOLERANCE: Final = 1e-4
# Of each request of a step: start, stop, and the positions whose states are kept.
Spans = dict[int, tuple[int, int, tuple[int, ...]]]


@dataclass
class Served:
    """A tiny hybrid on the kernels, and the one that mlx-lm computes."""

    model: nn.Module
    check: CheckedModel
    plain: nn.Module

    def expected(self, prompt: list[int]) -> mx.array:
        cache = make_prompt_cache(self.plain)
        logits: mx.array = self.plain(mx.array([prompt]), cache=cache)[0]
        return logits


class Requests:
    """Prompts that run on one pool in steps of any slices."""

    def __init__(self, served: Served, prompts: Sequence[list[int]]) -> None:
        num_blocks = BLOCKS_EACH * len(prompts)
        self.cache = served.check.cache(num_blocks, BLOCK_SIZE)
        self._runner = MLXRunner(served.model, VOCAB_SIZE, served.check.selection, self.cache)
        self.requests = [make_request(i, prompt, max_tokens=1) for i, prompt in enumerate(prompts)]
        for i, request in enumerate(self.requests):
            first = BLOCKS_EACH * i
            request.block_table = BlockTable(list(range(first, first + BLOCKS_EACH)))
            request.state_slot = i

    def step(self, spans: Spans) -> dict[int, mx.array]:
        """Return the logits of each request's rows."""
        slices = [slice_of(self.requests[i], *span[:2], keep=span[2]) for i, span in spans.items()]
        step = self.cache.begin(slices)
        all_rows = replace(step.logit_rows, rows=mx.arange(len(step.tokens)))
        logits = self._runner.logits(replace(step, logit_rows=all_rows))
        self.cache.flush()
        mx.eval(logits, self.cache.arrays)
        sizes = [stop - start for start, stop, _ in spans.values()]
        rows = mx.split(logits, np.cumsum(sizes)[:-1].tolist())
        return dict(zip(spans, rows, strict=True))


def prompt_of(size: int, salt: int) -> list[int]:
    return [(7 * i + 11 * salt + 3) % VOCAB_SIZE for i in range(size)]


def served(native: Native, name: str, input_bits: int = 32) -> Served:
    bits = None if input_bits == 32 else 4
    model = use_kernels(make_tiny(name, bits=bits), native, input_bits=input_bits)
    return Served(model, check_model(model, VOCAB_SIZE, native), make_tiny(name, bits=bits))


def fused_halves(model: nn.Module) -> list[Any]:
    fused = [vars(module).get("_fused") for module in model.modules()]
    return [getattr(path, "attention", path) for path in fused if path]


@pytest.mark.parametrize("name", weekly(MIXERS, 1, always=KINDS))
def test_they_are_served_by_it_with_mlx_lm_s_logits(native: Native, name: str) -> None:
    hybrid = served(native, name)
    assert hybrid.check.mode is ExecutionMode.PIECES
    assert any(isinstance(half, RecurrentHalf) for half in fused_halves(hybrid.model))
    prompts = [prompt_of(30, 0), prompt_of(9, 1)]
    logits = Requests(hybrid, prompts).step({0: (0, 30, ()), 1: (0, 9, ())})
    for i, prompt in enumerate(prompts):
        expected = hybrid.expected(prompt)
        difference = float(mx.abs(logits[i] - expected).max() / mx.abs(expected).max())
        assert difference < TOLERANCE


@pytest.mark.parametrize("name", weekly(MIXERS, 3))
def test_they_are_the_same_with_rounded_inputs(native: Native, name: str) -> None:
    model = use_kernels(make_tiny(name, bits=4), native, input_bits=16)
    assert any(isinstance(half, RecurrentHalf) for half in fused_halves(model))


@pytest.mark.parametrize(("name", "input_bits"), weekly_pairs(KINDS, [16, 32]))
def test_bits_depend_on_no_neighbour_nor_on_how_a_prompt_is_cut(
    native: Native, input_bits: int, name: str
) -> None:
    hybrid = served(native, name, input_bits)
    prompt, other = prompt_of(20, 2), prompt_of(20, 3)
    whole = Requests(hybrid, [prompt]).step({0: (0, 20, ())})[0]
    pair = Requests(hybrid, [prompt, other])
    steps: list[Spans] = [
        {1: (0, 3, ())},
        {0: (0, 1, ()), 1: (3, 4, ())},
        {1: (4, 5, ()), 0: (1, 9, (4, 8))},
        {0: (9, 10, (8,)), 1: (5, 15, ())},
        # One pauses, and is alone with another state.
        {0: (10, 11, (8,))},
        {1: (15, 16, ()), 0: (11, 20, (12,))},
    ]
    outputs = [pair.step(spans) for spans in steps]
    parts = [logits[0] for logits in outputs if 0 in logits]
    assert mx.array_equal(mx.concatenate(parts), whole)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_another_request_begins_with_is_not_overwritten(
    native: Native, name: str
) -> None:
    hybrid = served(native, name)
    prompt = prompt_of(20, 4)
    whole = Requests(hybrid, [prompt]).step({0: (0, 20, ())})[0]
    pair = Requests(hybrid, [prompt, prompt])
    pair.requests[1].block_table = pair.requests[0].block_table
    pair.step({0: (0, 8, ())})
    pair.cache.copy_states([StateCopy(0, 1, 8)])
    first = pair.step({0: (8, 9, ())})[0]
    both = pair.step({0: (9, 20, ()), 1: (8, 20, ())})
    assert mx.array_equal(mx.concatenate([first, both[0]]), whole[8:])
    assert mx.array_equal(both[1], whole[8:])


@pytest.mark.parametrize("name", KINDS)
def test_drafts_that_are_wrong_are_taken_back(native: Native, name: str) -> None:
    hybrid = served(native, name)
    prompt = prompt_of(20, 5)
    whole = Requests(hybrid, [prompt]).step({0: (0, 20, ())})[0]
    own = Requests(hybrid, [prompt])
    own.step({0: (0, 10, ())})
    own.step({0: (10, 14, (10,))})
    assert mx.array_equal(own.step({0: (10, 20, ())})[0], whole[10:])


# Cells


def cells_of(native: Native) -> tuple[StateCells, Callable[..., list[list[int]]]]:
    cells = StateCells(native)
    requests = [make_request(i, [0] * 30, max_tokens=1) for i in range(3)]
    for i, request in enumerate(requests):
        request.state_slot = i

    def step(
        *spans: tuple[int, int, int, tuple[int, ...]], gone: tuple[int, ...] = ()
    ) -> list[list[int]]:
        """Return the cells before and after of each piece."""
        cells.begin(
            [slice_of(requests[i], start, stop, keep=keep) for i, start, stop, keep in spans], gone
        )
        rows = [list(row[2:]) for row in cells._rows()]
        cells.flush()
        return rows

    return cells, step


def test_a_state_is_overwritten_where_nothing_keeps_it(native: Native) -> None:
    _, step = cells_of(native)
    assert step((0, 0, 5, ())) == [[-1, 0]]
    assert step((0, 5, 6, ()), (1, 0, 2, ())) == [[0, 0], [-1, 1]]
    assert step((1, 2, 3, ()), (0, 6, 9, (6,))) == [[1, 1], [0, 2]]


def test_kept_states_have_cells_until_they_are_not_named(native: Native) -> None:
    _, step = cells_of(native)
    assert step((0, 0, 9, (4, 8))) == [[-1, 0], [0, 1], [1, 2]]
    assert step((0, 9, 10, (8,))) == [[2, 2]]
    # That of position 4 is free.
    assert step((0, 10, 11, (8, 10))) == [[2, 0]]


def test_a_copied_state_is_shared(native: Native) -> None:
    cells, step = cells_of(native)
    step((0, 0, 4, ()))
    cells.copy(StateCopy(0, 1, 4))
    assert step((0, 4, 5, ())) == [[0, 1]]
    assert step((1, 4, 5, ()), (0, 5, 6, ())) == [[0, 0], [1, 1]]


def test_what_a_request_leaves_is_free(native: Native) -> None:
    _, step = cells_of(native)
    step((0, 0, 4, ()), (1, 0, 4, ()))
    step((0, 4, 5, ()), gone=(1,))
    assert step((2, 0, 4, ())) == [[-1, 1]]


def test_a_request_that_pauses_keeps_its_state(native: Native) -> None:
    _, step = cells_of(native)
    step((0, 0, 4, ()), (1, 0, 4, ()))
    step((0, 4, 5, ()))
    assert step((2, 0, 4, ()), (1, 4, 5, ())) == [[-1, 2], [1, 1]]


# Faults: what is fused then computes something else.


def described_otherwise(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    plain = mixers.describe

    def other(module: nn.Module) -> Mixer:
        mixer = plain(module)
        return mixer._replace(options={**mixer.options, **change(mixer.options)})

    monkeypatch.setattr(recurrent, "describe", other)


def other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """k in place of q, or z in place of b where there are no keys."""

    def swapped(options: dict[str, Any]) -> dict[str, Any]:
        q, k, v, z, b, a = options["columns"]
        has_keys = options["recurrence"] != "none"
        return {"columns": [k, q, v, z, b, a] if has_keys else [q, k, z, v, b, a]}

    described_otherwise(monkeypatch, swapped)


def other_order_of_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = recurrent._convolution

    def backwards(*given: Any) -> dict[str, list[float]]:
        taps = plain(*given)
        return {**taps, "taps": taps["taps"][::-1]}

    monkeypatch.setattr(recurrent, "_convolution", backwards)


def states_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = StateCells._rows

    def lost(self: StateCells) -> list[tuple[int, int, int, int]]:
        return [(*row[:2], -1, row[3]) for row in rows(self)]

    monkeypatch.setattr(StateCells, "_rows", lost)


def no_bias_of_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = recurrent._convolution
    monkeypatch.setattr(recurrent, "_convolution", lambda *given: {**plain(*given), "tap_bias": []})


def no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    described_otherwise(monkeypatch, lambda options: {"skip": []})


def other_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    described_otherwise(monkeypatch, lambda options: {"gates_first": not options["gates_first"]})


def norms_of_other_width(monkeypatch: pytest.MonkeyPatch) -> None:
    described_otherwise(monkeypatch, lambda options: {"norm_width": 32})


def other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    described_otherwise(monkeypatch, lambda options: {"step_limits": (1.0, 2.0)})


Fault = Callable[[pytest.MonkeyPatch], None]


FAULTS: Final[dict[Fault, Sequence[str]]] = {
    **dict.fromkeys((other_columns, other_order_of_taps, states_that_are_lost), MIXERS),
    no_bias_of_taps: (*SHORT_CONVOLUTIONS, *MAMBAS),
    **dict.fromkeys((no_skip, other_gates, other_steps, norms_of_other_width), MAMBAS),
}


@pytest.mark.parametrize(
    ("fault", "name", "input_bits"),
    [case for fault in FAULTS for case in weekly(product([fault], FAULTS[fault], [16, 32]), 2)],
)
def test_what_computes_something_else_is_not_fused(
    native: Native, name: str, fault: Fault, input_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    model = use_kernels(make_tiny(name, bits=4), native, input_bits=input_bits)
    assert not any(isinstance(half, RecurrentHalf) for half in fused_halves(model))


def test_gates_of_another_function_are_not_fused(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen3_next.mx, "sigmoid", mx.tanh)
    halves = fused_halves(use_kernels(make_tiny("qwen3_5"), native))
    assert not any(isinstance(half, AttentionHalf) for half in halves)


@pytest.mark.parametrize(("name", "value"), [("head_k_dim", 512), ("num_v_heads", 3), ("norm", {})])
def test_a_net_whose_parts_do_not_fit_together_is_not_fused(
    native: Native, name: str, value: Any
) -> None:
    model = make_tiny("qwen3_5")
    for layer in model.layers:
        if "linear_attn" in layer:
            setattr(layer.linear_attn, name, value)
    halves = fused_halves(use_kernels(model, native))
    assert not any(isinstance(half, RecurrentHalf) for half in halves)


def test_a_layer_without_a_mixer_of_its_own_keeps_states_in_arrays(native: Native) -> None:
    hybrid = served(native, "mamba")
    requests = Requests(hybrid, [prompt_of(12, 6)])
    requests.step({0: (0, 12, ())})
    layers = [cache for cache in requests.cache.caches if isinstance(cache, NativeStates)]
    assert layers
    assert all(cache._pool is None for cache in layers)
