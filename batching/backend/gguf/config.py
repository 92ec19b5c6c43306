"""mlx-lm's config of a GGUF file's model, or why mlx-lm would compute something else."""

from typing import Final

import mlx.core as mx

from batching.backend.gguf.architecture.known import ARCHITECTURES, Architecture
from batching.backend.gguf.architecture.metadata import Config, ModelMetadata
from batching.backend.gguf.file.quantizations import read_weight
from batching.model_files.gguf_header import GgufHeader

_SCALES: Final = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")


def architecture_of(header: GgufHeader) -> tuple[Architecture, ModelMetadata]:
    family = header.text("general.architecture", "none") or "none"
    if family not in ARCHITECTURES:
        raise header.refuse(
            f"architecture {family} is not known: take the model as MLX or Hugging Face directory "
            f"(known: {', '.join(ARCHITECTURES)})"
        )
    return ARCHITECTURES[family], ModelMetadata(header, family)


def read_config(header: GgufHeader) -> Config:
    """Build mlx-lm's config of the model, or refuse what mlx-lm would compute differently."""
    architecture, metadata = architecture_of(header)
    _reject_unsupported(architecture, metadata)
    values = {key: value(metadata) for key, value in architecture.values.items()}
    return _common_values(architecture, metadata) | values


def _common_values(architecture: Architecture, metadata: ModelMetadata) -> Config:
    header = metadata.header
    if not (embedding := header.tensors.get("token_embd.weight")):
        raise header.refuse("it has no tensor token_embd.weight")
    biases = [name for name in header.tensors if name.endswith(".bias")]
    return {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.num_layers,
        "intermediate_size": metadata.integer("feed_forward_length", 0),
        "num_attention_heads": metadata.num_heads,
        "num_key_value_heads": metadata.num_kv_heads,
        "head_dim": metadata.head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_traditional": False,
        "rope_scaling": _rope_scaling(architecture, metadata),
        "partial_rotary_factor": metadata.rotated_share,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", metadata.integer("context_length")
        ),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(".attn_" in name for name in biases),
        "mlp_bias": any(".ffn_" in name for name in biases),
    }


def _reject_unsupported(architecture: Architecture, metadata: ModelMetadata) -> None:
    head_dim = metadata.head_dim
    usual = metadata.integer("embedding_length") // metadata.num_heads
    is_latent = "kv_lora_rank" in architecture.values
    refused = {
        "mixture of experts": metadata.integer("expert_count", 0) > 0
        and "num_experts_per_tok" not in architecture.values,
        "heads whose keys and values differ in size": not is_latent
        and head_dim != metadata.integer("attention.value_length", head_dim),
        "rotary embedding of a part of the head": metadata.rotated_share != 1
        and not architecture.rotates_a_part,
        f"a head size of {head_dim} in {metadata.family}": architecture.model_type
        in _OF_USUAL_HEADS
        and head_dim != usual,
        "soft caps on logits": metadata.number("final_logit_softcapping", 0) != 0
        or metadata.number("attn_logit_softcapping", 0) != 0,
        "scaled embeddings, residuals or logits": any(map(metadata.has, _SCALES))
        and "logits_scaling" not in architecture.values,
        "attention scaled by position": metadata.has("attention.temperature_scale"),
        "attention that is not causal": not metadata.number("attention.causal", True),
        "no rotary embedding": metadata.family == "granite"
        and not metadata.number("rope.scaling.finetuned", True),
        "recurrent layers that are not at regular distances": not _is_regular(metadata),
    }
    for reason, applies in refused.items():
        if applies:
            raise metadata.header.refuse(reason)


# mlx-lm's models of these have no head_dim of their own.
_OF_USUAL_HEADS: Final = ("qwen2", "phi3", "granite", "lfm2", "lfm2_moe")


def _is_regular(metadata: ModelMetadata) -> bool:
    interval = metadata.integer("full_attention_interval", 4)
    layers = metadata.numbers("attention.recurrent_layers")[: metadata.num_layers]
    return all(bool((i + 1) % interval) == bool(is_one) for i, is_one in enumerate(layers))


def _rope_scaling(architecture: Architecture, metadata: ModelMetadata) -> Config | None:
    prefix = "rope.scaling."
    # Files of 2023 name the factor otherwise; without a type it is linear scaling.
    factor = metadata.number(f"{prefix}factor", metadata.number("rope.scale_linear", 1.0))
    kind = metadata.text(f"{prefix}type", "linear")
    if "rope_factors_long.weight" in metadata.header.tensors:
        kind = "longrope"
    elif kind == "linear" and factor in (0, 1):
        kind = "none"
    is_known = kind == "none" or kind in architecture.rope_scalings
    if not is_known or _has_other_factors(metadata, kind):
        raise metadata.header.refuse(f"rope scaling {kind} with its parameters is not supported")
    match kind:
        case "none":
            return None
        case "longrope":
            return {"type": kind} | _rope_factors(metadata)
        case "yarn":
            return {"type": kind, "factor": metadata.number(f"{prefix}factor")} | _yarn(metadata)
        case _:
            return {"type": kind, "factor": factor}


def _has_other_factors(metadata: ModelMetadata, kind: str) -> bool:
    """Tell whether attention is scaled by what mlx-lm would not multiply with."""
    prefix = "rope.scaling."
    return (
        (kind != "longrope" and metadata.number(f"{prefix}attn_factor", 1.0) != 1.0)
        or (kind == "yarn" and metadata.number(f"{prefix}yarn_ext_factor", 1.0) != 1.0)
        or (
            "kv_lora_rank" not in ARCHITECTURES[metadata.family].values
            and metadata.number(f"{prefix}yarn_log_multiplier", 0) != 0
        )
    )


def _rope_factors(metadata: ModelMetadata) -> Config:
    factors: Config = {}
    for length in ("long", "short"):
        if (name := f"rope_factors_{length}.weight") not in metadata.header.tensors:
            raise metadata.header.refuse(f"it has no tensor {name}")
        values = read_weight(metadata.header, name, None).dense()
        factors[f"{length}_factor"] = values.astype(mx.float32).tolist()
    return factors


def _yarn(metadata: ModelMetadata) -> Config:
    original = "rope.scaling.original_context_length"
    values: Config = {
        "original_max_position_embeddings": metadata.integer(
            original, metadata.integer("context_length")
        )
    }
    for key in ("beta_fast", "beta_slow"):
        if metadata.has(f"rope.scaling.yarn_{key}"):
            values[key] = metadata.number(f"rope.scaling.yarn_{key}")
    if metadata.family == "gpt-oss":
        # As its publisher's config says; no key of the file does.
        values["truncate"] = False
    # The converter writes a tenth of DeepSeek's mscale.
    if scale := 10 * metadata.number("rope.scaling.yarn_log_multiplier", 0):
        values |= {"mscale": scale, "mscale_all_dim": scale}
    return values
