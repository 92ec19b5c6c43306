"""Heads of cross-encoders: from the hidden states of a pair of texts to one number.

Modules have the names that transformers gives them beside the trunk of each kind.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batching.backend.encoders.parts import ACTIVATIONS, Part
from batching.backend.encoders.ragged import Texts
from batching.backend.encoders.sizes import Sizes


class Dense(Part):
    """A product of the module `dense`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size, size)

    def __call__(self, x: mx.array) -> mx.array:
        product: mx.array = mx.tanh(self.dense(x))
        return product


class BertClassifier(Part):
    """Returns `[texts, 1]`, as the other classifiers do."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size = Sizes(config).hidden
        self.pooler = Dense(size)
        self.classifier = nn.Linear(size, 1)

    def __call__(self, hidden: mx.array, texts: Texts) -> mx.array:
        logits: mx.array = self.classifier(self.pooler(hidden[mx.array(texts.firsts)]))
        return logits


class RobertaHead(Dense):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.out_proj = nn.Linear(size, 1)

    def __call__(self, x: mx.array) -> mx.array:
        logits: mx.array = self.out_proj(super().__call__(x))
        return logits


class RobertaClassifier(Part):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.classifier = RobertaHead(Sizes(config).hidden)

    def __call__(self, hidden: mx.array, texts: Texts) -> mx.array:
        logits: mx.array = self.classifier(hidden[mx.array(texts.firsts)])
        return logits


class ModernBertHead(Part):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        size = sizes.hidden
        self.dense = nn.Linear(size, size, bias=sizes.flag("classifier_bias", default=False))
        eps, bias = sizes.number("norm_eps", 1e-5), sizes.flag("norm_bias", default=False)
        self.norm = nn.LayerNorm(size, eps=eps, bias=bias)
        self._activation = sizes.word("classifier_activation", ACTIVATIONS, "gelu")

    def __call__(self, x: mx.array) -> mx.array:
        normed: mx.array = self.norm(self._activation(self.dense(x)))
        return normed


class ModernBertClassifier(Part):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = Sizes(config)
        self.head = ModernBertHead(sizes)
        self.classifier = nn.Linear(sizes.hidden, 1)
        self._is_mean = sizes.word("classifier_pooling", {"cls": False, "mean": True}, "cls")

    def __call__(self, hidden: mx.array, texts: Texts) -> mx.array:
        pooled = _means(hidden, texts) if self._is_mean else hidden[mx.array(texts.firsts)]
        logits: mx.array = self.classifier(self.head(pooled))
        return logits


def _means(hidden: mx.array, texts: Texts) -> mx.array:
    return mx.concatenate(
        [
            hidden[g.first : g.stop].reshape(g.num_texts, g.length, -1).mean(axis=1)
            for g in texts.groups
        ]
    )
