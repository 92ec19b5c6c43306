"""Faults that are planted in models and in mechanisms are found, and not served."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from batching.backend.execution_mode import ExecutionMode
from batching.backend.hooks import ranges
from batching.backend.paged.kv_cache import LayerCache, StepInputs
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.paged.pieces import DeferredMask
from batching.backend.paged.state_cache import RecurrentStates
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.self_check import steps as self_check_steps
from batching.backend.self_check.checked_model import CheckedModel
from batching.block_manager import BlockTable
from batching.steps.step_plan import Slice, StateCopy
from tests.support.greedy import most_probable
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, replace_modules, use_kernels
from tests.support.requests import make_request
from tests.support.serving import limits, make_runner, serve
from tests.support.tiny_models import (
    DEVICE_KINDS,
    VOCAB_SIZE,
    Check,
    insist_on_own_caches,
    tiny_model,
)
from tests.support.weekly import weekly, weekly_pairs

NUM_TOKENS: Final = 4
RNG: Final = np.random.default_rng(5)
SHARED: Final = RNG.integers(0, VOCAB_SIZE, 12).tolist()
PROMPTS: Final = [[*SHARED, *RNG.integers(0, VOCAB_SIZE, n).tolist()] for n in (1, 19, 5)]

Patch = pytest.MonkeyPatch


def assert_served_right(model: nn.Module, checked: CheckedModel) -> None:
    requests = [make_request(i, p, max_tokens=NUM_TOKENS) for i, p in enumerate(PROMPTS)]
    serve(make_runner(model, VOCAB_SIZE, checked), limits(checked), requests)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        output = request.output_token_ids
        assert output == most_probable(model, prompt, output)


def quantize(model: nn.Module) -> None:
    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, group_size=32, bits=4, class_predicate=fits)


def plant_in_rope(model: nn.Module, fault: Callable[[mx.array], mx.array]) -> None:
    """Let the rows of a step have the positions of other rows."""
    plain = type(model.layers[0].self_attn.rope)

    def call(self: nn.Module, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        at = fault(offset) if isinstance(offset, mx.array) else offset
        rotated: mx.array = plain.__call__(self, x, offset=at)
        return rotated

    for layer in model.layers:
        layer.self_attn.rope.__class__ = type("Faulty", (plain,), {"__call__": call})


@pytest.mark.parametrize("input_bits", [None, 32, 16])
def test_a_model_whose_batch_differs_is_served_one_by_one(
    request: pytest.FixtureRequest, input_bits: int | None
) -> None:
    model = tiny_model("llama")
    native: Native | None = None
    if input_bits is not None:
        native = request.getfixturevalue("native")
        assert native is not None
        if input_bits < native.min_input_bits:
            pytest.skip("this processor multiplies no integers")
        quantize(model)
        model = replace_modules(model, native, input_bits=input_bits)
        assert check_model(model, VOCAB_SIZE, native).mode == ExecutionMode.RAGGED
    plant_in_rope(model, lambda offset: offset[::-1])
    checked = check_model(model, VOCAB_SIZE, native)
    assert checked.mode == ExecutionMode.ONE_BY_ONE
    assert "a batch changes its logits" in checked.reason
    if input_bits in (None, 32):
        assert_served_right(model, checked)


@pytest.mark.parametrize("kv_dtype", [mx.bfloat16, mx.int8])
def test_experts_that_rounded_keys_choose_do_not_make_a_model_slow(
    native: Native, kv_dtype: mx.Dtype
) -> None:
    model = use_kernels(tiny_model("gpt_oss"), native)
    checked = check_model(model, VOCAB_SIZE, native, kv_dtype)
    assert (checked.mode, checked.reason) == (ExecutionMode.RAGGED, "")
    assert {shape.dtype for shape in checked.layout.shapes} == {kv_dtype}


def plant_leaps(model: nn.Module) -> None:
    """Let the last bit decide how far a quarter of the rows are off."""
    plain = type(model.model.norm)

    def call(self: nn.Module, x: mx.array) -> mx.array:
        normed: mx.array = plain.__call__(self, x)
        leaps = mx.sign(mx.sin(1e9 * x[..., :1])) * (x[..., 1:2] > 0) * (x[..., 2:3] > 0)
        return normed + 0.1 * leaps

    model.model.norm.__class__ = type("Leaping", (plain,), {"__call__": call})


@pytest.mark.parametrize(
    ("family", "is_faulty", "is_ragged"),
    [("gpt_oss", False, True), ("gpt_oss", True, False), ("llama", False, False)],
)
def test_only_rows_that_leap_with_the_last_bit_may_differ_and_only_with_experts(
    family: str, is_faulty: bool, is_ragged: bool
) -> None:
    model = tiny_model(family)
    plant_leaps(model)
    if is_faulty:
        plant_in_rope(model, lambda offset: offset[::-1])
    assert (check_model(model, VOCAB_SIZE).mode == ExecutionMode.RAGGED) == is_ragged


def test_a_model_that_needs_caches_of_mlx_lm_gets_them() -> None:
    for family in ("llama", "mamba"):
        model = tiny_model(family)
        insist_on_own_caches(model)
        checked = check_model(model, VOCAB_SIZE)
        assert checked.mode == ExecutionMode.OWN
        assert "a batch changes its logits" in checked.reason
        assert_served_right(model, checked)


def plant_in_a_row(model: nn.Module, value: float) -> None:
    """Add a value to one row of a step of five."""
    plain = type(model.model.norm)

    def call(self: nn.Module, x: mx.array) -> mx.array:
        normed: mx.array = plain.__call__(self, x)
        if normed.shape[0] == 5:
            normed[1, ..., ::2] += value
        return normed

    model.model.norm.__class__ = type("Faulty", (plain,), {"__call__": call})


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_one_row_that_is_no_number_is_a_difference(family: str) -> None:
    """Also where all later rows are right: no maximum hides it."""
    model = tiny_model(family)
    plant_in_a_row(model, math.nan)
    checked = check_model(model, VOCAB_SIZE)
    assert "nan" in checked.reason
    assert_served_right(model, checked)


@pytest.mark.parametrize(("family", "is_right"), [("llama", False), ("gpt_oss", True)])
def test_one_row_may_go_to_experts_that_the_last_bit_chooses(family: str, is_right: bool) -> None:
    model = tiny_model(family)
    plant_in_a_row(model, 1.0)
    assert (check_model(model, VOCAB_SIZE).mode is ExecutionMode.RAGGED) == is_right


# In the mechanisms


def states_are_swapped(patch: Patch) -> None:
    begin = RecurrentStates._begin
    patch.setattr(RecurrentStates, "_begin", lambda self, states: begin(self, states[::-1]))


def a_draft_stays_in_the_state(patch: Patch) -> None:
    def latest(self: RecurrentStates, s: Slice) -> Any:
        if s.start == 0:
            return None
        states = self._slots[s.slot]
        return states[max(states)]

    patch.setattr(RecurrentStates, "_state", latest)


def nothing_is_kept(patch: Patch) -> None:
    flush = RecurrentStates.flush

    def only_the_last(self: RecurrentStates) -> None:
        flush(self)
        for slot, states in self._slots.items():
            self._slots[slot] = {max(states): states[max(states)]}

    patch.setattr(RecurrentStates, "flush", only_the_last)


def a_checkpoint_has_the_latest_state(patch: Patch) -> None:
    def copy(self: RecurrentStates, copy: StateCopy) -> None:
        states = self._slots[copy.source]
        self._slots[copy.target] = {copy.position: states[max(states)]}

    patch.setattr(RecurrentStates, "copy", copy)


def a_state_is_forgotten(patch: Patch) -> None:
    begin = RecurrentStates._begin

    def empty(self: RecurrentStates, states: Sequence[Any]) -> Any:
        return begin(self, [None] * len(states) if len(states) > 1 else states)

    patch.setattr(RecurrentStates, "_begin", empty)


MISTAKES_WITH_STATES: Final[dict[Callable[[Patch], None], ExecutionMode]] = {
    states_are_swapped: ExecutionMode.ONE_BY_ONE,
    a_state_is_forgotten: ExecutionMode.ONE_BY_ONE,
    a_draft_stays_in_the_state: ExecutionMode.OWN,
    nothing_is_kept: ExecutionMode.OWN,
    a_checkpoint_has_the_latest_state: ExecutionMode.OWN,
}


@pytest.mark.parametrize("plant", MISTAKES_WITH_STATES)
def test_a_wrong_state_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    model = tiny_model("mamba")
    assert check_model(model, VOCAB_SIZE).mode == ExecutionMode.PIECES
    plant(monkeypatch)
    checked = check_model(model, VOCAB_SIZE)
    assert checked.mode == MISTAKES_WITH_STATES[plant]
    assert checked.reason
    assert_served_right(model, checked)


def test_a_window_that_is_too_wide_is_found(monkeypatch: Patch) -> None:
    make_mask = LayerCache.make_mask

    def wider(self: LayerCache, *args: Any, **kwargs: Any) -> Any:
        mask = make_mask(self, *args, **kwargs)
        return SlidingWindow(mask.size + 1) if isinstance(mask, SlidingWindow) else mask

    model = tiny_model("mistral")
    assert check_model(model, VOCAB_SIZE).mode == ExecutionMode.RAGGED
    monkeypatch.setattr(LayerCache, "make_mask", wider)
    checked = check_model(model, VOCAB_SIZE)
    assert checked.mode == ExecutionMode.PIECES
    assert "a batch changes its logits" in checked.reason
    assert_served_right(model, checked)


def the_blocks_of_other_layers_are_read(patch: Patch) -> None:
    patch.setattr(StepInputs, "windowed", lambda self, block_size: self)


def blocks_are_given_up_too_early(patch: Patch) -> None:
    patch.setattr(self_check_steps, "blocks_in_window", lambda window, block_size: 1)


def what_has_left_the_window_is_read(patch: Patch) -> None:
    def drop(self: BlockTable, stop: int) -> list[int]:
        dropped = self.block_ids[self.num_dropped : stop]
        self.num_dropped = stop
        return dropped

    def wider(self: LayerCache, window: SlidingWindow | None) -> SlidingWindow | None:
        return window and SlidingWindow(window.size + 4)

    patch.setattr(BlockTable, "drop", drop)
    patch.setattr(LayerCache, "visible", wider)


MISTAKES_WITH_WINDOWS: Final[dict[Callable[[Patch], None], str]] = {
    the_blocks_of_other_layers_are_read: "a batch changes its logits by ",
    blocks_are_given_up_too_early: "a batch changes its logits by ",
    what_has_left_the_window_is_read: "a batch changes its logits by nan ",
}


@pytest.mark.parametrize(
    ("device_kind", "plant"),
    weekly_pairs(DEVICE_KINDS, MISTAKES_WITH_WINDOWS),
    indirect=["device_kind"],
)
def test_the_blocks_of_windowed_layers_are_checked(
    device_kind: Check, plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    assert device_kind(tiny_model("gemma3_text"), VOCAB_SIZE).mode == ExecutionMode.RAGGED
    plant(monkeypatch)
    checked = device_kind(tiny_model("gemma3_text"), VOCAB_SIZE)
    assert checked.mode != ExecutionMode.RAGGED
    assert checked.reason.startswith(MISTAKES_WITH_WINDOWS[plant])


@pytest.mark.parametrize("off", [1, -1])
def test_a_window_that_is_off_by_one_in_pieces_is_found(off: int, monkeypatch: Patch) -> None:
    of = DeferredMask.of

    def shifted(self: DeferredMask, piece: Any) -> Any:
        return of(replace_window(self, off), piece)

    model = tiny_model("mistral")
    # Positions of other rows, so that the ragged way is wrong.
    plant_in_rope(model, lambda offset: offset[::-1])
    assert check_model(model, VOCAB_SIZE).mode == ExecutionMode.ONE_BY_ONE
    monkeypatch.setattr(DeferredMask, "of", shifted)
    checked = check_model(model, VOCAB_SIZE)
    assert checked.mode == ExecutionMode.OWN
    assert_served_right(model, checked)


def replace_window(mask: DeferredMask, off: int) -> DeferredMask:
    return mask._replace(window=mask.window + off if mask.window else None)


def chunks_are_sliding(patch: Patch) -> None:
    def first(self: SlidingWindow, positions: Any) -> Any:
        return positions - self.size + 1

    patch.setattr(SlidingWindow, "first", first)


def ranges_are_off_by_one(patch: Patch) -> None:
    arange = ranges.arange

    def shifted(*args: Any) -> mx.array:
        return arange(*args) + isinstance(args[0], mx.array)

    patch.setattr(ranges, "arange", shifted)


@pytest.mark.parametrize("plant", weekly([chunks_are_sliding, ranges_are_off_by_one], 1))
def test_a_wrong_chunk_or_position_is_found(
    plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """Also where a checkpoint's chunks are longer than the prompts of the check."""
    model = make_tiny("llama4")
    for owner in (model.args.text_config, model.language_model.model):
        owner.attention_chunk_size = 8192
    for layer in model.layers:
        layer.self_attn.floor_scale = 8192
    checked = check_model(model, VOCAB_SIZE)
    assert (checked.mode, checked.layout.window) == (ExecutionMode.RAGGED, 8192)
    plant(monkeypatch)
    checked = check_model(model, VOCAB_SIZE)
    assert checked.mode == ExecutionMode.WHOLE
    assert "a batch changes its logits" in checked.reason
    assert_served_right(model, checked)


