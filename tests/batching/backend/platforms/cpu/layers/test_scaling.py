"""Inputs of 8 bits are scaled by channel where that is possible, and by what the model's own inputs are."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from mlx_lm.models.switch_layers import SwitchGLU

from batching.backend.platforms.cpu.layers.experts import Experts
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.layers.scaling import (
    Shifts,
    find_shifts,
    scale_inputs,
    shifts_of,
)
from batching.backend.platforms.cpu.native_loader import Native
from tests.support.logits import error, logits_of
from tests.support.model_zoo import make_tiny
from tests.support.platforms import replace_modules, use_kernels


@pytest.fixture
def scaling(native: Native) -> Native:
    if native.min_input_bits > 8:
        pytest.skip("this processor has no VNNI")
    return native


def shifts_by_name(largest: list[float]) -> list[int]:
    return list(shifts_of(np.array(largest, np.float32)))


def test_a_large_channel_is_divided_and_equal_ones_are_not() -> None:
    assert shifts_by_name([1.0] * 16) == [0] * 16
    assert shifts_by_name([16.0] + [1.0] * 15) == [2] + [0] * 15
    # Half of what would make them equal: their weights become as much larger.
    assert shifts_by_name([4.0] + [1.0] * 15) == [1] + [0] * 15
    assert shifts_by_name([1.0] * 16 + [9.0] * 16) == [0] * 32
    assert shifts_by_name([0.0] * 16) == [0] * 16
    assert shifts_by_name([0.0] * 15 + [1.0]) == [0] * 15 + [2]


@given(arrays(np.float32, 64, elements=st.floats(0, 2.0**127, width=32)))
def test_shifts_are_small_and_grow_with_the_channel(largest: Any) -> None:
    shifts = np.frombuffer(shifts_of(largest), np.uint8)
    assert shifts.shape == largest.shape
    for group, of_group in zip(largest.reshape(-1, 16), shifts.reshape(-1, 16), strict=True):
        assert (of_group.min(), of_group.max() <= 2) == (0, True)
        assert (np.diff(of_group[np.argsort(group)].astype(int)) >= 0).all()


def test_channels_that_are_not_finite_have_shifts() -> None:
    assert len(shifts_of(np.array([np.nan, np.inf] * 8, np.float32))) == 16


def scaled(native: Native, model: nn.Module, *, input_bits: int = 16) -> tuple[nn.Module, Packing]:
    packing = Packing(native.module, input_bits, finds_shifts=True)
    return use_kernels(model, native, packing=packing), packing


def with_outliers(model: nn.Module) -> nn.Module:
    """Let some channels of what norms give be large, as in trained models."""
    for layer in model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight = mx.where(mx.arange(norm.weight.size) % 16 == 3, 12.0, 1.0)
    return model


def test_a_model_with_large_channels_loses_less(scaling: Native) -> None:
    exact = logits_of(use_kernels(with_outliers(make_tiny("llama", bits=4)), scaling))
    plain = with_outliers(make_tiny("llama", bits=4))
    unscaled, packing = scaled(scaling, plain)
    of_none = {path: bytes(len(shifts)) for path, shifts in packing.shifts.items()}
    scale_inputs(scaling.module, packing.packed, of_none)
    without = error(logits_of(unscaled), exact)
    model, packing = scaled(scaling, with_outliers(make_tiny("llama", bits=4)))
    as_before = logits_of(model)
    assert error(as_before, exact) < 1e-3
    scale_inputs(scaling.module, packing.packed, packing.shifts)
    assert 1e-3 < error(logits_of(model), exact) < 0.7 * without


def test_layers_of_one_input_share_its_shifts(scaling: Native) -> None:
    _, packing = scaled(scaling, with_outliers(make_tiny("llama", bits=4)))
    assert packing.shifts.keys() == packing.packed.keys()
    for of_input in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        found = {v for path, v in packing.shifts.items() if path.endswith(of_input)}
        paths = [path for path in packing.shifts if path.endswith(of_input)]
        assert 0 < len(found) == len(paths) // len(of_input)
    shifts = packing.shifts["model.layers.0.self_attn.q_proj"]
    assert all((shift == 2) == (i % 16 == 3) for i, shift in enumerate(shifts))


def test_what_has_more_bits_is_not_scaled(scaling: Native) -> None:
    _, packing = scaled(scaling, make_tiny("llama", bits=8))
    assert packing.shifts == {}


def test_inputs_that_are_not_rounded_are_not_scaled(scaling: Native) -> None:
    _, packing = scaled(scaling, make_tiny("llama", bits=4), input_bits=32)
    assert packing.shifts == {}


class Mixture(nn.Module):
    """Experts behind an embedding."""

    def __init__(self, **bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = nn.Embedding(100, 64)
        self.experts = SwitchGLU(64, 96, 4)

        def quantization(path: str, _: nn.Module) -> Any:
            name = path.rpartition(".")[2]
            return name.endswith("proj") and {"group_size": 32, "bits": bits.get(name, 4)}

        nn.quantize(self, class_predicate=quantization)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens)
        indices = mx.stack([tokens % 4, tokens % 3], axis=-1)
        outputs: mx.array = self.experts(x, indices)
        return outputs.sum(axis=-2)


def found(native: Native, model: nn.Module) -> tuple[nn.Module, Packing, Shifts]:
    packing = Packing(native.module, 16)
    model = replace_modules(model, native, packing=packing)
    return model, packing, find_shifts(model, packing.packed)


def test_experts_share_the_shifts_of_their_input(scaling: Native) -> None:
    model, packing, shifts = found(scaling, Mixture())
    assert set(shifts) == {f"experts.{name}_proj" for name in ("gate", "up", "down")}
    assert shifts["experts.gate_proj"] == shifts["experts.up_proj"]
    assert type(model.experts) is Experts
    before = logits_of(model)
    scale_inputs(scaling.module, packing.packed, shifts)
    assert 0 < error(logits_of(model), before) < 0.02


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_gate_and_up_of_experts_are_scaled_both_or_not_at_all(scaling: Native, name: str) -> None:
    """They read what was packed once."""
    model, packing, shifts = found(scaling, Mixture(**{name: 8}))
    assert set(shifts) == {"experts.down_proj"}
    before = logits_of(model)
    scale_inputs(scaling.module, packing.packed, shifts)
    assert 0 < error(logits_of(model), before) < 0.02


def test_a_model_whose_code_fails_keeps_16_bits(
    scaling: Native, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Mixture):
        def __call__(self, tokens: mx.array) -> mx.array:
            super().__call__(tokens)
            raise RuntimeError("not without a cache")

    model, packing = scaled(scaling, Failing())
    assert packing.shifts == {}
    assert "inputs are not scaled by channel: RuntimeError: not without a cache" in caplog.text
    # It is as it was, not half watched.
    assert type(model.experts) is Experts
    assert model.experts.gate_proj.kernels is scaling.module


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gemma3_text", "gpt_oss", "lfm2_moe", "phi3", "qwen3_moe", "qwen3_next"]
)
def test_other_kinds_of_models(scaling: Native, name: str) -> None:
    """What they compute changes by little, in blocks that are fused, too."""
    model, packing = scaled(scaling, make_tiny(name, bits=4))
    assert len(packing.shifts) > len(packing.packed) / 2
    before = logits_of(model)
    scale_inputs(scaling.module, packing.packed, packing.shifts)
    assert 0 < error(logits_of(model), before) < 0.3
