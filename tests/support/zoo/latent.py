"""Latent attention, with and without an index of the context."""

from typing import Final

from scripts.make_model.tiny_configs import DENSE_FIRST, EXPERTS, LATENT, WINDOW, Config, nested

_DEEPSEEK: Final[Config] = {**DENSE_FIRST, **LATENT, "topk_method": "noaux_tc"}
_INDEX: Final[Config] = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
_YARN: Final[Config] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LONGCAT: Final[Config] = {
    **DENSE_FIRST,
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 64,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

LATENT_MODELS: Final[dict[str, Config]] = {
    "glm4_moe_lite": _DEEPSEEK,
    "kimi_k25": nested("deepseek_v3", **_DEEPSEEK),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, **_INDEX},
    "glm_moe_dsa": {
        **_DEEPSEEK,
        **_INDEX,
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy", "rope_scaling": _YARN},
    "kimi_vl": nested("kimi_vl_text", **_DEEPSEEK),
    "mistral4": {
        **_DEEPSEEK,
        "rope_parameters": {**_YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_split_num": 2},
    "minicpm3": {
        **LATENT,
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    },
    "youtu_llm": LATENT,
    "deepseek_v41": {
        **EXPERTS,
        "num_hidden_layers": 6,
        "head_dim": 64,
        "q_lora_rank": 96,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 32,
        "rms_norm_eps": 1e-20,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 0, 4, 4, 4, 4],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 3, 4],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
    },
}
