"""The context that a model's config declares."""

from collections.abc import Mapping
from typing import Any, Final

_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_STRETCHED: Final = ("linear", "dynamic", "yarn")
# Command-R's max_position_embeddings is how long its first prompts in training were.
_LONGER: Final = {"cohere": "model_max_length"}
# Gemma 3's number is that after scaling, and configs leave it out where it is transformers' default.
_GEMMA_3: Final = frozenset({"gemma3", "gemma3_text"})
_CONTEXT_OF_GEMMA_3: Final = 131_072


def declared_context(config: Mapping[str, Any]) -> int | None:
    """Return the context that a config declares, with its rope scaling; None if it declares none."""
    text_config = config.get("text_config")
    parts = (config, text_config if isinstance(text_config, dict) else {})
    is_gemma_3 = any(part.get("model_type") in _GEMMA_3 for part in parts)
    for part in parts:
        for key in (_LONGER.get(part.get("model_type", ""), _KEYS[0]), *_KEYS):
            if isinstance(length := part.get(key), int) and length > 0:
                return length if is_gemma_3 else _stretched(length, part)
    return _CONTEXT_OF_GEMMA_3 if is_gemma_3 else None


def _stretched(length: int, config: Mapping[str, Any]) -> int:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if (scaling.get("type") or scaling.get("rope_type")) not in _STRETCHED:
        return length
    original = scaling.get("original_max_position_embeddings") or length
    return max(length, int(original * (scaling.get("factor") or 1)))
