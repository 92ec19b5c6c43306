"""Writes the model of a GGUF file as a directory that mlx-lm loads, to train adapters of it."""

from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import save_config, save_model

from batching.backend.exceptions import one_line
from batching.backend.gguf.model import GgufOutline
from batching.backend.gguf.storage import num_bytes
from batching.backend.gguf.tensors import ROPE_FACTORS
from batching.backend.gguf.tokenizer import build_tokenizer
from batching.backend.memory.device import check_room
from batching.backend.weights.storage import dtype_name
from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header


def write_directory(path: Path, directory: Path, dtype: str) -> None:
    """Write config.json, weights as Hugging Face's checkpoints have them, tokenizer and chat template.

    dtype: such as `float32`; all weights are dequantized to it.

    Raises:
        ModelLoadError: the file holds no model that is served, or one that its config.json could not describe.
        OSError: the directory cannot be written.
    """
    try:
        _write(path, directory, getattr(mx, dtype))
    except (ModelLoadError, OSError):
        raise
    except Exception as error:
        # As in a load: whatever the loaders of other packages meet in a foreign file.
        raise ModelLoadError(f"cannot export {path}: {one_line(error)}") from error


def _write(path: Path, directory: Path, dtype: mx.Dtype) -> None:
    header = read_header(path)
    if ROPE_FACTORS in header.tensors:
        raise header.refuse(f"{ROPE_FACTORS} has no place in a config.json")
    advice = "take a smaller model, or a dtype that takes less"
    check_room(num_bytes(header, dtype), f"weights ({dtype_name(dtype)})", advice)
    tokenizer = build_tokenizer(header)
    outline = GgufOutline(header, dtype)
    outline.read_all()
    save_model(directory, outline.model, donate_model=True)
    tokenizer.save_pretrained(directory)
    # Last: a directory without it is no model.
    config = outline.config | {"eos_token_id": sorted(tokenizer.eos_token_ids)}
    save_config(config, directory / "config.json")
