"""Encoders and cross-encoders of which other libraries have computed vectors and scores.

Needs neither MLX nor torch: both sides read it.
"""

from typing import Any, Final

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
# The padding of RoBERTa's kind is behind position 1, as in the published models.
_ROBERTA: Final = _COMMON | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 98}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "bert": _COMMON | {"type_vocab_size": 2},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "modernbert": _COMMON
    | {
        "num_hidden_layers": 4,
        "local_attention": 16,
        "global_attn_every_n_layers": 3,
        "classifier_pooling": "mean",
    },
}
POOLING: Final = {"bert": "mean", "roberta": "cls", "xlm-roberta": "cls", "modernbert": "mean"}
# Words of the tokenizer; the last is longer than a window, and <pad> has a position of its own in RoBERTa.
TEXTS: Final = (
    "1",
    "7 3 yes 44 9 no 81 : 5",
    "5 <unk> 6",
    " ".join(str(i * i % 87) for i in range(80)),
)
QUERY: Final = "16 23 42"
