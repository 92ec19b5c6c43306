"""Models described by their files, without a weight of them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import ModelLoadError
from batching.fit.weights import Compute, weight_bytes
from batching.model_files.description import ModelDescription, describe, outline, read_config
from batching.model_files.model_types import served_as
from tests.support.gguf_writer import Q8_0, RawTensor, write_gguf
from tests.support.rows import rows

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 512}


def write_directory(
    folder: Path, config: Any = CONFIG, names: tuple[str, ...] = (), dtype: str = "BF16"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = {
        name: {"dtype": dtype, "shape": [2, 2], "data_offsets": [8 * i, 8 * i + 8]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(8 * len(names))
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_a_directory_is_described(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", names=("model.embed_tokens.weight",))
    (path / "chat_template.jinja").write_text("{{ tools }}")
    found = describe(path)
    assert (found.model_type, found.context, found.num_layers) == ("llama", 512, 2)
    assert (found.quantization, found.has_tools) == ("bf16", True)
    assert found.size == sum(file.stat().st_size for file in path.iterdir())
    assert [tensor.name for tensor in found.tensors] == ["model.embed_tokens.weight"]


def test_what_mlx_lm_does_not_load_is_left_out(tmp_path: Path) -> None:
    names = (
        "layers.1.q.weight",
        "layers.2.q.weight",
        "vision_tower.layers.0.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.fc.weight",
        "lm_head.weight",
    )
    found = describe(write_directory(tmp_path / "m", names=names))
    assert [tensor.name for tensor in found.tensors] == ["layers.1.q.weight", "lm_head.weight"]
    unbounded = describe(write_directory(tmp_path / "n", {"model_type": "x"}, names[:2]))
    assert len(unbounded.tensors) == 2
    assert (unbounded.num_layers, unbounded.context) == (None, None)


@rows(
    ("config", "expected"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit"),
        ({"quantization": {"bits": 4, "mode": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "4-bit awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization": "none"}, ""),
        ({}, ""),
    ],
)
def test_a_config_says_how_it_is_quantized(config: dict[str, Any], expected: str) -> None:
    assert ModelDescription(None, config, (), 0).quantization == expected


@rows(
    ("files", "template"),
    [
        ({}, None),
        ({"chat_template.json": '{"chat_template": "a"}'}, '{"chat_template": "a"}'),
        ({"tokenizer_config.json": '{"chat_template": "b"}'}, "b"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "c"}]}'}, '[{"name": "c"}]'),
        ({"tokenizer_config.json": "{}"}, None),
        ({"tokenizer_config.json": "[]"}, None),
        ({"tokenizer_config.json": "no JSON"}, None),
    ],
)
def test_a_template_is_in_one_of_several_files(
    files: dict[str, str], template: str | None, tmp_path: Path
) -> None:
    folder = write_directory(tmp_path / str(len(list(tmp_path.iterdir()))))
    for name, text in files.items():
        (folder / name).write_text(text)
    found = describe(folder)
    assert found.chat_template == template
    assert not found.has_tools


@rows(
    ("content", "reason"),
    [
        (b"{", "it is no JSON"),
        (b"\xff", "it is no JSON"),
        (b"[]", "it is no config"),
        (None, "No such file"),
    ],
)
def test_what_is_no_config_is_refused(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=reason):
        read_config(path)


def test_a_gguf_file_is_described(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.file_type": 15,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "tokenizer.chat_template": "{{ tools }}",
    }
    tensors: dict[str, Any] = {
        "token_embd.weight": RawTensor(Q8_0, (2, 32), bytes(68)),
        "rope_freqs.weight": np.ones(4, np.float32),
        "blk.1.attn_q.weight": np.ones((2, 2), np.float32),
    }
    found = describe(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    assert (found.model_type, found.context, found.num_layers) == ("llama", 64, 1)
    assert (found.quantization, found.has_tools, found.is_gguf) == ("Q4_K_M", True, True)
    assert [tensor.name for tensor in found.tensors] == ["token_embd.weight"]
    del metadata["general.file_type"]
    assert describe(write_gguf(tmp_path / "n.gguf", metadata, tensors)).quantization == "Q8_0"


@rows(
    ("config", "num_weights", "bits"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, 64_000, 4.5),
        ({"quantization": {"bits": 8, "group_size": 0}}, 64_000, 8.5),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, 64_000, 4.25),
        ({"torch_dtype": "float16"}, 1000, 16),
        ({"dtype": "float32"}, 1000, 32),
        ({"text_config": {"torch_dtype": "bfloat16"}}, 1000, 16),
        ({"torch_dtype": "strange"}, 1000, 16),
        ({"quantization_config": {"bits": 4}}, 1000, 4),
        ({"quantization": {"bits": "x"}}, 1000, 16),
    ],
)
def test_a_model_that_is_not_here_is_outlined_by_its_size(
    config: dict[str, Any], num_weights: int, bits: float
) -> None:
    num_bytes = int(num_weights * bits / 8)
    found = outline(config, num_bytes, num_bytes + 99)
    assert (found.path, found.size) == (None, num_bytes + 99)
    assert weight_bytes(found, Compute.STORED) == pytest.approx(num_bytes, abs=8)


def test_how_a_type_is_served_is_known_by_its_name() -> None:
    assert served_as("qwen3") == "batched"
    assert served_as("mistral") == "batched"
    assert served_as("lfm2_vl") == "batched, in pieces"
    assert served_as("glm4v", "glm4v_text") == "batched"
    assert served_as("no_such_type") is None
    assert served_as("no_such_type", "qwen3") == served_as("qwen3", "mamba") == "batched"
    assert served_as(None) is None
