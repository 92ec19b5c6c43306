"""Embedding models and a reranker of which other libraries have computed vectors and scores.

Needs neither MLX nor torch: both sides read it.
"""

from dataclasses import dataclass
from typing import Any, Final

_NAMES: Final = ("<pad>", "<unk>", "<end>", "yes", "no", ":", "q", "<|im_start|>", "<|im_end|>")
WORDS: Final = {word: index for index, word in enumerate([*_NAMES, *map(str, range(87))])}

_CONFIG: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DENSE_SIZE: Final = 24


@dataclass(frozen=True)
class Embedder:
    model_type: str
    pooling: str
    is_dense: bool = False
    is_normalized: bool = True


EMBEDDERS: Final = {
    "last": Embedder("qwen3", "lasttoken"),
    "mean": Embedder("llama", "mean"),
    "first, not normalized": Embedder("qwen2", "cls", is_normalized=False),
    "dense": Embedder("qwen3", "mean", is_dense=True),
}
# Words of the tokenizer; the last is longer than a chunk of the tests.
TEXTS: Final = ("1", "7 3 yes 44 9 no 81 : 5", " ".join(str(i * i % 87) for i in range(70)))

RERANKER: Final = "qwen3"
INSTRUCTION: Final = "4 8 15"
QUERY: Final = "16 23 42"


def config_of(model_type: str) -> dict[str, Any]:
    """Return a config of that type; Qwen 2 has no size of heads."""
    config = dict(_CONFIG)
    if model_type == "qwen2":
        del config["head_dim"]
    return config


def rerank_prompt(instruction: str, query: str, document: str) -> str:
    """Return a prompt of a template that the tests set."""
    return f"{instruction} : {query} : {document} :"


# The same as a template.
RERANK_TEMPLATE: Final = (
    "{% for m in messages %}{{ m.content + ' : ' if m.role != 'document' else m.content + ' :' }}"
    "{% endfor %}"
)
