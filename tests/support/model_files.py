"""A small model directory, and what loading it is rejected for."""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batching.backend.loader import load_model
from batching.errors import ModelLoadError
from tests.support.model_zoo import make_tiny, tiny_config

CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 3],
}


def write_model(directory: Path, seed: int = 5, bits: int = 4, **changes: Any) -> Path:
    """Write a model directory as mlx-lm does: bfloat16 or its `torch_dtype`, quantized; of random weights.

    changes: of its config.
    """
    directory.mkdir(exist_ok=True)
    mx.random.seed(seed)
    config = {**CONFIG, **changes}
    arguments = llama.ModelArgs.from_dict(config)
    model: nn.Module = llama.Model(arguments)
    model.set_dtype(getattr(mx, config.get("torch_dtype", "bfloat16")))
    model, config = quantize_model(model, config, group_size=32, bits=bits)
    save_model(directory, model)
    save_config(config, directory / "config.json")
    _write_tokenizer(directory)
    return directory


def write_tiny(name: str, directory: Path) -> Path:
    """Write a tiny model of any type of mlx-lm as a directory."""
    directory.mkdir(exist_ok=True)
    save_model(directory, make_tiny(name))
    save_config(tiny_config(name), directory / "config.json")
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    words = {chr(97 + index): index for index in range(26)}
    backend = Tokenizer(models.WordLevel(words, unk_token="z"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="c"
    )
    tokenizer.save_pretrained(directory)


def edit_config(directory: Path, name: str = "config.json", **changes: Any) -> None:
    """Change a JSON file; None removes a key."""
    path = directory / name
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def rejection(reference: str | Path, dtype: mx.Dtype | None = None) -> str:
    """Return the line with which loading is rejected."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(reference), dtype=dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)
