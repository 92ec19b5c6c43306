"""The model that is measured, and the least that a step of it has to do."""

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from batching.backend.memory.device import device_memory, memory_in_use
from scripts.gpu_check.models import large_model
from scripts.gpu_check.record import Options, Roofs, Skipped
from scripts.make_model.shapes import SHAPES
from scripts.make_model.tiny_configs import COMMON, Config

_SHAPE: Final = "qwen3-4b"
# Of the device's memory; the rest is for what steps need, and for the system.
_SHARE: Final = 0.75
_BITS_WITH_SCALES: Final = 4.5
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Point:
    """Requests, and the tokens that each has before the first step."""

    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.context}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step reads and computes at least.

    weight_bytes: of all that products read.  num_weights: of those, a multiplication and an addition for
    each row.  head_weights: those that only rows need which are sampled from.  token_bytes: of the keys and values of a token.  token_flops: of attention, for each
    pair of a query's token and a key.
    """

    weight_bytes: int
    num_weights: int
    head_weights: int
    token_bytes: int
    token_flops: int

    def decode_seconds(self, point: Point, roofs: Roofs) -> float:
        num_bytes = self.weight_bytes + point.rows * point.context * self.token_bytes
        pairs = point.rows * point.context
        flops = 2 * self.num_weights * point.rows + pairs * self.token_flops
        return max(num_bytes / roofs["bandwidth"], flops / roofs["flops bfloat16"])

    def prefill_seconds(self, num_tokens: int, roofs: Roofs) -> float:
        pairs = num_tokens * (num_tokens + 1) / 2
        flops = 2 * (self.num_weights - self.head_weights) * num_tokens + pairs * self.token_flops
        return max(self.weight_bytes / roofs["bandwidth"], flops / roofs["flops bfloat16"])


def config(options: Options) -> Config:
    """Return the published configuration, or a small one to show that all runs."""
    if not options.is_quick:
        return SHAPES[_SHAPE].full_config
    return {**COMMON, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}


def load(options: Options, bits: int | None) -> tuple[Config, nn.Module, Cost]:
    """Make the model.

    Raises:
        Skipped: it does not fit.
    """
    chosen = config(options)
    needed = weight_bytes(chosen, bits)
    if needed > _SHARE * device_memory():
        raise Skipped(f"needs {needed / _GIB:.1f} GiB for the weights alone")
    model = large_model(chosen, bits)
    return chosen, model, cost(chosen, model)


def cost(chosen: Config, model: nn.Module) -> Cost:
    arrays: dict[str, Any] = dict(tree_flatten(model.parameters()))
    layers, heads = chosen["num_hidden_layers"], chosen["num_attention_heads"]
    return Cost(
        sum(array.nbytes for array in arrays.values()),
        _num_weights(chosen),
        chosen["vocab_size"] * chosen["hidden_size"],
        kv_bytes(chosen),
        4 * layers * heads * chosen["head_dim"],
    )


def kv_bytes(chosen: Config) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    heads = chosen["num_key_value_heads"] * chosen["head_dim"]
    return int(2 * chosen["num_hidden_layers"] * heads * mx.bfloat16.size)


def weight_bytes(chosen: Config, bits: int | None) -> int:
    return int(_num_weights(chosen) * (_BITS_WITH_SCALES if bits else 16) / 8)


def bytes_for_pool(chosen: Config, bits: int | None) -> int:
    """Return what the keys and values may take beside the weights, which may not be there yet."""
    used = max(memory_in_use(), weight_bytes(chosen, bits))
    return int(_SHARE * device_memory()) - used


def _num_weights(chosen: Config) -> int:
    width, head_dim = chosen["hidden_size"], chosen["head_dim"]
    heads = 2 * chosen["num_attention_heads"] + 2 * chosen["num_key_value_heads"]
    layer = width * head_dim * heads + 3 * width * chosen["intermediate_size"]
    return int(chosen["num_hidden_layers"] * layer + chosen["vocab_size"] * width)