def test_a_soft_cap_that_is_ignored_is_found(monkeypatch: Patch) -> None:
    model = tiny_model("gemma2")
    assert check_model(model, VOCAB_SIZE).mode == ExecutionMode.RAGGED
    attend = LayerCache.attend

    def uncapped(self: LayerCache, *args: Any, **kwargs: Any) -> mx.array:
        self.shape = self.shape._replace(soft_cap=0.0)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(LayerCache, "attend", uncapped)
    checked = check_model(model, VOCAB_SIZE)
    assert checked.mode != ExecutionMode.RAGGED
    assert "a batch changes its logits" in checked.reason
    assert_served_right(model, checked)


def test_attention_that_only_looks_like_capped_attention_is_found() -> None:
    model = tiny_model("gemma2")
    for layer in model.layers:
        plain = type(layer.self_attn)

        def call(self: nn.Module, x: mx.array, *args: Any, plain: Any = plain) -> Any:
            return x + plain.__call__(self, x, *args)

        layer.self_attn.__class__ = type("Residual", (plain,), {"__call__": call})
    checked = check_model(model, VOCAB_SIZE)
    assert checked.mode != ExecutionMode.RAGGED
    assert "a batch changes its logits" in checked.reason
    assert_served_right(model, checked)


def test_capped_attention_that_has_a_part_of_unknown_use_runs_its_own_code() -> None:
    model = tiny_model("gemma2")
    for layer in model.layers:
        layer.self_attn.temperature = 1.0
    checked = check_model(model, VOCAB_SIZE)
    assert all(shape.is_gathered for shape in checked.layout.shapes)
    assert_served_right(model, checked)


def test_a_model_that_wants_caches_of_its_own_class_is_served_on_its_own_caches() -> None:
    model = tiny_model("llama")
    plain = type(model)

    class Particular(plain):  # type: ignore[misc, valid-type]
        def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
            if any(type(each) is not KVCache for each in cache or ()):
                raise TypeError("no cache of mine")
            return super().__call__(tokens, cache)

    model.__class__ = Particular
    checked = check_model(model, VOCAB_SIZE)
    assert (checked.mode, checked.reason) == (
        ExecutionMode.OWN,
        "its caches cannot be watched (no cache of mine)",
    )
