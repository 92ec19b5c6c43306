"""Where a matrix unit multiplies in bfloat16, all weights of an input do so or none."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from batching.backend.native.layers.bfloat16 import of_one_input
from batching.backend.native.layers.packing import Packing
from batching.backend.native.layers.replace import replace_modules
from batching.backend.native.model import use_kernels
from batching.backend.native_loader import Native
from tests.support.logits import error, logits_of
from tests.support.model_zoo import make_tiny


@pytest.fixture
def unit(native: Native) -> Native:
    if not native.supports_bfloat16:
        pytest.skip("this processor has no matrix unit")
    return native


def in_bfloat16(native: Native, model: nn.Module) -> tuple[set[str], float]:
    """Return which weights are multiplied in bfloat16, and what that changes of the logits."""
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

    def __init__(self, name: str, dtype: mx.Dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = nn.Embedding(100, 64)
        self.experts = SwitchGLU(64, 96, 4)
        self.set_dtype(mx.bfloat16)
        self.experts[name].set_dtype(dtype)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed_tokens(tokens).astype(mx.float32)
        indices = mx.stack([tokens % 4, tokens % 3], axis=-1)
        outputs: mx.array = self.experts(x, indices)
        return outputs.sum(axis=-2)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_gate_and_up_of_experts_are_rounded_both_or_not_at_all(unit: Native, name: str) -> None:
    """They read what was packed once."""
    others = {"embed_tokens", "experts.down_proj"}
    changed, difference = in_bfloat16(unit, Mixture(name, mx.bfloat16))
    assert changed == others | {"experts.gate_proj", "experts.up_proj"}
    assert 0 < difference < 0.01
    assert in_bfloat16(unit, Mixture(name, mx.float32))[0] == others


def test_gate_and_up_share_an_input(native: Native) -> None:
    assert {"gate_proj", "up_proj"} in names_by_input(native, Mixture("up_proj", mx.bfloat16))


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gemma3_text", "gpt_oss", "lfm2_moe", "phi3", "qwen3_moe", "qwen3_next"]
)
@pytest.mark.parametrize("bits", [4, 0])
def test_other_kinds_of_models(unit: Native, name: str, bits: int) -> None:
    """What they compute changes by little, in blocks that are fused, too."""
    model = make_tiny(name, bits=bits) if bits else make_tiny(name)
    if not bits:
        model.set_dtype(mx.bfloat16)
    changed, difference = in_bfloat16(unit, model)
    assert changed
    # Rounding may lead to other experts.
    assert 0 < difference < 0.3
