"""From a model's config to what it keeps of a request, for the model types whose config tells it.

tests/batching/backend/test_fit.py compares each rule with what mlx-lm's model of the type really keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from batching.fit.kept import Kept, KeptLayer
from batching.model_files.model_types import ENCODER_TYPES, module_of

_LAYER_KEYS: Final = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_HEAD_KEYS: Final = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEAD_KEYS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HIDDEN_KEYS: Final = ("hidden_size", "model_dim", "n_embd")
_WINDOW_KEYS: Final = ("sliding_window", "sliding_window_size", "window_size")
# What mlx-lm takes for sizes that configs leave out and that do not follow from others.
_GEMMA: Final = {"head_dim": 256, "sliding_window": 512}
DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "afmoe": {"head_dim": 64, "sliding_window": 2048},
    "cohere2": {"head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon_h1": {"head_dim": 64, "mamba_d_conv": 4},
    "gemma3": {
        **_GEMMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window_pattern": 6,
    },
    "gemma3_text": {
        **_GEMMA,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window_pattern": 6,
    },
    "gemma4": {
        **_GEMMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "global_head_dim": 512,
        "num_kv_shared_layers": 20,
        "sliding_window_pattern": 5,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "laguna": {"head_dim": 128, "sliding_window": 512},
    "muse_glimmer": {"head_dim": 128, "sliding_window": 2048},
    "olmo3": {"sliding_window_pattern": 4},
    "plamo3": {"head_dim": 128, "window_size": 2048, "sliding_window_pattern": 8},
    "talkie": {"head_dim": 128},
}
_ALIKE: Final = {"gemma4_text": "gemma4", "gemma3n_text": "gemma3n"}


class _NotTold(Exception):
    """The config does not tell it."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Reads the sizes of a config, which different models name differently."""

    config: Mapping[str, Any]

    def any_of(self, *names: str) -> int:
        for name in names:
            if isinstance(value := self.config.get(name), int) and value > 0:
                return value
        raise _NotTold(names[0])

    def one_of(self, default: int, *names: str) -> int:
        try:
            return self.any_of(*names)
        except _NotTold:
            return default

    def texts(self, name: str) -> list[str]:
        value = self.config.get(name)
        return [str(item) for item in value] if isinstance(value, list | str) else []

    @property
    def num_layers(self) -> int:
        return self.any_of(*_LAYER_KEYS)

    @property
    def num_heads(self) -> int:
        return self.any_of(*_HEAD_KEYS)

    @property
    def num_kv_heads(self) -> int:
        return self.one_of(self.num_heads, *_KV_HEAD_KEYS)

    @property
    def hidden_size(self) -> int:
        return self.any_of(*_HIDDEN_KEYS)

    @property
    def head_dim(self) -> int:
        return self.one_of(self.hidden_size // self.num_heads, "head_dim")

    @property
    def plain_layer(self) -> KeptLayer:
        return KeptLayer(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def latent_layer(self) -> KeptLayer:
        dim = self.any_of("kv_lora_rank") + self.any_of("qk_rope_head_dim")
        return KeptLayer(1, dim, 0)

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer."""
        if (window := self.one_of(0, *_WINDOW_KEYS)) == 0:
            return [None] * self.num_layers
        return [window if is_windowed else None for is_windowed in self._are_windowed()]

    def _are_windowed(self) -> list[bool]:
        count = self.num_layers
        if kinds := self.texts("layer_types"):
            return ["sliding" in kind for kind in kinds[:count]]
        pattern = self.config.get("sliding_window_pattern")
        if isinstance(pattern, str):
            return [pattern[index % len(pattern)] == "L" for index in range(count)]
        if not isinstance(pattern, int):
            raise _NotTold("sliding_window_pattern")
        return [(index + 1) % pattern != 0 for index in range(count)]


_Rule = Callable[[_Sizes], Kept]


def _all_alike(sizes: _Sizes) -> Kept:
    return Kept((sizes.plain_layer,) * sizes.num_layers)


def _without_groups(sizes: _Sizes) -> Kept:
    """Return keys and values of as many heads as there are queries."""
    dim = sizes.one_of(sizes.hidden_size // sizes.num_heads, "kv_channels")
    return Kept((KeptLayer(sizes.num_heads, dim, dim),) * sizes.num_layers)


def _of_one_head(sizes: _Sizes) -> Kept:
    dim = sizes.hidden_size // sizes.num_heads
    return Kept((KeptLayer(1, dim, dim),) * sizes.num_layers)


def _read_by_the_model(sizes: _Sizes) -> Kept:
    return Kept((sizes.plain_layer._replace(is_gathered=True),) * sizes.num_layers)


def _windowed(sizes: _Sizes) -> Kept:
    return Kept(tuple(sizes.plain_layer._replace(window=window) for window in sizes.windows))


def _perhaps_windowed(sizes: _Sizes) -> Kept:
    """Return windows where the config names the layers that have one: mlx-lm ignores others."""
    return _windowed(sizes) if sizes.texts("layer_types") else _all_alike(sizes)


def _gemma4(sizes: _Sizes) -> Kept:
    """Return layers with windows and larger ones without; the last ones share those of others."""
    count = sizes.num_layers - sizes.one_of(0, "num_kv_shared_layers")
    own = sizes.plain_layer
    is_shared = bool(sizes.config.get("attention_k_eq_v"))
    heads = (
        sizes.one_of(own.num_heads, "num_global_key_value_heads") if is_shared else own.num_heads
    )
    dim = sizes.one_of(own.key_dim, "global_head_dim")
    layers = (
        own._replace(window=window) if window else KeptLayer(heads, dim, dim)
        for window in sizes.windows[:count]
    )
    return Kept(tuple(layers))


def _llama4(sizes: _Sizes) -> Kept:
    """Return chunks in all layers but every fourth."""
    chunk = sizes.any_of("attention_chunk_size")
    layers = (
        sizes.plain_layer._replace(window=chunk if (index + 1) % 4 else None)
        for index in range(sizes.num_layers)
    )
    return Kept(tuple(layers))


def _mimo_v2(sizes: _Sizes) -> Kept:
    window = sizes.any_of(*_WINDOW_KEYS)
    value_dim = sizes.one_of(sizes.head_dim, "v_head_dim")
    full = KeptLayer(sizes.num_kv_heads, sizes.head_dim, value_dim)
    windowed = KeptLayer(
        sizes.any_of("swa_num_key_value_heads"),
        sizes.any_of("swa_head_dim"),
        sizes.any_of("swa_v_head_dim"),
        window,
    )
    kinds = sizes.texts("hybrid_layer_pattern")
    return Kept(tuple(windowed if kind == "1" else full for kind in kinds[: sizes.num_layers]))


def _latent(sizes: _Sizes) -> Kept:
    return Kept((sizes.latent_layer,) * sizes.num_layers)


def _two_latents_a_layer(sizes: _Sizes) -> Kept:
    return Kept((sizes.latent_layer,) * (2 * sizes.any_of("num_layers")))


def _latent_with_index(sizes: _Sizes) -> Kept:
    dim = sizes.any_of("index_head_dim")
    layers = sizes.latent_layer, KeptLayer(1, dim, dim)
    return Kept(tuple(layer._replace(is_gathered=True) for layer in layers) * sizes.num_layers)


def _from_latents(sizes: _Sizes) -> Kept:
    """Return keys and values of all heads, which mlx-lm makes of latents before it keeps them."""
    key_dim = sizes.any_of("qk_nope_head_dim") + sizes.any_of("qk_rope_head_dim")
    layer = KeptLayer(sizes.num_heads, key_dim, sizes.any_of("v_head_dim"))
    return Kept((layer,) * sizes.num_layers)


def _delta_net(sizes: _Sizes) -> Kept:
    """Return attention in some layers, and the state of a gated delta net in the others."""
    kinds = sizes.texts("layer_types")
    interval = sizes.one_of(4, "full_attention_interval")
    if not kinds:
        kinds = [
            "linear" if (index + 1) % interval else "full" for index in range(sizes.num_layers)
        ]
    num_linear = sum("linear" in kind for kind in kinds)
    key_heads, value_heads = (
        sizes.any_of("linear_num_key_heads"),
        sizes.any_of("linear_num_value_heads"),
    )
    key_dim, value_dim = sizes.any_of("linear_key_head_dim"), sizes.any_of("linear_value_head_dim")
    width = 2 * key_heads * key_dim + value_heads * value_dim
    state = _convolved(sizes, width, "linear_conv_kernel_dim") + value_heads * value_dim * key_dim
    return Kept((sizes.plain_layer,) * (len(kinds) - num_linear), num_linear * state)


def _convolved(sizes: _Sizes, width: int, *names: str) -> int:
    """Return the numbers of the last inputs of a convolution."""
    return (sizes.any_of(*names) - 1) * width


def _short_convolutions(sizes: _Sizes) -> Kept:
    if kinds := sizes.texts("layer_types"):
        num_full = sum("full" in kind for kind in kinds)
    else:
        num_full = len(sizes.texts("full_attn_idxs"))
    state = _convolved(sizes, sizes.hidden_size, "conv_L_cache")
    return Kept((sizes.plain_layer,) * num_full, max(0, sizes.num_layers - num_full) * state)


def _mamba(sizes: _Sizes) -> Kept:
    """Return the states of Mamba's first version."""
    width = sizes.any_of("intermediate_size", "d_inner")
    return Kept((), sizes.num_layers * _mamba_state(sizes, width, "conv_kernel", "state_size"))


def _mamba_state(sizes: _Sizes, width: int, kernel: str, state: str) -> int:
    return _convolved(sizes, width, kernel) + width * sizes.any_of(state)


def _jamba(sizes: _Sizes) -> Kept:
    period, offset = sizes.any_of("attn_layer_period"), sizes.one_of(0, "attn_layer_offset")
    num_full = sum(index % period == offset for index in range(sizes.num_layers))
    width = sizes.any_of("mamba_expand") * sizes.hidden_size
    state = _mamba_state(sizes, width, "mamba_d_conv", "mamba_d_state")
    return Kept((sizes.plain_layer,) * num_full, (sizes.num_layers - num_full) * state)


def _mamba2_state(sizes: _Sizes, heads: str, dim: int, groups: str, state: str, kernel: str) -> int:
    width = sizes.any_of(heads) * dim
    numbers = sizes.any_of(state)
    convolved = _convolved(sizes, width + 2 * sizes.one_of(1, groups) * numbers, kernel)
    return convolved + width * numbers


def _mamba2(sizes: _Sizes) -> Kept:
    dim = sizes.any_of("head_dim")
    state = _mamba2_state(sizes, "num_heads", dim, "n_groups", "state_size", "conv_kernel")
    return Kept((), sizes.num_layers * state)


def _nemotron_h(sizes: _Sizes) -> Kept:
    kinds = sizes.texts("hybrid_override_pattern")
    dim = sizes.any_of("mamba_head_dim")
    state = _mamba2_state(
        sizes, "mamba_num_heads", dim, "n_groups", "ssm_state_size", "conv_kernel"
    )
    return Kept((sizes.plain_layer,) * kinds.count("*"), kinds.count("M") * state)


def _mamba_of_hybrids(sizes: _Sizes) -> int:
    dim = sizes.any_of("mamba_d_head")
    names = ("mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return _mamba2_state(sizes, "mamba_n_heads", dim, *names)


def _granite_hybrid(sizes: _Sizes) -> Kept:
    kinds = sizes.texts("layer_types")
    num_mamba = kinds.count("mamba")
    layers = (sizes.plain_layer,) * (len(kinds) - num_mamba)
    return Kept(layers, num_mamba * _mamba_of_hybrids(sizes) if num_mamba else 0)


def _falcon_h1(sizes: _Sizes) -> Kept:
    layers = (sizes.plain_layer,) * sizes.num_layers
    return Kept(layers, sizes.num_layers * _mamba_of_hybrids(sizes))


def _kimi_linear(sizes: _Sizes) -> Kept:
    linear = _Sizes(sizes.config.get("linear_attn_config") or {})
    num_linear = len(linear.texts("kda_layers"))
    heads, dim = linear.any_of("num_heads"), linear.any_of("head_dim")
    state = _convolved(linear, 3 * heads * dim, "short_conv_kernel_size") + heads * dim * dim
    return Kept((sizes.latent_layer,) * (sizes.num_layers - num_linear), num_linear * state)


def _types(rule: _Rule, names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: Final[Mapping[str, _Rule]] = {
    **_types(lambda _: Kept(()), " ".join(ENCODER_TYPES)),
    **_types(
        _all_alike,
        "Klear apertus bailing_moe cohere deepseek dots1 ernie4_5 ernie4_5_moe exaone gemma gemma2 glm glm4 "
        "glm4_moe glm4v glm4v_moe granite granitemoe helium hunyuan_v1_dense internlm2 internlm3 lille-130m llama4_text mimo "
        "minicpm minimax mistral3 mixtral nanochat nemotron olmo2 olmoe phi phi3 phimoe pixtral qwen2 "
        "qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open starcoder2 "
        "telechat3",
    ),
    **_types(_without_groups, "gpt2 gpt_neox gptj phixtral qwen talkie"),
    **_types(_of_one_head, "gpt_bigcode"),
    **_types(_read_by_the_model, "stablelm"),
    **_types(_perhaps_windowed, "llama ministral3"),
    **_types(
        _windowed,
        "afmoe cohere2 exaone4 exaone_moe gemma3 gemma3_text gpt_oss laguna mellum muse_glimmer olmo3 plamo3 "
        "spark2_5",
    ),
    **_types(_gemma4, "gemma3n gemma3n_text gemma4 gemma4_text"),
    **_types(_llama4, "llama4"),
    **_types(_mimo_v2, "mimo_v2_flash"),
    **_types(_latent, "deepseek_v3 glm4_moe_lite kimi_k25 kimi_vl mistral4"),
    **_types(_two_latents_a_layer, "longcat_flash"),
    **_types(_latent_with_index, "deepseek_v32 glm_moe_dsa"),
    **_types(_from_latents, "deepseek_v2 minicpm3 youtu_llm"),
    **_types(_delta_net, "qwen3_5 qwen3_5_moe qwen3_next olmo_hybrid prism_hadamard_qwen35"),
    **_types(_short_convolutions, "lfm2 lfm2-vl lfm2_moe"),
    **_types(_mamba, "mamba"),
    **_types(_jamba, "jamba"),
    **_types(_mamba2, "mamba2"),
    **_types(_nemotron_h, "nemotron_h"),
    **_types(_granite_hybrid, "granitemoehybrid"),
    **_types(_falcon_h1, "falcon_h1"),
    **_types(_kimi_linear, "kimi_linear kimi_k3"),
}


def kept_of(config: Mapping[str, Any]) -> Kept | None:
    """Return what a model keeps of each request; None if its config does not tell."""
    model_type = module_of(str(config.get("model_type")))
    text = config.get("text_config")
    declared = {**config, **text} if isinstance(text, dict) else config
    given = {key: value for key, value in declared.items() if value is not None}
    defaults = DEFAULTS.get(_ALIKE.get(model_type, model_type), {})
    try:
        return _RULES[model_type](_Sizes({**defaults, **given}))
    except (_NotTold, KeyError):
        return None
