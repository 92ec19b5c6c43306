"""GGUF files, byte by byte: their header, and what becomes of its values and tensors."""

from pathlib import Path
from typing import Final

from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header
from tests.fuzz.loading import load, new_folder
from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.target import Target

_WORDS: Final = (
    *(b"GGUF\3\0\0\0", b"general.architecture", b"general.alignment", b"llama.block_count"),
    *(b"tokenizer.ggml.tokens", b"llama.attention.head_count", b"token_embd.weight"),
)
_PATH: Final = new_folder() / "model.gguf"


def run(data: bytes) -> None:
    """It is loaded or rejected, and all that its header tells of is in it."""
    _PATH.write_bytes(data)
    _check_header(_PATH, len(data))
    load(_PATH)


def _check_header(path: Path, size: int) -> None:
    try:
        header = read_header(path)
    except ModelLoadError:
        return
    for tensor in header.tensors.values():
        assert header.data_start + tensor.start + tensor.num_bytes <= size, tensor


TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS), cpu_seconds=20)
