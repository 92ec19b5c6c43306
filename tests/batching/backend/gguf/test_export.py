"""Exported models: mlx-lm by itself computes what the server computes of the file."""

from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
from mlx_lm import load

from batching.backend_calls.export import export_gguf
from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header
from tests.support.arrays import parameters
from tests.support.gguf_architectures import TINY
from tests.support.gguf_bytes import A_TENSOR, gguf, tensor
from tests.support.gguf_converter import random_model, write_model
from tests.support.gguf_models import BPE, load_gguf
from tests.support.gguf_writer import write_gguf

TOKENS: Final = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3] * 3])


def exported(path: Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Return mlx-lm's model and tokenizer."""
    directory = path.parent / "exported"
    export_gguf(path, directory, dtype)
    model, tokenizer, *_ = load(str(directory))
    return model, tokenizer


# The parameters of Qwen 3.5 are in one place more than transformers wants.
@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", TINY[name], *random_model(TINY[name]))
    model, tokenizer = exported(path)
    assert tokenizer.decode(tokenizer.encode("12 a")) == "12 a"
    assert tokenizer.eos_token_ids == {259}
    served, _ = load_gguf(read_header(path), mx.float32)
    expected = served(TOKENS)
    # mlx-lm alone rounds where gpt-oss begins to stretch its rotations, see batching/backend/yarn.py.
    tolerance = 0.02 if name == "gpt-oss" else 1e-6
    assert mx.abs(model(TOKENS) - expected).max() < tolerance * mx.abs(expected).max()


def test_weights_are_as_on_the_hub(tmp_path: Path) -> None:
    """Those of llama are permuted in the file."""
    original, config = random_model(TINY["llama"])
    model, _ = exported(write_model(tmp_path / "m.gguf", TINY["llama"], original, config))
    weights, expected = parameters(model), parameters(original)
    assert weights.keys() == expected.keys()
    assert all(mx.array_equal(weights[name], expected[name]) for name in expected)
    assert not model.args.rope_traditional


def test_weights_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", TINY["qwen3"], *random_model(TINY["qwen3"]))
    model, _ = exported(path, "bfloat16")
    assert {array.dtype for array in parameters(model).values()} == {mx.bfloat16}


def test_what_a_config_cannot_say_is_refused(tmp_path: Path) -> None:
    assert "rope_freqs.weight has no place in a config.json" in refusal(
        tmp_path, gguf(tensors=(tensor("rope_freqs.weight", (4,)),))
    )


def test_files_without_a_model_are_refused(tmp_path: Path) -> None:
    assert "it has no tokens" in refusal(tmp_path, gguf(tensors=(A_TENSOR,)))
    path = write_gguf(tmp_path / "merges.gguf", BPE | {"tokenizer.ggml.merges": ["? ?"]}, {})
    assert "cannot export" in refusal(tmp_path, path.read_bytes())


def refusal(folder: Path, content: bytes) -> str:
    """Return why a file is refused, of which nothing is written."""
    path = folder / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as error:
        export_gguf(path, folder / "exported", "float32")
    assert not (folder / "exported").exists()
    return str(error.value)
