"""Where inputs are rounded further, all weights of an input take part in that or none."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from batching.backend.platforms.cpu.layers.one_input import of_one_input
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.native_loader import Native
from tests.support.logits import error, logits_of
from tests.support.model_zoo import make_tiny
from tests.support.platforms import replace_modules, use_kernels

# Of weights with which inputs can be rounded to bfloat16, and cannot; 0 are bfloat16, 32 float32.
BITS: Final = (4, 0)
OTHER_BITS: Final = 32


@pytest.fixture
def with_unit(native: Native) -> Native:
    if not native.supports_bfloat16:
        pytest.skip("this processor has no matrix unit")
    return native


def in_bfloat16(native: Native, model: nn.Module) -> tuple[set[str], float]:
    """Return with which weights inputs are rounded to bfloat16, and what that changes of the logits."""
    packing = Packing(native.module, 16, finds_inputs=True)
    model = use_kernels(model, native, packing=packing)
    types = {path: weights.layout["input_type"] for path, weights in packing.packed.items()}
    before = logits_of(model)
    for weights in packing.of_one_input:
        native.module.use_bfloat16(weights)
    changed = {p for p, w in packing.packed.items() if w.layout["input_type"] != types[p]}
    return changed, error(logits_of(model), before)


def names_by_input(native: Native, model: nn.Module) -> list[set[str]]:
    packing = Packing(native.module, 16)
    model = replace_modules(model, native, packing=packing)
    paths = {id(weights): path for path, weights in packing.packed.items()}
    return [
        {paths[id(weights)].rpartition(".")[2] for weights in each}
        for each in of_one_input(model, packing.packed)
    ]


def test_layers_of_one_input_are_found(native: Native) -> None:
    found = names_by_input(native, make_tiny("llama", bits=4))
    assert {"q_proj", "k_proj", "v_proj"} in found
    assert {"gate_proj", "up_proj"} in found
    assert {"down_proj"} in found


class Mixture(nn.Module):
    """Experts behind an embedding, one layer of which has other weights."""

    def __init__(self, name: str, bits: int, other_bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = nn.Embedding(100, 64)
        self.experts = SwitchGLU(64, 96, 4)
        self.set_dtype(mx.bfloat16)

        def quantization(path: str, module: nn.Module) -> Any:
            of_module = other_bits if path.endswith(name) else bits
            if not hasattr(module, "weight"):
                return False
            if of_module in (0, 32):
                module.set_dtype(mx.float32 if of_module else mx.bfloat16)
                return False
            return {"group_size": 32, "bits": of_module}

        nn.quantize(self, class_predicate=quantization)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens).astype(mx.float32)
        indices = mx.stack([tokens % 4, tokens % 3], axis=-1)
        outputs: mx.array = self.experts(x, indices)
        return outputs.sum(axis=-2)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_gate_and_up_of_experts_are_rounded_both_or_not_at_all(
    with_unit: Native, name: str
) -> None:
    """They read what was packed once."""
    others = {"embed_tokens", "experts.down_proj"}
    for bits in BITS:
        changed, difference = in_bfloat16(with_unit, Mixture(name, bits, bits))
        assert changed == others | {"experts.gate_proj", "experts.up_proj"}
        assert 0 < difference < 0.01
        assert in_bfloat16(with_unit, Mixture(name, bits, OTHER_BITS))[0] == others


def test_gate_and_up_share_an_input(native: Native) -> None:
    assert {"gate_proj", "up_proj"} in names_by_input(native, Mixture("up_proj", 0, 0))


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gemma3_text", "gpt_oss", "lfm2_moe", "phi3", "qwen3_moe", "qwen3_next"]
)
def test_other_kinds_of_models(with_unit: Native, name: str) -> None:
    """What they compute changes by little, in blocks that are fused, too."""
    for bits in BITS:
        model = make_tiny(name, bits=bits) if bits else make_tiny(name)
        if not bits:
            model.set_dtype(mx.bfloat16)
        changed, difference = in_bfloat16(with_unit, model)
        assert changed
        # Rounding may lead to other experts.
        assert 0 < difference < 0.3
