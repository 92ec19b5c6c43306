"""Models of a few bytes: headers of files, whose weights are not read."""

import json
import struct
from pathlib import Path
from typing import Any, Final

CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def safetensors(num_weights: int = 32) -> bytes:
    """Return a file with one tensor of bfloat16."""
    size = 2 * num_weights
    entry = {"dtype": "BF16", "shape": [num_weights], "data_offsets": [0, size]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def model_files(**config: Any) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG | config).encode(),
        "model.safetensors": safetensors(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ tools }}",
    }


def write_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    for name, content in model_files(**config).items():
        (folder / name).write_bytes(content)
    return folder
