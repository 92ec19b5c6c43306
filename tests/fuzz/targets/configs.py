"""A directory's JSON files; an input is JSON, their contents by their names."""

import json
from typing import Final

from tests.fuzz.loading import load, new_folder
from tests.fuzz.mutations import json_mutation
from tests.fuzz.target import Target
from tests.support.model_files import write_model

_NAMES: Final = ("config.json", "tokenizer_config.json", "generation_config.json", "modules.json")
_WORDS: Final = (
    *("model_type", "llama", "qwen2", "gemma3_text", "mamba", "bert", "hidden_size", "vocab_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "text_config"),
    *("intermediate_size", "rope_scaling", "rope_theta", "rope_type", "linear", "factor", "yarn"),
    *("quantization", "quantization_config", "group_size", "bits", "mode", "eos_token_id"),
    *("max_position_embeddings", "tie_word_embeddings", "layer_types", "sliding_window"),
    *("tokenizer_class", "auto_map", "chat_template", "chat_template_type", "tool_parser_type"),
    *("architectures", "temperature", "top_p", "max_length", *_NAMES),
)

_MODEL: Final = write_model(new_folder())


def run(data: bytes) -> None:
    """The model is loaded or rejected."""
    try:
        given = json.loads(data)
        texts = {name: json.dumps(given[name]) for name in _NAMES if name in given}
    except (ValueError, TypeError, RecursionError):
        return
    for name in _NAMES:
        (_MODEL / name).unlink(missing_ok=True)
    for name, text in texts.items():
        (_MODEL / name).write_text(text)
    load(_MODEL)


TARGET: Final = Target(run=run, mutate=json_mutation(*_WORDS), cpu_seconds=20)
