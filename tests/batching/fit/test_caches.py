"""What models keep of a request, by their configs; tests/batching/backend/test_fit.py has the models themselves."""

from typing import Any, Final

from batching.fit.caches import kept_of
from batching.fit.kept import Kept, KeptLayer
from tests.support.rows import rows

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PLAIN: Final = KeptLayer(2, 32, 32)
WINDOW: Final = PLAIN._replace(window=12)
LATENT: Final[dict[str, Any]] = {
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 32,
}
LATENT_LAYER: Final = KeptLayer(1, 80, 0)
INDEXED: Final = (LATENT_LAYER._replace(is_gathered=True), KeptLayer(1, 32, 32, is_gathered=True))
DELTA: Final[dict[str, Any]] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
MAMBA2: Final[dict[str, Any]] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@rows(
    ("model_type", "config", "layers", "state"),
    [
        ("llama", {}, (PLAIN,) * 4, 0),
        ("mistral", {"sliding_window": 12}, (PLAIN,) * 4, 0),
        ("llama", {"sliding_window": 12, "layer_types": [SLIDING, FULL] * 2}, (WINDOW, PLAIN) * 2, 0),
        ("qwen3", {"head_dim": 8}, (KeptLayer(2, 8, 8),) * 4, 0),
        ("gpt_neox", {}, (KeptLayer(4, 32, 32),) * 4, 0),
        ("gpt_bigcode", {}, (KeptLayer(1, 32, 32),) * 4, 0),
        ("stablelm", {}, (PLAIN._replace(is_gathered=True),) * 4, 0),
        ("gemma3_text", {"head_dim": 32, "sliding_window_pattern": 2, "sliding_window": 12}, (WINDOW, PLAIN) * 2, 0),
        ("exaone4", {"sliding_window": 12, "sliding_window_pattern": "LG"}, (WINDOW, PLAIN) * 2, 0),
        ("exaone4", {"sliding_window": None}, (PLAIN,) * 4, 0),
        (
            "gemma4_text",
            {
                "head_dim": 32,
                "global_head_dim": 64,
                "num_kv_shared_layers": 2,
                "sliding_window": 12,
                "layer_types": [SLIDING, FULL] * 2,
            },
            (WINDOW, KeptLayer(2, 64, 64)),
            0,
        ),
        (
            "gemma4",
            {
                "text_config": {
                    "head_dim": 32,
                    "global_head_dim": 64,
                    "attention_k_eq_v": True,
                    "num_global_key_value_heads": 1,
                    "num_kv_shared_layers": 0,
                    "sliding_window": 12,
                    "layer_types": [SLIDING, FULL] * 2,
                }
            },
            (WINDOW, KeptLayer(1, 64, 64)) * 2,
            0,
        ),
        ("llama4", {"text_config": {"attention_chunk_size": 12}}, (WINDOW,) * 3 + (PLAIN,), 0),
        (
            "mimo_v2_flash",
            {
                "sliding_window_size": 12,
                "v_head_dim": 64,
                "swa_num_key_value_heads": 4,
                "swa_head_dim": 16,
                "swa_v_head_dim": 8,
                "hybrid_layer_pattern": [0, 1, 1, 0],
            },
            (KeptLayer(2, 32, 64), *(KeptLayer(4, 16, 8, 12),) * 2, KeptLayer(2, 32, 64)),
            0,
        ),
        ("deepseek_v3", LATENT, (LATENT_LAYER,) * 4, 0),
        ("longcat_flash", {**LATENT, "num_layers": 2}, (LATENT_LAYER,) * 4, 0),
        ("deepseek_v32", LATENT, INDEXED * 4, 0),
        ("deepseek_v2", LATENT, (KeptLayer(4, 48, 32),) * 4, 0),
        ("qwen3_next", DELTA, (PLAIN,), 3 * 4864),
        ("olmo_hybrid", {**DELTA, "layer_types": ["linear_attention", FULL]}, (PLAIN,), 4864),
        ("lfm2", {"conv_L_cache": 3, "layer_types": ["conv", "conv", FULL, FULL]}, (PLAIN,) * 2, 512),
        ("lfm2", {"conv_L_cache": 3, "full_attn_idxs": [1]}, (PLAIN,), 3 * 256),
        ("mamba", {"intermediate_size": 256, "conv_kernel": 4, "state_size": 16}, (), 4 * 4864),
        (
            "jamba",
            {
                "attn_layer_period": 4,
                "attn_layer_offset": 1,
                "mamba_expand": 2,
                "mamba_d_conv": 4,
                "mamba_d_state": 16,
            },
            (PLAIN,),
            3 * 4864,
        ),
        (
            "mamba2",
            {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16, "conv_kernel": 4},
            (),
            4 * 2624,
        ),
        (
            "nemotron_h",
            {
                "hybrid_override_pattern": "M*-M",
                "mamba_num_heads": 4,
                "mamba_head_dim": 32,
                "n_groups": 2,
                "ssm_state_size": 16,
                "conv_kernel": 4,
            },
            (PLAIN,),
            2 * 2624,
        ),
        ("granitemoehybrid", {**MAMBA2, "layer_types": ["mamba", "attention"]}, (PLAIN,), 2624),
        ("granitemoehybrid", {"layer_types": ["attention"]}, (PLAIN,), 0),
        ("falcon_h1", {**MAMBA2, "head_dim": 32}, (PLAIN,) * 4, 4 * 2624),
        (
            "kimi_linear",
            {
                **LATENT,
                "linear_attn_config": {
                    "kda_layers": [1, 2, 3],
                    "num_heads": 4,
                    "head_dim": 32,
                    "short_conv_kernel_size": 4,
                },
            },
            (LATENT_LAYER,),
            3 * 5248,
        ),
    ],
)  # fmt: skip
def test_a_config_tells_what_a_model_keeps(
    model_type: str, config: dict[str, Any], layers: tuple[KeptLayer, ...], state: int
) -> None:
    assert kept_of({"model_type": model_type, **SIZES, **config}) == Kept(layers, state)


@rows(
    "config",
    [
        {},
        {"model_type": "no_such_type"},
        {"model_type": "llama"},
        {"model_type": "llama", **SIZES, "num_hidden_layers": "many"},
        {"model_type": "mellum", **SIZES, "sliding_window": 12},
        {"model_type": "kimi_linear", **SIZES, "linear_attn_config": None},
        {"model_type": "rwkv7", **SIZES},
    ],
)
def test_what_a_config_does_not_tell_is_unknown(config: dict[str, Any]) -> None:
    assert kept_of(config) is None


def test_a_token_takes_the_bytes_of_all_layers() -> None:
    kept = Kept((PLAIN, WINDOW, LATENT_LAYER), state_numbers=10)
    assert kept.bytes_per_token(2) == 2 * (128 + 128 + 80)
    assert kept.window_bytes_per_token(4) == 4 * 128
    assert (kept.window, kept.state_bytes, kept.is_gathered) == (12, 40, False)
    # A scale for each head of keys and of values; latents are never of 8 bits.
    assert kept.bytes_per_token(1) == 2 * (128 + 2 * 8) + 2 * 80
    assert kept.bytes_per_token(1, 4) == 2 * (128 + 2 * 8) + 4 * 80
    assert Kept(INDEXED).is_gathered
    assert Kept(()).window is None
