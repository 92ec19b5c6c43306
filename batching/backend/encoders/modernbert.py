"""ModernBERT (Warner et al. 2024): rotations, windows in most layers, gated products, no biases.

Modules and arrays have the names of transformers.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batching.backend.encoders.parts import ACTIVATIONS, Part
from batching.backend.encoders.ragged import Texts, attention
from batching.backend.encoders.sizes import Sizes
from batching.errors import ModelLoadError


class ModernBertEmbeddings(Part):
    def __init__(self, sizes: Sizes, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden, eps=eps, bias=bias)

    def __call__(self, texts: Texts) -> mx.array:
        embedded: mx.array = self.norm(self.tok_embeddings(texts.tokens))
        return embedded


class ModernBertAttention(Part):
    def __init__(self, sizes: Sizes, theta: float, window: int | None) -> None:
        super().__init__()
        bias = sizes.flag("attention_bias", default=False)
        self.Wqkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=bias)
        self.Wo = nn.Linear(sizes.hidden, sizes.hidden, bias=bias)
        self.num_heads, self.theta, self.window = sizes.num_heads, theta, window

    def __call__(self, x: mx.array, texts: Texts) -> mx.array:
        seen = attention(self.Wqkv(x), texts, self.num_heads, theta=self.theta, window=self.window)
        output: mx.array = self.Wo(seen)
        return output


class ModernBertMLP(Part):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        bias = sizes.flag("mlp_bias", default=False)
        self.Wi = nn.Linear(sizes.hidden, 2 * sizes.inner, bias=bias)
        self.Wo = nn.Linear(sizes.inner, sizes.hidden, bias=bias)
        self.activation = sizes.word("hidden_activation", ACTIVATIONS, "gelu")

    def __call__(self, x: mx.array) -> mx.array:
        activated, gate = mx.split(self.Wi(x), 2, axis=-1)
        output: mx.array = self.Wo(self.activation(activated) * gate)
        return output


class ModernBertLayer(Part):
    def __init__(self, sizes: Sizes, attention: ModernBertAttention, *, is_first: bool) -> None:
        super().__init__()
        eps = sizes.number("norm_eps", 1e-5)
        bias = sizes.flag("norm_bias", default=False)
        # The embeddings are normalized already.
        if not is_first:
            self.attn_norm = nn.LayerNorm(sizes.hidden, eps=eps, bias=bias)
        self.attn = attention
        self.mlp_norm = nn.LayerNorm(sizes.hidden, eps=eps, bias=bias)
        self.mlp = ModernBertMLP(sizes)

    def __call__(self, x: mx.array, texts: Texts) -> mx.array:
        normed = self.attn_norm(x) if "attn_norm" in self else x
        x = x + self.attn(normed, texts)
        output: mx.array = x + self.mlp(self.mlp_norm(x))
        return output


class ModernBert(Part):
    """Returns hidden states, `[T, hidden_size]`.

    context: the most tokens of a text.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.sizes = sizes = Sizes(config)
        eps, bias = sizes.number("norm_eps", 1e-5), sizes.flag("norm_bias", default=False)
        self.context = sizes.context
        self.embeddings = ModernBertEmbeddings(sizes, eps, bias=bias)
        # Of the whole window half is to either side.
        window = sizes.count("local_attention", 128) // 2
        thetas = _thetas(config, sizes)
        self.layers = [
            ModernBertLayer(
                sizes,
                ModernBertAttention(sizes, thetas[kind], None if kind == _FULL else window),
                is_first=index == 0,
            )
            for index, kind in enumerate(_kinds(config, sizes))
        ]
        self.final_norm = nn.LayerNorm(sizes.hidden, eps=eps, bias=bias)

    def __call__(self, texts: Texts) -> mx.array:
        x: mx.array = self.embeddings(texts)
        for layer in self.layers:
            x = layer(x, texts)
        normed: mx.array = self.final_norm(x)
        return normed


_FULL, _SLIDING = "full_attention", "sliding_attention"


def _kinds(config: Mapping[str, Any], sizes: Sizes) -> list[str]:
    """Return what each layer attends to: newer configs list it, older ones say how often it is all."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = sizes.count("global_attn_every_n_layers", 3)
        kinds = [_SLIDING if index % every else _FULL for index in range(sizes.num_layers)]
    known = (_FULL, _SLIDING)
    is_known = isinstance(kinds, list) and all(kind in known for kind in kinds)
    if not is_known or len(kinds) != sizes.num_layers:
        raise ModelLoadError(
            f"layer_types in its config are not one of {' and '.join(known)} for each layer"
        )
    return list(kinds)


def _thetas(config: Mapping[str, Any], sizes: Sizes) -> dict[str, float]:
    """Return the bases of rotations of both kinds of layers, where newer or older configs have them."""
    found = {
        _FULL: sizes.number("global_rope_theta", 160_000.0),
        _SLIDING: sizes.number("local_rope_theta", 10_000.0),
    }
    parameters = config.get("rope_parameters")
    for kind, own in parameters.items() if isinstance(parameters, dict) else ():
        if kind not in found or not isinstance(own, dict) or own.get("rope_type") != "default":
            raise ModelLoadError(f"rope_parameters of {kind} in its config are not supported")
        found[kind] = float(own.get("rope_theta", found[kind]))
    return found
