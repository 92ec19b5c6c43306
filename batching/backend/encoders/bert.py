"""BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2019).

Modules and arrays have the names of transformers, but for queries, keys and values, which are one product.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batching.backend.encoders.parts import ACTIVATIONS, Part
from batching.backend.encoders.ragged import Texts, attention
from batching.backend.encoders.sizes import Sizes
from batching.errors import ModelLoadError


class BertEmbeddings(Part):
    def __init__(self, sizes: Sizes, eps: float, padding_id: int | None) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position_embeddings = nn.Embedding(sizes.context, sizes.hidden)
        self.token_type_embeddings = nn.Embedding(sizes.count("type_vocab_size", 2), sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=eps)
        self._padding_id = padding_id

    def __call__(self, texts: Texts) -> mx.array:
        has_types = len(self.token_type_embeddings.weight) > 1
        types = texts.types if has_types else mx.zeros_like(texts.types)
        embedded: mx.array = self.LayerNorm(
            self.word_embeddings(texts.tokens)
            + self.token_type_embeddings(types)
            + self.position_embeddings(texts.positions(self._padding_id))
        )
        return embedded


class BertOutput(Part):
    """A product, and the norm of the sum with what was before."""

    def __init__(self, in_size: int, size: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(in_size, size)
        self.LayerNorm = nn.LayerNorm(size, eps=eps)

    def __call__(self, x: mx.array, before: mx.array) -> mx.array:
        normed: mx.array = self.LayerNorm(self.dense(x) + before)
        return normed


class BertAttention(Part):
    def __init__(self, sizes: Sizes, eps: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.output = BertOutput(sizes.hidden, sizes.hidden, eps)
        self.num_heads = sizes.num_heads

    def __call__(self, x: mx.array, texts: Texts) -> mx.array:
        attended: mx.array = self.output(attention(self.qkv(x), texts, self.num_heads), x)
        return attended


class BertIntermediate(Part):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dense = nn.Linear(sizes.hidden, sizes.inner)
        self.activation = sizes.word("hidden_act", ACTIVATIONS, "gelu")

    def __call__(self, x: mx.array) -> mx.array:
        activated: mx.array = self.activation(self.dense(x))
        return activated


class BertLayer(Part):
    def __init__(self, sizes: Sizes, eps: float) -> None:
        super().__init__()
        self.attention = BertAttention(sizes, eps)
        self.intermediate = BertIntermediate(sizes)
        self.output = BertOutput(sizes.inner, sizes.hidden, eps)

    def __call__(self, x: mx.array, texts: Texts) -> mx.array:
        x = self.attention(x, texts)
        output: mx.array = self.output(self.intermediate(x), x)
        return output


class BertStack(Part):
    def __init__(self, sizes: Sizes, eps: float) -> None:
        super().__init__()
        self.layer = [BertLayer(sizes, eps) for _ in range(sizes.num_layers)]


class Bert(Part):
    """Returns hidden states, `[T, hidden_size]`.

    context: the most tokens of a text.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.sizes = sizes = Sizes(config)
        eps = sizes.number("layer_norm_eps", 1e-12)
        if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
            raise ModelLoadError(f"its positions are {kind}, and only absolute ones are supported")
        padding_id = None
        self.context = sizes.context
        if config["model_type"] != "bert":
            padding_id = sizes.count("pad_token_id", 1)
            self.context = max(1, sizes.context - padding_id - 1)
        self.embeddings = BertEmbeddings(sizes, eps, padding_id)
        self.encoder = BertStack(sizes, eps)

    def __call__(self, texts: Texts) -> mx.array:
        x: mx.array = self.embeddings(texts)
        for layer in self.encoder.layer:
            x = layer(x, texts)
        return x
