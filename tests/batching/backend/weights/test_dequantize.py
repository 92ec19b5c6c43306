"""A model that is dequantized has no quantized weights left, and computes the same."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from batching.backend.weights.dequantize import dequantize
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import make_tiny

PROMPT = mx.array([[token % VOCAB_SIZE for token in range(3, 40, 5)]])


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
@pytest.mark.parametrize("model_type", ["llama", "glm4_moe_lite"])
def test_no_weight_stays_quantized(model_type: str, bits: int, mode: str) -> None:
    model = make_tiny(model_type, bits=bits, mode=mode)
    expected = model(PROMPT)
    dense = dequantize(model)
    parameters: list[tuple[str, mx.array]] = [*tree_flatten(dense.parameters())]
    assert [name for name, _ in parameters if name.endswith("scales")] == []
    assert mx.allclose(dense(PROMPT), expected, atol=1e-3)


def test_experts_with_a_scale_of_their_own() -> None:
    experts = SwitchLinear(64, 32, 4, bias=True)
    weight = experts.weight
    model = nn.Sequential(experts.to_quantized(16, 4, "nvfp4", global_scale=True))
    [dense] = dequantize(model).layers
    assert mx.abs(dense.weight - weight).max() < mx.abs(weight).max() / 4
