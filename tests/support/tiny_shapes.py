"""Published shapes with small sizes and as few layers as each kind of layer takes."""

from dataclasses import replace
from typing import Final

from scripts.make_model.shapes import SHAPES, Shape

VOCAB_SIZE: Final = 49152 + 8
_SMALL: Final = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": VOCAB_SIZE,
}


def tiny_shape(name: str, quantization: str | None = None) -> Shape:
    shape = SHAPES[name]
    config = shape.config | {key: _SMALL[key] for key in _SMALL if key in shape.config}
    tiny = replace(shape, config=config)
    if quantization is not None:
        tiny = replace(tiny, quantization=quantization, of_experts=quantization)
    return tiny.with_layers(shape.least_layers)
