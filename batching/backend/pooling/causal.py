"""Models whose tokens see those after them, which this server does not compute."""

from collections.abc import Mapping
from typing import Any, Final

from batching.model_files.model_types import ENCODER_TYPES

# Parts of the names of encoders: BERT, RoBERTa, ModernBERT, ...
_ENCODERS: Final = ("bert", "roberta")
_OTHER_ENCODERS: Final = frozenset({"mpnet", "electra", "deberta", "deberta-v2", "t5", "xlnet"})
# Keys of a config, and the values that let tokens see those after them.
_BIDIRECTIONAL: Final = {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}


def why_not_causal(config: Mapping[str, Any]) -> str | None:
    """Return why a model's attention is not causal; None if it is."""
    model_type = str(config.get("model_type", ""))
    if model_type in _OTHER_ENCODERS or any(part in model_type for part in _ENCODERS):
        return (
            f"{model_type} is an encoder, whose tokens see those after them; of these "
            f"{', '.join(ENCODER_TYPES)} are served"
        )
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        for key, values in _BIDIRECTIONAL.items():
            if part.get(key) in values:
                return (
                    f"its attention is bidirectional ({key} in its config), and only causal attention "
                    "is served: its embeddings would be wrong; decoders such as Qwen3-Embedding embed"
                )
    return None
