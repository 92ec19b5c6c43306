"""Tokenizers of GGUF files; an input is JSON, the metadata by their keys."""

import json
import struct
from itertools import islice
from typing import Any, Final

from batching.backend.gguf.tokenizer import build_tokenizer
from batching.model_files.gguf_header import read_header
from tests.fuzz.loading import new_folder
from tests.fuzz.mutations import json_mutation
from tests.fuzz.target import Target
from tests.support.gguf_writer import write_gguf

_WORDS: Final = (
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "gpt2", "llama"),
    *("tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "gemma4"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template"),
    *("tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token", "general.architecture"),
    *("<|im_end|>", "<unk>", "Ġ", "▁", "a", "ab", "a b", "<0x0A>", "phi3", "qwen2", 3, 4, 0.5),
)
_PATH: Final = new_folder() / "tokenizer.gguf"
_TEXT: Final = "a b ab\n12 é<|im_end|>"
_MAX_KEYS: Final = 40


def run(data: bytes) -> None:
    """It is rejected, or encodes a text and decodes it."""
    try:
        given = json.loads(data)
        metadata = {str(key): _value(value) for key, value in islice(given.items(), _MAX_KEYS)}
        write_gguf(_PATH, metadata, {})
    except (
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        LookupError,
        RecursionError,
        struct.error,
    ):
        # Such a file cannot be written.
        return
    if (tokenizer := _built()) is not None:
        tokenizer.decode(tokenizer.encode(_TEXT))


def _value(value: Any) -> Any:
    """Return what a file can have: a number, a text, or a list whose items are alike."""
    if isinstance(value, list):
        items = [item for item in value if isinstance(item, type(value[0]))]
        return [_value(item) for item in items if not isinstance(item, list)]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _built() -> Any:
    """Return the tokenizer, or None; what others' code raises is a rejection once the file is loaded."""
    try:
        return build_tokenizer(read_header(_PATH))
    except MemoryError:
        raise
    except BaseException:
        return None


TARGET: Final = Target(
    run=run,
    mutate=json_mutation(*_WORDS),
    max_bytes=1 << 20,
    memory_bytes=1 << 28,
)
