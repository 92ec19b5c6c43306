"""Undoes the changes that llama.cpp's converter makes to tensors; rows keep their quantization."""

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from batching.backend.gguf.architecture.metadata import Config
from batching.backend.gguf.file.quantizations import Weight, join

Change = Callable[[Weight, Config], Weight]
Changes = dict[str, Change]


def _less_one(weight: Weight, _: Config) -> Weight:
    return weight.map(lambda norm: norm.astype(mx.float32) - 1)


def _with_channels(weight: Weight, _: Config) -> Weight:
    """Give a convolution its last axis: one input channel for each output channel."""
    return weight.map(lambda kernel: kernel[..., None])


def _logarithm(weight: Weight, _: Config) -> Weight:
    """Turn the decay -exp(A_log) into A_log."""
    return weight.map(lambda decay: mx.log(-decay.astype(mx.float32)))


def _after(first: Change, second: Change) -> Change:
    return lambda weight, config: second(first(weight, config), config)


def _one_row(weight: Weight, _: Config) -> Weight:
    return weight.map(lambda part: part.reshape(1, -1))


def _apart(num_heads: str) -> Change:
    """Put the first numbers of a head's rotated pairs before the second ones."""

    def change(weight: Weight, config: Config) -> Weight:
        heads = config[num_heads]
        return weight.map(lambda part: _swapped(part, 0, (heads, -1, 2, 1)))

    return change


def _beside(num_heads: str) -> Change:
    """Put the numbers of a head's rotated pairs side by side, where a file of a model with axes has them apart."""

    def change(weight: Weight, config: Config) -> Weight:
        if not any(config["mrope_section"]):
            return weight
        rotated = int(config["head_dim"] * config["partial_rotary_factor"])

        def of(part: mx.array) -> mx.array:
            heads = mx.unflatten(part, 0, (config[num_heads], -1))
            pairs = _swapped(heads[:, :rotated], 1, (1, 2, -1, 1))
            return mx.contiguous(mx.concatenate([pairs, heads[:, rotated:]], axis=1).flatten(0, 1))

        return weight.map(of)

    return change


def _swapped(part: mx.array, axis: int, shape: tuple[int, int, int, int]) -> mx.array:
    """View an axis in a shape, and swap the middle two."""
    axis %= part.ndim
    swapped = mx.swapaxes(mx.unflatten(part, axis, shape), axis + 1, axis + 2)
    return mx.contiguous(mx.flatten(swapped, axis, axis + 3))


def _grouped(start: int) -> Change:
    """Put value heads beside those of the same key head: rows from `start` key dimensions on."""

    def change(weight: Weight, config: Config) -> Weight:
        first = start * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return weight.map(
            lambda part: mx.concatenate([part[:first], _by_key_head(part[first:], 0, config)])
        )

    return change


def _grouped_columns(weight: Weight, config: Config) -> Weight:
    if weight.format and config["linear_value_head_dim"] % weight.format.group_size:
        weight = Weight({"weight": weight.dense()})
    return weight.map(lambda part: _by_key_head(part, -1, config))


def _by_key_head(part: mx.array, axis: int, config: Config) -> mx.array:
    num_keys = config["linear_num_key_heads"]
    per_key = config["linear_num_value_heads"] // num_keys
    return _swapped(part, axis, (1, per_key, num_keys, -1))


def join_qkvz(weights: dict[str, Weight], config: Config) -> None:
    """Join q, k, v and z of each key head, which the file has by kind."""
    for name in [name for name in weights if name.endswith(".in_proj_qkv.weight")]:
        module = name.removesuffix("qkv.weight")
        both = join(weights.pop(name), weights.pop(f"{module}z.weight"))
        weights[f"{module}qkvz.weight"] = both.map(lambda part: _by_head(part, config))


def _by_head(part: mx.array, config: Config) -> mx.array:
    num_keys = config["linear_num_key_heads"]
    keys = num_keys * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    kinds = mx.split(part, [keys, 2 * keys, 2 * keys + values])
    heads = [mx.unflatten(kind, 0, (num_keys, -1)) for kind in kinds]
    return mx.contiguous(mx.concatenate(heads, axis=1).flatten(0, 1))


def join_latent(weights: dict[str, Weight], config: Config) -> None:
    """Join or part the matrices from a latent to keys and values, as the model has them.

    Those of the keys are transposed in files that have two, hence dequantized.
    """
    nope = config["qk_nope_head_dim"]
    is_joined = config["model_type"] == "deepseek_v2"
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn."
        both, keys, values = (
            f"{attention}{part}.weight" for part in ("kv_b_proj", "embed_q", "unembed_out")
        )
        if is_joined and keys in weights and values in weights:
            of_keys, of_values = weights.pop(keys).dense(), weights.pop(values).dense()
            joined = mx.concatenate([of_keys.swapaxes(1, 2), of_values], axis=1)
            weights[both] = Weight({"weight": mx.contiguous(joined.flatten(0, 1))})
        elif not is_joined and both in weights:
            heads = mx.unflatten(weights.pop(both).dense(), 0, (config["num_attention_heads"], -1))
            weights[keys] = Weight({"weight": mx.contiguous(heads[:, :nope].swapaxes(1, 2))})
            weights[values] = Weight({"weight": mx.contiguous(heads[:, nope:])})


_GEMMA_NORMS: Final = (
    "attn_norm",
    "attn_q_norm",
    "attn_k_norm",
    "post_attention_norm",
    "ffn_norm",
    "post_ffw_norm",
    "output_norm",
)
OF_GEMMA: Final[Changes] = dict.fromkeys(_GEMMA_NORMS, _less_one)
OF_ROTATED_PAIRS: Final[Changes] = {
    "attn_q": _apart("num_attention_heads"),
    "attn_k": _apart("num_key_value_heads"),
}
OF_GLM4: Final[Changes] = {
    "attn_q": _beside("num_attention_heads"),
    "attn_k": _beside("num_key_value_heads"),
}
OF_LFM2: Final[Changes] = {"shortconv.conv": _with_channels}
OF_SHARED_EXPERT: Final[Changes] = {"ffn_gate_inp_shexp": _one_row}
OF_DELTA_NET: Final[Changes] = {"ssm_conv1d": _with_channels, "ssm_a": _logarithm}
OF_GROUPED_HEADS: Final[Changes] = {
    "attn_qkv": _grouped(2),
    "attn_gate": _grouped(0),
    "ssm_alpha": _grouped(0),
    "ssm_beta": _grouped(0),
    "ssm_a": _after(_logarithm, _grouped(0)),
    "ssm_dt.bias": _grouped(0),
    "ssm_conv1d": _after(_grouped(2), _with_channels),
    "ssm_out": _grouped_columns,
}
